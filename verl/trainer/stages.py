"""The clock of a step: how long each stage took, and what it did."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from verl.tracking.base import TrackerSet
from verl.utils.progress import report


class Note:
    """What a stage has to say of what it did."""

    text = ""

    def say(self, text: str) -> None:
        self.text = text


class Stages:
    """Times the stages of a step and reports each as it ends: `[gen] 1.24s  384 responses, 1536 tokens`."""

    def __init__(self, tracker: TrackerSet):
        self.tracker = tracker
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[Note]:
        """Time what is done inside; the same name again within a step adds up."""
        report(name)
        note, start = Note(), time.perf_counter()
        yield note
        took = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + took
        self.tracker.stage(name, took, note.text)

    def take(self) -> dict[str, float]:
        """The seconds of each stage since the last call, as metrics."""
        taken, self.seconds = self.seconds, {}
        return {f"timing/{name}_s": seconds for name, seconds in taken.items()}
