"""Writing and reading the safetensors format: a header in JSON, then the tensors one after another.

Files are laid out here, not by the library, so that all bytes pass through `filesystem.py`, are hashed while they are
written, and are not copied: a 10 GB file is a header and views of existing memory. The library can read the result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.checkpoint.core.manifest import ITEM_BYTES
from verl.utils.external_input import parse_mapping, whole_number

HEADER_LIMIT_BYTES = 100_000_000  # the library's own limit
DEFAULT_SHARD_BYTES = 5 * 10**9
INDEX_NAME = "model.safetensors.index.json"
MODEL_METADATA = {"format": "pt"}  # without it, transformers refuses the file


@dataclass(frozen=True)
class TensorPlace:
    """A tensor in a safetensors file.

    Args:
        dtype: as safetensors calls it, `F32` or `BF16`.
        shape: in that file; of a slice, its own.
        begin: of its first byte, from the beginning of the file; 0 before `lay_out`.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int = 0

    @property
    def num_bytes(self) -> int:
        """Size according to shape and dtype."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def end(self) -> int:
        """Offset of the first byte after it."""
        return self.begin + self.num_bytes


def lay_out(
    tensors: Mapping[str, TensorPlace], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, TensorPlace]]:
    """The header of a file with these tensors, and their places, in the order in which their bytes follow.

    >>> header, places = lay_out({"bias": TensorPlace("F32", (2,))}, {"format": "pt"})
    >>> places["bias"].begin == len(header), places["bias"].end - places["bias"].begin
    (True, 8)

    Raises:
        ValueError: a type is unknown.
    """
    if unknown := {tensor.dtype for tensor in tensors.values()} - ITEM_BYTES.keys():
        raise ValueError(f"dtype {unknown.pop()!r} is not one of {', '.join(ITEM_BYTES)}")
    # Wide types first: after a header padded to 8 bytes every tensor is then aligned to its own elements.
    ordered = sorted(tensors.items(), key=lambda item: (-ITEM_BYTES[item[1].dtype], item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begins, end = [], 0
    for name, tensor in ordered:
        begins.append(end)
        end += tensor.num_bytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": (begins[-1], end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    places = {name: replace(tensor, begin=base + begin) for (name, tensor), begin in zip(ordered, begins)}
    return len(text).to_bytes(8, "little") + text, places


def model_files(
    writers: Sequence[Mapping[str, int]], max_bytes: int = DEFAULT_SHARD_BYTES
) -> tuple[list[dict[str, list[str]]], bytes | None]:
    """The files of a model, as Hugging Face lays one out: `model.safetensors`, or numbered files and an index.

    Args:
        writers: bytes of each tensor by name, for each process that writes some of them.
        max_bytes: of a file.
    Returns:
        Of each writer, file -> names; and the content of the index where there is more than one file.
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
    for name, tensor in sorted(places.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != end:
            raise ValueError(f"its safetensors header gives {name} a place that does not fit")
        end = tensor.end
    if end != file_bytes:
        raise ValueError(f"its safetensors header accounts for {end} of {file_bytes} bytes")
    return places


def _place(entry: dict[str, Any], base: int) -> TensorPlace:
    begin, end = entry["data_offsets"]
    if entry["dtype"] not in ITEM_BYTES:
        raise ValueError(f"dtype {entry['dtype']!r} is unknown")
    shape = tuple(whole_number(size) for size in entry["shape"])
    tensor = TensorPlace(entry["dtype"], shape, base + whole_number(begin))
    if tensor.end != base + whole_number(end):
        raise ValueError(f"{end - begin} bytes are not those of {tensor.dtype}{list(shape)}")
    return tensor
