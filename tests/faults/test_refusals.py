"""The file system refuses an operation: the save raises, nothing else happens, and the next save works."""

import errno
import resource
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from faults.disks import CHANGING, FailingDisk, Operation, RecordingDisk, RefusingDisk, ShortWritingDisk, is_killed
from faults.scenarios import WEIGHT, Scenario, check, check_next_save, fast_directory, save, scenarios, version_of

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.filesystem import FileSystem
from verl.errors import CheckpointError, NoSpaceForCheckpoint

CODES = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.EINTR, errno.EROFS]


def is_convenience(operation: Operation) -> bool:
    """Whether the save is durable without it: `latest`, the index of objects, the end of a lock, what is removed."""
    paths = " ".join(str(arg) for arg in operation.args)
    return operation.name in ("close", "unlink", "remove_directory", "lock") or "/objects" in paths or "latest" in paths


def refused(scenario: Scenario, at: int, code: int) -> Operation | None:
    """Let one operation fail and check everything. None where there is no such operation any more."""
    with fast_directory() as base:
        root = base / "checkpoints"
        scenario.prepare(root)
        disk = FailingDisk(at, code)
        store = CheckpointStore(root, "second", disk)
        weight = WEIGHT.copy()
        try:
            scenario.act(store)
            has_raised = False
        except CheckpointError:
            has_raised = True
        if disk.failed is None:
            return None
        place = f"{disk.failed.name} {disk.failed.path} ({errno.errorcode[code]})"
        assert check(root, scenario, is_done=scenario.saves and not has_raised) == [], place
        if scenario.saves and disk.failed.name in CHANGING and not is_convenience(disk.failed):
            assert has_raised, f"nothing was raised after a failed {place}"
        assert np.array_equal(WEIGHT, weight)
        if at % 3 == 0:
            check_next_save(root, store=store)
        return disk.failed


def run(scenario: Scenario, codes: list[int], stride: int) -> int:
    """Let every `stride`-th operation fail; returns the number of cases."""
    num_cases = 0
    for code in codes:
        at = 5 * codes.index(code) % stride  # other places for every code
        while refused(scenario, at, code) is not None:
            at += stride
            num_cases += 1
    return num_cases


@pytest.mark.first_rows(1)
@pytest.mark.parametrize(("scenario", "whole"), scenarios("save from memory", "retention"))
def test_a_refusal_is_raised_and_does_no_harm(scenario, whole, record_property):
    record_property("fault_cases", run(scenario, CODES, stride=1 if whole else 211))


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
def test_where_files_cannot_be_linked_they_are_copied(code, tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", disk=RefusingDisk(link=code, clone=errno.EOPNOTSUPP))
    save(store, 100, 1)
    second = save(store, 200, 2)
    assert version_of(second) == 2
    assert second.path("reference_model/frozen.bin").stat().st_nlink == 1
    assert second.manifest.file("reference_model/frozen.bin").linked_from == "global_step_100"


def test_short_writes_are_continued(tmp_path):
    assert version_of(save(CheckpointStore(tmp_path / "checkpoints", disk=ShortWritingDisk()), 100, 1)) == 1


def test_without_file_locks_saving_works_and_says_so(tmp_path, caplog):
    store = CheckpointStore(tmp_path / "checkpoints", disk=RefusingDisk(lock=errno.ENOLCK))
    assert version_of(save(store, 100, 1)) == 1
    assert "no file locks" in caplog.text


def test_without_symbolic_links_saving_works_and_says_so(tmp_path, caplog):
    store = CheckpointStore(tmp_path / "checkpoints", disk=RefusingDisk(symlink=errno.EPERM))
    assert version_of(save(store, 100, 1)) == 1
    assert "latest does not point to global_step_100" in caplog.text
    assert store.newest().step == 100


def test_a_file_whose_sync_failed_is_never_synced_again(tmp_path):
    synced = []

    class SyncFailing(FileSystem):
        def perform(self, operation, call, *args):
            if operation == "sync" and args[0].path.name.endswith(".safetensors"):
                synced.append(args[0].path)
                raise OSError(errno.EIO, "Input/output error")
            return super().perform(operation, call, *args)

    store = CheckpointStore(tmp_path / "checkpoints", disk=SyncFailing())
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"writing actor/model-00001.*failed: Input/output error"):
            save(store, 100, 1)
    assert len(synced) == len(set(synced)) == 2


def test_a_checkpoint_whose_last_sync_failed_is_made_durable_when_it_is_saved_again(tmp_path):
    class RootSyncFailing(RecordingDisk):
        def perform(self, operation, call, *args):
            checkpoint = any(noted.name == "rename" and "global" in noted.args[1].name for noted in self.operations)
            if operation == "sync_directory" and args[0].name == "checkpoints" and checkpoint and not failures:
                failures.append(args[0])
                raise OSError(errno.EIO, "Input/output error")
            return super().perform(operation, call, *args)

    failures, disk = [], RootSyncFailing()
    store = CheckpointStore(tmp_path / "checkpoints", disk=disk)
    with pytest.raises(CheckpointError, match="publishing step 100 failed"):
        save(store, 100, 1)
    assert save(store, 100, 1).name == "global_step_100"
    renamed = [
        n for n, noted in enumerate(disk.operations) if noted.name == "rename" and "global" in str(noted.args[1])
    ]
    synced = [n for n, noted in enumerate(disk.operations) if noted == Operation("sync_directory", (store.directory,))]
    assert synced[-1] > renamed[-1]


def test_an_error_in_a_thread_that_nobody_looked_at_stops_the_commit(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    with store.begin(100) as transaction:
        transaction.main.write("a", [b"1"])
        with pytest.raises(CheckpointError, match="File exists"):
            transaction.main.write("a", [b"2"])
        with pytest.raises(CheckpointError, match="main could not write a"):
            transaction.commit()
    assert store.complete() == []


def test_a_save_larger_than_the_free_space_is_refused_before_anything_is_written(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    with pytest.raises(NoSpaceForCheckpoint, match=r"GiB free and the save needs 931322\.58 GiB; nothing was written"):
        store.begin(100, needed_bytes=10**15)
    with pytest.raises(NoSpaceForCheckpoint, match="inodes"):
        store.begin(100, needed_files=10**15)
    assert list((tmp_path / "checkpoints/staging").iterdir()) == []


def test_a_file_size_limit_that_a_thread_runs_into_stops_the_save(tmp_path):
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        with CheckpointStore(tmp_path / "checkpoints").begin(1) as transaction, ThreadPoolExecutor(2) as threads:
            small, large = (threads.submit(transaction.main.write, str(size), [bytes(size)]) for size in (10, 10_000))
            small.result()
            with pytest.raises(CheckpointError, match="writing 10000 failed: File too large"):
                large.result()
            with pytest.raises(CheckpointError, match="main could not write 10000"):
                transaction.commit()

    assert not is_killed(limited)
    assert CheckpointStore(tmp_path / "checkpoints").complete() == []


def test_a_disk_that_fills_up_says_so(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", disk=RefusingDisk(write=errno.ENOSPC))
    with pytest.raises(NoSpaceForCheckpoint, match="No space left on device"):
        save(store, 100, 1)
