"""The writer process is killed, stopped, refused; the trainer ends in every way. No save is lost without a word."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from cases import exhaustive
from checkpoint.requests import request, tensors_of
from cluster.processes_of import is_running, wait_until_gone
from faults.process_disks import COUNTED, KILL_AT, KILLS, SLEEP, KillingProcessDisk, SlowDisk
from faults.scenarios import fast_directory

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.save.async_writer import CheckpointWriter
from verl.errors import CheckpointWriteFailed, NoSpaceForCheckpoint

TESTS = Path(__file__).resolve().parents[1]
ELEMENTS = 300_000  # a file of more than a megabyte, so that it is written past the page cache


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((ELEMENTS,), float(value)), "bias": torch.full((3,), float(value))}


def check(store: CheckpointStore, steps: list[int]) -> None:
    """Every checkpoint is whole, and holds the values of its own step."""
    good, bad = store.survey("full")
    assert bad == []
    assert [checkpoint.step for checkpoint in good] == steps
    for checkpoint in good:
        for component in ("actor", "optimizer"):
            for tensor in tensors_of(checkpoint, component).values():
                assert set(tensor.tolist()) == {float(checkpoint.step)}


@pytest.fixture
def killing(tmp_path, monkeypatch):
    """Says where, and how often, the writer process is killed; returns how many operations one made at most."""
    kills, counted = tmp_path / "kills", tmp_path / "counted"
    kills.mkdir()

    def setting(at: int, times: int) -> None:
        for ticket in range(times):
            (kills / str(ticket)).touch()
        monkeypatch.setenv(KILL_AT, str(at))

    monkeypatch.setenv(KILLS, str(kills))
    monkeypatch.setenv(COUNTED, str(counted))
    setting.counted = counted  # type: ignore
    return setting


def operations_of_a_save(killing) -> int:
    killing(10_000, 0)
    with (
        fast_directory() as base,
        CheckpointWriter(CheckpointStore(base / "checkpoints", disk=KillingProcessDisk())) as writer,
    ):
        writer.save(request(1, weights(1)))
        writer.drain()
    return int(killing.counted.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("stride", [23, *exhaustive(1)])
def test_a_writer_killed_at_any_operation_is_started_again_and_the_save_is_published(killing, stride, record_property):
    places = range(0, operations_of_a_save(killing), stride)
    for at in places:
        with fast_directory() as base:
            store = CheckpointStore(base / "checkpoints", disk=KillingProcessDisk())
            killing(at, times=1)
            with CheckpointWriter(store) as writer:
                tensors = weights(1)
                writer.save(request(1, tensors))
                writer.wait_copied()
                tensors["weight"] += 10  # what is written again is what was copied
                (outcome,) = writer.drain()
            assert (outcome.num_deaths, outcome.name) == (1, "global_step_1"), f"operation {at}"
            check(store, [1])
            assert [path.name for path in (store.directory / "staging").iterdir()] == []
    record_property("fault_cases", len(places))


def test_a_save_whose_writer_dies_twice_has_failed_and_the_next_one_is_published(killing, tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", disk=KillingProcessDisk())
    killing(5, times=2)
    with CheckpointWriter(store) as writer:
        writer.save(request(1, weights(1)))
        (outcome,) = writer.drain(raises=False)
        assert (outcome.num_deaths, outcome.name) == (2, None)
        assert "Step 1 was tried 2 times" in str(outcome.error)
        writer.save(request(2, weights(2)))
        (outcome,) = writer.drain()
        assert outcome.num_deaths == 0  # with a process again
        assert writer.process_id is not None
    check(store, [2])


@pytest.mark.parametrize("num_tensors", [1, *exhaustive(2000)])  # a plan of many is longer than what a socket holds
def test_a_writer_that_is_stopped_is_ended_after_its_time_and_the_save_is_published(tmp_path, num_tensors):
    store = CheckpointStore(tmp_path / "checkpoints")
    with CheckpointWriter(store, timeout_s=5.0) as writer:
        writer.save(request(1, weights(1)))
        writer.drain()
        os.kill(writer.process_id, signal.SIGSTOP)  # type: ignore
        writer.save(request(2, {str(number): torch.full((2,), 2.0) for number in range(num_tensors)}))
        (outcome,) = writer.drain()
    assert outcome.num_deaths == 1
    check(store, [1, 2])


@pytest.mark.exhaustive
def test_a_save_that_makes_progress_may_take_longer_than_its_writer_may_stand_still(tmp_path, monkeypatch):
    monkeypatch.setenv(SLEEP, "0.35")
    store = CheckpointStore(tmp_path / "checkpoints", disk=SlowDisk())
    with CheckpointWriter(store, timeout_s=2.0) as writer:
        writer.save(request(1, weights(1)))
        (outcome,) = writer.drain()
    assert outcome.num_deaths == 0
    assert outcome.total_s > 2.0


def test_a_disk_that_does_not_answer_ends_the_wait_in_words(tmp_path, monkeypatch, caplog):
    claim = CheckpointStore(tmp_path / "checkpoints").claim_directory()
    monkeypatch.setenv(SLEEP, "5")
    writer = CheckpointWriter(CheckpointStore(tmp_path / "checkpoints", disk=SlowDisk(), claim=claim), timeout_s=0.5)
    writer.save(request(1, weights(1)))
    with pytest.raises(CheckpointWriteFailed, match=r"made no progress for 0\.5 s.* Does the disk answer\?"):
        writer.drain()
    assert caplog.text.count("made no progress for 0.5 s (checkpoint.writer_timeout_s) at: saving step 1") == 2
    writer.close(timeout_s=0.1)


def test_closing_gives_up_a_writer_that_hangs_and_says_so(tmp_path, caplog):
    store = CheckpointStore(tmp_path / "checkpoints")
    writer = CheckpointWriter(store)
    writer.save(request(1, weights(1)))
    writer.drain()
    pid = writer.process_id
    os.kill(pid, signal.SIGSTOP)  # type: ignore
    writer.save(request(2, weights(2)))
    writer.close(timeout_s=0.1)
    assert not is_running(pid)  # type: ignore
    with pytest.raises(CheckpointWriteFailed, match="step 2 was given up"):
        writer.poll()
    assert "step 2 was never saved" in caplog.text
    check(store, [1])


def test_a_file_that_may_not_grow_fails_the_save_and_the_following_one_works(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    with CheckpointWriter(store) as writer:
        writer.save(request(1, weights(1)))
        writer.drain()
        unlimited = resource.prlimit(writer.process_id, resource.RLIMIT_FSIZE)  # type: ignore
        resource.prlimit(writer.process_id, resource.RLIMIT_FSIZE, (2**20, unlimited[1]))  # type: ignore
        writer.save(request(2, weights(2)))
        with pytest.raises(CheckpointWriteFailed, match=r"writing actor/model.safetensors failed: File too large"):
            writer.drain()
        resource.prlimit(writer.process_id, resource.RLIMIT_FSIZE, unlimited)  # type: ignore
        writer.save(request(3, weights(3)))
        assert [outcome.name for outcome in writer.drain()] == ["global_step_3"]
    check(store, [1, 3])


def test_a_full_disk_fails_the_save_and_earlier_checkpoints_stay(tmp_path):
    disk = tmp_path / "small"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=7m", "none", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs permission to mount a small file system")
    try:
        store = CheckpointStore(disk / "checkpoints")
        with CheckpointWriter(store) as writer:
            for step in (1, 2):
                writer.save(request(step, weights(step)))
                writer.drain()
            writer.save(request(3, weights(3)))
            with pytest.raises(NoSpaceForCheckpoint, match="nothing was written"):
                writer.drain()
        check(store, [1, 2])
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


TRAINER = """
import os, signal, sys, time
import torch
from checkpoint.requests import request
from faults.process_disks import SlowDisk
from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.save.async_writer import CheckpointWriter

