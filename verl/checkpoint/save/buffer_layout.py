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
class TensorItem:
    """A tensor to be saved, or a slice of one.

    Args:
        name: within the component, the same whatever the number of writers.
        tensor: on any device, of any strides; may share memory with others.
        shape: of the whole tensor, where `tensor` is a slice of it.
        start: where the slice begins in every dimension.
    """

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...] | None = None
    start: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class SavedComponent:
    """One directory of a checkpoint.

    Args:
        tensors: in the order in which a model's shards are filled.
        file: name of the safetensors file; None is a model as Hugging Face lays it out: `model.safetensors`, or shards
            and an index.
        metadata: of that file, such as `{"format": "pt"}`; a model has it anyway.
        files: other files by name.
        constant_files: those that likely never change, such as a tokenizer's: bytes are shared with earlier saves.
        max_shard_bytes: of a model.
        shards: names of tensors by file, if a model is already split over several writers.
    """

    tensors: Sequence[TensorItem] = ()
    file: str | None = None
    metadata: Mapping[str, str] | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    constant_files: Mapping[str, bytes] = field(default_factory=dict)
    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    shards: Mapping[str, Sequence[str]] | None = None


@dataclass(frozen=True)
class CopyRegion:
    """What is to be copied to one place of a host buffer."""

    begin: int
    content: bytes | torch.Tensor


def lay_out_request(request: SaveRequest) -> tuple[SaveRequest, list[CopyRegion]]:
    """The request with the memory layout of all files in place of its components, and the copies into the memory.

    Raises:
        ValueError: a type that safetensors does not know, two files or tensors of one name, a slice without a position.
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
        items = {item.name: item for item in component.tensors}
        places, index = _places(directory, component), None
        metadata = {**(component.metadata or {}), **({} if component.file else MODEL_METADATA)}
        files = {component.file: list(items)} if component.file else component.shards
        if files is None:
            sizes = {name: place.num_bytes for name, place in places.items()}
            (files,), index = model_files([sizes], component.max_shard_bytes)
        for file, names in files.items():
            path = f"{directory}/{file}"
            header, laid_out = lay_out({name: places[name] for name in names}, metadata)
            self._place(path, [header, *(items[name].tensor for name in laid_out)])
            self.tensors += [_logical(directory, items[name], path, place) for name, place in laid_out.items()]
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


def _places(directory: str, component: SavedComponent) -> dict[str, TensorPlace]:
    """The tensors of a component, checked, before they are laid out."""
    places: dict[str, TensorPlace] = {}
    for item in component.tensors:
        where = f"{directory}/{item.name}"
        if item.name in places:
            raise ValueError(f"{where}: two tensors of one component have the same name")
        if item.tensor.dtype not in DTYPES:
            raise ValueError(f"{where} is of {item.tensor.dtype}, which safetensors does not know. Save it as another")
        is_dense = item.tensor.layout is torch.strided and not item.tensor.is_meta
        if not is_dense or (item.tensor.numel() and not item.tensor.untyped_storage().nbytes()):
            raise ValueError(f"{where} is not a dense tensor with its own memory")
        if (item.shape is None) != (item.start is None):
            raise ValueError(f"{where} is a slice: it needs both `shape`, of the whole tensor, and `start`")
        if item.shape is not None and component.file is None:
            raise ValueError(f"{where} is a slice: a model's files hold whole tensors. Give the component a `file`")
        places[item.name] = TensorPlace(DTYPES[item.tensor.dtype], tuple(item.tensor.shape))
    return places


def _logical(directory: str, item: TensorItem, path: str, place: TensorPlace) -> LogicalTensor:
    start = item.start if item.start is not None else (0,) * len(place.shape)
    part = SavedSlice(file=path, key=item.name, offset=place.begin, start=start, extent=place.shape)
    shape = item.shape if item.shape is not None else place.shape
    return LogicalTensor(component=directory, name=item.name, dtype=place.dtype, shape=shape, slices=(part,))
