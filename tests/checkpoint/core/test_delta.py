"""What is coded comes back bit by bit, and what was damaged is refused."""

from __future__ import annotations

import numpy as np
import pytest

from verl.checkpoint.core import delta
from verl.checkpoint.core.delta import SEGMENT_BYTES, CodedSpan, DeltaError, DeltaIndex, decode, encode, estimate

NUMBERS = np.random.default_rng(0)


def coded(file: bytes, spans: list[CodedSpan], base: bytes) -> bytes:
    return b"".join(encode(memoryview(file), spans, memoryview(base)))


def index_of(stored: bytes) -> DeltaIndex:
    return DeltaIndex.read(lambda begin, size: stored[begin : begin + size], len(stored))


def decoded(stored: bytes, base: bytes, begin: int = 0, end: int | None = None) -> bytes:
    index, view = index_of(stored), memoryview(stored)
    parts = [
        bytes(decode(segment, view[at : at + segment.stored], lambda low, high: memoryview(base)[low:high]))
        for _, at, segment in index.within(begin, index.size if end is None else end)
    ]
    return b"".join(parts)


def kinds(stored: bytes) -> list[str]:
    return [segment.kind for segment in index_of(stored).segments]


@pytest.mark.parametrize("item", [1, 2, 4, 8])
def test_any_bits_come_back_from_any_base(item):
    file, base = (NUMBERS.integers(0, 256, 1000 * item, dtype=np.uint8) for _ in range(2))
    file[::3] = base[::3]
    spans = [CodedSpan(0, 400 * item, item, 600 * item), CodedSpan(400 * item, 600 * item, item, 0)]
    stored = coded(file.tobytes(), spans, base.tobytes())
    assert decoded(stored, base.tobytes()) == file.tobytes()


def test_numbers_that_are_none_come_back_with_all_their_bits():
    odd = np.array([0x7FC00001, 0xFFC00000, 0x7F800000, 0x80000000, 0, 1, 0xFFFFFFFF], np.uint32)
    for base in (np.zeros_like(odd), odd[::-1].copy(), odd + np.uint32(1)):
        file, before = np.tile(odd, 100).tobytes(), np.tile(base, 100).tobytes()
        assert decoded(coded(file, [CodedSpan(0, len(file), 4, 0)], before), before) == file


def test_small_steps_take_little_and_a_tensor_that_stayed_takes_nothing():
    base = NUMBERS.integers(0, 2**32, 20_000, dtype=np.uint32)
    file = base + NUMBERS.integers(0, 3, len(base), dtype=np.uint32)
    stored = coded(
        file.tobytes() + base.tobytes(), [CodedSpan(0, 80_000, 4, 0), CodedSpan(80_000, 80_000, 4, 0)], base.tobytes()
    )
    assert kinds(stored) == ["difference", "same"]
    assert len(stored) < 80_000 / 8
    assert decoded(stored, base.tobytes()) == file.tobytes() + base.tobytes()


def test_noise_is_stored_as_it_is():
    file, base = (NUMBERS.integers(0, 256, 80_000, dtype=np.uint8).tobytes() for _ in range(2))
    stored = coded(file, [CodedSpan(0, 80_000, 4, 0)], base)
    assert kinds(stored) == ["raw"]
    assert estimate(memoryview(file), [CodedSpan(0, 80_000, 4, 0)], memoryview(base)) > 0.95
    assert decoded(stored, base) == file


def test_what_the_base_has_not_is_compressed_alone():
    file = b"a header " * 500
    for span in (
        CodedSpan(0, len(file)),
        CodedSpan(0, len(file), 1, 10),
    ):  # the second reaches over the end of the base
        stored = coded(file, [span], b"short")
        assert kinds(stored) == ["zstd"]
        assert decoded(stored, b"short") == file


def test_a_part_is_decoded_from_its_segments_alone():
    base = np.arange(3 * SEGMENT_BYTES // 8, dtype=np.uint64)
    file = base + (np.arange(len(base), dtype=np.uint64) & np.uint64(1))
    stored = coded(file.tobytes(), [CodedSpan(0, file.nbytes, 8, 0)], base.tobytes())
    index = index_of(stored)
    assert [start for start, _, _ in index.within(SEGMENT_BYTES + 1, SEGMENT_BYTES + 2)] == [SEGMENT_BYTES]
    part = decoded(stored, base.tobytes(), SEGMENT_BYTES, 2 * SEGMENT_BYTES)
    assert part == file.tobytes()[SEGMENT_BYTES : 2 * SEGMENT_BYTES]


def test_the_estimate_is_near_the_size():
    base = NUMBERS.standard_normal(200_000).astype(np.float32)
    file = base + np.float32(1e-6) * NUMBERS.standard_normal(len(base)).astype(np.float32)
    spans = [CodedSpan(0, file.nbytes, 4, 0)]
    stored = coded(file.tobytes(), spans, base.tobytes())
    assert estimate(memoryview(file.tobytes()), spans, memoryview(base.tobytes())) == pytest.approx(
        len(stored) / file.nbytes, rel=0.15
    )


def damaged(stored: bytes, at: int) -> bytes:
    data = bytearray(stored)
    data[at] ^= 1
    return bytes(data)


def test_a_damaged_index_is_refused():
    file = bytes(range(256)) * 8
    stored = coded(file, [CodedSpan(0, len(file))], b"")
    for bad in (b"", stored[:-1], stored[4:], damaged(stored, -1), damaged(stored, -12), damaged(stored, -20)):
        with pytest.raises(DeltaError):
            index_of(bad)


def test_a_segment_that_says_it_is_longer_is_refused():
    segment = delta.DeltaSegment("zstd", 10, 0)
    packed = delta.zstandard.ZstdCompressor().compress(bytes(1000))
    for size in (10, 2000):
        with pytest.raises(DeltaError, match="longer|instead"):
            decode(segment._replace(size=size), memoryview(packed), lambda low, high: memoryview(b""))
    with pytest.raises(DeltaError, match="decompressed"):
        decode(segment, memoryview(b"no frame"), lambda low, high: memoryview(b""))
