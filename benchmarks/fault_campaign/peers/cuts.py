"""Samples of what a disk may hold after a power cut, for recordings that are too long to try every subset.

Two models. `posix` is that of `faults.power_cut`: what was not synced is lost or kept, each write and each name on its
own. `journal` is kinder, and nearer to ext4 and XFS: names survive in the order in which they were changed, and a sync
of anything makes all names before it durable.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from faults.power_cut import Content, Effect, Trace

Model = Literal["posix", "journal"]
MODES = ["all", "names only", "files", "tails", "writes", "but one", "one", "half"]


@dataclass(frozen=True)
class Cut:
    """The power fails after `at` steps of the trace, and leaves this disk."""

    at: int
    is_after: bool
    mode: str
    disk: dict[int, Content]

    def __str__(self) -> str:
        return f"power cut after step {self.at}, lost: {self.mode}"


def sampled_cuts(trace: Trace, model: Model, num: int, seed: int) -> Iterator[Cut]:
    """Half of them while the last save is under way, half after it has returned."""
    coin = random.Random(seed)
    end = len(trace.steps)
    for number in range(num):
        at = end if number % 2 else coin.randrange(end)
        # Each way once before any is drawn, so that a small sample has them too.
        mode = MODES[number // 2] if number // 2 < len(MODES) else coin.choice(MODES)
        dropped, half = _lost(trace.steps[:at], model, mode, coin)
        yield Cut(at, at == end, mode, trace.disk(trace.steps[:at], dropped, half))


def _lost(done: list[Effect | int], model: Model, mode: str, coin: random.Random) -> tuple[set[int], int]:
    """The effects that are lost, and the write of which half is kept."""
    synced = {step: number for number, step in enumerate(done) if isinstance(step, int)}
    pending = [n for n, step in enumerate(done) if isinstance(step, Effect) and n > synced.get(step.inode, -1)]
    writes = [n for n in pending if not _is_name(done[n])]
    names = [n for n in pending if _is_name(done[n])]
    lost_names = _lost_names(names, model, mode, max(synced.values(), default=-1), coin)
    inodes = sorted({done[n].inode for n in writes})
    half = -1
    if mode == "names only":
        lost = set()
    elif mode == "all":
        lost = set(writes)
    elif mode == "files":
        gone = {inode for inode in inodes if coin.random() < 0.5}
        lost = {n for n in writes if done[n].inode in gone}
    elif mode == "tails":
        ends = {inode: coin.choice([n for n in writes if done[n].inode == inode]) for inode in inodes}
        lost = {n for n in writes if n > ends[done[n].inode]}
    elif mode == "writes":
        lost = {n for n in writes if coin.random() < 0.5}
    elif mode == "but one":
        lost = set(writes) - {coin.choice(writes)} if writes else set()
    elif mode == "one":
        lost = {coin.choice(writes)} if writes else set()
    else:
        lost, half = set(), coin.choice([n for n in writes if done[n].data] or [-1])
    return lost | lost_names, half


def _lost_names(names: list[int], model: Model, mode: str, last_sync: int, coin: random.Random) -> set[int]:
    if model == "journal":
        loose = [n for n in names if n > last_sync]
        kept = len(loose) if coin.random() < 0.5 else coin.randint(0, len(loose))
        return set(loose if mode == "all" else loose[kept:])
    if mode == "all":
        return set(names)
    if coin.random() < 0.5:
        return set()
    return {n for n in names if coin.random() < 0.3}


def _is_name(step: Effect | int) -> bool:
    return isinstance(step, Effect) and step.data is None and step.size is None
