"""A process uploads while training goes on; the store fails and vanishes, and nothing is lost or wrongly taken."""

import dataclasses
import logging
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoint.remote.test_upload_and_download import save
from refusals import refusal
from storage.s3_server import BUCKET, Fault, Proxy, after, wait_until

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.commit.upload_state import (
    UploadTarget,
    confirm_upload,
    is_upload_confirmed,
    manifest_digest,
    write_upload_target,
)
from verl.checkpoint.core.filesystem import FileSystem, FreeSpace
from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.checkpoint.remote.transfer import CheckpointTier
from verl.checkpoint.remote.upload_process import Uploader, UploadEvent, UploadSettings
from verl.checkpoint.resolve import resolve
from verl.checkpoint.retention import Retention, prune
from verl.storage.config import LocalStorage, S3Storage


@pytest.fixture
def tier(proxy: Proxy, tmp_path: Path) -> CheckpointTier:
    storage = S3Storage(
        bucket=BUCKET, prefix=tmp_path.name, endpoint_url=proxy.url, part_mib=5, retries=1, backoff_s=0.01
    )
    return CheckpointTier(storage=storage)


@pytest.fixture
def near(tmp_path: Path) -> CheckpointTier:
    return CheckpointTier(storage=LocalStorage(path=str(tmp_path / "bucket")))


def uploader(tier: CheckpointTier, directory: Path, claim: str = "one") -> Uploader:
    CheckpointStore(directory).claim_directory()
    cold = dataclasses.replace(tier.rules, address=tier.address)
    write_upload_target(FileSystem(), directory, cold)
    return Uploader(
        UploadSettings(directory=str(directory), storage=tier.storage, claim=claim, cold=cold, shortest_pause_s=0.05)
    )


def until(uploading: Uploader, kind: str, told: list[UploadEvent] | None = None) -> list[UploadEvent]:
    """All that was told until something of this kind was."""
    heard = told if told is not None else []
    wait_until(lambda: any(one.kind == kind for one in heard) or bool(heard.extend(uploading.heard())), 60)
    return heard


@pytest.mark.slow
def test_checkpoints_arrive_while_others_are_saved_and_at_the_end_all_are_there(
    tier: CheckpointTier, tmp_path: Path
) -> None:
    uploading = uploader(tier, tmp_path / "here")
    for step in (1, 2, 3):
        save(tmp_path / "here", step)
    told = uploading.close(wait_s=60)
    assert uploading.is_done
    assert {one.name for one in told if one.kind == "uploaded"} <= {f"global_step_{step}" for step in (1, 2, 3)}
    assert [record.step for record in tier.connect().records()] == [1, 2, 3]
    assert all(
        is_upload_confirmed(FileSystem(), one, tier.address)
        for one in CheckpointDirectory(tmp_path / "here").complete()
    )


def test_within_an_interval_of_time_the_newest_goes_once_and_what_has_a_tag_and_the_last_one_all_the_same(
    near: CheckpointTier, tmp_path: Path
) -> None:
    near = dataclasses.replace(near, rules=UploadTarget(address="", upload_interval_s=3600.0))
    save(tmp_path / "here", 1)
    uploading = uploader(near, tmp_path / "here")
    until(uploading, "uploaded")
    for step in (2, 3):
        save(tmp_path / "here", step)
    save(tmp_path / "here", 4, tag="kept")
    until(uploading, "uploaded")
    assert [record.step for record in near.connect().records()] == [1, 4]
    for step, later_s in ((5, -3600), (6, 3600)):  # an hour later, and after the clock was set back by an hour
        save(tmp_path / "here", step)
        for recorded in (tmp_path / "here/uploaded").iterdir():
            os.utime(recorded, (time.time() + later_s, time.time() + later_s))
        until(uploading, "uploaded")
    assert [record.step for record in near.connect().records()] == [1, 4, 5, 6]
    for step in (7, 8):
        save(tmp_path / "here", step)
    uploading.close(wait_s=60)
    assert [record.step for record in near.connect().records()] == [1, 4, 5, 6, 8]


@pytest.mark.slow
def test_a_store_that_refuses_is_told_of_at_the_start_and_not_waited_for_at_the_end(
    tier: CheckpointTier, tmp_path: Path
) -> None:
    elsewhere = dataclasses.replace(tier, storage=dataclasses.replace(tier.storage, bucket="nobodys"))
    with refusal("storage"):
        elsewhere.cold()
    uploading = uploader(elsewhere, tmp_path / "here")
    save(tmp_path / "here", 1)
    told = uploading.close(wait_s=300)
    assert uploading.is_refused
    assert not uploading.is_done
    assert "there is no bucket nobodys" in told[-1].error
    assert told[-1].waiting == 1


@pytest.mark.slow
def test_an_uploader_that_is_killed_is_told_and_the_next_one_goes_on_where_it_was(
    tier: CheckpointTier, proxy: Proxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.misbehave = after(3, Fault(passed_on=True, delay_s=30.0), method="PUT", part="objects/", times=99)
    uploading = uploader(tier, tmp_path / "here")
    save(tmp_path / "here", 1)
    wait_until(lambda: proxy.count("PUT", "objects/") >= 3, 60)
    os.kill(uploading.child.pid, signal.SIGKILL)
    proxy.over.set()
    proxy.misbehave = lambda request: None
    put_before = [request.path for request in proxy.seen if request.method == "PUT" and "objects/" in request.path]
    uploading.close(wait_s=60)  # without waiting for what does not come
    assert not uploading.is_done
    assert "the uploader ended with" in caplog.text
    assert tier.connect().records() == []
    uploader(tier, tmp_path / "here", claim="two").close(wait_s=60)
    (record,) = tier.connect().records()
    assert tier.connect().verified(record, "full").step == 1
    put = [request.path for request in proxy.seen if request.method == "PUT" and "objects/" in request.path]
    assert len(put) - len(put_before) <= 1, "what had arrived was not sent again"


def test_a_store_that_cannot_be_connected_to_is_told_and_the_uploader_lives(
    tier: CheckpointTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "gone.pem"))
    uploading = uploader(tier, tmp_path / "here")
    process = uploading.child.pid
    assert until(uploading, "failed")[-1].is_refused
    assert uploading.child.pid == process
    uploading.close(60)


