"""A run is read from its files alone: finished, running, killed, damaged, and resumed along a chain."""

import json
import math
import shutil
import subprocess
import sys

import pytest
from cli.report.run_files import add_lineage, evals, metrics, run_directory, write_lines

from verl.checkpoint.resolve import SAVED
from verl.cli.report.page import outcome
from verl.cli.report.read import diagnosis, last_start, read_run, run_status, step_files
from verl.errors import ConfigError
from verl.trainer.state.lineage import Lineage


def test_a_finished_run_tells_outcome_command_and_settings(tmp_path):
    run = read_run(run_directory(tmp_path / "run"))
    assert (run.name, run.status, run.steps) == ("verl/small", "finished", 30)
    assert run.command == "verl ppo trainer.total_steps=30 'data.note=a b'"
    assert run.config["trainer.total_steps"] == 30
    assert run.differences == {"trainer.total_steps": [30, 300]}
    assert outcome(run) == "Finished after 30 of 30 steps in 30s; eval/accuracy rose from 0.5 to 0.8."
    assert list(run.column("eval/accuracy").steps) == [0, 10, 20, 30]
    assert set(run.evals) == {0, 10, 30}
    assert set(run.tokens) == {1}


def test_half_a_line_nan_and_lines_that_are_no_metrics_cost_themselves_only(tmp_path):
    directory = run_directory(tmp_path / "run", metrics(1, 3))
    with (directory / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "time_s": 9, "reward/mean": "nan", "note": [1], "flag": true}\n')
        file.write(b'[]\n{"step": "x"}\n\xff\xfe\n' + b"[" * 100_000 + b'\n{"step": 5, "time_s": 9.5, "reward/me')
    (directory / "summary.json").write_text("{")
    (directory / "config.yaml").write_text("a: [")
    run = read_run(directory)
    assert list(run.column("reward/mean").steps) == [1, 2, 3, 4]
    assert math.isnan(run.column("reward/mean").values[-1])
    assert (run.status, run.config, "note" in run.keys()) == ("killed", {}, False)  # noqa: SIM118
    assert outcome(run).startswith("No summary, so killed")


def test_a_running_run_is_known_by_its_lock(tmp_path):
    directory = run_directory(tmp_path / "run")
    (directory / "summary.json").unlink()
    code = (
        "import sys, pathlib; from verl.checkpoint.ownership import Owner, RunLock\n"
        "lock = RunLock(pathlib.Path(sys.argv[1]), Owner.here('a')); lock.acquire()\n"
        "print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        assert read_run(directory).status == "running"
        holder.kill()
    assert read_run(directory).status == "killed"


def test_a_run_killed_three_times_is_one_curve_and_its_repeated_steps_are_apart(tmp_path):
    save_dir = tmp_path / "checkpoints"
    starts = [("a", 1, 14, None), ("b", 11, 24, ("a", 10)), ("c", 21, 23, ("b", 20)), ("d", 21, 30, ("b", 20))]
    for number, (run_id, first, last, parent) in enumerate(starts):
        directory = run_directory(tmp_path / f"run_{run_id}", metrics(first, last, lift=number))
        add_lineage(save_dir, run_id, directory, parent, "finished" if run_id == "d" else None)
    run = read_run(tmp_path / "run_d")
    assert [link["run_id"] for link in run.lineage] == ["a", "b", "d"]
    rewards = run.column("reward/mean")
    assert list(rewards.steps) == list(range(1, 31))
    assert [int(value) for value in rewards.values] == [0] * 10 + [1] * 10 + [3] * 10
    assert [(part.start_step, part.end_step) for part in run.segments] == [(0, 10), (10, 20), (20, math.inf)]
    assert run.clock().values[-1] == 30.0
    assert run.code["commit"] == "0123456789abcdef"
    # moved together with its checkpoints
    (tmp_path / "elsewhere").mkdir()
    for path in (save_dir, *tmp_path.glob("run_*")):
        shutil.move(path, tmp_path / "elsewhere" / path.name)
    assert list(read_run(tmp_path / "elsewhere/run_d").column("reward/mean").steps) == list(range(1, 31))


def test_a_run_that_restarted_in_its_directory_is_cut_where_its_clock_goes_back(tmp_path):
    run = read_run(run_directory(tmp_path / "run", [*metrics(1, 14), *metrics(11, 20, lift=1)]))
    assert [int(value) for value in run.column("reward/mean").values] == [0] * 10 + [1] * 10
    assert [part.start_step for part in run.segments] == [0, 10]


def test_files_of_steps_that_were_trained_again_are_those_of_the_later_run(tmp_path):
    first = run_directory(tmp_path / "first", metrics(1, 14))
    second = run_directory(tmp_path / "second", metrics(11, 20))
    for step in (12, 14):
        write_lines(first / f"evals/step_{step}.jsonl", evals(step, 1))
    write_lines(second / "evals/step_12.jsonl", evals(12, 20))
    add_lineage(tmp_path / "checkpoints", "a", first, None, None)
    add_lineage(tmp_path / "checkpoints", "b", second, ("a", 10), "finished")
    files = step_files(read_run(second), "evals")
    assert 14 not in files
    assert files[12].parent.parent == second


@pytest.mark.parametrize("name", ["nowhere", "empty", "file"])
def test_what_is_not_a_run_is_refused(name, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Give the directory of a run|not the directory of a run"):
        read_run(tmp_path / name)


def test_the_diagnosis_names_metric_value_and_threshold(tmp_path):
    rows = metrics(1, 30)
    for row in rows:
        if "reward/mean" in row:
            row |= {"kl/reference_nats": 2.0, "rollout/response_length_tokens": 7.9, "reward/std": 0.3}
            row["actor/grad_norm"] = 50.0 if row["step"] == 7 else 1.0
    findings = {finding["key"]: finding for finding in diagnosis(read_run(run_directory(tmp_path / "run", rows)))}
    assert {key for key, finding in findings.items() if finding["exceeded"]} == {
        "kl/reference_nats", "rollout/response_length_tokens", "actor/grad_norm",
    }  # fmt: skip
    assert findings["rollout/response_length_tokens"]["threshold"] == "above 7.2 of rollout.max_new_tokens=8"
    assert findings["actor/grad_norm"]["value"] == 50.0
    assert json.dumps([*findings.values()])


def test_the_outcome_of_one_evaluation_is_no_change(tmp_path):
    rows = [{"step": step, "time_s": step, "sft/loss": 4.0 / step} for step in (1, 2)]
    rows.append({"step": 2, "time_s": 2.5, "eval/loss": 0.5})
    sentence = outcome(read_run(run_directory(tmp_path / "run", rows=rows)))
    assert sentence == "Finished after 2 of 30 steps in 2s; eval/loss is 0.5; sft/loss fell from 4 to 2."


def test_a_run_that_ends_while_it_is_listed_is_not_listed_as_killed(tmp_path):
    lineage = Lineage(tmp_path / "saved", "first")
    (tmp_path / SAVED).write_text(json.dumps({"save_dir": str(tmp_path / "saved"), "run_id": "first"}))
    lineage.add("run", run_dir=str(tmp_path))
    events = last_start(tmp_path)
    assert run_status(tmp_path, events) == "killed"
    lineage.add("end", status="finished", step=3)  # and releases the lock
    assert run_status(tmp_path, events) == "finished"
