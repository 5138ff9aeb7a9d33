"""Executes a save, in the writer process or the trainer's: from bytes in memory to a commit."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from verl.checkpoint.commit.rank_writer import RankReport, RankWriter
from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.commit.transaction import SaveTransaction
from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.core.direct_io import FEWEST_DIRECT_BYTES, FileImage, ImageSource
from verl.checkpoint.core.filesystem import TEMPORARY_SUFFIX, FileSystem, write_errors
from verl.checkpoint.core.hashing import Leaf, hash_buffers
from verl.checkpoint.core.manifest import COMMIT, MANIFEST, STATE, FileEntry
from verl.checkpoint.read.reader import CheckpointReader
from verl.checkpoint.read.verify import open_verified
from verl.checkpoint.retention import Retention, prune
from verl.checkpoint.save.save_request import (
    ExistingFile,
    IncrementalSettings,
    MultiWriterSave,
    SaveReport,
    SaveRequest,
    collect_reports,
    submit_failure,
    submit_report,
)
from verl.errors import BadCheckpoint, CheckpointError, CheckpointNotFound

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HashedFile:
    """A file of an incremental save, hashed before the save begins.

    Attributes:
        entry: the file.
        hash_s: processor seconds that hashing it took.
        unchanged_in: a checkpoint that holds the same bytes under the same path; None: the file is written.
    """

    entry: FileEntry
    hash_s: float
    unchanged_in: Checkpoint | None = None


def hash_increment(store: CheckpointStore, request: SaveRequest, source: ImageSource) -> dict[str, HashedFile]:
    """Each image of an incremental save by path; nothing for another save.

    Called before the save begins, since it determines how much space that needs.
    """
    if request.increment is None:
        return {}
    source.wait(request.num_bytes)
    earlier = [checkpoint for checkpoint in (_base(store, request.increment), _newest(store)) if checkpoint is not None]
    hashed = {}
    for image in request.images:
        began = time.thread_time()
        entry = FileEntry.of(image.path, hash_buffers(image.buffers(source)))
        hash_s = time.thread_time() - began
        unchanged_in = next((checkpoint for checkpoint in earlier if _holds(store.disk, checkpoint, entry)), None)
        hashed[image.path] = HashedFile(entry, hash_s, unchanged_in)
    return hashed


def needed_bytes(image: FileImage, hashed: HashedFile | None) -> int:
    """Disk space that storing a file takes."""
    return 0 if image.is_constant or (hashed is not None and hashed.unchanged_in is not None) else image.num_bytes


def _holds(disk: FileSystem, checkpoint: Checkpoint, entry: FileEntry) -> bool:
    """Whether a checkpoint has the same file, and its bytes on the disk are still those that were written."""
    recorded = checkpoint.manifest.file(entry.path)
    if recorded is None or (recorded.size, recorded.blake3) != (entry.size, entry.blake3):
        return False
    try:
        CheckpointReader(checkpoint, disk).check(entry.path)
    except BadCheckpoint as error:
        log.error("%s of %s is damaged, and is written anew: %s", entry.path, checkpoint.directory, error)
        return False
    return True


def _newest(store: CheckpointStore) -> Checkpoint | None:
    try:
        return store.newest()
    except (CheckpointNotFound, BadCheckpoint):
        return None


def _base(store: CheckpointStore, settings: IncrementalSettings) -> Checkpoint | None:
    if settings.base is None:
        return None
    try:
        return open_verified(store.disk, settings.base)
    except (BadCheckpoint, OSError) as error:
        log.error("checkpoint.incremental_base cannot be used: %s", error)
        return None


Hashed = tuple[tuple[Leaf, ...], float]


def execute_save(
    store: CheckpointStore,
    request: SaveRequest,
    source: ImageSource,
    retention: Retention | None = None,
    fewest_direct_bytes: int = FEWEST_DIRECT_BYTES,
) -> SaveReport:
    """Write, hash and publish one save, then prune.

    Args:
        source: memory with the images of the request; it must not change meanwhile.
        fewest_direct_bytes: of a file that is written past the page cache.
    Raises:
        CheckpointError: nothing was published. What retention could not do is in the report instead.
    """
    multi_writer = request.multi_writer
    if multi_writer is not None and not multi_writer.commits:
        return _write_part(store, request, multi_writer, source, fewest_direct_bytes)
    clock = _PhaseTimer()
    increment = hash_increment(store, request, source)
    with _begun(store, request, increment) as transaction:
        begin_s = clock.lap()
        hash_s, reports = 0.0, []
        checkpoint = None if multi_writer is None else transaction.finish_commit()
        if checkpoint is None:
            if multi_writer is not None:
                _remove_own(store.disk, request, multi_writer)
            hash_s = _write(transaction.main, request, source, fewest_direct_bytes, increment)
            _add_existing_files(store, transaction.main, request.existing_files)
            source.wait(request.num_bytes)
            if multi_writer is not None:
                reports = collect_reports(store.disk, multi_writer.directory, multi_writer.others, multi_writer.late_s)
        write_s = clock.lap()
        if checkpoint is None:
            checkpoint = transaction.commit(reports, state=dict(request.state), metrics=dict(request.metrics))
    commit_s = clock.lap()
    pruned, prune_error = _prune(store, retention)
    return SaveReport(
        name=checkpoint.name, directory=checkpoint.directory, sequence=checkpoint.sequence,
        num_bytes=sum(image.num_bytes for image in request.images) + sum(_num_bytes(report) for report in reports),
        written_bytes=sum(entry.size for entry in checkpoint.manifest.files if entry.linked_from is None),
        begin_s=begin_s, write_s=write_s, hash_s=hash_s, commit_s=commit_s, prune_s=clock.lap(),
        pruned=pruned, prune_error=prune_error,
    )  # fmt: skip


def _begun(store: CheckpointStore, request: SaveRequest, increment: Mapping[str, HashedFile]) -> SaveTransaction:
    if (multi_writer := request.multi_writer) is not None:  # the trainer has begun it, and locks its directory
        return SaveTransaction(store, multi_writer.directory, request.step, request.tag, multi_writer.others, None)
    copied = [file.source for file in request.existing_files if file.source is not None and file.leaves is None]
    return store.begin(
        request.step,
        request.tag,
        needed_bytes=sum(needed_bytes(image, increment.get(image.path)) for image in request.images)
        + sum(path.stat().st_size for path in copied if path.exists()),
        needed_files=len(request.images) + len(request.existing_files),
    )


def _write_part(
    store: CheckpointStore,
    request: SaveRequest,
    multi_writer: MultiWriterSave,
    source: ImageSource,
    fewest_direct_bytes: int,
) -> SaveReport:
    """Write this participant's files into a save that another process commits, and report them, or why not."""
    clock = _PhaseTimer()
    try:
        _remove_own(store.disk, request, multi_writer)
        participant = RankWriter(multi_writer.directory, multi_writer.name, store.disk)
        hash_s = _write(participant, request, source, fewest_direct_bytes, hash_increment(store, request, source))
        source.wait(request.num_bytes)
        submit_report(store.disk, multi_writer.directory, participant.report())
    except Exception as error:
        submit_failure(store.disk, multi_writer.directory, multi_writer.name, f"{type(error).__name__}: {error}")
        raise
    report = participant.report()
    return SaveReport(
        name=multi_writer.name, directory=multi_writer.directory, sequence=0, num_bytes=_num_bytes(report),
        written_bytes=sum(entry.size for entry in report.files if entry.linked_from is None),
        begin_s=0.0, write_s=clock.lap(), hash_s=hash_s, commit_s=0.0, prune_s=0.0,
    )  # fmt: skip


