"""A rollout engine, a sharding and a tracker from a directory of the user train a step without an edit of ours."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    "my_parts.py": '''
import json
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from verl.component import component
from verl.engines.sharding import DDP
from verl.rollout.base import Rollout
from verl.rollout.hf import HFRollout
from verl.tracking.base import Tracker, TrackerDescription


@component
class Loud(HFRollout):
    """An engine that is told of by the first words of each response."""

    words: PositiveInt = 3

    def attach(self, *args: Any, **kwargs: Any) -> Any:
        engine = super().attach(*args, **kwargs)
        engine.words = self.words
        return engine


@component
class Pairs(DDP):
    """Data parallelism over an even number of processes."""

    def size_fault(self, world_size: int) -> str | None:
        return None if world_size % 2 == 0 else f"_target_ is Pairs: {world_size} processes make no pairs."


@component
class File(TrackerDescription):
    """One line for each step."""

    name: str = "mine.txt"

    def build(self, context: Any) -> Tracker:
        return FileTracker(self.name)


class FileTracker(Tracker):
    def __init__(self, name: str):
        self.name = name

    def start(self, run_name: str, config: dict[str, Any], run_dir: Path, total_steps: int | None) -> None:
        self.path = Path(run_dir) / self.name

    def log(self, metrics: Any, step: int) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([step, metrics["reward/mean"]]) + "\\n")
''',
    "conf/rollout/loud.yaml": "defaults: [hf, _self_]\n_target_: my_parts.Loud\nwords: 2\n",
    "conf/sharding/pairs.yaml": "_target_: my_parts.Pairs\n",
    "conf/tracker/mine.yaml": "_target_: verl.tracking.base.Trackers\nmine: {_target_: my_parts.File}\n",
}


def digests() -> dict[str, str]:
    files = (path for part in ("verl", "conf") for path in (ROOT / part).rglob("*") if path.suffix in (".py", ".yaml"))
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def run(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{directory}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "main_ppo.py"), "--config-dir", str(directory / "conf"), *options]
    return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.exhaustive
def test_an_engine_a_sharding_and_a_tracker_are_one_class_and_one_file_each_and_no_edit(tmp_path):
    before = digests()
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    options = ["rollout=loud", "sharding=pairs", "tracker=[jsonl,mine]", "actor=tiny_scratch", "algorithm=grpo"]
    options += ["checkpoint=off", "trainer.n_gpus_per_node=2", "trainer.total_steps=1", "trainer.prompts_per_step=4"]
    options += ["trainer.eval_before=false", "trainer.save_final=false", f"hydra.run.dir={tmp_path}/run"]
    done = run(tmp_path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    ((step, reward),) = [json.loads(line) for line in (tmp_path / "run/mine.txt").read_text().splitlines()]
    assert (step, isinstance(reward, float)) == (1, True)
    assert digests() == before
