"""Tensors in memory written by a `RankWriter`, without torch: whole ones and slices of several writers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from verl.checkpoint.commit.rank_writer import RankWriter
from verl.checkpoint.core.manifest import LogicalTensor, SavedSlice
from verl.checkpoint.core.safetensors_format import INDEX_NAME, MODEL_METADATA, TensorPlace, lay_out, model_files


class TensorBytes(NamedTuple):
    """A whole tensor in memory; `data` is anything with a contiguous buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Any


def render(
    tensors: Sequence[TensorBytes], metadata: dict[str, str] | None = None
) -> tuple[list, dict[str, TensorPlace]]:
    """A safetensors file: its buffers in order, and the place of each tensor."""
    header, places = lay_out({x.name: TensorPlace(x.dtype, x.shape) for x in tensors}, metadata)
    data = {x.name: x.data for x in tensors}
    return [header, *(data[name] for name in places)], places


@dataclass(frozen=True, kw_only=True)
class RankTensor:
    """One writer's part of a logical tensor of a `shape`; without `start` and `extent` all of it."""

    component: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Any
    start: tuple[int, ...] | None = None
    extent: tuple[int, ...] | None = None


def write_tensors(writer: RankWriter, path: str, parts: Sequence[RankTensor]) -> None:
    """A safetensors file of tensors or of slices, whose keys are the tensors' names."""
    tensors = [TensorBytes(p.name, p.dtype, p.shape if p.extent is None else p.extent, p.data) for p in parts]
    buffers, places = render(tensors)
    writer.write(path, buffers)
    writer.record(*(_logical(part, path, places) for part in parts))


def write_model(writer: RankWriter, component: str, tensors: Sequence[TensorBytes], max_shard_bytes: int) -> None:
    """Whole tensors as `model.safetensors`, or as shards and an index."""
    by_name = {x.name: x for x in tensors}
    (files,), index = model_files([{x.name: TensorPlace(x.dtype, x.shape).num_bytes for x in tensors}], max_shard_bytes)
    for name, names in files.items():
        path = f"{component}/{name}"
        buffers, places = render([by_name[key] for key in names], MODEL_METADATA)
        writer.write(path, buffers)
        for key, place in places.items():
            part = RankTensor(component=component, name=key, dtype=place.dtype, shape=place.shape, data=None)
            writer.record(_logical(part, path, places))
    if index is not None:
        writer.write(f"{component}/{INDEX_NAME}", [index])


def _logical(part: RankTensor, path: str, places: dict[str, TensorPlace]) -> LogicalTensor:
    place = places[part.name]
    start = (0,) * len(part.shape) if part.start is None else part.start
    where = SavedSlice(file=path, key=part.name, offset=place.begin, start=start, extent=place.shape)
    return LogicalTensor(component=part.component, name=part.name, dtype=part.dtype, shape=part.shape, slices=(where,))
