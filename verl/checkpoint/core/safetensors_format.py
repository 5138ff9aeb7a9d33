"""Writing and reading the safetensors format: a header in JSON, then the tensors one after another.

Files are rendered here as buffers, not by the library, so that all bytes pass through `filesystem.py`, are hashed while
they are written, and are not copied: a 10 GB file is a header and views of existing memory. The library can read the
result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl.checkpoint.core.hashing import flat_view
from verl.checkpoint.core.manifest import ITEM_BYTES
from verl.utils.external_input import parse_mapping, whole_number

HEADER_LIMIT_BYTES = 100_000_000  # the library's own limit
DEFAULT_SHARD_BYTES = 5 * 10**9
INDEX_NAME = "model.safetensors.index.json"
MODEL_METADATA = {"format": "pt"}  # without it, transformers refuses the file


@dataclass(frozen=True)
class TensorBytes:
    """A tensor's bytes in memory, row-major.

    Args:
        dtype: as safetensors calls it, `F32` or `BF16`.
        data: anything with a contiguous buffer; for a tensor, its view as an array of bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Any

    @property
    def num_bytes(self) -> int:
        """Size according to shape and dtype."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class TensorPlace:
    """Position of a tensor in a file; `begin` is relative to the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class RenderedFile:
    """A file to be written: its buffers in order, and the position of each tensor."""

    buffers: tuple[Any, ...]
    places: dict[str, TensorPlace]


def render(tensors: Sequence[TensorBytes], metadata: dict[str, str] | None = None) -> RenderedFile:
    """Render tensors as one safetensors file.

    >>> file = render([TensorBytes("bias", "F32", (2,), bytes(8))], {"format": "pt"})
    >>> file.places["bias"].end - file.places["bias"].begin
    8

    Raises:
        ValueError: a name appears twice, a type is unknown, or the size of a buffer does not match shape and dtype.
    """
    header, places = lay_out(tensors, metadata)
    by_name = {tensor.name: tensor for tensor in tensors}
    views = [flat_view(by_name[name].data) for name in places]
    for name, view in zip(places, views):
        if len(view) != by_name[name].num_bytes:
            tensor = by_name[name]
            raise ValueError(f"{name} has {len(view)} bytes, not those of {tensor.dtype}{list(tensor.shape)}")
    return RenderedFile((header, *views), places)


def lay_out(
    tensors: Sequence[TensorBytes], metadata: dict[str, str] | None = None
) -> tuple[bytes, dict[str, TensorPlace]]:
    """The header of a file with these tensors, whose data is not needed, and their positions in order.

    Raises:
        ValueError: a name appears twice.
    """
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise ValueError("two tensors of one file have the same name")
    if unknown := {tensor.dtype for tensor in tensors} - ITEM_BYTES.keys():
        raise ValueError(f"dtype {unknown.pop()!r} is not one of {', '.join(ITEM_BYTES)}")
    # Wide types first: after a header padded to 8 bytes every tensor is then aligned to its own elements.
    ordered = sorted(tensors, key=lambda tensor: (-ITEM_BYTES[tensor.dtype], tensor.name))
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    spans, end = [], 0
    for tensor in ordered:
        spans.append((end, end := end + tensor.num_bytes))
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": spans[-1]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    places = {
        tensor.name: TensorPlace(tensor.dtype, tensor.shape, base + begin, base + end)
        for tensor, (begin, end) in zip(ordered, spans)
    }
    return len(text).to_bytes(8, "little") + text, places


def render_shards(
    tensors: Sequence[TensorBytes], max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> tuple[dict[str, RenderedFile], bytes | None]:
    """A model in the layout of Hugging Face: `model.safetensors`, or numbered shards and an index.

    Returns:
        Files by name, and the content of `model.safetensors.index.json` if there is more than one.
    """
    shards, index = split_into_files(tensors, max_shard_bytes)
    return {name: render(shard, MODEL_METADATA) for name, shard in shards.items()}, index


def split_into_files(
    tensors: Sequence[TensorBytes], max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> tuple[dict[str, list[TensorBytes]], bytes | None]:
    """The tensors of each file of a model, in order, and the index if there is more than one file."""
    shards: list[list[TensorBytes]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}, None
    count = len(shards)
    files = {f"model-{n:05d}-of-{count:05d}.safetensors": shard for n, shard in enumerate(shards, 1)}
    where = {tensor.name: file for file, shard in files.items() for tensor in shard}
    total = {"total_size": sum(tensor.num_bytes for tensor in tensors)}
    return files, json.dumps({"metadata": total, "weight_map": where}, indent=2, sort_keys=True).encode() + b"\n"


def header_bytes(first_bytes: bytes | memoryview) -> int:
    """Size of a file's header, from the first eight bytes of the file.

    Raises:
        ValueError: it is not a safetensors file.
    """
    length = 8 + int.from_bytes(first_bytes[:8], "little")
    if len(first_bytes) < 8 or length > HEADER_LIMIT_BYTES:
        raise ValueError("it is not a safetensors file")
    return length


def read_header(head: bytes | memoryview, file_bytes: int) -> dict[str, TensorPlace]:
    """Positions of all tensors of a file.

    Args:
        head: at least the header; see `header_bytes`.
        file_bytes: size of the whole file.
    Raises:
        ValueError: it is not a safetensors file, or the tensors do not fill it exactly.
    """
    base = header_bytes(head)
    if base > len(head):
        raise ValueError("its safetensors header reaches over the end of the file")
    try:
        header = parse_mapping(head[8:base])
        header.pop("__metadata__", None)
        places = {name: _place(entry, base) for name, entry in header.items()}
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"its safetensors header cannot be read: {error}") from error
    end = base
    for name, place in sorted(places.items(), key=lambda item: (item[1].begin, item[1].end)):
        if place.begin != end or place.end - place.begin != math.prod(place.shape) * ITEM_BYTES[place.dtype]:
            raise ValueError(f"its safetensors header gives {name} a place that does not fit")
        end = place.end
    if end != file_bytes:
        raise ValueError(f"its safetensors header accounts for {end} of {file_bytes} bytes")
    return places


def _place(entry: dict[str, Any], base: int) -> TensorPlace:
    begin, end = entry["data_offsets"]
    if entry["dtype"] not in ITEM_BYTES:
        raise ValueError(f"dtype {entry['dtype']!r} is unknown")
    shape = tuple(whole_number(size) for size in entry["shape"])
    return TensorPlace(entry["dtype"], shape, base + whole_number(begin), base + whole_number(end))
