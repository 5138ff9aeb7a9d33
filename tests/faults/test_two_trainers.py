"""Two trainers on one directory: the later one fences the earlier one out."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faults.scenarios import check_next_save, save, version_of

from verl.checkpoint import ownership
from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.retention import Retention, prune
from verl.errors import CheckpointFenced, CheckpointWriteFailed

pytestmark = pytest.mark.slow

TESTS = Path(__file__).resolve().parents[1]
TRAINER = """
import sys
from faults.scenarios import save
from verl.checkpoint.commit.store import CheckpointStore
from verl.errors import CheckpointError

store = CheckpointStore(sys.argv[1], run_id=sys.argv[2])
for line in sys.stdin:
    command, step = line.split()
    try:
        if command == "save":
            print(save(store, int(step), int(step)).name, flush=True)
        else:
            staging = store.begin(int(step))
            staging.main.write("half.bin", [b"half"])
            print("begun", flush=True)
    except CheckpointError as error:
        print(type(error).__name__, error, flush=True)
"""


class Trainer:
    """A process of its own that saves when told to."""

    def __init__(self, root: Path, name: str):
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
        command = [sys.executable, "-c", TRAINER, str(root), name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def ask(self, command: str, step: int) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{command} {step}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.communicate()


def test_a_save_in_progress_is_left_alone_while_its_process_lives_and_removed_after(tmp_path):
    root = tmp_path / "checkpoints"
    with Trainer(root, "early") as early:
        assert early.ask("begin", 1) == "begun"
        assert early.ask("begin", 2) == "begun"
        (staged,) = [path for path in (root / "staging").iterdir() if path.name.startswith("2-")]
        early.process.send_signal(signal.SIGSTOP)
        save(CheckpointStore(root, run_id="late"), 5, 5)
        assert (staged / "half.bin").read_bytes() == b"half"
    check_next_save(root)


def test_who_is_fenced_out_between_writing_and_committing_publishes_nothing(tmp_path):
    early, late = (CheckpointStore(tmp_path / "checkpoints", run_id=name) for name in ("early", "late"))
    with early.begin(1) as transaction:
        transaction.main.write("a", [b"1"])
        late.claim_directory()
        with pytest.raises(CheckpointFenced, match=r"give this one its own checkpoint\.save_dir"):
            transaction.commit()
    assert late.complete() == []
    assert list((tmp_path / "checkpoints/staging").iterdir()) == []


def test_who_is_fenced_out_prunes_nothing(tmp_path):
    early = CheckpointStore(tmp_path / "checkpoints", run_id="early")
    for step in range(1, 5):
        save(early, step, step)
    CheckpointStore(tmp_path / "checkpoints", run_id="late").claim_directory()
    with pytest.raises(CheckpointFenced):
        prune(early, Retention(keep_last_n=2))
    assert len(early.complete()) == 4


def test_a_lock_that_is_never_given_up_is_an_error_not_a_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(ownership, "LOCK_TIMEOUT_S", 0.05)
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 1, 1)
    held = store.disk.lock(store.directory / "format.json")
    assert held is not None
    with pytest.raises(CheckpointWriteFailed, match="is a trainer that saves there suspended"):
        save(store, 2, 2)
    store.disk.close(held)
    assert version_of(save(store, 2, 2)) == 2


def test_what_is_pruned_while_another_process_looks_is_not_called_bad(tmp_path, caplog):
    class Pruned(FileSystem):
        def perform(self, operation, call, *args):
            if operation == "read" and args[0].parent.name == "global_step_1" and args[0].parent.exists():
                shutil.rmtree(args[0].parent)
            return super().perform(operation, call, *args)

    save(CheckpointStore(tmp_path / "checkpoints"), 1, 1)
    save(CheckpointStore(tmp_path / "checkpoints"), 2, 2)
    assert CheckpointStore(tmp_path / "checkpoints", disk=Pruned()).complete()[-1].step == 2
    assert caplog.text == ""


def test_processes_of_one_run_share_a_claim(tmp_path):
    trainer = CheckpointStore(tmp_path / "checkpoints", run_id="one")
    writer = CheckpointStore(tmp_path / "checkpoints", run_id="one", claim=trainer.claim_directory())
    save(writer, 1, 1)
    save(trainer, 2, 2)
    assert version_of(save(writer, 3, 3)) == 3


def test_a_claim_whose_record_somebody_deleted_holds_until_the_next_one(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 1, 1)
    (tmp_path / "checkpoints/run.lock").unlink()
    assert save(store, 2, 2).sequence == 2
    CheckpointStore(tmp_path / "checkpoints").claim_directory()
    with pytest.raises(CheckpointFenced):
        save(store, 3, 3)
