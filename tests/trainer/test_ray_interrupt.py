"""`python main_ppo.py trainer=ray` and Ctrl-C, which a terminal sends to every process of the job, Ray's among them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster.processes_of import wait_until_gone
from trainer.runs import read_lines

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.exhaustive]
ROOT = Path(__file__).resolve().parents[2]


def of_session(leader: int) -> list[int]:
    """Processes of a session, zombies left out."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (directory / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if state != "Z" and int(session) == leader:
            found.append(int(directory.name))
    return found


def test_ctrl_c_to_the_whole_job_saves_the_step_and_leaves_no_process_of_ray(model32, tmp_path):
    run_dir = tmp_path / "run"
    choices = ["trainer=ray", "algorithm=grpo", "actor=pretrained", f"actor.model.path={model32.path}"]
    length = ["trainer.total_steps=100000", "data.held_out=4", "trainer.eval_samples=0", "trainer.save_final=false"]
    sizes = ["trainer.prompts_per_step=4", "trainer.group_size=2", "rollout.max_new_tokens=6"]
    quiet = ["trainer.num_threads=1", "tracker.tensorboard=null", "tracker.curves=null", f"hydra.run.dir={run_dir}"]
    small = ["trainer.placement.object_store_mib=80"]
    command = [sys.executable, ROOT / "main_ppo.py", *choices, *length, *sizes, *quiet, *small]
    with (tmp_path / "output").open("w") as output:
        driver = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=tmp_path, start_new_session=True
        )
    try:
        _wait_for_a_step(run_dir / "metrics.jsonl", driver, tmp_path / "output")
        processes = of_session(driver.pid)
        assert len(processes) > 4  # the driver, a worker, and Ray's own
        os.killpg(driver.pid, signal.SIGINT)
        status = driver.wait(timeout=240)
    finally:
        driver.kill()
        driver.wait()
    told = (tmp_path / "output").read_text()
    assert status == 130, told
    assert "Interrupted after step" in told
    assert "Traceback" not in told
    assert wait_until_gone(processes) == []
    assert of_session(driver.pid) == []
    steps = [line["step"] for line in read_lines(run_dir / "metrics.jsonl") if "actor/loss" in line]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["restarts"]) == ("interrupted", steps[-1], [])
    assert summary["checkpoints"] == [f"global_step_{steps[-1]}"]


def _wait_for_a_step(file: Path, driver: subprocess.Popen, output: Path) -> None:
    end = time.monotonic() + 240
    while time.monotonic() < end:
        if file.is_file() and any("actor/loss" in line for line in file.read_text().splitlines()):
            return
        assert driver.poll() is None, output.read_text()
        time.sleep(0.1)
    raise AssertionError(f"no step: {output.read_text()}")
