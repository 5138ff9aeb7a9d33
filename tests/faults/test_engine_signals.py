"""Trainer and vLLM engine are killed and stopped at random moments of real runs; each run goes on or ends in words.

The number of rounds: VERL_ENGINE_KILLS (20) and VERL_ENGINE_STOPS (15) of the environment; VERL_ENGINE_SEED (0) draws
what is struck when.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import pytest
from cli.small_runs import small_run
from cluster.processes_of import engines_of, is_running, wait_until_gone
from rollout.engines import save_family
from same_training import numbers

from verl.compose.schema import conf_dir
from verl.utils.progress import Progress

pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.exhaustive, pytest.mark.slow]

ROOT = conf_dir().parent
KILLS = int(os.environ.get("VERL_ENGINE_KILLS", "20"))
STOPS = int(os.environ.get("VERL_ENGINE_STOPS", "15"))
SEED = int(os.environ.get("VERL_ENGINE_SEED", "0"))
STEPS = 6
LIMIT_S = 10.0  # without progress
END_S = 900.0
VARIANTS = {
    "plain": (),
    "ahead": (
        "trainer.rollout_ahead=1",
        "algorithm.correction={_target_:verl.algorithms.importance_sampling.TruncatedIS}",
    ),
    "adapter": ("actor.lora={_target_:verl.models.lora.LoRA,rank:8}", "rollout.lora=adapter"),
}
MARK = "VERL_TEST_ROUND"


@dataclass
class Round:
    """One run. All of its processes have a variable of their own in their environment, and a TMPDIR of their own."""

    model: object
    directory: Path
    variant: str
    mark: str = field(default_factory=lambda: uuid4().hex)
    engine_names: set[str] = field(default_factory=set)
    pids: set[int] = field(default_factory=set)

    def __enter__(self) -> Round:
        self.temporary = self.directory / "tmp"
        self.temporary.mkdir(parents=True)
        engine = ["rollout=vllm", "rollout.kv_cache_gib=0.05", "rollout.max_num_seqs=16", "rollout.num_threads=1"]
        engine += [f"rollout.call_timeout_s={LIMIT_S:g}", *VARIANTS[self.variant]]
        quiet = ["tracker.tensorboard=null"]
        length = [
            f"trainer.total_steps={STEPS}",
            "trainer.eval_interval=3",
            "checkpoint=off",
            "trainer.save_final=false",
        ]
        overrides = [*small_run(self.model, self.directory), *engine, *quiet, *length, "algorithm=grpo"]
        command = [sys.executable, str(ROOT / "main_ppo.py"), *overrides, "rollout.max_new_tokens=24"]
        environment = {MARK: self.mark, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with (self.directory / "log").open("w") as log:
            self.trainer = subprocess.Popen(
                [*command, f"hydra.run.dir={self.directory / 'run'}"],
                env=os.environ | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.trainer.wait()

    def processes(self) -> list[int]:
        """Those that run, the trainer and its clean-up process among them."""
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"{MARK}={self.mark}".encode() in (directory / "environ").read_bytes().split(b"\0"):
                    found.append(int(directory.name))
        self.pids.update(found)
        return [pid for pid in found if is_running(pid)]

    def engine(self) -> int | None:
        """The engine's process, once it is there."""
        for pid in engines_of(self.trainer.pid):
            with suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                self.engine_names.update(v[17:].decode() for v in variables if v.startswith(b"VERL_ENGINE_NAME="))
                return pid
        return None

    def wait_for_engine(self) -> int:
        end = time.monotonic() + END_S
        while (pid := self.engine()) is None:
            assert self.trainer.poll() is None, self.said()
            assert time.monotonic() < end
            time.sleep(0.01)
        return pid

    def wait_for_steps(self, count: int) -> None:
        lines, end = self.directory / "run/metrics.jsonl", time.monotonic() + END_S
        while self.trainer.poll() is None and time.monotonic() < end:
            if lines.is_file() and lines.read_bytes().count(b"actor/loss") >= count:
                return
            time.sleep(0.005)

    def said(self) -> str:
        return (self.directory / "log").read_text()

    def left(self) -> list[str]:
        """Files in TMPDIR, and those in shared memory that carry the name of an engine or the number of a process."""
        own = {*self.engine_names, *(f"_{pid}_" for pid in self.pids)}
        shared = [name for name in os.listdir("/dev/shm") if any(part in name for part in own)]
        return [*shared, *(str(path) for path in self.temporary.rglob("*"))]

    def assert_nothing_is_left(self) -> None:
        assert wait_until_gone(self.processes()) == [], self.said()
        end = time.monotonic() + 20
        while left := self.left():
            assert time.monotonic() < end, left
            time.sleep(0.05)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_family(tmp_path_factory.mktemp("models") / "qwen2", "qwen2")


