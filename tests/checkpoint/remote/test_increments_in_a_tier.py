"""Increments in a tier: a link is sent once, and what comes back is what was saved."""

from __future__ import annotations

from checkpoint.save.test_increments import WEIGHTS, assert_holds, save

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.remote.commit_log import CommitLog
from verl.checkpoint.remote.remote_store import RemoteStore
from verl.checkpoint.remote.transfer import pull, upload
from verl.storage.config import LocalStorage


def test_increments_are_sent_without_their_links_and_come_back(tmp_path):
    objects = LocalStorage(path=str(tmp_path / "bucket"), part_mib=5).connect()
    saved = save(tmp_path / "here", {1: 1, 2: 2, 3: 2})
    sent = [upload(CommitLog(objects), checkpoint)[1] for checkpoint in saved]
    written = [sum(e.size for e in checkpoint.manifest.files if e.linked_from is None) for checkpoint in saved[1:]]
    assert sent[1:] == written
    assert written[1] < written[0]
    tier = RemoteStore(objects)
    pulled = pull(tier, tier.find(), CheckpointStore(tmp_path / "there"))
    assert pulled.path(WEIGHTS).read_bytes() == saved[-1].path(WEIGHTS).read_bytes()
    assert_holds(CheckpointStore(tmp_path / "there").newest(), 2)
