"""Carrying out the plan of a save: from bytes in memory to a published checkpoint. Runs in the writer process, or in
the trainer's where there is none."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from verl.checkpoint.choices import Choice, choose, needed_bytes
from verl.checkpoint.disk import Disk
from verl.checkpoint.files import write_errors
from verl.checkpoint.hashing import Leaf, hash_buffers
from verl.checkpoint.images import FEWEST_DIRECT_BYTES, Image, Source
from verl.checkpoint.joint import Joint, collect, hand_in, hand_in_failure
from verl.checkpoint.manifest import BASE_SUFFIX, DELTA_SUFFIX, FileEntry
from verl.checkpoint.participant import Participant, PartReport
from verl.checkpoint.plan import CopiedFile, LinkedFile, SavePlan, SaveReport, SharedFile
from verl.checkpoint.published import Published
from verl.checkpoint.retention import Retention, prune
from verl.checkpoint.staging import Staging
from verl.checkpoint.store import CheckpointStore
from verl.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, FileFault

Hashed = tuple[tuple[Leaf, ...], float]


def carry_out(
    store: CheckpointStore,
    plan: SavePlan,
    source: Source,
    retention: Retention | None = None,
    fewest_direct_bytes: int = FEWEST_DIRECT_BYTES,
) -> SaveReport:
    """Write, hash and publish one save, then prune.

    Args:
        source: memory in which the images of the plan lie; what was copied there must not change meanwhile.
        fewest_direct_bytes: of a file that is written past the page cache.
    Raises:
        CheckpointError: nothing was published. What retention could not do is in the report instead.
    """
    if plan.joint is not None and not plan.joint.commits:
        return _write_part(store, plan, plan.joint, source, fewest_direct_bytes)
    clock = _Clock()
    chosen = choose(store, plan, source)
    with _begun(store, plan, chosen) as staging:
        begin_s = clock.lap()
        hash_s = _write(staging.main, plan, source, fewest_direct_bytes, chosen)
        _take_over(store, staging, plan)
        source.wait(plan.num_bytes)
        reports = [] if plan.joint is None else _reports_of_others(store, plan.joint)
        write_s = clock.lap()
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


def _begun(store: CheckpointStore, plan: SavePlan, chosen: Mapping[str, Choice]) -> Staging:
    if plan.joint is not None:  # the trainer has begun it, and holds the lock on its directory
        _remove_own(store.disk, plan, plan.joint)
        return Staging(store, plan.joint.directory, plan.step, plan.tag, plan.joint.others, lease=None)
    outside = sum(copied.source.stat().st_size for copied in plan.copies if copied.source.exists())
    return store.begin(
        plan.step,
        plan.tag,
        needed_bytes=sum(needed_bytes(image, chosen.get(image.path)) for image in plan.images) + outside,
        needed_files=len(plan.images)
        + sum(choice.prospect is not None for choice in chosen.values())
        + len(plan.links)
        + len(plan.copies)
        + len(plan.shared),
    )


def _reports_of_others(store: CheckpointStore, joint: Joint) -> list[PartReport]:
    return collect(store.disk, joint.directory, joint.others, joint.late_s)


def _write_part(
    store: CheckpointStore, plan: SavePlan, joint: Joint, source: Source, fewest_direct_bytes: int
) -> SaveReport:
    """Write this participant's files into a save that another process commits, and report them, or why not."""
    clock = _Clock()
    try:
        _remove_own(store.disk, plan, joint)
        participant = Participant(joint.directory, joint.name, store.disk)
        hash_s = _write(participant, plan, source, fewest_direct_bytes, choose(store, plan, source))
        source.wait(plan.num_bytes)
        hand_in(store.disk, joint.directory, participant.report())
    except Exception as error:
        hand_in_failure(store.disk, joint.directory, joint.name, f"{type(error).__name__}: {error}")
        raise
    report = participant.report()
    return SaveReport(
        name=joint.name, directory=joint.directory, sequence=0, num_bytes=_num_bytes(report),
        written_bytes=sum(entry.size for entry in report.files if entry.linked_from is None),
        begin_s=0.0, write_s=clock.lap(), hash_s=hash_s, commit_s=0.0, prune_s=0.0,
    )  # fmt: skip


