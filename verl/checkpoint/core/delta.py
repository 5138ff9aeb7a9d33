"""Delta coding of a file against a base: tensors as differences in byte planes, compressed; and reading such files.

There are no chains of deltas: the base is a file that is stored whole. Each segment is coded independently, so that one
tensor can be read without the rest, with memory for one segment:

    segment   at most 4 MiB of one tensor        same        its bytes are the base's
                                                 difference  element less the base's, as integers; byte planes; zstd
                                                 zstd        compressed by itself: headers, and what the base has not
                                                 raw         as it is, where nothing pays
    file      segments | index | length of the index | MAGIC

Integers wrap, so that every bit pattern comes back, NaN with its payload included. A small step leaves most of the high
bytes of the differences 0; with XOR in place of the difference, a carry would set them.
"""

from __future__ import annotations

import json
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

import zstandard

from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.core.hashing import digest_of
from verl.checkpoint.core.manifest import DeltaEntry, FileEntry
from verl.errors import CheckpointCorrupt, FileFault
from verl.utils.external_input import parse_json

MAGIC = b"verldlt1"
TAIL = struct.Struct("<Q8s")
INDEX_LIMIT_BYTES = 2**28
SEGMENT_BYTES = 4 * 2**20  # divides a leaf of a digest, so that a leaf is whole segments
PROBE_BYTES = 2**16
NUM_PROBES = 24
LEVEL = 1  # of zstd: level 9 gains a tenth and takes six times as long
LEAST_GAIN = 0.95  # of a segment's bytes: above it, it is stored raw
SKIPPED = 3  # segments of one tensor that are stored raw, untried, after one that did not pay

Kind = Literal["same", "difference", "zstd", "raw"]
KINDS: tuple[Kind, ...] = ("same", "difference", "zstd", "raw")


class DeltaError(ValueError):
    """A delta is invalid, or does not match its base."""


@dataclass(frozen=True)
class CodedSpan:
    """A range of the file to be coded: its header, or one tensor.

    Args:
        begin, size: in the file, in bytes.
        item: bytes of an element.
        base: offset of its counterpart in the base; None if there is none.
    """

    begin: int
    size: int
    item: int = 1
    base: int | None = None


class DeltaSegment(NamedTuple):
    """One stored segment of the file.

    Args:
        kind: see the top of this file.
        size: decoded, in bytes.
        stored: bytes in the delta.
        base: where it begins in the base, for `same` and `difference`.
        item: bytes of an element, for `difference`.
    """

    kind: Kind
    size: int
    stored: int
    base: int = 0
    item: int = 1


class DeltaIndex:
    """The positions of all segments.

    Attributes:
        size: of the file, decoded.
    """

    def __init__(self, segments: Iterable[DeltaSegment]):
        self.segments = tuple(segments)
        self._ends = list(accumulate(segment.size for segment in self.segments))
        self._stored_ends = list(accumulate(segment.stored for segment in self.segments))
        self.size = self._ends[-1] if self._ends else 0

    @property
    def stored_bytes(self) -> int:
        """Of all segments, without the index."""
        return self._stored_ends[-1] if self._stored_ends else 0

    @property
    def base_bytes(self) -> int:
        """Minimum size of the base."""
        return max((s.base + s.size for s in self.segments if s.kind in ("same", "difference")), default=0)

    def within(self, begin: int, end: int) -> Iterator[tuple[int, int, DeltaSegment]]:
        """The segments with bytes in a range of the file: each with its offset in the file and in the delta."""
        for number in range(bisect_right(self._ends, begin), len(self.segments)):
            segment = self.segments[number]
            start = self._ends[number] - segment.size
            if start >= end:
                return
            yield start, self._stored_ends[number] - segment.stored, segment

    def to_bytes(self) -> bytes:
        """The trailer of a delta, which follows its last segment."""
        rows = [[KINDS.index(s.kind), s.size, s.stored, s.base, s.item] for s in self.segments]
        text = zstandard.ZstdCompressor(level=LEVEL).compress(json.dumps(rows, separators=(",", ":")).encode())
        return text + TAIL.pack(len(text), MAGIC)

    @classmethod
    def read(cls, read: Callable[[int, int], bytes | memoryview], stored_bytes: int) -> DeltaIndex:
        """The index of a delta.

        Args:
            read: returns bytes of the delta, for an offset and a size.
            stored_bytes: size of the delta.
        Raises:
            DeltaError: it is invalid or truncated.
        """
        try:
            if stored_bytes < TAIL.size:
                raise DeltaError("it is not a delta")
            length, magic = TAIL.unpack(read(stored_bytes - TAIL.size, TAIL.size))
            if magic != MAGIC or length > min(stored_bytes - TAIL.size, INDEX_LIMIT_BYTES):
                raise DeltaError("it is not a delta")
            text = _decompressed(read(stored_bytes - TAIL.size - length, length), INDEX_LIMIT_BYTES)
            index = cls(_segment(row) for row in parse_json(text))
        except DeltaError:
            raise
        except (struct.error, ValueError, TypeError, LookupError, ArithmeticError) as error:
            raise DeltaError(f"its index cannot be read ({type(error).__name__}: {error})") from error
        if index.stored_bytes + length + TAIL.size != stored_bytes:
            raise DeltaError(f"its index accounts for {index.stored_bytes + length + TAIL.size} of its bytes")
        return index


