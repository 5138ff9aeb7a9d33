"""Tensors in memory written by a `RankWriter`, without torch: whole ones and slices of several writers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.checkpoint.commit.rank_writer import RankWriter
from verl.checkpoint.core.manifest import LogicalTensor
from verl.checkpoint.core.safetensors_format import INDEX_NAME, MODEL_METADATA, lay_out, model_files


@dataclass(frozen=True, kw_only=True)
class RankTensor:
    """One writer's part of a tensor of a `shape`; without `start` and `extent` all of it. `data` is anything with a
    contiguous buffer."""

    component: str = "c"
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Any
    start: tuple[int, ...] | None = None
    extent: tuple[int, ...] | None = None

    @property
    def record(self) -> LogicalTensor:
        return LogicalTensor.of_slice(self.component, self.name, self.dtype, self.shape, self.start, self.extent)


def render(
    parts: Sequence[RankTensor], path: str = "c/file", metadata: Mapping[str, str] | None = None
) -> tuple[list, list[LogicalTensor]]:
    """A safetensors file: its buffers in order, and the record of each tensor."""
    header, records = lay_out(path, [part.record for part in parts], metadata)
    data = {part.name: part.data for part in parts}
    return [header, *(data[record.name] for record in records)], records


def write_tensors(
    writer: RankWriter, path: str, parts: Sequence[RankTensor], metadata: Mapping[str, str] | None = None
) -> None:
    """A safetensors file of tensors or of slices, whose keys are the tensors' names."""
    buffers, records = render(parts, path, metadata)
    writer.write(path, buffers)
    writer.record(*records)


def write_model(writer: RankWriter, parts: Sequence[RankTensor], max_shard_bytes: int) -> None:
    """Whole tensors of a component as `model.safetensors`, or as shards and an index."""
    component, by_name = parts[0].component, {part.name: part for part in parts}
    (files,), index = model_files([{name: part.record.num_bytes for name, part in by_name.items()}], max_shard_bytes)
    for file, names in files.items():
        write_tensors(writer, f"{component}/{file}", [by_name[name] for name in names], MODEL_METADATA)
    if index is not None:
        writer.write(f"{component}/{INDEX_NAME}", [index])
