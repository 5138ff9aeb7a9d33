"""Comparison of two checkpoints: tensors and files by digest, configuration and state by key."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.checkpoint.core.checkpoint import Checkpoint, read_state
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.core.hashing import Leaf, digest_of
from verl.checkpoint.core.manifest import STATE, LogicalTensor
from verl.checkpoint.core.safetensors_format import INDEX_NAME
from verl.checkpoint.read.reader import CheckpointReader
from verl.utils.external_input import ExternalInputError, parse_json, parse_yaml

ABSENT = "absent"
DOCUMENT_LIMIT_BYTES = 2**18
CHUNK_ELEMENTS = 2**22
# Entries that always differ, or that are reported separately.
PASSED_OVER = ("saved_at", "sequence", "manifest_checksum", "loss_history", "wall_clock", "time_stamps")


@dataclass(frozen=True, kw_only=True)
class CheckpointDifference:
    """One difference between two checkpoints.

    Args:
        kind: `tensor`, `file`, or `key` of a JSON file.
        component: such as `actor`; for a key, the file that contains it.
        name: of the tensor, file or key.
        first, second: description of each checkpoint's value.
        max_abs: the largest absolute difference of elements; None if not requested or shapes differ.
    """

    kind: str
    component: str
    name: str
    first: Any
    second: Any
    max_abs: float | None = None


def compare(first: Checkpoint, second: Checkpoint, numbers: bool = False) -> list[CheckpointDifference]:
    """All differences between two checkpoints, except times and loss history.

    Tensors are compared by the digests in the manifests; if those are not comparable, because the slices differ, the
    tensors are read. Safetensors files are compared by their tensors only.

    Args:
        numbers: also compute the largest difference of elements of each tensor that differs; reads both tensors.
    """
    readers = CheckpointReader(first, writable=True), CheckpointReader(second, writable=True)
    differences = [*_tensor_differences(*readers, numbers), *_file_differences(first, second)]
    for path in sorted(_documents(first) & _documents(second)):
        if _digest(first, path) != _digest(second, path):
            differences += _key_differences(path, *(_parsed(path, bytes(reader.read(path))) for reader in readers))
    states = [read_state(FileSystem(), checkpoint) for checkpoint in (first, second)]
    states = [{key: value for key, value in state.items() if key not in PASSED_OVER} for state in states]
    return differences + list(_key_differences(STATE, *states))


def _tensor_differences(
    first: CheckpointReader, second: CheckpointReader, numbers: bool
) -> Iterator[CheckpointDifference]:
    firsts, seconds = ({t.full_name: t for t in reader.checkpoint.manifest.tensors} for reader in (first, second))
    for name in sorted(firsts.keys() | seconds.keys()):
        a, b = firsts.get(name), seconds.get(name)
        if a is not None and b is not None and _is_same(first, a, second, b):
            continue
        some = a or b
        assert some is not None
        largest = _max_abs(first, a, second, b) if numbers and a and b and a.shape == b.shape else None
        texts = [_form(a), _form(b)] if a is None or b is None or _form(a) != _form(b) else [_form(a), "other values"]
        yield CheckpointDifference(
            kind="tensor", component=some.component, name=some.name, first=texts[0], second=texts[1], max_abs=largest
        )


def _is_same(first: CheckpointReader, a: LogicalTensor, second: CheckpointReader, b: LogicalTensor) -> bool:
    if _form(a) != _form(b):
        return False
    leaves = _leaves(first.checkpoint, a), _leaves(second.checkpoint, b)
    if None not in leaves and [leaf.size for leaf in leaves[0] or ()] == [leaf.size for leaf in leaves[1] or ()]:
        return leaves[0] == leaves[1]
    return digest_of(first.tensor(a.component, a.name)) == digest_of(second.tensor(b.component, b.name))


def _leaves(checkpoint: Checkpoint, tensor: LogicalTensor) -> list[Leaf] | None:
    """The leaves of a file that hold this tensor and nothing else; None if it is split or shares a leaf."""
    if len(tensor.slices) != 1:
        return None
    (part,) = tensor.slices
    entry = checkpoint.manifest.file(part.file)
    if entry is None:
        return None
    begin, end = part.offset, part.offset + tensor.slice_bytes(part)
    ends = itertools.accumulate(leaf.size for leaf in entry.leaves)
    touching = [
        (high - leaf.size, leaf) for high, leaf in zip(ends, entry.leaves) if high > begin and high - leaf.size < end
    ]
    whole = not touching or (touching[0][0] == begin and sum(leaf.size for _, leaf in touching) == end - begin)
    return [leaf for _, leaf in touching] if whole else None


def _form(tensor: LogicalTensor | None) -> str:
    return ABSENT if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"


def _max_abs(first: CheckpointReader, a: LogicalTensor, second: CheckpointReader, b: LogicalTensor) -> float:
    """The largest difference, in float64; NaN where only one of two elements is NaN."""
    import torch

    from verl.checkpoint.read.lazy_tensors import as_torch

    elements = as_torch(first.tensor(a.component, a.name), a).flatten()
    others = as_torch(second.tensor(b.component, b.name), b).flatten()
    largest = torch.zeros((), dtype=torch.float64)
    for x, y in zip(elements.split(CHUNK_ELEMENTS), others.split(CHUNK_ELEMENTS)):
        if x.numel():
            x, y = x.to(torch.float64), y.to(torch.float64)
            same = (x == y) | (x.isnan() & y.isnan())  # inf - inf is not a number
            largest = torch.maximum(largest, torch.where(same, 0.0, (x - y).abs()).max())  # which keep NaN
    return float(largest)


def _file_differences(first: Checkpoint, second: Checkpoint) -> Iterator[CheckpointDifference]:
    """Differences between files without tensors, by digest; JSON files in both checkpoints are compared by key."""
    firsts, seconds = _plain_files(first), _plain_files(second)
    by_key = _documents(first) & _documents(second)
    for path in sorted((firsts.keys() | seconds.keys()) - by_key):
        a, b = firsts.get(path), seconds.get(path)
        if a != b:
            component, _, name = path.rpartition("/")
            yield CheckpointDifference(
                kind="file", component=component, name=name, first=a or ABSENT, second=b or ABSENT
            )


def _digest(checkpoint: Checkpoint, path: str) -> str:
    entry = checkpoint.manifest.file(path)
    return "" if entry is None else entry.blake3


def _plain_files(checkpoint: Checkpoint) -> dict[str, str]:
    held = checkpoint.slices_by_file.keys() | {STATE}
    files = [entry for entry in checkpoint.manifest.contents.values() if entry.path not in held]
    return {e.path: f"{e.size} bytes, {e.blake3[:12]}" for e in files if not e.path.endswith(INDEX_NAME)}


def _documents(checkpoint: Checkpoint) -> set[str]:
    """Files that are compared by key: configuration files, but no vocabularies."""
    small = {entry.path for entry in checkpoint.manifest.contents.values() if entry.size <= DOCUMENT_LIMIT_BYTES}
    return {path for path in small if path.endswith((".json", ".yaml")) and path != STATE and INDEX_NAME not in path}


def _parsed(path: str, data: bytes) -> Any:
    try:
        return (parse_json if path.endswith(".json") else parse_yaml)(data)
    except ExternalInputError:
        return f"{len(data)} bytes, {digest_of(data)[:12]}"


def _key_differences(file: str, first: Any, second: Any) -> Iterator[CheckpointDifference]:
    firsts, seconds = dict(flat(first)), dict(flat(second))
    for key in sorted(firsts.keys() | seconds.keys()):
        a, b = firsts.get(key, ABSENT), seconds.get(key, ABSENT)
        if a != b:
            yield CheckpointDifference(kind="key", component=file, name=key, first=a, second=b)


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested mappings to dotted paths; lists are leaves."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from flat(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