def _num_bytes(report: RankReport) -> int:
    """Size of the files that a participant saved."""
    return sum(entry.size for entry in report.files)


def _remove_own(disk: FileSystem, request: SaveRequest, multi_writer: MultiWriterSave) -> None:
    """Remove what an earlier attempt left, whose process was killed."""
    with write_errors(f"going on with the save of step {request.step}"):
        names = [file.path for file in (*request.images, *request.existing_files)]
        if multi_writer.commits:
            names += [path + suffix for path in (MANIFEST, STATE, COMMIT) for suffix in ("", TEMPORARY_SUFFIX)]
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                disk.unlink(multi_writer.directory / name)


def _write(
    main: RankWriter,
    request: SaveRequest,
    source: ImageSource,
    fewest_direct_bytes: int,
    increment: Mapping[str, HashedFile],
) -> float:
    """Write every image; one thread writes, which costs no processor time, while another one hashes.

    Returns:
        Processor seconds of hashing.
    """
    main.record(*request.tensors)
    large = [
        i
        for i in request.images
        if i.num_bytes >= fewest_direct_bytes and not i.is_constant and i.path not in increment
    ]
    with ThreadPoolExecutor(1, thread_name_prefix="hash") as hashers:
        hashed: dict[str, Future[Hashed]] = {i.path: _started(hashers, i, source, request.num_bytes) for i in large}
        try:
            for image in request.images:
                file = increment.get(image.path)
                if not image.is_constant and file is not None and file.unchanged_in is not None:
                    main.link(image.path, file.unchanged_in, records_tensors=False)
                elif file is not None and image.num_bytes >= fewest_direct_bytes and not image.is_constant:
                    main.write_image(image, source, lambda file=file: file.entry.leaves)
                elif image.path in hashed:
                    main.write_image(image, source, lambda future=hashed[image.path]: future.result()[0])
                else:
                    main.write(image.path, list(image.buffers(source)), deduplicate=image.is_constant)
        except BaseException:
            hashers.shutdown(cancel_futures=True)
            raise
    return sum(future.result()[1] for future in hashed.values()) + sum(file.hash_s for file in increment.values())


