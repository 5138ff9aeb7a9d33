"""Increments in a tier: a base is sent once, and what comes back, whole or by ranges, is what was saved."""

from __future__ import annotations

from checkpoint.save.test_increments import BASE, DELTA, assert_holds, save_all

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.read.reader import CheckpointReader
from verl.checkpoint.remote.commit_log import CommitLog
from verl.checkpoint.remote.download import pull
from verl.checkpoint.remote.remote_store import RemoteReader, RemoteStore
from verl.checkpoint.remote.upload import CheckpointUpload
from verl.storage.config import LocalStorage


def test_increments_are_sent_without_their_bases_and_come_back(tmp_path):
    objects = LocalStorage(path=str(tmp_path / "bucket"), part_mib=5).connect()
    saved = save_all(tmp_path / "here", 3)
    sent = [CheckpointUpload(objects, CommitLog(objects, "")).push(published).num_sent for published in saved]
    assert sent[1:] == [sum(e.linked_from is None for e in published.manifest.files) for published in saved[1:]]
    tier = RemoteStore(objects)
    remote = tier.open(tier.find())
    assert RemoteReader(objects, remote).digest() == CheckpointReader(saved[-1]).digest()
    pulled = pull(tier, tier.find(), CheckpointStore(tmp_path / "there"))
    for path in (BASE, DELTA):
        assert pulled.path(path).read_bytes() == saved[-1].path(path).read_bytes()
    assert_holds(CheckpointStore(tmp_path / "there").newest(strict=True), 3)