def encode(file: memoryview, spans: Iterable[CodedSpan], base: memoryview) -> Iterator[bytes | memoryview]:
    """The bytes of a delta, in pieces.

    Args:
        spans: that make up the file, in order.
        base: the bytes of the whole base.
    """
    segments = []
    for span in spans:
        skipped = 0
        for begin in range(0, span.size, SEGMENT_BYTES):
            size = min(SEGMENT_BYTES, span.size - begin)
            piece = CodedSpan(span.begin + begin, size, span.item, None if span.base is None else span.base + begin)
            if skipped:
                segment, data = DeltaSegment("raw", size, size), file[piece.begin : piece.begin + size]
                skipped -= 1
            else:
                segment, data = _coded(file, piece, base)
                skipped = SKIPPED if segment.kind == "raw" else 0
            segments.append(segment)
            if segment.stored:
                yield data
    yield DeltaIndex(segments).to_bytes()


def estimate(file: memoryview, spans: Iterable[CodedSpan], base: memoryview) -> float:
    """Estimated size of the delta relative to the file, from a sample."""
    pieces = [
        CodedSpan(
            span.begin + at, min(PROBE_BYTES, span.size - at), span.item, None if span.base is None else span.base + at
        )
        for span in spans
        for at in range(0, span.size, PROBE_BYTES)
    ]
    chosen = pieces[:: -(-len(pieces) // NUM_PROBES)] if pieces else []
    sizes = [(_coded(file, piece, base)[0].stored, piece.size) for piece in chosen]
    return sum(stored for stored, _ in sizes) / max(1, sum(size for _, size in sizes))


def decode(segment: DeltaSegment, stored: memoryview, base: Callable[[int, int], memoryview]) -> bytes | memoryview:
    """The bytes of a segment.

    Args:
        stored: its bytes in the delta.
        base: returns bytes of the base, for two offsets.
    Raises:
        DeltaError: they cannot be decoded.
    """
    if segment.kind == "raw":
        return stored
    if segment.kind == "same":
        return base(segment.base, segment.base + segment.size)
    data = _decompressed(stored, segment.size)
    if len(data) != segment.size:
        raise DeltaError(f"a segment has {len(data)} bytes instead of {segment.size}")
    if segment.kind == "zstd":
        return data
    return _added(data, base(segment.base, segment.base + segment.size), segment.item)


def _coded(file: memoryview, piece: CodedSpan, base: memoryview) -> tuple[DeltaSegment, bytes | memoryview]:
    data = file[piece.begin : piece.begin + piece.size]
    if piece.base is None or piece.base + piece.size > len(base):
        packed = zstandard.ZstdCompressor(level=LEVEL).compress(data)
        kind: Kind = "zstd"
    else:
        planes = _subtracted(data, base[piece.base : piece.base + piece.size], piece.item)
        if planes is None:
            return DeltaSegment("same", piece.size, 0, piece.base), b""
        packed = zstandard.ZstdCompressor(level=LEVEL).compress(planes)
        kind = "difference"
    if len(packed) > LEAST_GAIN * piece.size:
        return DeltaSegment("raw", piece.size, piece.size), data
    return DeltaSegment(kind, piece.size, len(packed), piece.base or 0, piece.item), packed


def _subtracted(data: memoryview, base: memoryview, item: int) -> memoryview | None:
    """The differences as byte planes, the sign in the lowest bit; None if all are zero."""
    import numpy as np  # not needed to inspect checkpoints

    distance = np.frombuffer(data, f"<i{item}") - np.frombuffer(base, f"<i{item}")
    if not distance.any():
        return None
    folded = (distance << 1) ^ (distance >> (8 * item - 1))
    return np.ascontiguousarray(folded.view(np.uint8).reshape(-1, item).T).data.cast("B")


def _added(planes: bytes, base: memoryview, item: int) -> memoryview:
    import numpy as np

    if len(base) != len(planes) or len(planes) % item:
        raise DeltaError("a segment does not fit the base")
    count = len(planes) // item
    folded = np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(item, count).T).view(f"<u{item}").ravel()
    one = folded.dtype.type(1)
    distance = (folded >> one) ^ -(folded & one)
    return memoryview(np.frombuffer(base, f"<u{item}") + distance).cast("B")


def _segment(row: list[int]) -> DeltaSegment:
    kind, size, stored, base, item = row
    if not all(isinstance(value, int) and value >= 0 for value in row) or item not in (1, 2, 4, 8):
        raise DeltaError(f"its index holds {row}")
    return DeltaSegment(KINDS[kind], size, stored, base, item)


def _decompressed(data: bytes | memoryview, limit: int) -> bytes:
    try:
        if zstandard.frame_content_size(data) > limit:
            raise DeltaError("a segment says that it is longer than the index says")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=limit)
    except zstandard.ZstdError as error:
        raise DeltaError(f"its bytes cannot be decompressed: {error}") from error


