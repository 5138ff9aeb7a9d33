"""Writing and reading the safetensors format: a header in JSON, then the tensors one after another.

Files are laid out here, not by the library, so that all bytes pass through `filesystem.py`, are hashed while they are
written, and are not copied: a 10 GB file is a header and views of existing memory. The library can read the result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl.checkpoint.core.manifest import ITEM_BYTES, LogicalTensor
from verl.utils.external_input import parse_mapping, whole_number

HEADER_LIMIT_BYTES = 100_000_000  # the library's own limit
DEFAULT_SHARD_BYTES = 5 * 10**9
INDEX_NAME = "model.safetensors.index.json"
MODEL_METADATA = {"format": "pt"}  # without it, transformers refuses the file


def lay_out(
    path: str, tensors: Sequence[LogicalTensor], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[LogicalTensor]]:
    """The header of a file with one slice of each tensor, and the tensors with the offsets of these slices, in file
    order.

    >>> header, (bias,) = lay_out("model.safetensors", [LogicalTensor.of_slice("actor", "bias", "F32", (2,))])
    >>> bias.slices[0].offset == len(header)
    True
    """
    # Wide types first: after a header padded to 8 bytes every tensor is then aligned to its own elements.
    ordered = sorted(tensors, key=lambda tensor: (-ITEM_BYTES[tensor.dtype], tensor.name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begins, end = [], 0
    for tensor in ordered:
        (part,) = tensor.slices
        begins.append(end)
        end += tensor.slice_bytes(part)
        header[tensor.name] = {"dtype": tensor.dtype, "shape": part.extent, "data_offsets": (begins[-1], end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, [
        replace(tensor, slices=(replace(tensor.slices[0], file=path, key=tensor.name, offset=base + begin),))
        for tensor, begin in zip(ordered, begins)
    ]


def model_files(
    writers: Sequence[Mapping[str, int]], max_bytes: int = DEFAULT_SHARD_BYTES
) -> tuple[list[dict[str, list[str]]], bytes | None]:
    """The files of a model in Hugging Face's layout: `model.safetensors`, or numbered files and an index.

    Args:
        writers: bytes of each tensor by name, for each process that writes some of them.
        max_bytes: maximum size of a file.
    Returns: Names by file, for each writer; and the content of the index, None for a single file.
    """
    cut = [list(_cut(sizes, max_bytes)) for sizes in writers]
    count = sum(len(files) for files in cut)
    if count <= 1:
        return [dict(zip(["model.safetensors"], files)) for files in cut], None
    numbers = iter(range(1, count + 1))
    named = [{f"model-{next(numbers):05d}-of-{count:05d}.safetensors": names for names in files} for files in cut]
    where = {name: file for files in named for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": sum(sum(sizes.values()) for sizes in writers)}, "weight_map": where}
    return named, json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"


def _cut(sizes: Mapping[str, int], max_bytes: int) -> Iterator[list[str]]:
    now, filled = [], 0
    for name, size in sizes.items():
        if now and filled + size > max_bytes:
            yield now
            now, filled = [], 0
        now.append(name)
        filled += size
    if now:
        yield now


def header_bytes(first_bytes: bytes | memoryview) -> int:
    """Size of a file's header, from the first eight bytes of the file.

    Raises:
        ValueError: it is not a safetensors file.
    """
    length = 8 + int.from_bytes(first_bytes[:8], "little")
    if len(first_bytes) < 8 or length > HEADER_LIMIT_BYTES:
        raise ValueError("it is not a safetensors file")
    return length


def read_header(head: bytes | memoryview, file_bytes: int) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """All tensors of a file: dtype, shape, and offset of the first byte in the file.

    Args:
        head: at least the header; see `header_bytes`.
        file_bytes: size of the whole file.
    Raises:
        ValueError: this is not a safetensors file, or the tensors do not fill it exactly.
    """
    base = header_bytes(head)
    if base > len(head):
        raise ValueError("its safetensors header reaches over the end of the file")
    places, ends = {}, {}
    try:
        header = parse_mapping(head[8:base])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, ends[name] = (base + whole_number(offset) for offset in entry["data_offsets"])
            places[name] = (entry["dtype"], tuple(whole_number(size) for size in entry["shape"]), begin)
            if entry["dtype"] not in ITEM_BYTES:
                raise ValueError(f"dtype {entry['dtype']!r} is unknown")
            if ends[name] - begin != math.prod(places[name][1]) * ITEM_BYTES[entry["dtype"]]:
                raise ValueError(f"the bytes of {name} are not those of {entry['dtype']}{entry['shape']}")
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"its safetensors header cannot be read: {error}") from error
    end = base
    for name in sorted(places, key=lambda name: (places[name][2], ends[name])):
        if places[name][2] != end:
            raise ValueError(f"its safetensors header gives {name} a place that does not fit")
        end = ends[name]
    if end != file_bytes:
        raise ValueError(f"its safetensors header accounts for {end} of {file_bytes} bytes")
    return places
