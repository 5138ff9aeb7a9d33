"""A run is a function of its description: the same numbers again, bit for bit, and others under another seed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trainer.runs import JSONL, fit, ppo_run, read_lines, weights, without_times

from verl.trainer.ppo_config import PPORun


def run_to_the_end(run: PPORun, directory: Path) -> tuple[list, dict, dict]:
    """Lines of metrics.jsonl without times, weights, and sample tables by file."""
    fit(run, directory)
    lines = [without_times(line) for line in read_lines(directory / "metrics.jsonl")]
    samples = {file.name: file.read_text() for file in sorted((directory / "samples").iterdir())}
    return lines, weights(directory), samples


@pytest.mark.exhaustive
def test_the_same_seed_gives_the_same_run_bit_for_bit_and_another_seed_another(model32, tmp_path):
    def run(seed: int) -> PPORun:
        return ppo_run(model32, seed=seed, total_steps=3, eval_interval=2, tracker=JSONL)

    torch.manual_seed(1)
    lines, tensors, samples = run_to_the_end(run(5), tmp_path / "first")
    torch.manual_seed(2)  # the state that a run finds does not matter
    again = run_to_the_end(run(5), tmp_path / "again")
    assert (lines, samples) == (again[0], again[2])
    assert tensors.keys() == again[1].keys()
    assert all(torch.equal(x, again[1][name]) for name, x in tensors.items())
    assert [line["step"] for line in lines] == [0, 1, 2, 2, 3, 3]  # steps, and evaluations before, during and after

    other = run_to_the_end(run(6), tmp_path / "other")
    assert lines[0]["eval/accuracy"] == other[0][0]["eval/accuracy"]  # the starting weights are the same
    assert lines[1] != other[0][1]
    assert any(not torch.equal(x, other[1][name]) for name, x in tensors.items())
