"""Checkpoints go into a store and come back as they were; what is wrong is found, and names the file."""

from pathlib import Path

import pytest
from cases import exhaustive
from refusals import refusal
from storage.s3_server import BUCKET

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.checkpoint.remote import transfer
from verl.checkpoint.remote.commit_log import CommitLog
from verl.checkpoint.remote.remote_store import RemoteStore, object_key
from verl.checkpoint.remote.transfer import bring, pull, upload
from verl.errors import CheckpointCorrupt, CheckpointFenced, CheckpointIncomplete, CheckpointNotFound, ConfigError
from verl.storage.config import GCSStorage, LocalStorage, OSSStorage
from verl.storage.store import ObjectStore

TOKENIZER = b"tokens of a constant file" * 40


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return LocalStorage(path=str(tmp_path / "bucket"), part_mib=5).connect()


@pytest.fixture(params=["local", "gcs", *exhaustive("oss")])
def any_objects(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "local":
        return request.getfixturevalue("objects")
    kind, url = {"gcs": GCSStorage, "oss": OSSStorage}[request.param], request.getfixturevalue(f"{request.param}_url")
    return kind(bucket=BUCKET, prefix=tmp_path.name, endpoint_url=url, part_mib=5).connect()


def save(directory: Path, step: int, weight: bytes = b"", tag: str | None = None) -> Checkpoint:
    store = CheckpointStore(directory, run_id="testing")
    with store.begin(step, tag) as transaction:
        transaction.main.write("actor/weights.bin", [weight or bytes([step % 256]) * 5000, b"second leaf" * step])
        transaction.main.write("actor/tokenizer.json", [TOKENIZER])
        transaction.main.write("actor/empty", [b""])
        return transaction.commit(state={"epoch": step})


def push(objects: ObjectStore, checkpoint: Checkpoint, claim: str = ""):
    return upload(CommitLog(objects, claim), checkpoint)


def test_what_was_pushed_is_pulled_bit_by_bit(any_objects: ObjectStore, tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "here", 3)
    push(any_objects, checkpoint)
    tier = RemoteStore(any_objects)
    assert tier.newest().step == 3
    pulled = pull(tier, tier.find(), CheckpointStore(tmp_path / "there"))
    files = [path.relative_to(checkpoint.directory) for path in checkpoint.directory.rglob("*") if path.is_file()]
    assert len(files) == 6
    for file in files:
        assert (pulled.directory / file).read_bytes() == (checkpoint.directory / file).read_bytes()
    assert CheckpointDirectory(tmp_path / "there").newest().step == 3


def test_what_was_fetched_for_earlier_starts_is_removed(objects: ObjectStore, tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        push(objects, save(tmp_path / "here", step))
    for step in (1, 2, 3, 4, 1):
        found, _ = bring(f"{objects.address}/global_step_{step}", tmp_path / "there")
        assert found.step == step
        kept = sorted(path.name for path in found.directory.parent.glob("global_step_*"))
    assert kept == ["global_step_1", "global_step_3", "global_step_4"]  # the newest two, and the one asked for


@pytest.mark.parametrize("damage", ["altered", "cut", "missing"])
def test_a_damaged_object_is_named_and_not_published(objects: ObjectStore, tmp_path: Path, damage: str) -> None:
    checkpoint = save(tmp_path / "here", 5)
    push(objects, checkpoint)
    entry = checkpoint.manifest.file("actor/weights.bin")
    key, data = object_key(entry), checkpoint.path(entry.path).read_bytes()
    if damage == "missing":
        objects.delete(key)
    else:
        objects.put(
            key,
            data[:-1] if damage == "cut" else data[:6000] + b"~" + data[6001:] if len(data) > 6000 else b"~" + data[1:],
        )
    tier = RemoteStore(objects)
    kind = CheckpointIncomplete if damage == "missing" else CheckpointCorrupt
    with pytest.raises(kind, match="actor/weights.bin"):
        tier.verified(tier.find(), "full")
    with pytest.raises(kind, match="actor/weights.bin"):
        pull(tier, tier.find(), CheckpointStore(tmp_path / "there"))
    assert CheckpointDirectory(tmp_path / "there").candidates() == []


def test_a_manifest_that_is_not_the_one_of_the_log_is_refused(objects: ObjectStore, tmp_path: Path) -> None:
    record = push(objects, save(tmp_path / "here", 5))[0]
    key = f"manifests/{record.manifest}.json"
    objects.put(key, bytes(objects.get(key)).replace(b'"step": 5', b'"step": 6'))
    with refusal("manifest.json", kind=CheckpointCorrupt):
        RemoteStore(objects).open(record)


def test_the_newest_whole_one_is_taken(objects: ObjectStore, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    push(objects, save(tmp_path / "here", 1))
    second = save(tmp_path / "here", 2)
    push(objects, second)
    entry = second.manifest.file("actor/weights.bin")
    objects.delete(object_key(entry))
    assert RemoteStore(objects).newest().step == 1
    assert "NOT USING" in caplog.text
    with pytest.raises(CheckpointNotFound):
        RemoteStore(LocalStorage(path=str(tmp_path / "nothing")).connect()).newest()


def test_a_record_of_the_log_that_is_damaged_costs_its_checkpoint_alone(objects, tmp_path, caplog) -> None:
    one = CommitLog(objects, "one")
    one.take_claim()
    for step in (1, 2):
        record, _ = upload(one, save(tmp_path / "here", step))
    objects.put(f"log/{record.number:012d}.json", b"{")
    assert RemoteStore(objects).newest().step == 1
    assert "NOT USING" in caplog.text
    with pytest.raises(CheckpointFenced, match="a record that is damaged"):  # it may have been a claim
        push(objects, save(tmp_path / "here", 3), "one")
    CommitLog(objects, "two").take_claim()
    push(objects, save(tmp_path / "here", 3), "two")
    assert RemoteStore(objects).newest().step == 3


def test_the_later_of_two_trainers_fences_the_earlier_one_out(any_objects: ObjectStore, tmp_path: Path) -> None:
    one, two = CommitLog(any_objects, "one"), CommitLog(any_objects, "two")
    one.take_claim()
    upload(one, save(tmp_path / "one", 1))
    two.take_claim()
    with pytest.raises(CheckpointFenced, match="taken over"):
        upload(one, save(tmp_path / "one", 2))
    upload(two, save(tmp_path / "two", 3))
    with pytest.raises(CheckpointFenced):
        CommitLog(any_objects, "one").take_claim()
    again = CommitLog(any_objects, "two")
    again.take_claim()  # the same trainer, whose uploader was started again
    assert [record.step for record in RemoteStore(any_objects).records()] == [1, 3]


def test_a_claim_between_the_last_look_and_the_commit_wins(objects: ObjectStore, tmp_path: Path, monkeypatch) -> None:
    one = CommitLog(objects, "one")
    one.take_claim()
    put_objects = transfer.put_objects

    def then_another_claims(*given):
        CommitLog(objects, "two").take_claim()
        return put_objects(*given)

    monkeypatch.setattr(transfer, "put_objects", then_another_claims)
    with pytest.raises(CheckpointFenced):
        upload(one, save(tmp_path / "one", 1))
    assert RemoteStore(objects).records() == []


def test_somebody_who_pushes_by_hand_disturbs_no_trainer(objects: ObjectStore, tmp_path: Path) -> None:
    trainer = CommitLog(objects, "trainer")
    trainer.take_claim()
    push(objects, save(tmp_path / "hand", 1))
    upload(trainer, save(tmp_path / "trainer", 2))
    assert len(RemoteStore(objects).records()) == 2


def test_a_store_that_replaces_what_it_should_not_is_found_out(objects: ObjectStore) -> None:
    objects.backend.create = objects.backend.put
    log = CommitLog(objects, "one")
    with pytest.raises(ConfigError, match="conditional_put=false"):
        log.take_claim()
    assert [record.claim for record in CommitLog(objects).records()] == ["one"], "the log is as it was"
