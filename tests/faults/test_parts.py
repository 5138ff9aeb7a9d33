"""What strikes one of several processes that write a checkpoint costs that save at most: never the training, never
what is there, and never in silence."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest
from cluster.processes_of import workers_of
from same_training import course as saved_course
from trainer.runs import GRPO_ALGORITHM

import verl.trainer.state.train_state as joint
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.checkpoint.read.reader import open_verified
from verl.component import BuildContext, as_plain
from verl.engines.sharding import FSDP
from verl.errors import WorkerDied
from verl.trainer.train_loop import TrainLoop

pytestmark = [pytest.mark.xdist_group("two processes"), pytest.mark.slow]


def environment(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(entry.partition("=")[::2] for entry in entries if "=" in entry)


def worker(rank: int) -> int:
    (found,) = [pid for pid in workers_of(os.getpid()) if environment(pid)["RANK"] == str(rank)]
    return found


def writer_of(process: int) -> int:
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            is_writer = b"writer_process" in (directory / "cmdline").read_bytes()
            if is_writer and environment(int(directory.name)).get("VERL_PARENT") == str(process):
                found.append(int(directory.name))
        except OSError:
            continue
    (pid,) = found
    return pid


class Training:
    """A run of two processes, a step at a time, each of which is saved."""

    def __init__(self, trainer, directory: Path):
        self.course, self.directory = TrainLoop(trainer, as_plain(trainer.description)), directory
        self.messages: list[str] = []
        self.course.open()
        trainer.tracker.message = self.messages.append

    def step(self) -> None:
        self.course.step()

    def whole(self) -> list[str]:
        """The checkpoints that are there, every byte of each looked at."""
        self.course.settle()
        complete = CheckpointDirectory(self.directory / "checkpoints").complete()
        return [open_verified(FileSystem(), checkpoint.directory, "full").name for checkpoint in complete]


@pytest.fixture
def training(model32, tmp_path):
    shared = {"sharding": FSDP(timeout_s=60.0), "n_gpus_per_node": 2, "total_steps": 9}
    run = saved_course(model32, tmp_path, GRPO_ALGORITHM, save={"save_async": True}, **shared)
    with run.build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        yield Training(trainer, tmp_path)


@pytest.mark.exhaustive
def test_one_ranks_writer_is_refused_killed_and_lost_with_its_rank(training, monkeypatch):
    training.step()
    assert training.whole() == ["global_step_1"]

    # Its writes are refused, as on a full disk: the save fails by its name, training goes on, the next one is whole.
    writer, before = writer_of(worker(1)), resource.prlimit(os.getpid(), resource.RLIMIT_FSIZE)
    resource.prlimit(writer, resource.RLIMIT_FSIZE, (0, before[1]))
    training.step()
    assert training.whole() == ["global_step_1"]
    (told,) = training.messages
    assert "The checkpoint of step 2 was not saved" in told
    assert "rank_1: could not write its part: CheckpointWriteFailed: writing " in told
    resource.prlimit(writer, resource.RLIMIT_FSIZE, before)
    training.step()
    assert training.whole() == ["global_step_1", "global_step_3"]

    # It is killed while the save is under way: another one writes what is still in memory.
    os.kill(writer, signal.SIGSTOP)
    training.step()
    os.kill(writer, signal.SIGKILL)
    assert training.whole() == ["global_step_1", "global_step_3", "global_step_4"]
    assert writer_of(worker(1)) != writer

    # It is lost together with its rank: nobody will report any more, and that is told; what was saved is untouched.
    monkeypatch.setattr(joint, "LOST_GRACE_S", 0.2)
    lost, writer = worker(1), writer_of(worker(1))
    os.kill(writer, signal.SIGSTOP)
    training.step()
    os.kill(lost, signal.SIGSTOP)  # a stopped writer whose parent is gone first would be woken by the kernel, and go on
    for pid in (writer, lost):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDied) as caught:
        training.step()
    training.course.failed(caught.value)
    assert training.whole() == ["global_step_1", "global_step_3", "global_step_4"]
    assert "The checkpoint of step 5 was not saved" in training.messages[-1]
    assert "rank_1: could not write its part: WorkerDied" in training.messages[-1]