def _num_bytes(report: PartReport) -> int:
    """Of the files that a participant saved, as they are read."""
    stored = {path for entry in report.deltas for path in (entry.delta, entry.base)}
    whole = sum(entry.size for entry in report.files if entry.path not in stored)
    return whole + sum(entry.file.size for entry in report.deltas)


def _remove_own(disk: Disk, plan: SavePlan, joint: Joint) -> None:
    """What an attempt before this one left, whose process was killed."""
    with write_errors(f"going on with the save of step {plan.step}"):
        for path in (*plan.images, *plan.links, *plan.copies, *plan.shared):
            for suffix in ("", DELTA_SUFFIX, BASE_SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    disk.unlink(joint.directory / (path.path + suffix))


def _write(
    main: Participant, plan: SavePlan, source: Source, fewest_direct_bytes: int, chosen: Mapping[str, Choice]
) -> float:
    """Write every image; one thread writes, which costs no processor time, while another one hashes.

    Returns:
        Processor seconds of hashing.
    """
    main.record(*plan.tensors)
    large = [
        i for i in plan.images if i.num_bytes >= fewest_direct_bytes and not i.is_constant and i.path not in chosen
    ]
    with ThreadPoolExecutor(1, thread_name_prefix="hash") as hashers:
        hashed: dict[str, Future[Hashed]] = {i.path: _started(hashers, i, source, plan.num_bytes) for i in large}
        try:
            for image in plan.images:
                choice = chosen.get(image.path)
                if not image.is_constant and choice is not None and choice.store(main):
                    continue
                if choice is not None and image.num_bytes >= fewest_direct_bytes and not image.is_constant:
                    main.write_image(image, source, lambda choice=choice: choice.entry.leaves)
                elif image.path in hashed:
                    main.write_image(image, source, lambda future=hashed[image.path]: future.result()[0])
                else:
                    main.write(image.path, list(image.buffers(source)), deduplicate=image.is_constant)
        except BaseException:
            hashers.shutdown(cancel_futures=True)
            raise
    return sum(future.result()[1] for future in hashed.values()) + sum(choice.hash_s for choice in chosen.values())


def _started(hashers: ThreadPoolExecutor, image: Image, source: Source, end: int) -> Future[Hashed]:
    try:
        return hashers.submit(_hash, image, source, end)
    except RuntimeError:  # no thread can be started: the interpreter is ending
        done: Future[Hashed] = Future()
        done.set_result(_hash(image, source, end))
        return done


def _hash(image: Image, source: Source, end: int) -> Hashed:
    source.wait(end)  # training waits for the copy, which needs the processors and the memory; the disk needs neither
    began = time.thread_time()
    leaves = hash_buffers(image.buffers(source))
    return leaves, time.thread_time() - began


def _take_over(store: CheckpointStore, staging: Staging, plan: SavePlan) -> None:
    """Files that are there already. Each earlier checkpoint is opened once."""
    opened: dict[str | None, Published] = {}

    def checkpoint(name: str | None) -> Published:
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


def _link(main: Participant, link: LinkedFile, published: Published) -> None:
    source = link.source or link.path
    entry = published.manifest.file(source)
    if entry is None:
        raise CheckpointNotFound(f"{published.directory} has no file {source} to take over as {link.path}")
    if link.blake3 is not None and entry.blake3 != link.blake3:
        raise CheckpointCorrupt(published.directory, [FileFault(source, "its digest is not the one that was expected")])
    main.link(link.path, published, source)


def _newest_or_none(store: CheckpointStore) -> Published | None:
    try:
        return store.newest()
    except CheckpointNotFound:
        return None


def _adopt(main: Participant, shared: Sequence[SharedFile], newest: Published | None) -> None:
    known = {} if newest is None else {entry.path: entry.blake3 for entry in newest.manifest.files}
    for file in shared:
        entry = FileEntry.of(file.path, file.leaves)
        before = newest.name if newest is not None and known.get(file.path) == entry.blake3 else None
        main.adopt(entry.at(file.path, linked_from=before), file.source)


def _copy(main: Participant, copied: CopiedFile, newest: Published | None) -> None:
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


class _Clock:
    """Seconds since it was last asked."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        last, self._last = self._last, time.perf_counter()
        return self._last - last
