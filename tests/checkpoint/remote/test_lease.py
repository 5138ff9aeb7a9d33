"""The lease on a place in a store: one living run holds it, a dead one's is taken over, on a directory and on S3."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from cases import exhaustive
from storage.s3_server import BUCKET

from verl.checkpoint.commit.fencing import LockHolder, RunLock, _process_start
from verl.checkpoint.remote import store_lease
from verl.checkpoint.remote.store_lease import LeaseRecord, StoreLease, living_holder, machine_id, newest_lease
from verl.component import as_plain
from verl.errors import StorageUnreachable
from verl.storage.config import LocalStorage, S3Storage, Storage
from verl.storage.store import ObjectStore

LIVING = """
import importlib, json, sys
from verl.checkpoint.commit.fencing import RunLock
from verl.checkpoint.remote import store_lease
target, fields, directory = json.loads(sys.argv[1])
kind = getattr(importlib.import_module(target.rpartition(".")[0]), target.rpartition(".")[2])
store_lease.RENEW_EVERY_S = 0.05
own = RunLock(__import__("pathlib").Path(directory), "first", {})
held = store_lease.StoreLease(kind(**fields), own.holder)
print(held.acquire(), flush=True)
held.keep()
if sys.stdin.readline():
    held.release()
"""


@pytest.fixture(params=["a directory", *exhaustive("S3")])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "S3":
        url = request.getfixturevalue("s3_url")
        return S3Storage(bucket=BUCKET, prefix=f"lease/{tmp_path.name}", endpoint_url=url)
    return LocalStorage(path=str(tmp_path / "bucket"))


@contextmanager
def living_run(storage: Storage, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process whose run holds the place."""
    target = f"{type(storage).__module__}.{type(storage).__name__}"
    fields = {key: value for key, value in as_plain(storage).items() if key != "_target_"}
    given = json.dumps([target, fields, str(directory)])
    process = subprocess.Popen([sys.executable, "-c", LIVING, given], stdin=-1, stdout=-1, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "None\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def own(tmp_path: Path, name: str = "second") -> LockHolder:
    return RunLock(tmp_path / name, name, {}).holder


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on this process looks from a machine that sees no process of the other."""
    monkeypatch.setattr(store_lease, "machine_id", lambda: "another machine")
    monkeypatch.setattr(store_lease, "LOOK_EVERY_S", 0.05)


def test_a_place_that_a_living_run_of_another_machine_holds_is_not_taken_and_one_that_it_gave_up_is(
    storage, tmp_path, monkeypatch
):
    with living_run(storage, tmp_path / "first") as process:
        elsewhere(monkeypatch)
        mine = StoreLease(storage, own(tmp_path))
        holder = mine.acquire(wait_s=60)
        assert holder is not None
        assert str(holder).startswith(f"run first: process {process.pid} on ")
        assert mine.number is None
        assert living_holder(storage, 60) is not None
        process.communicate("end\n")
    assert mine.acquire(wait_s=1e9) is None, "a place that was given up is free at once"


def test_a_dead_runs_place_is_taken_at_once_on_its_machine_and_after_a_while_elsewhere(storage, tmp_path, monkeypatch):
    with living_run(storage, tmp_path / "first") as process:
        assert StoreLease(storage, own(tmp_path)).acquire(wait_s=1e9) is not None
        process.kill()
        process.wait()
    with storage.connect() as store:
        number, _ = newest_lease(store)
    with monkeypatch.context() as patched:
        elsewhere(patched)
        assert living_holder(storage, 0.2) is None
        waits: list[float] = []
        patched.setattr(
            store_lease.time, "sleep", lambda seconds, of=store_lease.time.sleep: (waits.append(seconds), of(seconds))
        )
        far = StoreLease(storage, own(tmp_path, "far"))
        assert far.acquire(wait_s=0.3) is None
        assert waits, "it was looked whether the run lives"
    assert far.number == number + 1
    near = StoreLease(storage, own(tmp_path, "near"))
    assert near.acquire(wait_s=0.3) is None
    with storage.connect() as store:
        assert not far.renew(store), "who lost it does not write it again"
        near.release()
        assert newest_lease(store)[1].is_released


def test_of_several_that_find_a_dead_runs_place_one_gets_it(storage, tmp_path, monkeypatch):
    with living_run(storage, tmp_path / "first"):
        pass
    monkeypatch.setattr(
        store_lease, "is_alive", lambda holder: holder.run_id != "first"
    )  # the takers are of one process
    takers = [StoreLease(storage, own(tmp_path, f"taker {number}")) for number in range(6)]
    got: list[int] = []
    threads = [threading.Thread(target=_take, args=(taker, got.append)) for taker in takers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1


@pytest.mark.parametrize("listed", [0, 1, 2])
def test_a_listing_older_than_the_newest_lease_gives_nobody_a_place_that_is_held(
    storage, tmp_path, monkeypatch, listed
):
    for name in ("first", "next"):
        lease = StoreLease(storage, own(tmp_path, name))
        assert lease.acquire() is None
        lease.release()
    holder = StoreLease(storage, own(tmp_path, "holder"))
    assert holder.acquire() is None
    late = iter([(listed, None)])
    monkeypatch.setattr(store_lease, "newest_lease", lambda store: next(late, None) or newest_lease(store))
    monkeypatch.setattr(store_lease, "is_alive", lambda record: True)
    refused = StoreLease(storage, own(tmp_path, "late")).acquire()
    assert refused is not None, "two hold the place"
    assert refused.run_id == "holder"
    with storage.connect() as store:
        assert newest_lease(store)[0] == holder.number == 3


def _take(taker: StoreLease, tell: Callable[[int], None]) -> None:
    if taker.acquire(wait_s=1e9) is None:
        assert taker.number is not None
        tell(taker.number)


def test_what_somebody_else_wrote_there_is_nobodys_lease_and_a_store_that_is_gone_is_told(storage, tmp_path, proxy):
    with storage.connect() as store:
        store.put("leases/000000000003.json", b'{"pid": "seven"}')
        store.put("leases/notes.txt", b"by hand")
    mine = StoreLease(storage, own(tmp_path))
    assert mine.acquire(wait_s=1e9) is None
    assert mine.number == 4
    assert asdict(mine.holder)["run_id"] == "second"
    gone = S3Storage(bucket=BUCKET, endpoint_url="http://127.0.0.1:9", retries=0)
    with pytest.raises(StorageUnreachable):
        StoreLease(gone, own(tmp_path)).acquire()


def test_the_first_renewal_by_the_upload_process_shows_that_the_run_lives(storage, tmp_path, monkeypatch):
    mine = StoreLease(storage, own(tmp_path, "first"))
    assert mine.acquire() is None
    uploading = StoreLease(storage, mine.holder, mine.number)  # counts its renewals from the beginning
    elsewhere(monkeypatch)
    with storage.connect() as store:
        number, found = newest_lease(store)
        renewed = iter([uploading])  # in the wait for a sign of life, once
        monkeypatch.setattr(store_lease.time, "sleep", lambda seconds: [lease.renew(store) for lease in renewed])
        assert store_lease._lives(store, number, found, wait_s=0.2)


def test_a_process_that_takes_renewing_over_renews_at_once(storage, tmp_path, monkeypatch):
    mine = StoreLease(storage, own(tmp_path, "first"))
    assert mine.acquire() is None
    uploading, renewed = StoreLease(storage, mine.holder, mine.number), threading.Event()
    monkeypatch.setattr(store_lease, "RENEW_EVERY_S", 1e6)

    def told(self: StoreLease, store: ObjectStore) -> bool:
        renewed.set()
        return True

    monkeypatch.setattr(StoreLease, "renew", told)
    uploading.keep()
    assert renewed.wait(60)
    uploading.release()


def test_a_request_for_renewal_that_gets_no_answer_does_not_last_as_long_as_the_lease(tmp_path, monkeypatch):
    storage = S3Storage(bucket=BUCKET, prefix="lease/slow", endpoint_url="http://127.0.0.1:9")
    assert storage.timeout_s >= store_lease.LEASE_S, "as long as that of other requests"
    lease, used, done = StoreLease(storage, own(tmp_path), 1), [], threading.Event()

    def told(self: StoreLease, store: ObjectStore) -> bool:
        used.append(store.storage)
        done.set()
        return False

    monkeypatch.setattr(StoreLease, "renew", told)
    lease.keep()
    assert done.wait(60)
    assert 2 * used[0].timeout_s + store_lease.RENEW_EVERY_S < store_lease.LEASE_S
    assert used[0].retries == 0


def test_a_lease_has_one_length_whatever_a_renewal_writes(tmp_path, monkeypatch):
    times = [1.7e9, 1.7e9 + 0.1234567]
    for length in range(1200):
        lease = StoreLease(LocalStorage(path=str(tmp_path)), own(tmp_path, "x" * length))
        sizes = set()
        for renewals, is_released, now in ((0, False, times[0]), (9, False, times[1]), (10**6, True, times[1])):
            monkeypatch.setattr(store_lease.time, "time", lambda now=now: now)
            lease._own = replace(lease._own, renewals=renewals, is_released=is_released)
            sizes.add(len(lease._data()))
        assert len(sizes) == 1, f"a reader may get a part of it: {length} {sizes}"


def test_a_run_in_a_container_of_another_name_is_not_taken_for_dead(tmp_path):
    record = LeaseRecord(**asdict(replace(own(tmp_path), pid=os.getppid())), machine=machine_id())
    living = replace(record, host="another-name", started=_process_start(os.getppid()))
    assert not living.is_known_dead
    assert replace(living, started="1").is_known_dead


def test_a_lease_that_is_released_during_a_renewal_ends_its_thread_in_order(storage, tmp_path, monkeypatch):
    lease = StoreLease(storage, own(tmp_path))
    assert lease.acquire() is None
    listed = store_lease.newest_lease

    def released_meanwhile(store: ObjectStore) -> tuple[int, LeaseRecord | None]:
        found = listed(store)
        lease.number = None  # by `release`, which did not wait longer
        return found

    monkeypatch.setattr(store_lease, "newest_lease", released_meanwhile)
    with storage.connect() as store:
        assert lease.renew(store)