def test_a_trainer_that_is_gone_takes_its_uploader_along(near: CheckpointTier, tmp_path: Path) -> None:
    uploading = uploader(near, tmp_path / "here")
    child = uploading.child
    child.channel.close()  # as the end of the trainer's process would
    assert child.await_exit(timeout_s=120) == 0
    uploading.close(wait_s=0.0)


# -- the local disk ---------------------------------------------------------------------------------------------------


ADDRESS = "s3://models/run"


def directory_with(tmp_path: Path, steps: range, **cold) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "here")
    for step in steps:
        save(store.directory, step)
    write_upload_target(store.disk, store.directory, UploadTarget(address=ADDRESS, **cold))
    return store


def test_retention_drops_only_what_the_store_has_confirmed(tmp_path: Path) -> None:
    store = directory_with(tmp_path, range(1, 6))
    assert prune(store, Retention(keep_last_n=2)) == []
    second = store.open("global_step_2")
    confirm_upload(store.disk, second, manifest_digest(store.disk, second), ADDRESS)
    assert prune(store, Retention(keep_last_n=2)) == ["global_step_2"]
    assert not (store.directory / "uploaded/global_step_2").exists()
    wrong = store.open("global_step_1")
    confirm_upload(store.disk, wrong, "0" * 64, ADDRESS)  # of another checkpoint that had this name
    assert prune(store, Retention(keep_last_n=2)) == []
    confirm_upload(store.disk, wrong, manifest_digest(store.disk, wrong), "s3://models/another")
    assert prune(store, Retention(keep_last_n=2)) == []


@pytest.mark.parametrize(("keep_waiting", "said"), [(2, "2 later ones wait too"), (8, "no room for the next one")])
def test_waiting_ends_where_too_many_wait_or_the_disk_is_full(keep_waiting, said, tmp_path, caplog) -> None:
    store = directory_with(tmp_path, range(1, 7 if keep_waiting == 2 else 5), keep_waiting=keep_waiting)
    if keep_waiting == 8:
        store.disk.space = lambda path: FreeSpace(1000, None)  # type: ignore[method-assign]
    assert prune(store, Retention(keep_last_n=2)) == ["global_step_1", "global_step_2"]
    assert f"GIVING UP checkpoint global_step_1, which {ADDRESS} has not confirmed" in caplog.text
    assert said in caplog.text


# -- which one is the newest ------------------------------------------------------------------------------------------


def upload(tier: CheckpointTier, directory: Path) -> None:
    uploading = uploader(tier, directory, claim=directory.name)
    uploading.close(wait_s=60)
    assert uploading.is_done


def found(*arguments: Any, **options: Any) -> Any:
    """The checkpoint that there is."""
    point = resolve(*arguments, **options)
    assert point is not None
    return point


def test_the_newest_of_any_tier_is_taken(near: CheckpointTier, tmp_path: Path) -> None:
    save(tmp_path / "here", 1)
    save(tmp_path / "here", 2)
    upload(near, tmp_path / "here")
    assert found("latest", tmp_path / "wiped", tier=near).step == 2
    save(tmp_path / "here", 3)
    assert found("latest", tmp_path / "here", tier=near).step == 3
    elsewhere = CheckpointTier(storage=near.storage.below("elsewhere"))
    assert resolve("latest", tmp_path / "none", tier=elsewhere) is None


def test_a_damaged_local_copy_is_replaced_by_the_one_in_the_store(
    near: CheckpointTier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = save(tmp_path / "here", 2)
    upload(near, tmp_path / "here")
    path = checkpoint.path("actor/weights.bin")
    path.write_bytes(b"!" + path.read_bytes()[1:])
    taken = found("latest", tmp_path / "here", tier=near).checkpoint
    assert taken.directory.name == "global_step_2-2"
    assert taken.path("actor/weights.bin").read_bytes()[:1] == b"\x02"
    assert "NOT USING" in caplog.text


@pytest.mark.exhaustive
@pytest.mark.parametrize("change", ["another store", "emptied"])
def test_a_store_gets_what_it_lacks_although_another_one_or_it_had_confirmed_that(
    change: str, near: CheckpointTier, tmp_path: Path
) -> None:
    for step in (1, 2):
        save(tmp_path / "here", step)
    upload(near, tmp_path / "here")
    if change == "emptied":
        shutil.rmtree(tmp_path / "bucket")
    else:
        near = dataclasses.replace(near, storage=near.storage.below("another"))
    upload(near, tmp_path / "here")
    assert [record.step for record in near.connect().records()] == [1, 2]


def test_a_store_that_cannot_be_asked_is_no_reason_to_start_afresh(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    away = CheckpointTier(
        storage=S3Storage(
            bucket="models", endpoint_url="http://127.0.0.1:9", region="x", retries=0, connect_timeout_s=1
        )
    )
    with refusal("resume"):
        found("latest", tmp_path / "wiped", tier=away)
    save(tmp_path / "here", 7)
    with caplog.at_level(logging.ERROR):
        assert found("latest", tmp_path / "here", tier=away).step == 7
    assert "resuming from the local disk" in caplog.text
    before = time.time()
    assert before - 1 <= away.cold().sequence_floor <= time.time()
