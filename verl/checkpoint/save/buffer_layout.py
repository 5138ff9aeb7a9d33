"""Components of a save, with live tensors and small files, and their layout in a host buffer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from verl.checkpoint.core.direct_io import FileImage, page_aligned
from verl.checkpoint.core.manifest import LogicalTensor, SavedSlice
from verl.checkpoint.core.safetensors_format import (
    DEFAULT_SHARD_BYTES,
    INDEX_NAME,
    MODEL_METADATA,
    TensorPlace,
    lay_out,
    model_files,
)
from verl.checkpoint.read.lazy_tensors import TORCH_TYPES
from verl.checkpoint.save.host_buffer import HEAD_BYTES
from verl.checkpoint.save.save_request import SaveRequest

DTYPES = {dtype: name for name, dtype in TORCH_TYPES.items()}


@dataclass(frozen=True, kw_only=True)
class PartialTensor:
    """A slice of a tensor of which other processes save the rest.

    Args:
        tensor: the slice.
        shape: of the whole tensor.
        start: where the slice begins in every dimension.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SavedComponent:
    """One directory of a checkpoint.

    Args:
        tensors: by name, the same whatever the number of writers, in the order in which a model's files are filled; on
            any device, of any strides, and may share memory. Slices need a `file`.
        file: name of the safetensors file; None is a model as Hugging Face lays it out: `model.safetensors`, or shards
            and an index.
        metadata: of that file, such as `{"format": "pt"}`; a model has it anyway.
        files: other files by name.
        constant_files: those that likely never change, such as a tokenizer's: shared with the newest checkpoint.
        max_shard_bytes: of a model.
        shards: names of tensors by file, if a model is already split over several writers.
    """

    tensors: Mapping[str, torch.Tensor | PartialTensor] = field(default_factory=dict)
    file: str | None = None
    metadata: Mapping[str, str] | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    constant_files: Mapping[str, bytes] = field(default_factory=dict)
    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    shards: Mapping[str, Sequence[str]] | None = None


@dataclass(frozen=True)
class CopyRegion:
    """Data to be copied to one place of a host buffer."""

    begin: int
    content: bytes | torch.Tensor


def lay_out_request(request: SaveRequest) -> tuple[SaveRequest, list[CopyRegion]]:
    """The request with the memory layout of all files in place of its components, and the copies into the memory.

    Raises:
        ValueError: a type that safetensors does not know, two files of one name, a slice of a model's tensor.
        TypeError: `state` holds something that is not a plain value.
    """
    layout = _BufferLayout()
    for directory, component in request.components.items():
        layout.add(directory, component)
    names = [file.path for file in (*layout.images, *request.existing_files)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"a save holds {', '.join(sorted(twice))} twice")
    laid_out = replace(
        request,
        components={},
        state=json.loads(json.dumps(dict(request.state))),
        metrics={key: float(value) for key, value in request.metrics.items()},
        num_bytes=layout.end,
        images=tuple(layout.images),
        tensors=tuple(layout.tensors),
    )
    return laid_out, layout.pieces


class _BufferLayout:
    """Files one after another in memory, each on a boundary of pages."""

    def __init__(self) -> None:
        self.end = HEAD_BYTES
        self.images: list[FileImage] = []
        self.pieces: list[CopyRegion] = []
        self.tensors: list[LogicalTensor] = []

    def add(self, directory: str, component: SavedComponent) -> None:
        for name, data in component.files.items():
            self._place(f"{directory}/{name}", [data])
        for name, data in component.constant_files.items():
            self._place(f"{directory}/{name}", [data], is_constant=True)
        if not component.tensors:
            return
        tensors, index = component.tensors, None
        places = {name: _place_of(f"{directory}/{name}", x, component.file) for name, x in tensors.items()}
        metadata = {**(component.metadata or {}), **({} if component.file else MODEL_METADATA)}
        files = {component.file: list(tensors)} if component.file else component.shards
        if files is None:
            sizes = {name: tensor_place.num_bytes for name, tensor_place in places.items()}
            (files,), index = model_files([sizes], component.max_shard_bytes)
        for file, names in files.items():
            path = f"{directory}/{file}"
            header, laid_out = lay_out({name: places[name] for name in names}, metadata)
            self._place(path, [header, *(_local(tensors[name]) for name in laid_out)])
            self.tensors += [_logical(directory, name, tensors[name], path, laid_out[name]) for name in laid_out]
        if index is not None:
            self._place(f"{directory}/{INDEX_NAME}", [index])

    def _place(self, path: str, buffers: Sequence[bytes | torch.Tensor], is_constant: bool = False) -> None:
        sizes = tuple(len(b) if isinstance(b, bytes) else b.numel() * b.element_size() for b in buffers)
        image = FileImage(path=path, begin=self.end, sizes=sizes, is_constant=is_constant)
        begin = self.end
        for buffer, size in zip(buffers, sizes):
            if size:
                self.pieces.append(CopyRegion(begin, buffer))
            begin += size
        self.images.append(image)
        self.end += page_aligned(image.num_bytes)


def _local(tensor: torch.Tensor | PartialTensor) -> torch.Tensor:
    return tensor.tensor if isinstance(tensor, PartialTensor) else tensor


def _place_of(where: str, tensor: torch.Tensor | PartialTensor, file: str | None) -> TensorPlace:
    """The type and shape of a tensor in its file, if it can be saved.

    Args:
        where: component and name, for messages.
        file: of its component.
    """
    data = _local(tensor)
    if data.dtype not in DTYPES:
        raise ValueError(f"{where} is of {data.dtype}, which safetensors does not know. Save it as another")
    is_dense = data.layout is torch.strided and not data.is_meta
    if not is_dense or (data.numel() and not data.untyped_storage().nbytes()):
        raise ValueError(f"{where} is not a dense tensor with its own memory")
    if isinstance(tensor, PartialTensor) and file is None:
        raise ValueError(f"{where} is a slice: a model's files hold whole tensors. Give the component a `file`")
    return TensorPlace(DTYPES[data.dtype], tuple(data.shape))


def _logical(
    directory: str, name: str, tensor: torch.Tensor | PartialTensor, path: str, place: TensorPlace
) -> LogicalTensor:
    shape, start = place.shape, (0,) * len(place.shape)
    if isinstance(tensor, PartialTensor):
        shape, start = tensor.shape, tensor.start
    part = SavedSlice(file=path, key=name, offset=place.begin, start=start, extent=place.shape)
    return LogicalTensor(component=directory, name=name, dtype=place.dtype, shape=shape, slices=(part,))
