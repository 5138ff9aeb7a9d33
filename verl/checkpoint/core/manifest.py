"""The manifest of a checkpoint: every file with its digest, every logical tensor with its slices.

The slices of a tensor must tile it: cover each element exactly once. A manifest does not depend on the number of
writers, so a checkpoint written by eight ranks can be read by three.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from verl.checkpoint.core.hashing import Leaf, digest_of, file_digest
from verl.utils import external_input
from verl.utils.external_input import ByteCount, ExternalInputError, parse_as

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
MANIFEST, COMMIT, STATE = "manifest.json", "COMMIT", "trainer_state.json"


class ManifestError(ValueError):
    """A manifest is invalid."""


class ManifestTooNew(ManifestError):
    """A manifest of an unknown, later format."""


def checked_path(path: str) -> str:
    """Check a path within a checkpoint and return it.

    Raises:
        ManifestError: the path leads out of the checkpoint, or to a file that the store itself writes.
    """
    try:
        checked = external_input.checked_path(path)
    except ExternalInputError as error:
        raise ManifestError(str(error)) from error
    if checked in (MANIFEST, COMMIT):
        raise ManifestError(f"{path!r} is written by the store itself")
    return checked


RelativePath = Annotated[str, AfterValidator(checked_path)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True, kw_only=True)
class SavedSlice:
    """A rectangular part of a tensor, stored row-major and contiguously in a file.

    Args:
        file: path within the checkpoint; empty before the layout is known.
        key: the name in that file's safetensors header, or None for other kinds of files.
        offset: of the first byte in the file.
        start, extent: the first index and the length in every dimension of the tensor.
    """

    file: RelativePath
    offset: ByteCount
    start: tuple[ByteCount, ...]
    extent: tuple[ByteCount, ...]
    key: str | None = None

    @property
    def end(self) -> tuple[int, ...]:
        """The end index (exclusive) in every dimension."""
        return tuple(start + extent for start, extent in zip(self.start, self.extent))

    @property
    def num_elements(self) -> int:
        """Number of elements; 1 for a tensor without dimensions."""
        return math.prod(self.extent)


@dataclass(frozen=True, kw_only=True)
class LogicalTensor:
    """A whole tensor and its slices.

    >>> halves = [SavedSlice(file="a", offset=0, start=(i,), extent=(2,)) for i in (0, 2)]
    >>> LogicalTensor(component="actor", name="bias", dtype="F32", shape=(4,), slices=tuple(halves)).faults()
    []

    Args:
        component: such as `actor` or `optimizer`.
        name: within the component, independent of the number of writers.
        dtype: in safetensors' notation, such as `F32` or `BF16`.
        shape: of the whole tensor.
    """

    component: str
    name: str
    dtype: str
    shape: tuple[ByteCount, ...]
    slices: tuple[SavedSlice, ...]

    @classmethod
    def of_slice(
        cls, component: str, name: str, dtype: str, shape: tuple[int, ...],
        start: tuple[int, ...] | None = None, extent: tuple[int, ...] | None = None,
    ) -> LogicalTensor:  # fmt: skip
        """A tensor with one slice to save; the whole tensor without `start` and `extent`."""
        part = SavedSlice(
            file="", offset=0, start=start or (0,) * len(shape), extent=shape if extent is None else extent
        )
        return cls(component=component, name=name, dtype=dtype, shape=shape, slices=(part,))

    @property
    def full_name(self) -> str:
        """Component and name, for messages."""
        return f"{self.component}/{self.name}"

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def slice_bytes(self, part: SavedSlice) -> int:
        """Size of a slice in its file."""
        return part.num_elements * ITEM_BYTES[self.dtype]

    def faults(self) -> list[str]:
        """Why the slices do not cover the tensor exactly once; empty if they do."""
        if self.dtype not in ITEM_BYTES:
            return [f"dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}"]
        if outside := [part for part in self.slices if not self._holds(part)]:
            return [f"{_describe(part)} does not lie within the shape {list(self.shape)}" for part in outside]
        if (overlap := _first_overlap(self.slices)) is not None:
            return [f"{_describe(overlap[0])} and {_describe(overlap[1])} overlap"]
        size = math.prod(self.shape)
        missing = size - sum(part.num_elements for part in self.slices)
        return [f"{missing} of its {size} elements are in no slice"] if missing else []

    def _holds(self, part: SavedSlice) -> bool:
        if not len(part.start) == len(part.extent) == len(self.shape) or part.offset < 0:
            return False
        sides = zip(part.start, part.extent, self.shape)
        return all(start >= 0 and extent >= 0 and start + extent <= size for start, extent, size in sides)


def join_tensors(parts: Iterable[LogicalTensor]) -> tuple[list[LogicalTensor], list[str]]:
    """Merge the reports of several writers about the same tensors.

    Returns:
        The tensors in order of component and name, and the contradictions between writers.
    """
    joined: dict[tuple[str, str], LogicalTensor] = {}
    contradictions = []
    for part in parts:
        known = joined.setdefault((part.component, part.name), part)
        if known is part:
            continue
        if (known.dtype, known.shape) != (part.dtype, part.shape):
            seen = [f"{tensor.dtype}{list(tensor.shape)}" for tensor in (known, part)]
            contradictions.append(f"{part.full_name} is {seen[0]} to one writer and {seen[1]} to another")
            continue
        joined[part.component, part.name] = LogicalTensor(
            component=part.component, name=part.name, dtype=part.dtype, shape=part.shape,
            slices=known.slices + part.slices,
        )  # fmt: skip
    return [joined[key] for key in sorted(joined)], contradictions


def _first_overlap(slices: Sequence[SavedSlice]) -> tuple[SavedSlice, SavedSlice] | None:
    """Two overlapping slices. They are sorted along the dimension with the most starts, so each is compared with few
    neighbours."""
    present = [part for part in slices if part.num_elements]
    starts = [len(set(own)) for own in zip(*(part.start for part in present))]
    dim = starts.index(max(starts)) if starts else 0
    ordered = sorted(present, key=lambda part: part.start[dim : dim + 1])
    for number, first in enumerate(ordered):
        for second in itertools.islice(ordered, number + 1, None):
            if first.start and second.start[dim] >= first.end[dim]:
                break
            if all(a < d and c < b for a, b, c, d in zip(first.start, first.end, second.start, second.end)):
                return first, second
    return None


def _describe(part: SavedSlice) -> str:
    bounds = ", ".join(f"{start}:{start + extent}" for start, extent in zip(part.start, part.extent))
    return f"slice [{bounds}] of {part.file}"


FORMAT_NAME = "verl-checkpoint"
FORMAT_VERSION = "1.0.0"  # each later format reads all formats from this one on
MANIFEST_LIMIT_BYTES = 2**28
COMMIT_LIMIT_BYTES = 4096
DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A file of a checkpoint.

    Args:
        path: within the checkpoint, with forward slashes.
        blake3: digest of the file (`hashing.file_digest`).
        leaves: pieces that can be verified separately.
        linked_from: the checkpoint with which the file shares bytes, for information.
    """

    path: RelativePath
    size: ByteCount
    blake3: Digest
    leaves: tuple[Leaf, ...] = ()
    linked_from: str | None = None

    @classmethod
    def of(cls, path: str, leaves: Iterable[Leaf], linked_from: str | None = None) -> FileEntry:
        """The entry of a file with these leaves."""
        leaves = tuple(leaves)
        size = sum(leaf.size for leaf in leaves)
        return cls(path=path, size=size, blake3=file_digest(leaves), leaves=leaves, linked_from=linked_from)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a checkpoint.

    Args:
        sequence: publication number in this directory; the highest is the newest checkpoint, regardless of its step.
        saved_at: UTC, ISO 8601.
        verl_version: of the code that wrote it.
        metrics: at that step, for `keep_best`.
        files: in order of path, without the manifest itself and COMMIT.
        tensors: in order of component and name.
    """

    sequence: ByteCount
    step: ByteCount
    tag: str | None
    run_id: str
    saved_at: str
    verl_version: str
    metrics: dict[str, int | float] = field(default_factory=dict)
    files: tuple[FileEntry, ...] = ()
    tensors: tuple[LogicalTensor, ...] = ()
    version: str = FORMAT_VERSION

    @cached_property
    def contents(self) -> dict[str, FileEntry]:
        """The files by path, in order."""
        return {entry.path: entry for entry in sorted(self.files, key=lambda entry: entry.path)}

    def file(self, path: str) -> FileEntry | None:
        return self.contents.get(path)

    def to_bytes(self) -> bytes:
        """The canonical form: equal manifests give equal bytes; one line per file or tensor."""
        head = {"format": {"name": FORMAT_NAME, "version": self.version}}
        head |= {key: getattr(self, key) for key in _PLAIN_FIELDS}
        lines = [f"{json.dumps(key)}: {_compact(value)}" for key, value in head.items()]
        lines.append(f'"files": {_one_a_line(_file_json(entry) for entry in self.files)}')
        lines.append(f'"tensors": {_one_a_line(_tensor_json(tensor) for tensor in self.tensors)}')
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parse a manifest; unknown keys are ignored.

        Raises:
            ManifestTooNew: the format is newer than this version.
            ManifestError: the data is not a valid manifest.
        """
        try:
            version = _supported(parse_as(_Stamped, data).format)
            saved = parse_as(_SavedManifest, data)
        except ExternalInputError as error:
            raise ManifestError(f"it is not a manifest of a checkpoint ({error})") from error
        manifest = cls(**{**vars(saved), "version": version})
        _refuse_contradictions(manifest)
        return manifest


