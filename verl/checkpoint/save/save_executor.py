"""Executes a save, in the writer process or the trainer's: from bytes in memory to a commit."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from verl.checkpoint.commit.rank_writer import FEWEST_DIRECT_BYTES, FileImage, ImageSource, RankReport, RankWriter
from verl.checkpoint.commit.store import CheckpointStore, SaveTransaction
from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.core.filesystem import TEMPORARY_SUFFIX, FileSystem, write_errors
from verl.checkpoint.core.hashing import Leaf, hash_buffers
from verl.checkpoint.core.manifest import COMMIT, MANIFEST, STATE, FileEntry
from verl.checkpoint.read.reader import CheckpointReader, open_verified
from verl.checkpoint.retention import Retention, prune
from verl.checkpoint.save.save_request import (
    ExistingFile,
    MultiWriterSave,
    SaveOutcome,
    SaveRequest,
    collect_reports,
    submit_report,
)
from verl.errors import BadCheckpoint, CheckpointError, CheckpointNotFound, error_text

log = logging.getLogger(__name__)


def execute_save(
    store: CheckpointStore,
    request: SaveRequest,
    source: ImageSource,
    retention: Retention | None = None,
) -> SaveOutcome:
    """Write, hash and publish one save, then prune.

    Args:
        source: memory with the images of the request; it must not change during the call.
    Raises:
        CheckpointError: nothing was published. Errors of retention are in the outcome instead.
    """
    multi_writer, files = request.multi_writer, _SaveFiles(store, request, source)
    if multi_writer is not None and not multi_writer.commits:
        return _write_part(store, request, multi_writer, files)
    files.hash_increment()
    with _begun(store, request, files) as transaction:
        reports: list[RankReport] = []
        checkpoint = None if multi_writer is None else transaction.finish_commit()
        if checkpoint is None:
            if multi_writer is not None:
                _remove_own(store.disk, request, multi_writer)
            files.write(transaction.main)
            if multi_writer is not None:
                reports = collect_reports(store.disk, multi_writer.directory, multi_writer.others, multi_writer.late_s)
            checkpoint = transaction.commit(reports, state=dict(request.state), metrics=dict(request.metrics))
    pruned, prune_error = _prune(store, retention)
    return SaveOutcome(
        step=request.step, tag=request.tag, directory=checkpoint.directory,
        num_bytes=sum(x.num_bytes for x in request.images) + sum(x.size for report in reports for x in report.files),
        pruned=pruned, prune_error=prune_error,
    )  # fmt: skip


def _begun(store: CheckpointStore, request: SaveRequest, files: _SaveFiles) -> SaveTransaction:
    if (multi_writer := request.multi_writer) is not None:  # the trainer has begun it, and locks its directory
        return SaveTransaction(store, multi_writer.directory, request.step, request.tag, multi_writer.others, None)
    num_files = len(request.images) + len(request.existing_files)
    return store.begin(request.step, request.tag, files.needed_bytes, num_files)


def _write_part(
    store: CheckpointStore, request: SaveRequest, multi_writer: MultiWriterSave, files: _SaveFiles
) -> SaveOutcome:
    """Write this participant's files into a save that another process commits, and report them."""
    _remove_own(store.disk, request, multi_writer)
    writer = RankWriter(multi_writer.directory, multi_writer.name, store.disk)
    files.hash_increment()
    files.write(writer)
    report = writer.report()
    submit_report(store.disk, multi_writer.directory, report)
    return SaveOutcome(
        step=request.step, tag=request.tag, directory=multi_writer.directory,
        num_bytes=sum(entry.size for entry in report.files),
    )  # fmt: skip


def _remove_own(disk: FileSystem, request: SaveRequest, multi_writer: MultiWriterSave) -> None:
    """Remove the files of an earlier attempt whose process was killed."""
    with write_errors(f"going on with the save of step {request.step}"):
        names = [file.path for file in (*request.images, *request.existing_files)]
        if multi_writer.commits:
            names += [path + suffix for path in (MANIFEST, STATE, COMMIT) for suffix in ("", TEMPORARY_SUFFIX)]
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                disk.unlink(multi_writer.directory / name)