root, ending = sys.argv[1:]
writer = CheckpointWriter(CheckpointStore(root, disk=SlowDisk()))
weight = torch.zeros(300_000)
for step in range(1, 1000 if ending == "killed" else 3):
    writer.wait_copied()
    weight += 1
    writer.save(request(step, {"weight": weight, "bias": weight[:3]}))
    while writer.process_id is None:
        time.sleep(0.01)
    print(step, writer.process_id, flush=True)
    if step == 1:
        writer.drain()
        if ending == "forked" and os.fork() == 0:
            time.sleep(60)
            os._exit(0)
if ending == "raised":
    raise RuntimeError("the reward function failed")
if ending == "terminated":
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
if ending == "forked":
    print(0, 0, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


class TrainerProcess:
    """A trainer that saves every step, and ends in one way or another."""

    def __init__(self, root: Path, ending: str, sleep_s: float):
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]), SLEEP: str(sleep_s)}
        command = [sys.executable, "-c", TRAINER, str(root), ending]
        self.process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def next_step(self) -> tuple[int, int]:
        step, pid = self.process.stdout.readline().split()  # type: ignore
        return int(step), int(pid)

    def __enter__(self) -> TrainerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        for kill in (self.process.kill, lambda: os.killpg(self.process.pid, signal.SIGKILL)):
            try:
                kill()
            except ProcessLookupError:
                continue
        self.process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["raised", *exhaustive("returned")])
