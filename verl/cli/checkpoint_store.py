"""`verl checkpoint pull` and `push`, and what `ls` and `verify` say of checkpoints in object storage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.describe import CheckpointSummary, status_of
from verl.checkpoint.manager import CheckpointManager
from verl.checkpoint.read.verify import Level
from verl.checkpoint.remote.download import pull as pull_one
from verl.checkpoint.remote.remote_store import RemoteStore
from verl.checkpoint.remote.resolve import find_at
from verl.checkpoint.remote.upload import CheckpointUpload
from verl.cli.output import command, size
from verl.errors import BadCheckpoint, CheckpointNotFound, ConfigError
from verl.storage.config import is_address, storage_at

ADDRESS = "Checkpoints in object storage, such as s3://BUCKET/PREFIX, or one of them. Credentials: the environment."


def remote_summaries(address: str, level: Level = "quick") -> list[CheckpointSummary]:
    """What a tier holds, in order of publication; those that do not verify are told as they are.

    Raises:
        CheckpointNotFound: nothing is there.
        StorageError: the store does not answer.
    """
    tier, named = find_at(address)
    records = tier.records() if named is None else [named]
    seen: set[str] = set()
    told = []
    for record in records:
        try:
            published = tier.verified(record, level)
        except BadCheckpoint as error:
            told.append(
                CheckpointSummary(directory=tier.directory(record), status=status_of(error), faults=error.faults)
            )
            continue
        added = [entry for entry in published.manifest.files if f"{entry.blake3}-{entry.size}" not in seen]
        seen |= {f"{entry.blake3}-{entry.size}" for entry in published.manifest.files}
        told.append(
            CheckpointSummary(
                directory=published.directory,
                status="complete",
                published=published,
                state=tier.state(published),
                added_bytes=sum(entry.size for entry in added),
                is_newest=record == records[-1],
            )
        )
    return told


def add_to(app: typer.Typer) -> None:
    """Register the commands."""

    @command(app, "pull")
    def pull(
        address: Annotated[str, typer.Argument(metavar="ADDRESS", help=ADDRESS)],
        directory: Annotated[Path, typer.Argument(metavar="DIR", help="Of checkpoints; made where it is not there.")],
        all_: Annotated[bool, typer.Option("--all", help="Every checkpoint, not the newest whole one.")] = False,
    ) -> None:
        """Fetch a checkpoint from object storage; every byte is hashed on its way."""
        tier, named = find_at(address)
        records = tier.records() if all_ and named is None else [named or tier.newest().record]
        for record in records:
            published = pull_one(tier, record, CheckpointStore(directory))
            typer.echo(f"{published.directory} is there: step {published.step}, {size(published.num_bytes)}")

    @command(app, "push")
    def push(
        path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint, or a directory of them.")],
        address: Annotated[str, typer.Argument(metavar="ADDRESS", help=ADDRESS)],
        all_: Annotated[bool, typer.Option("--all", help="Every complete checkpoint, not the newest one.")] = False,
    ) -> None:
        """Upload a checkpoint; what the store has is not sent again. A trainer that uploads is not disturbed."""
        if not is_address(address):
            raise ConfigError(f"ADDRESS is {address!r}: expected one such as s3://BUCKET/PREFIX.")
        manager = CheckpointManager(path)
        chosen = [one.published for one in manager.list()] if all_ else [manager.published]
        if not chosen:
            raise CheckpointNotFound(f"{path} holds no complete checkpoint")
        with storage_at(address.rstrip("/")).connect() as store:
            tier = RemoteStore(store)
            pusher = CheckpointUpload(store, tier.log)
            for published in chosen:
                pushed = pusher.push(published)
                typer.echo(f"{published.name} is in {store.address}: {size(pushed.sent_bytes)} were sent")