@pytest.fixture(scope="module")
def twins(model, tmp_path_factory) -> dict[str, dict]:
    """The metrics of runs that nobody disturbs, made when they are first asked for."""

    class Twins(dict):
        def __missing__(self, variant: str) -> dict:
            with Round(model, tmp_path_factory.mktemp("twin"), variant) as run:
                assert run.trainer.wait(timeout=END_S) == 0, run.said()
                self[variant] = numbers(run.directory / "run")
                run.assert_nothing_is_left()
            assert list(self[variant]) == list(range(1, STEPS + 1))
            return self[variant]

    return Twins()


def at_random_moment(run: Round, coin: random.Random) -> int:
    """Wait for one, from the start of the engine's process to the last step; gives that process."""
    pid = run.wait_for_engine()
    if coin.random() < 0.35:
        time.sleep(coin.uniform(0.0, 8.0))
    else:
        run.wait_for_steps(coin.randint(0, STEPS - 2) or 0)
        time.sleep(coin.uniform(0.0, 0.7))
    return run.engine() or pid


def stage_of(engine: int) -> str:
    """What the engine's process says that it is at, read from its memory; how much is left is cut off."""
    with suppress(OSError):
        for link in Path(f"/proc/{engine}/fd").iterdir():
            if "verl_progress" in os.readlink(link):
                progress = Progress.open(str(link))
                stage = progress.stage().partition(";")[0]
                progress.close()
                return stage or "starting"
    return "starting"


def signalled(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def finishes_as(run: Round, twin: dict) -> None:
    """The run ends with the numbers of the one that nobody disturbed.

    What was drawn ahead and is lost with the engine is drawn again by later weights, so there the steps alone are. An
    engine that was started again in the midst of a sync is probed in it, as one is in the first.
    """
    assert run.trainer.wait(timeout=END_S) == 0, run.said()
    found = numbers(run.directory / "run")
    assert list(found) == list(twin)
    for step, metrics in twin.items() if run.variant != "ahead" else ():
        found[step] = {name: x for name, x in found[step].items() if name in metrics or name != "sync/probe_gap_nats"}
        assert found[step] == pytest.approx(metrics, rel=1e-3, abs=1e-5, nan_ok=True), f"step {step}"


@pytest.mark.parametrize("number", range(KILLS))
def test_a_kill_of_trainer_and_engine_at_a_random_moment(number, model, twins, tmp_path, record_property):
    coin = random.Random(f"kill {SEED} {number}")
    whom, variant = ("trainer", "engine", "both")[number % 3], coin.choice(list(VARIANTS))
    twin = twins[variant] if whom == "engine" else {}
    with Round(model, tmp_path, variant) as run:
        engine = at_random_moment(run, coin)
        run.processes()
        stage, is_over = stage_of(engine), run.trainer.poll() is not None
        if whom in ("engine", "both"):
            signalled(engine, signal.SIGKILL)
        if whom in ("trainer", "both") and not is_over:
            run.trainer.kill()
            assert run.trainer.wait() in (-signal.SIGKILL, 0)
        else:
            finishes_as(run, twin or twins[variant])
        run.assert_nothing_is_left()
    record_property("fault_cases", 1)
    record_property("struck", f"SIGKILL to {whom}, {variant}, {'after its end' if is_over else stage}")
