"""Executes the plan of a save, in the writer process or the trainer's: from bytes in memory to a commit."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

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
from verl.checkpoint.save.save_plan import (
    CopiedFile,
    IncrementalSettings,
    LinkedFile,
    MultiWriterSave,
    SavePlan,
    SaveReport,
    SharedFile,
    collect_reports,
    submit_failure,
    submit_report,
)
from verl.errors import BadCheckpoint, CheckpointCorrupt, CheckpointError, CheckpointNotFound, FileFault

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


def hash_increment(store: CheckpointStore, plan: SavePlan, source: ImageSource) -> dict[str, HashedFile]:
    """Each image of an incremental save by path; nothing for another save.

    Called before the save begins, since it determines how much space that needs.
    """
    if plan.increment is None:
        return {}
    source.wait(plan.num_bytes)
    earlier = [checkpoint for checkpoint in (_base(store, plan.increment), _newest(store)) if checkpoint is not None]
    hashed = {}
    for image in plan.images:
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


def execute_plan(
    store: CheckpointStore,
    plan: SavePlan,
    source: ImageSource,
    retention: Retention | None = None,
    fewest_direct_bytes: int = FEWEST_DIRECT_BYTES,
) -> SaveReport:
    """Write, hash and publish one save, then prune.

    Args:
        source: memory with the images of the plan; it must not change meanwhile.
        fewest_direct_bytes: of a file that is written past the page cache.
    Raises:
        CheckpointError: nothing was published. What retention could not do is in the report instead.
    """
    if plan.joint is not None and not plan.joint.commits:
        return _write_part(store, plan, plan.joint, source, fewest_direct_bytes)
    clock = _PhaseTimer()
    increment = hash_increment(store, plan, source)
    with _begun(store, plan, increment) as staging:
        begin_s = clock.lap()
        hash_s, reports = 0.0, []
        published = None if plan.joint is None else staging.finish_commit()
        if published is None:
            if plan.joint is not None:
                _remove_own(store.disk, plan, plan.joint)
            hash_s = _write(staging.main, plan, source, fewest_direct_bytes, increment)
            _take_over(store, staging, plan)
            source.wait(plan.num_bytes)
            reports = [] if plan.joint is None else _reports_of_others(store, plan.joint)
        write_s = clock.lap()
        if published is None:
            published = staging.commit(reports, state=plan.state, metrics=plan.metrics)
    commit_s = clock.lap()
    pruned, prune_error = _prune(store, retention)
    return SaveReport(
        name=published.name, directory=published.directory, sequence=published.sequence,
        num_bytes=sum(image.num_bytes for image in plan.images) + sum(_num_bytes(report) for report in reports),
        written_bytes=sum(entry.size for entry in published.manifest.files if entry.linked_from is None),
        begin_s=begin_s, write_s=write_s, hash_s=hash_s, commit_s=commit_s, prune_s=clock.lap(),
        pruned=pruned, prune_error=prune_error,
    )  # fmt: skip


def _begun(store: CheckpointStore, plan: SavePlan, increment: Mapping[str, HashedFile]) -> SaveTransaction:
    if plan.joint is not None:  # the trainer has begun it, and holds the lock on its directory
        return SaveTransaction(store, plan.joint.directory, plan.step, plan.tag, plan.joint.others, None)
    outside = sum(copied.source.stat().st_size for copied in plan.copies if copied.source.exists())
    return store.begin(
        plan.step,
        plan.tag,
        needed_bytes=sum(needed_bytes(image, increment.get(image.path)) for image in plan.images) + outside,
        needed_files=len(plan.images) + len(plan.links) + len(plan.copies) + len(plan.shared),
    )


def _reports_of_others(store: CheckpointStore, joint: MultiWriterSave) -> list[RankReport]:
    return collect_reports(store.disk, joint.directory, joint.others, joint.late_s)


def _write_part(
    store: CheckpointStore, plan: SavePlan, joint: MultiWriterSave, source: ImageSource, fewest_direct_bytes: int
) -> SaveReport:
    """Write this participant's files into a save that another process commits, and report them, or why not."""
    clock = _PhaseTimer()
    try:
        _remove_own(store.disk, plan, joint)
        participant = RankWriter(joint.directory, joint.name, store.disk)
        hash_s = _write(participant, plan, source, fewest_direct_bytes, hash_increment(store, plan, source))
        source.wait(plan.num_bytes)
        submit_report(store.disk, joint.directory, participant.report())
    except Exception as error:
        submit_failure(store.disk, joint.directory, joint.name, f"{type(error).__name__}: {error}")
        raise
    report = participant.report()
    return SaveReport(
        name=joint.name, directory=joint.directory, sequence=0, num_bytes=_num_bytes(report),
        written_bytes=sum(entry.size for entry in report.files if entry.linked_from is None),
        begin_s=0.0, write_s=clock.lap(), hash_s=hash_s, commit_s=0.0, prune_s=0.0,
    )  # fmt: skip