Read = Callable[[str, int, int], memoryview]


class DeltaFile:
    """Decodes ranges of a file, segment by segment, without caching.

    Args:
        read: returns bytes of a stored file, for its path and two offsets.
    """

    def __init__(self, published: Checkpoint, entry: DeltaEntry, read: Read):
        self.entry = entry
        self._published, self._read = published, read
        self._stored, self._base = (_listed(published, path) for path in (entry.delta, entry.base))

    @cached_property
    def index(self) -> DeltaIndex:
        """The index of segments, checked against the sizes of all three files.

        Raises:
            CheckpointCorrupt: it cannot be read, or does not fit.
        """
        try:
            index = DeltaIndex.read(
                lambda begin, size: self._read(self.entry.delta, begin, begin + size), self._stored.size
            )
        except DeltaError as error:
            raise self._corrupt(self.entry.delta, str(error)) from error
        if index.size != self.entry.file.size:
            problem = f"it gives {index.size} bytes of {self.entry.path}, which has {self.entry.file.size}"
            raise self._corrupt(self.entry.delta, problem)
        if index.base_bytes > self._base.size:
            raise self._corrupt(self.entry.base, f"it is shorter than {self.entry.delta} says")
        return index

    def decoded(self, begin: int, end: int) -> memoryview:
        """Bytes of the file, in new writable memory.

        Raises:
            CheckpointCorrupt: they cannot be decoded.
        """
        result = memoryview(bytearray(end - begin))
        for start, at, segment in self.index.within(begin, end):
            low, high = max(begin, start), min(end, start + segment.size)
            try:
                data = decode(segment, self._read(self.entry.delta, at, at + segment.stored), self._read_base)
            except DeltaError as error:
                problem = f"bytes {at} to {at + segment.stored}: {error}"
                raise self._corrupt(self.entry.delta, problem, low, high) from error
            result[low - begin : high - begin] = memoryview(data)[low - start : high - start]
        return result

    def blamed(self, low: int, high: int) -> CheckpointCorrupt:
        """Which of the stored files causes wrong bytes in this file."""
        faults = [*self._faults_of(self._base), *self._faults_of(self._stored)]
        problem = f"bytes {low} to {high}, decoded, are not those that were written"
        own = FileFault(self.entry.path, problem, self._published.tensors_in(self.entry.path, low, high))
        return CheckpointCorrupt(self._published.directory, faults or [own])

    def tensors_made_of(self, stored: str, begin: int, end: int) -> tuple[str, ...]:
        """Full names of the tensors that depend on a range of the delta or of the base."""
        try:
            touched = list(_touched(self.index, stored == self.entry.base, begin, end))
        except CheckpointCorrupt:
            touched = [(0, self.entry.file.size)]
        names = [name for low, high in touched for name in self._published.tensors_in(self.entry.path, low, high)]
        return tuple(dict.fromkeys(names))

    def _faults_of(self, stored: FileEntry) -> Iterator[FileFault]:
        begin = 0
        for leaf in stored.leaves:
            end = begin + leaf.size
            if digest_of(self._read(stored.path, begin, end)) != leaf.blake3:
                problem = f"bytes {begin} to {end} are not those that were written"
                yield FileFault(stored.path, problem, self.tensors_made_of(stored.path, begin, end))
            begin = end

    def _read_base(self, begin: int, end: int) -> memoryview:
        return self._read(self.entry.base, begin, end)

    def _corrupt(self, path: str, problem: str, low: int = 0, high: float = float("inf")) -> CheckpointCorrupt:
        tensors = self._published.tensors_in(self.entry.path, low, high)
        return CheckpointCorrupt(self._published.directory, [FileFault(path, problem, tensors)])


def _touched(index: DeltaIndex, is_base: bool, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Ranges of the file that are decoded from a range of the delta or of the base."""
    for start, at, segment in index.within(0, index.size):
        low, size = _used(segment, at, is_base)
        if size and low < end and begin < low + size:
            yield start, start + segment.size


def _used(segment: DeltaSegment, at: int, is_base: bool) -> tuple[int, int]:
    if not is_base:
        return at, segment.stored
    return segment.base, segment.size if segment.kind in ("same", "difference") else 0


def _listed(published: Checkpoint, path: str) -> FileEntry:
    entry = published.manifest.stored(path)
    assert entry is not None, "a manifest that is read lists it"
    return entry