@dataclass(frozen=True, kw_only=True)
class _SavedManifest(Manifest):
    """Types of a manifest's own fields."""

    metrics: dict[str, int | float] = field()
    files: tuple[FileEntry, ...] = field()
    tensors: tuple[LogicalTensor, ...] = field()


@dataclass(frozen=True)
class _Format:
    name: str
    version: Annotated[str, Field(pattern=r"^[0-9]{1,9}\.[0-9]{1,9}(\.|$)")]


@dataclass(frozen=True)
class _Stamped:
    format: _Format


_PLAIN_FIELDS = ("sequence", "step", "tag", "run_id", "saved_at", "verl_version", "metrics")


def content_digest(manifest: Manifest) -> str:
    """Digest of a checkpoint's content except `trainer_state.json`, which contains this digest."""
    entries = manifest.contents.values()
    listed = [{**_file_json(entry), "linked_from": None} for entry in entries if entry.path != STATE]
    return digest_of(_compact([listed, [_tensor_json(tensor) for tensor in manifest.tensors]]).encode())


def commit_line(manifest: bytes) -> bytes:
    """The content of COMMIT: a line that `b3sum --check COMMIT` understands."""
    return f"{digest_of(manifest)}  {MANIFEST}\n".encode()


def is_readable(version: str, by: str = FORMAT_VERSION) -> bool:
    """Whether checkpoints of one format version can be read by code of another.

    >>> is_readable("1.3.0", by="1.2.0"), is_readable("2.0.0", by="1.2.0"), is_readable("0.9.0", by="1.2.0")
    (True, False, False)
    """
    return 1 <= _major(version) <= _major(by)


