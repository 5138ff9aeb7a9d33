"""A whole run with vLLM through the entry point, and the end of the engine when its trainer is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster.processes_of import engines_of, wait_until_gone, wait_until_removed

import verl

pytestmark = pytest.mark.xdist_group("vllm")
ROOT = Path(verl.__file__).parents[1]

TRAINER = """
import sys, time
from pathlib import Path
import torch
from verl.rollout.engine_process.messages import EngineSetup
from verl.rollout.engine_process.process import EngineFiles, EngineProcess
from verl.rollout.vllm.engine import SERVER
files = EngineFiles()
setup = EngineSetup("vLLM", SERVER, "no setting: it is still importing vLLM", {}, torch.float32)
engine = EngineProcess(setup, files, None)
print(files.directory, files.temporary, flush=True)
engine.start()
"""


@pytest.mark.slow
def test_the_engine_ends_with_a_trainer_that_is_killed_and_removes_its_directory(tmp_path):
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdout is not None
    directories = [Path(path) for path in trainer.stdout.readline().split()]
    assert all(directory.is_dir() for directory in directories)
    while not (children := engines_of(trainer.pid)):
        time.sleep(0.01)
    time.sleep(0.3)  # its interpreter is up, and it watches
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    assert wait_until_gone(children) == []
    wait_until_removed(directories)


@pytest.mark.slow  # test_client.py has the engine in `make test`
def test_main_ppo_trains_with_vllm_and_leaves_no_process(tmp_path):
    """The cache holds what the prompts ask for, though not what the context of the model could."""
    command = [str(ROOT / "main_ppo.py"), "rollout=vllm", "actor=tiny_scratch", "trainer.total_steps=2"]
    command += ["trainer.prompts_per_step=4", "rollout.kv_cache_gib=0.05", "hydra.run.dir=run", "data.held_out=8"]
    trainer = subprocess.Popen(
        [sys.executable, *command, "checkpoint=off", "actor.model.context_length=131072"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said, _ = trainer.communicate()
    assert trainer.returncode == 0, said[-3000:]
    assert engines_of(trainer.pid) == []
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "actor/loss" in line]
    assert len(steps) == 2
    for step in steps:
        assert step["rollout/log_prob_gap_nats"] < 1e-4
        assert step["sync/unproven_tensors"] == 0
        assert step["sync/bytes"] > 1e5
    assert "to the engine" in Path("run/run.log").read_text()
    assert Path("run/workers/vllm_0.log").is_file()
