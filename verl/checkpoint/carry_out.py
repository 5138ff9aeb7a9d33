"""Carrying out the plan of a save: from bytes in memory to a published checkpoint. Runs in the writer process, or in
the trainer's where there is none."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

from verl.checkpoint.hashing import Leaf, hash_buffers
from verl.checkpoint.images import FEWEST_DIRECT_BYTES, Image, Source
from verl.checkpoint.participant import Participant
from verl.checkpoint.plan import CopiedFile, LinkedFile, SavePlan, SaveReport
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
    clock = _Clock()
    written = [image for image in plan.images if not image.is_constant]
    outside = sum(copied.source.stat().st_size for copied in plan.copies if copied.source.exists())
    with store.begin(
        plan.step,
        plan.tag,
        needed_bytes=sum(image.num_bytes for image in written) + outside,
        needed_files=len(plan.images) + len(plan.links) + len(plan.copies),
    ) as staging:
        begin_s = clock.lap()
        hash_s = _write(staging.main, plan, source, fewest_direct_bytes)
        _take_over(store, staging, plan)
        source.wait(plan.num_bytes)
        write_s = clock.lap()
        published = staging.commit(state=plan.state, metrics=plan.metrics)
    commit_s = clock.lap()
    pruned, prune_error = _prune(store, retention)
    return SaveReport(
        name=published.name, directory=published.directory, sequence=published.sequence,
        num_bytes=sum(image.num_bytes for image in plan.images),
        begin_s=begin_s, write_s=write_s, hash_s=hash_s, commit_s=commit_s, prune_s=clock.lap(),
        pruned=pruned, prune_error=prune_error,
    )  # fmt: skip


def _write(main: Participant, plan: SavePlan, source: Source, fewest_direct_bytes: int) -> float:
    """Write every image; one thread writes, which costs no processor time, while another one hashes.

    Returns:
        Processor seconds of hashing.
    """
    main.record(*plan.tensors)
    large = [i for i in plan.images if i.num_bytes >= fewest_direct_bytes and not i.is_constant]
    with ThreadPoolExecutor(1, thread_name_prefix="hash") as hashers:
        hashed: dict[str, Future[Hashed]] = {i.path: _started(hashers, i, source, plan.num_bytes) for i in large}
        try:
            for image in plan.images:
                if image.path in hashed:
                    main.write_image(image, source, lambda future=hashed[image.path]: future.result()[0])
                else:
                    main.write(image.path, list(image.buffers(source)), deduplicate=image.is_constant)
        except BaseException:
            hashers.shutdown(cancel_futures=True)
            raise
    return sum(future.result()[1] for future in hashed.values())


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


def _link(main: Participant, link: LinkedFile, published: Published) -> None:
    source = link.source or link.path
    entry = published.manifest.file(source)
    if entry is None:
        raise CheckpointNotFound(f"{published.directory} has no file {source} to take over as {link.path}")
    if link.blake3 is not None and entry.blake3 != link.blake3:
        raise CheckpointCorrupt(published.directory, [FileFault(source, "its digest is not the one that was expected")])
    main.link(link.path, published, source)


def _copy(main: Participant, copied: CopiedFile, newest: Published | None) -> None:
    known = [entry for entry in newest.manifest.files if entry.blake3 == copied.blake3] if newest else []
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