def _started(hashers: ThreadPoolExecutor, image: FileImage, source: ImageSource, end: int) -> Future[Hashed]:
    try:
        return hashers.submit(_hash, image, source, end)
    except RuntimeError:  # no thread can be started: the interpreter is ending
        done: Future[Hashed] = Future()
        done.set_result(_hash(image, source, end))
        return done


def _hash(image: FileImage, source: ImageSource, end: int) -> Hashed:
    source.wait(end)  # training waits for the copy, which needs the processors and the memory; the disk needs neither
    began = time.thread_time()
    leaves = hash_buffers(image.buffers(source))
    return leaves, time.thread_time() - began


def _add_existing_files(store: CheckpointStore, writer: RankWriter, files: Sequence[ExistingFile]) -> None:
    newest = None
    if files:
        with contextlib.suppress(CheckpointNotFound):
            newest = store.newest()
    for file in files:
        if file.source is None:
            if newest is None:
                raise CheckpointNotFound(f"{store.directory} holds no checkpoint that could share its {file.path}")
            writer.link(file.path, newest)
        elif file.leaves is None:
            writer.add_existing_file(file.path, file.source)
        else:
            entry, earlier = FileEntry.of(file.path, file.leaves), newest and newest.manifest.file(file.path)
            if newest is not None and earlier is not None and earlier.blake3 == entry.blake3:
                entry = replace(entry, linked_from=newest.name)
            writer.add_existing_file(file.path, file.source, entry)


def _prune(store: CheckpointStore, retention: Retention | None) -> tuple[tuple[str, ...], str | None]:
    if retention is None:
        return (), None
    try:
        return tuple(prune(store, retention)), None
    except CheckpointError as error:
        return (), f"{type(error).__name__}: {error}"


class _PhaseTimer:
    """Seconds since the last call."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        last, self._last = self._last, time.perf_counter()
        return self._last - last
