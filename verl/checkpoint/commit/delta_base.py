"""What an incremental save stores of a file: nothing, its difference from a base, or all of it.

unchanged since the newest checkpoint     a hard link to it
little changed                            its difference from a base, and a hard link to the base
otherwise                                 the whole file
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from verl.checkpoint.core import delta
from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.core.delta import CodedSpan
from verl.checkpoint.core.direct_io import FileImage, ImageSource
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.core.manifest import FileEntry
from verl.checkpoint.core.safetensors_format import TensorPlace, header_bytes, read_header
from verl.checkpoint.read.reader import CheckpointReader


@dataclass(frozen=True)
class DeltaBase:
    """A file that a checkpoint stores as a whole.

    Attributes:
        published: a checkpoint that contains it, under any name.
        entry: the file's entry there.
        checkpoint: the checkpoint that wrote it.
        number: number of saves that used it as their base, including this one.
    """

    published: Checkpoint
    entry: FileEntry
    checkpoint: str
    number: int


class DeltaCandidate:
    """A file of a save and its base.

    Attributes:
        ratio: estimated size of its delta relative to the file.
    """

    def __init__(
        self,
        base: DeltaBase,
        image: FileImage,
        source: ImageSource,
        items: Mapping[int, tuple[str, int]],
        disk: FileSystem,
    ):
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
    def _spans(self) -> list[CodedSpan]:
        """The header, then each tensor paired with the base's tensor of the same name and size."""
        there = self._places_in_base()
        spans, begin = [], 0
        for size in self._image.sizes:
            key, item = self._items.get(begin, (None, 1))
            place = there.get(key) if key is not None else None
            counterpart = place.begin if place is not None and place.end - place.begin == size else None
            spans.append(CodedSpan(begin, size, item, counterpart))
            begin += size
        return spans

    def _places_in_base(self) -> dict[str, TensorPlace]:
        try:
            length = header_bytes(self._bytes_of_base[:8])
            return read_header(self._bytes_of_base[:length], len(self._bytes_of_base))
        except ValueError:
            return {}
