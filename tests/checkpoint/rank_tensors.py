"""Tensors in memory written by a `RankWriter`, without torch: whole ones and slices of several writers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl.checkpoint.commit.rank_writer import RankWriter
from verl.checkpoint.core.manifest import LogicalTensor, SavedSlice
from verl.checkpoint.core.safetensors_format import INDEX_NAME, RenderedFile, TensorBytes, render, render_shards


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
    rendered = render(tensors)
    writer.write(path, rendered.buffers)
    writer.record(*(_logical(part, path, rendered) for part in parts))


def write_model(writer: RankWriter, component: str, tensors: Sequence[TensorBytes], max_shard_bytes: int) -> None:
    """Whole tensors as `model.safetensors`, or as shards and an index."""
    files, index = render_shards(tensors, max_shard_bytes)
    for name, rendered in files.items():
        path = f"{component}/{name}"
        writer.write(path, rendered.buffers)
        for key, place in rendered.places.items():
            part = RankTensor(component=component, name=key, dtype=place.dtype, shape=place.shape, data=None)
            writer.record(_logical(part, path, rendered))
    if index is not None:
        writer.write(f"{component}/{INDEX_NAME}", [index])


def _logical(part: RankTensor, path: str, rendered: RenderedFile) -> LogicalTensor:
    place = rendered.places[part.name]
    start = (0,) * len(part.shape) if part.start is None else part.start
    where = SavedSlice(file=path, key=part.name, offset=place.begin, start=start, extent=place.shape)
    return LogicalTensor(component=part.component, name=part.name, dtype=part.dtype, shape=part.shape, slices=(where,))
