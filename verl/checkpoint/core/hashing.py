"""BLAKE3 of files, in leaves: pieces that can be verified without reading the rest.

A leaf ends where a buffer ends (the header, one tensor) or after 16 MiB, so that a damaged leaf identifies its tensor
and reading one tensor hashes only that tensor. The digest of a file is the BLAKE3 of its only leaf or, with more
leaves, of their concatenated digests: no byte is hashed twice, and b3sum agrees for files of one leaf.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, NamedTuple

from blake3 import blake3
from pydantic import Field

from verl.utils.external_input import ByteCount
from verl.utils.progress import report

LEAF_BYTES = 16 * 2**20
BLOCK_BYTES = 2**20  # small enough that a hashed block is still in the cache when it is written


class Leaf(NamedTuple):
    """A piece of a file, `size` bytes long, and its BLAKE3 in hexadecimal."""

    size: ByteCount
    blake3: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class LeafHasher:
    """Hashes a file piece by piece.

    >>> hasher = LeafHasher()
    >>> hasher.update(memoryview(b"header"))
    >>> hasher.cut()
    >>> [leaf.size for leaf in hasher.leaves]
    [6]
    """

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self._open, self._size = blake3(), 0

    def update(self, block: memoryview) -> None:
        """Add bytes; a block must not extend beyond the end of a leaf (see `blocks`)."""
        self._open.update(block)
        self._size += len(block)
        assert self._size <= LEAF_BYTES
        if self._size == LEAF_BYTES:
            self.cut()

    def cut(self) -> None:
        """End the current leaf."""
        if self._size:
            self.leaves.append(Leaf(self._size, self._open.hexdigest()))
            self._open, self._size = blake3(), 0


def hash_buffers(buffers: Iterable[Any]) -> tuple[Leaf, ...]:
    """The leaves that a file written from these buffers will have."""
    hasher = LeafHasher()
    for buffer in buffers:
        for block in blocks(flat_view(buffer)):
            hasher.update(block)
            report()
        hasher.cut()
    return tuple(hasher.leaves)


def file_digest(leaves: Iterable[Leaf]) -> str:
    """The digest of a file with these leaves."""
    digests = [leaf.blake3 for leaf in leaves]
    if len(digests) == 1:
        return digests[0]
    return digest_of(b"".join(bytes.fromhex(digest) for digest in digests))


def digest_of(data: bytes | memoryview) -> str:
    """BLAKE3 in hexadecimal."""
    return blake3(data).hexdigest()


def flat_view(buffer: Any) -> memoryview:
    """The bytes of anything with a contiguous buffer: bytes, arrays of any shape, tensors viewed as arrays."""
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")


def blocks(view: memoryview) -> Iterator[memoryview]:
    """Split into blocks, none of which extends beyond the end of a leaf."""
    assert LEAF_BYTES % BLOCK_BYTES == 0
    for start in range(0, len(view), BLOCK_BYTES):
        yield view[start : start + BLOCK_BYTES]