def test_a_trainer_that_ends_without_closing_has_its_saves_finished_and_leaves_no_process(tmp_path, ending):
    with TrainerProcess(tmp_path / "checkpoints", ending, sleep_s=0.03) as trainer:
        pids = {trainer.next_step()[1] for _ in (1, 2)}
        assert trainer.process.wait(timeout=120) == (ending == "raised")
        for pid in pids:
            assert not is_running(pid)
    check(CheckpointStore(tmp_path / "checkpoints"), [1, 2])


@pytest.mark.exhaustive
def test_a_terminated_trainer_leaves_no_process_and_the_save_under_way_is_finished(tmp_path):
    with TrainerProcess(tmp_path / "checkpoints", "terminated", sleep_s=0.1) as trainer:
        _, pid = trainer.next_step()
        trainer.next_step()
        assert trainer.process.wait(timeout=120) == -signal.SIGTERM
        assert wait_until_gone([pid]) == []
    good, bad = CheckpointStore(tmp_path / "checkpoints").survey("full")
    assert bad == []
    assert [checkpoint.step for checkpoint in good] in ([1], [1, 2])


def rounds_of_killed_trainers(root: Path, rounds: int, seed: int) -> None:
    coin = random.Random(seed)
    newest = 0
    for _ in range(rounds):
        with TrainerProcess(root, "killed", sleep_s=0.002) as trainer:
            _, pid = trainer.next_step()
            time.sleep(coin.random() * 0.3)
            trainer.process.kill()
            trainer.process.wait()
            assert wait_until_gone([pid]) == []
        good, bad = CheckpointStore(root).survey("full")
        assert bad == []
        assert not good or good[-1].sequence >= newest
        newest = good[-1].sequence if good else 0
        for checkpoint in good:
            assert {float(value) for value in tensors_of(checkpoint, "actor")["bias"]} == {float(checkpoint.step)}
            assert set(tensors_of(checkpoint, "optimizer")["weight"].unique().tolist()) == {float(checkpoint.step)}
    store = CheckpointStore(root, run_id="next")
    with CheckpointWriter(store) as writer:
        writer.save(request(9999, weights(9999)))
        writer.drain()
    assert store.newest().step == 9999
    assert list((root / "staging").iterdir()) == []


def test_a_trainer_killed_while_it_saves_leaves_whole_checkpoints_and_no_process(record_property):
    with fast_directory() as base:
        rounds_of_killed_trainers(base / "checkpoints", rounds=1, seed=3)
    record_property("fault_cases", 1)
