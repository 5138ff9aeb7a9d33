"""Images in vLLM's requests. The trainer's processor has expanded the placeholders and made what the model reads of the
images, so vLLM's own processors, which may expand them otherwise, are never asked.

    token ids, tensors of a row ── multi_modal_prompt ──> an item for each image, or for each tile of one, and its place

vLLM's caches know an item by `version of the weights / digest of the row / number`: equal tokens with other images, and
features of former weights, are not taken for one another.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm import ModelRegistry
from vllm.inputs.engine import MultiModalInput, mm_input
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.multimodal.processing import BaseProcessingInfo

from verl.errors import RolloutError
from verl.models.images import GRIDS, PIXELS, ImageCounts
from verl.rollout.base import TurnRequest

IMAGE = "image"
TORCHVISION = tuple("torchvision.transforms.v2.functional".rsplit(".", parts)[0] for parts in range(4))


class ImageInfo(BaseProcessingInfo):
    """Limits that vLLM asks of the processor of a family before there are requests."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {IMAGE: None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return dict.fromkeys(mm_counts, ImageCounts(self.get_hf_config()).per_image or seq_len)


def inspect_here(directory: str) -> None:
    """Make vLLM inspect the model's class in this process, since by default it starts another Python process, which
    takes seconds; of an image-text model, register that its images are processed already."""
    (name,) = json.loads((Path(directory) / "config.json").read_text())["architectures"]
    entry = ModelRegistry.models.get(name)
    if entry is not None and hasattr(entry, "load_model_cls"):
        with torchvision_named():
            kind: Any = entry.load_model_cls()
        if "_processor_factory" in vars(kind):
            del kind._processor_factory
            register = MULTIMODAL_REGISTRY.register_processor
            unused: Any = lambda info, *_: SimpleNamespace(info=info)  # noqa: E731
            kind = register(unused, info=ImageInfo, dummy_inputs=unused)(kind)
        ModelRegistry.register_model(name, kind)


@contextlib.contextmanager
def torchvision_named() -> Iterator[None]:
    """Provide modules of the name of torchvision without content if it is not installed, as on a CPU: vLLM's models
    import the image processors of transformers that are written with it, and use none."""
    names = TORCHVISION if importlib.util.find_spec("torchvision") is None else ()
    for name in names:
        sys.modules[name] = module = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        module.__dict__["__getattr__"] = lambda name: type(name, (), {})
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def multi_modal_prompt(turn: TurnRequest, salt: str, config: Any) -> MultiModalInput:
    """The input of a turn with images.

    Args:
        salt: version of the weights.
        config: of the model.
    Raises:
        RolloutError: the placeholders are not in runs of the lengths that the images have.
    """
    assert turn.media is not None
    counts = ImageCounts(config).of(turn.media).tolist()
    ranges = _ranges(turn.tokens, config.image_token_id, counts)
    keys = [f"{salt}/{turn.media_key}/{number}" for number in range(len(counts))]
    items = MultiModalKwargsItems({IMAGE: _items(turn.media, len(counts))})
    return mm_input(turn.tokens, items, {IMAGE: keys}, {IMAGE: ranges}, cache_salt=salt)


def _ranges(tokens: Sequence[int], placeholder: int, counts: Sequence[int]) -> list[PlaceholderRange]:
    """The places of as many placeholders for each item; further ones are tokens like others."""
    places, ranges = [place for place, token in enumerate(tokens) if token == placeholder], []
    for count in counts:
        own, places = places[:count], places[count:]
        if len(own) < count or own[-1] - own[0] != count - 1:
            raise RolloutError(
                f"A prompt has images of {', '.join(map(str, counts))} tokens, and its placeholders are not in runs of "
                "these lengths: vLLM cannot place them. Set rollout=hf."
            )
        ranges.append(PlaceholderRange(own[0], count))
    return ranges


def _items(media: Mapping[str, Tensor], count: int) -> list[MultiModalKwargsItem]:
    """The tensors of each item: patches and their grid, or the pixels of an image or a tile."""
    if GRIDS in media:
        patches = media[PIXELS].split(media[GRIDS].prod(dim=1).tolist())
        return [_item({PIXELS: x}, {GRIDS: grid}) for x, grid in zip(patches, media[GRIDS], strict=True)]
    tiles = {name: x.flatten(0, 1) if media[PIXELS].ndim == 5 else x for name, x in media.items()}
    one = torch.tensor(1)
    return [_item({name: x[i : i + 1] for name, x in tiles.items()}, {"num_patches": one}) for i in range(count)]


def _item(joined: Mapping[str, Tensor], stacked: Mapping[str, Tensor]) -> MultiModalKwargsItem:
    """An item whose tensors are joined with those of other items along their first dim, or stacked."""
    flat, batched = MultiModalFlatField(slices=()), MultiModalBatchedField(keep_on_cpu=True)
    elements = {name: MultiModalFieldElem(x, flat) for name, x in joined.items()}
    return MultiModalKwargsItem(elements | {name: MultiModalFieldElem(x, batched) for name, x in stacked.items()})