def _num_bytes(report: RankReport) -> int:
    """Of the files that a participant saved, as they are read."""
    return sum(entry.size for entry in report.files)


def _remove_own(disk: FileSystem, plan: SavePlan, joint: MultiWriterSave) -> None:
    """What an attempt before this one left, whose process was killed."""
    with write_errors(f"going on with the save of step {plan.step}"):
        names = [file.path for file in (*plan.images, *plan.links, *plan.copies, *plan.shared)]
        if joint.commits:
            names += [path + suffix for path in (MANIFEST, STATE, COMMIT) for suffix in ("", TEMPORARY_SUFFIX)]
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                disk.unlink(joint.directory / name)


def _write(
    main: RankWriter, plan: SavePlan, source: ImageSource, fewest_direct_bytes: int, increment: Mapping[str, HashedFile]
) -> float:
    """Write every image; one thread writes, which costs no processor time, while another one hashes.

    Returns:
        Processor seconds of hashing.
    """
    main.record(*plan.tensors)
    large = [
        i for i in plan.images if i.num_bytes >= fewest_direct_bytes and not i.is_constant and i.path not in increment
    ]
    with ThreadPoolExecutor(1, thread_name_prefix="hash") as hashers:
        hashed: dict[str, Future[Hashed]] = {i.path: _started(hashers, i, source, plan.num_bytes) for i in large}
        try:
            for image in plan.images:
                file = increment.get(image.path)
                if not image.is_constant and file is not None and file.unchanged_in is not None:
                    main.share(image.path, file.unchanged_in)
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


def _take_over(store: CheckpointStore, staging: SaveTransaction, plan: SavePlan) -> None:
    """Files that are there already. Each earlier checkpoint is opened once."""
    opened: dict[str | None, Checkpoint] = {}

    def checkpoint(name: str | None) -> Checkpoint:
        if name not in opened:
            opened[name] = store.newest() if name is None else store.open(name)
        return opened[name]

    for link in plan.links:
        _link(staging.main, link, checkpoint(link.checkpoint))
    for copied in plan.copies:
        try:
            newest = checkpoint(None) if copied.blake3 else None
        except CheckpointNotFound:
            newest = None
        _copy(staging.main, copied, newest)
    if plan.shared:
        _adopt(staging.main, plan.shared, _newest_or_none(store))


def _link(main: RankWriter, link: LinkedFile, published: Checkpoint) -> None:
    source = link.source or link.path
    entry = published.manifest.file(source)
    if entry is None:
        raise CheckpointNotFound(f"{published.directory} has no file {source} to take over as {link.path}")
    if link.blake3 is not None and entry.blake3 != link.blake3:
        raise CheckpointCorrupt(published.directory, [FileFault(source, "its digest is not the one that was expected")])
    main.link(link.path, published, source)


def _newest_or_none(store: CheckpointStore) -> Checkpoint | None:
    try:
        return store.newest()
    except CheckpointNotFound:
        return None


def _adopt(main: RankWriter, shared: Sequence[SharedFile], newest: Checkpoint | None) -> None:
    known = {} if newest is None else {entry.path: entry.blake3 for entry in newest.manifest.files}
    for file in shared:
        entry = FileEntry.of(file.path, file.leaves)
        before = newest.name if newest is not None and known.get(file.path) == entry.blake3 else None
        main.adopt(entry.at(file.path, linked_from=before), file.source)


def _copy(main: RankWriter, copied: CopiedFile, newest: Checkpoint | None) -> None:
    known = [entry for entry in newest.manifest.contents.values() if entry.blake3 == copied.blake3] if newest else []
    entry = main.copy(copied.path, copied.source, expected=known[0] if known else None)
    if copied.blake3 not in (None, entry.blake3):
        fault = FileFault(copied.source.name, "its digest is not the one that was expected")
        raise CheckpointCorrupt(copied.source.parent, [fault])


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