class _SaveFiles:
    """Files of one save: new ones, and those shared with an earlier checkpoint."""

    def __init__(self, store: CheckpointStore, request: SaveRequest, source: ImageSource):
        self._store, self._request, self._source = store, request, source
        self._hashed: dict[str, tuple[FileEntry, Checkpoint | None]] = {}  # with a checkpoint that holds the same bytes

    def hash_increment(self) -> None:
        """Hash every image of an incremental save to find those that did not change; does nothing for other saves.

        Called before the save begins, because it determines the disk space that the save needs.
        """
        if self._request.increment:
            self._source.wait(self._request.num_bytes)
            for image in self._request.images:
                self._find_unchanged(image)

    @property
    def needed_bytes(self) -> int:
        """Bytes of disk space that the save takes."""
        copied = [file.source for file in self._request.existing_files if file.source and file.leaves is None]
        unchanged = {path for path, (_, earlier) in self._hashed.items() if earlier is not None}
        images = [image for image in self._request.images if not image.is_constant and image.path not in unchanged]
        return sum(x.num_bytes for x in images) + sum(path.stat().st_size for path in copied if path.exists())

    def write(self, writer: RankWriter) -> None:
        """Write every image: this thread writes, which takes no processor time, while another thread hashes.

        Returns once the memory is filled and every file is complete.
        """
        writer.record(*self._request.tensors)
        large = [image for image in self._request.images if _is_large(image) and not image.is_constant]
        large = [image for image in large if image.path not in self._hashed]
        end = self._request.num_bytes  # hash only once the copy is done: training waits for it, and it needs processors
        with ThreadPoolExecutor(1, thread_name_prefix="hash") as hashers:
            try:
                hashed = {image.path: hashers.submit(_hash, image, self._source, end).result for image in large}
            except RuntimeError:  # no thread can be started: the interpreter ends, or a limit is reached
                hashed = {image.path: partial(_hash, image, self._source, end) for image in large}
            try:
                for image in self._request.images:
                    self._write_image(writer, image, hashed)
            except BaseException:
                hashers.shutdown(cancel_futures=True)
                raise
        for file in self._request.existing_files:
            self._add_existing(writer, file)
        self._source.wait(self._request.num_bytes)

    def _write_image(
        self, writer: RankWriter, image: FileImage, hashed: Mapping[str, Callable[[], tuple[Leaf, ...]]]
    ) -> None:
        if image.is_constant and image.path not in self._hashed:
            self._find_unchanged(image)
        entry, earlier = self._hashed.get(image.path, (None, None))
        if earlier is not None:
            with contextlib.suppress(CheckpointNotFound):  # it was removed in the meantime: write the file
                writer.add_existing(image.path, earlier)
                return
        if not _is_large(image):
            writer.write(image.path, list(image.buffers(self._source)))
        else:
            writer.write_image(image, self._source, lambda: entry.leaves if entry else hashed[image.path]())

    def _add_existing(self, writer: RankWriter, file: ExistingFile) -> None:
        newest = self._newest
        if file.source is None:
            newest = self._newest_own
            if newest is None:
                where = self._store.directory
                raise CheckpointNotFound(f"{where} holds no checkpoint that could share its {file.path}")
            writer.add_existing(file.path, newest)
            slices = newest.slices_by_file.get(file.path, ())
            writer.record(*(replace(tensor, slices=(part,)) for tensor, part in slices))
        elif file.leaves is None:
            writer.add_existing(file.path, file.source)
        else:
            entry, earlier = FileEntry.of(file.path, file.leaves), newest and newest.manifest.file(file.path)
            if newest is not None and earlier is not None and earlier.blake3 == entry.blake3:
                entry = replace(entry, linked_from=newest.name)
            writer.add_existing(file.path, file.source, entry)

    def _find_unchanged(self, image: FileImage) -> None:
        """Hash an image, and look for a checkpoint that holds the same bytes under the same path."""
        entry = FileEntry.of(image.path, _hash(image, self._source))
        holders = (checkpoint for checkpoint in self._earlier if _holds(self._store.disk, checkpoint, entry))
        self._hashed[image.path] = entry, next(holders, None)

    @cached_property
    def _earlier(self) -> list[Checkpoint]:
        """Checkpoints whose files may be shared."""
        earlier = [] if self._newest is None else [self._newest]
        base = self._request.increment
        if isinstance(base, Path):
            try:
                return [open_verified(self._store.disk, base), *earlier]
            except (BadCheckpoint, OSError) as error:
                log.error("checkpoint.incremental_base cannot be used: %s", error)
        return earlier

    @cached_property
    def _newest(self) -> Checkpoint | None:
        try:
            return self._store.newest()
        except (CheckpointNotFound, BadCheckpoint):
            return None

    @property
    def _newest_own(self) -> Checkpoint | None:
        """The newest checkpoint, of this run if it has one: another process may fetch checkpoints of other runs."""
        try:
            return self._store.newest(lambda checkpoint: checkpoint.manifest.run_id == self._store.run_id)
        except (CheckpointNotFound, BadCheckpoint):
            return self._newest


def _is_large(image: FileImage) -> bool:
    """Whether a file bypasses the page cache."""
    return image.num_bytes >= FEWEST_DIRECT_BYTES


def _hash(image: FileImage, source: ImageSource, end: int = 0) -> tuple[Leaf, ...]:
    """Leaves of an image; begins once the memory is filled up to `end`."""
    source.wait(end)
    return hash_buffers(image.buffers(source))


def _holds(disk: FileSystem, checkpoint: Checkpoint, entry: FileEntry) -> bool:
    """Whether a checkpoint has the same file, undamaged on the disk."""
    recorded = checkpoint.manifest.file(entry.path)
    if recorded is None or (recorded.size, recorded.blake3) != (entry.size, entry.blake3):
        return False
    try:
        CheckpointReader(checkpoint, disk).check(entry.path)
    except BadCheckpoint as error:
        log.error("%s of %s is damaged, and is written anew: %s", entry.path, checkpoint.directory, error)
        return False
    return True


def _prune(store: CheckpointStore, retention: Retention | None) -> tuple[tuple[str, ...], str | None]:
    if retention is None:
        return (), None
    try:
        return tuple(prune(store, retention)), None
    except CheckpointError as error:
        return (), error_text(error)
