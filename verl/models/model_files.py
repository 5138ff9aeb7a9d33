"""Damaged files in a model's directory, as failed downloads leave them: found by names, sizes and headers alone."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

from verl.utils.external_input import ExternalInputError, checked_path, parse_json, parse_mapping

LFS_POINTER = b"version https://git-lfs.github.com/"
LARGEST_HEADER = 100_000_000  # bytes of a safetensors header, the limit of the format
WEIGHTS = ("model*.safetensors", "adapter_model*.safetensors", "pytorch_model*.bin", "adapter_model.bin")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
MAPPINGS = ("config.json", "adapter_config.json", "generation_config.json", "tokenizer_config.json", *INDEXES)
JSON = (*MAPPINGS, "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "chat_template.json")
DOWNLOAD = "Download it again"


def directory_faults(directory: Path, needs_weights: bool = True) -> Iterator[str]:
    """Yield a sentence per file of a model or tokenizer that cannot be read.

    Args:
        needs_weights: whether a directory without weights is a fault.
    """
    faults = [fault for file in sorted(directory.glob("*")) if (fault := file_fault(file)) is not None]
    indexes = [name for name in INDEXES if (directory / name).is_file()]
    if not faults and indexes:
        faults = list(_shard_faults(directory, indexes[0]))
    elif not faults and needs_weights and not any(found for name in WEIGHTS for found in directory.glob(name)):
        faults = [f"{directory} has no weights (*.safetensors, pytorch_model.bin). {DOWNLOAD}."]
    yield from faults


def file_fault(file: Path) -> str | None:
    """Description of the fault of a file; None for a sound one, and for a file of another kind."""
    is_weights = any(file.match(pattern) for pattern in WEIGHTS)
    if file.name not in JSON and file.suffix not in (".model", ".jinja", ".txt") and not is_weights:
        return None
    if file.is_symlink() and not file.exists():
        return f"{file} is a link to a file that does not exist. {DOWNLOAD}."
    if not file.is_file():
        return f"{file} is not a file. {DOWNLOAD}."
    try:
        with file.open("rb") as stream:
            beginning = stream.read(len(LFS_POINTER))
        if beginning == LFS_POINTER:
            return f"{file} is a pointer of git-lfs, not the file itself. Run `git lfs pull` in {file.parent}."
        fault = _safetensors_fault(file) if file.suffix == ".safetensors" else None
        if file.suffix == ".bin" and file.stat().st_size and not beginning.startswith(b"\x80"):
            fault = None if zipfile.is_zipfile(file) else "its end is missing"
        if file.stat().st_size == 0 and (is_weights or file.name in JSON):
            fault = "it is empty"
        elif file.name in JSON:
            fault = _json_fault(file)
    except OSError as error:
        return f"{file} cannot be read ({error.strerror})."
    return None if fault is None else f"{file} is damaged: {fault}. {DOWNLOAD}."


def _json_fault(file: Path) -> str | None:
    try:
        if file.name in MAPPINGS:
            parse_mapping(file.read_bytes())
        else:
            parse_json(file.read_bytes())
    except ExternalInputError as error:
        return str(error)
    return None


def _safetensors_fault(file: Path) -> str | None:
    """Fault found by the header: sizes of all tensors against that of the file."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(LARGEST_HEADER, size - 8):
            return f"it has {size:,} bytes, fewer than its header"
        try:
            header = parse_mapping(stream.read(length))
        except ExternalInputError:
            return "its header is not JSON"
    header.pop("__metadata__", None)
    try:
        places = sorted(tuple(map(int, tensor["data_offsets"])) for tensor in header.values())
        end = 0
        for begin, stop in places:
            if begin != end or stop < begin:
                return "tensors of its header overlap, or leave a gap"
            end = stop
    except (TypeError, KeyError, ValueError):
        return "its header has tensors without a place"
    expected = 8 + length + end
    return None if size == expected else f"it has {size:,} bytes, and its header tells of {expected:,}"


def _shard_faults(directory: Path, index: str) -> Iterator[str]:
    weight_map = parse_mapping((directory / index).read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        yield f"{directory / index} is damaged: it lists no weights. {DOWNLOAD}."
        return
    try:
        shards = sorted({checked_path(shard) for shard in weight_map.values()})
    except (ExternalInputError, TypeError) as error:
        yield f"{directory / index} is damaged: {error}. {DOWNLOAD}."
        return
    missing = [shard for shard in shards if not (directory / shard).is_file()]
    if missing:
        yield (f"{directory} lacks {len(missing)} of {len(shards)} files of weights, such as {missing[0]}. {DOWNLOAD}.")
