"""An S3 server that fails while a checkpoint is fetched from it: it is fetched whole, or not at all and told."""

from pathlib import Path

import pytest
from cases import exhaustive
from checkpoint.remote.test_upload_and_download import save
from refusals import refusal
from storage.s3_server import BUCKET, Fault, Proxy, after

from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.checkpoint.remote.commit_log import CommitLog
from verl.checkpoint.remote.transfer import CheckpointTier, upload
from verl.checkpoint.resolve import resolve
from verl.storage.config import S3Storage

OBJECTS = {"method": "GET", "part": "objects/"}


@pytest.fixture
def tier(proxy: Proxy, tmp_path: Path) -> CheckpointTier:
    limits = {"part_mib": 5, "retries": 1, "backoff_s": 0.01}
    storage = S3Storage(bucket=BUCKET, prefix=f"fetches/{tmp_path.name}", endpoint_url=proxy.url, **limits)
    return CheckpointTier(storage=storage)


def push(tier: CheckpointTier, checkpoint: Checkpoint) -> None:
    with tier.storage.connect() as objects:
        upload(CommitLog(objects), checkpoint)


def assert_fetched_whole(tier: CheckpointTier, directory: Path) -> None:
    assert resolve("latest", directory, tier=tier).step == 1
    assert list((directory / "staging").iterdir()) == []


def test_a_store_that_goes_away_in_a_fetch_is_said_to_and_nothing_is_published(tier, proxy, tmp_path):
    push(tier, save(tmp_path / "here", 1))
    proxy.misbehave = after(2, Fault(status=503), times=99, **OBJECTS)
    with refusal("resume"):
        resolve("latest", tmp_path / "wiped", tier=tier)
    assert CheckpointDirectory(tmp_path / "wiped").candidates() == []
    proxy.misbehave = lambda request: None
    assert_fetched_whole(tier, tmp_path / "wiped")


@pytest.mark.parametrize("status", [403, *exhaustive(500)])
def test_a_store_that_lists_and_gives_no_object_leaves_the_whole_checkpoint_of_the_disk(
    status, tier, proxy, tmp_path, caplog
):
    save(tmp_path / "here", 1)
    for step in (2, 3):
        push(tier, save(tmp_path / "elsewhere", step))
    proxy.misbehave = after(0, Fault(status=status), times=99, **OBJECTS)
    checkpoint = resolve("latest", tmp_path / "here", tier=tier).checkpoint
    assert checkpoint.directory == tmp_path / "here/global_step_1"
    assert caplog.text.count("which cannot be fetched") == 1
