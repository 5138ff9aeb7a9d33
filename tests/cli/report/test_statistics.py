"""Intervals are those of the textbook, and are there only where something supports them."""

import json

import numpy as np
import pytest
from cli.report.run_files import evals, run_directory, write_lines

from verl.cli.report.page import interval_over_seeds, paired_bootstrap, report, student_t


def test_runs_that_evaluate_other_prompts_are_not_paired(tmp_path):
    paired = []
    for name in ("same", "other"):
        runs = [run_directory(tmp_path / f"{name}{size}", group_size=size) for size in (4, 8)]
        for run, prompts in zip(runs, ("same", name)):
            rows = [{**row, "prompt_digest": f"{prompts} {row['prompt_id']}"} for row in evals(30, 15)]
            write_lines(run / "evals/step_30.jsonl", rows)
        content = json.loads(report(runs).split('type="application/json">')[1].split("</script>")[0])
        paired.append(content["comparison"]["statistics"][-1])
    assert [line["interval"] is None for line in paired] == [False, True]
    assert "other prompts" in paired[1]["why"]


def test_the_paired_bootstrap_agrees_with_the_normal_interval_of_the_differences():
    generator = np.random.default_rng(1)
    first = {prompt: float(value) for prompt, value in enumerate(generator.random(400))}
    second = {prompt: value + 0.1 + float(generator.normal(0, 0.2)) for prompt, value in first.items()}
    interval = paired_bootstrap(first, second)
    assert interval is not None
    differences = np.array([second[prompt] - first[prompt] for prompt in first])
    reach = 1.96 * differences.std() / 20
    assert interval.mean == pytest.approx(differences.mean())
    assert (interval.low, interval.high) == pytest.approx(
        (interval.mean - reach, interval.mean + reach), abs=reach / 10
    )
    assert paired_bootstrap(first, second) == interval  # of a fixed seed


def test_the_bootstrap_pairs_prompts_and_leaves_the_global_generator_alone():
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    same = {1: 0.0, 2: 1.0, 3: 0.5}
    interval = paired_bootstrap(same, {**same, 4: 1.0})
    assert interval is not None
    assert (interval.mean, interval.low, interval.high, interval.count) == (0.0, 0.0, 0.0, 3)
    assert (np.random.get_state()[1] == before).all()
    assert paired_bootstrap({1: 0.0}, {1: 1.0, 2: 0.0}) is None


def test_an_interval_over_seeds_needs_three_and_is_students():
    assert interval_over_seeds([0.5, 0.6]) is None
    interval = interval_over_seeds([1.0, 2.0, 3.0])
    assert interval is not None
    assert interval.mean == 2.0
    assert interval.high - 2.0 == pytest.approx(4.303 / 3**0.5)
    assert (student_t(10), student_t(1000)) == (2.262, 2.042)
