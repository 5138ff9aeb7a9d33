"""Ctrl-C and SIGTERM: what is finished is saved, the workers end, and the exit status tells which it was."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cluster.processes_of import wait_until_gone, workers_of
from trainer.runs import read_lines

from verl.models.pretrained import Pretrained

SHARDINGS = {"none": [], "ddp": ["sharding=ddp", "trainer.n_gpus_per_node=2"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding", "number"),
    [
        ("none", signal.SIGINT),
        pytest.param("none", signal.SIGTERM, marks=pytest.mark.exhaustive),  # in faults/test_killed_training.py too
        pytest.param("ddp", signal.SIGTERM, marks=pytest.mark.exhaustive),
    ],
)
def test_an_interrupted_run_writes_what_is_finished_and_leaves_nothing_running(
    sharding, number, fork_server, model32, tmp_path
):
    run_dir = tmp_path / "run"
    (tmp_path / "rate.py").write_text("def variety(prompts, responses):\n    return [len(set(r)) for r in responses]\n")
    choices = ["actor=pretrained", f"actor.model.path={model32.path}", "reward=function", "reward.path=rate.py:variety"]
    length = ["trainer.total_steps=100000", "data.held_out=4", "actor.optimizer.lr=1e-3"]
    sizes = ["trainer.prompts_per_step=4", "trainer.group_size=2", "rollout.max_new_tokens=6", "trainer.eval_samples=0"]
    quiet = ["trainer.num_threads=1", "tracker.tensorboard=null"]
    process = fork_server.start(tmp_path, "run", [*choices, *length, *sizes, *quiet, *SHARDINGS[sharding]])
    try:
        _wait_for_steps(run_dir / "metrics.jsonl", 3, process.is_running)
        workers = workers_of(process.pid)
        assert len(workers) == (2 if sharding == "ddp" else 0)
        process.kill(number)
        status = process.wait(240)
    finally:
        process.kill()
        process.wait()
    told = process.said()
    assert status == (130 if number == signal.SIGINT else 143), told
    assert "stopping once this step is done and saved" in told
    assert "Interrupted after step" in told
    assert "Traceback" not in told
    assert wait_until_gone(workers) == []

    steps = [line["step"] for line in read_lines(run_dir / "metrics.jsonl") if "actor/loss" in line]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("interrupted", steps[-1])
    assert steps == list(range(1, len(steps) + 1))
    before = model32.load_causal_lm("cpu").state_dict()
    after = Pretrained(path=str(run_dir / "actor")).load_causal_lm("cpu").state_dict()
    assert any(not torch.equal(x, after[name]) for name, x in before.items())
    assert (run_dir / "critic" / "config.json").is_file()


def _wait_for_steps(file: Path, count: int, is_running: Callable[[], bool], limit_s: float = 120) -> None:
    """Until so many steps are in the metrics; the run must not end before."""
    end = time.monotonic() + limit_s
    while not (file.is_file() and file.read_text().count("actor/loss") >= count):
        assert is_running(), "the run ended by itself"
        assert time.monotonic() < end, "no steps were made"
        time.sleep(0.1)


# In Ray: a terminal sends Ctrl-C to every process of the job, Ray's among them
