"""What an incremental save stores of a file: nothing, its difference from a base, or all of it.

    unchanged since the newest checkpoint     a hard link to it
    a delta pays                              the delta, and a hard link to the base
    else                                      the file; later saves take it as their base

A base belongs to one file, not to a checkpoint: the newest one that was saved whole, until it has served its number of
saves. A checkpoint has names of its own for the bases that it needs, so it needs no other checkpoint, and retention may
remove any. `choices.py` decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from verl.checkpoint import delta
from verl.checkpoint.delta import Span
from verl.checkpoint.disk import Disk
from verl.checkpoint.images import Image, Source
from verl.checkpoint.manifest import FileEntry
from verl.checkpoint.published import Published
from verl.checkpoint.reader import CheckpointReader
from verl.checkpoint.safetensors_bytes import TensorPlace, header_bytes, read_header


@dataclass(frozen=True, kw_only=True)
class Incremental:
    """How increments are made.

    Args:
        base: the checkpoint that deltas are taken from; None is the newest one that holds the file whole.
        saves_per_base: after so many a file is written whole again.
        pays_below: size of a delta relative to its file, above which the file is written.
    """

    base: Path | None = None
    saves_per_base: int = 20
    pays_below: float = 0.8


@dataclass(frozen=True)
class Base:
    """A file that lies whole in a checkpoint.

    Attributes:
        published: a checkpoint that has it, by whatever name.
        entry: the file there.
        checkpoint: the one that wrote it.
        number: of the saves that it will have served with this one.
    """

    published: Published
    entry: FileEntry
    checkpoint: str
    number: int


class Prospect:
    """A file of a save beside its base.

    Attributes:
        ratio: of the size of its delta to its own, by a sample.
    """

    def __init__(self, base: Base, image: Image, source: Source, items: Mapping[int, tuple[str, int]], disk: Disk):
        self.base = base
        self._image, self._source, self._items = image, source, items
        source.wait(image.begin + image.num_bytes)
        reader = CheckpointReader(base.published, disk, verify=False)  # it was verified just now
        self._bytes_of_base = reader.read(base.entry.path)
        self.ratio = delta.estimate(self._file, self._spans, self._bytes_of_base)

    def buffers(self) -> Iterator[bytes | memoryview]:
        """The delta, in pieces."""
        return delta.encode(self._file, self._spans, self._bytes_of_base)

    @property
    def _file(self) -> memoryview:
        return self._source.memory[self._image.begin : self._image.begin + self._image.num_bytes]

    @cached_property
    def _spans(self) -> list[Span]:
        """The header, then each tensor beside the one of its name in the base, if that is as long."""
        there = self._places_in_base()
        spans, begin = [], 0
        for size in self._image.sizes:
            key, item = self._items.get(begin, (None, 1))
            place = there.get(key) if key is not None else None
            counterpart = place.begin if place is not None and place.end - place.begin == size else None
            spans.append(Span(begin, size, item, counterpart))
            begin += size
        return spans

    def _places_in_base(self) -> dict[str, TensorPlace]:
        try:
            length = header_bytes(self._bytes_of_base[:8])
            return read_header(self._bytes_of_base[:length], len(self._bytes_of_base))
        except ValueError:
            return {}