def _major(version: str) -> int:
    return int(version.split(".")[0])


def _supported(form: _Format) -> str:
    if form.name != FORMAT_NAME:
        raise ManifestError(f"its format is {form.name!r}, not {FORMAT_NAME!r}")
    if not _major(form.version):
        raise ManifestError(f"it is of format {form.version}, of a version of verl before 0.3.0, which is not read")
    if not is_readable(form.version):
        raise ManifestTooNew(
            f"it is of format {form.version}; this version of verl reads up to {FORMAT_VERSION}. Use a newer verl"
        )
    return form.version


def utc_now() -> str:
    """The current time in the format of `saved_at`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _file_json(entry: FileEntry) -> dict[str, Any]:
    return dict(vars(entry))  # not asdict, which copies every leaf


def _tensor_json(tensor: LogicalTensor) -> dict[str, Any]:
    return {**vars(tensor), "slices": [vars(part) for part in tensor.slices]}


def _refuse_contradictions(manifest: Manifest) -> None:
    if manifest.file(STATE) is None:
        raise ManifestError(f"it does not list {STATE}")
    for entry in manifest.files:
        if any(leaf.size == 0 for leaf in entry.leaves):
            raise ManifestError(f"the leaves of {entry.path} are malformed")
        if entry != FileEntry.of(entry.path, entry.leaves, entry.linked_from):
            raise ManifestError(f"size and digest of {entry.path} are not those of its leaves")
    for tensor in manifest.tensors:
        if tensor.dtype not in ITEM_BYTES:
            raise ManifestError(f"dtype {tensor.dtype[:80]!r} is not one of {', '.join(ITEM_BYTES)}")


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True, allow_nan=False)


def _one_a_line(items: Iterable[dict[str, Any]]) -> str:
    return "[\n" + ",\n".join(_compact(item) for item in items) + "\n]"
