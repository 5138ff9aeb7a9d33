"""Images in rows: where their features go, and the positions of the tokens around them.

    distinct items of the rows ── vision tower, once each ──> features [n D] ── `slots` ──> embeddings of placeholders

The model reads the images in its own forward pass; only the features that it makes of them are repeated for the rows
that share an item. A placeholder beyond those of a row's images, which the policy has sampled, is a token like others.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from verl.errors import ConfigError
from verl.model_paths.families import ModelPaths
from verl.model_paths.packed_attention import describing
from verl.models.images import GRIDS, ImageCounts
from verl.models.structure import unwrapped
from verl.protocol import DataProto

MEDIA, KEYS = "media.", "media_keys"

RowMedia = tuple[int, Mapping[str, Tensor] | None]  # digest and tensors of the images of a row; 0 and None without


@dataclass(frozen=True)
class RowImages:
    """The images of the rows of a forward pass.

    Attributes:
        values: what the model reads of the distinct items, one after another.
        slots: [b S], or [1 N] of a packed line: the feature that a token is the placeholder of, -1 for other tokens.
        index: [n] the features of the placeholders, in their order.
        stray: [b S] placeholders without an image; None if there are none.
        placeholder: token id of placeholders.
        positions: [3 b S] of rotary embeddings; None if the model counts them from the tokens alone.
        shifts: [b] by how much the position of the next token differs from the number of tokens.
        keyword: under which the model is told which tokens are of images; None if it need not know.
    """

    values: Mapping[str, Tensor]
    slots: Tensor
    index: Tensor
    stray: Tensor | None
    placeholder: int
    positions: Tensor | None = None
    shifts: Sequence[int] = ()
    keyword: str | None = None

    def to(self, device: torch.device) -> RowImages:
        moved = {name: x.to(device, non_blocking=True) for name, x in self.values.items()}
        rest = {name: getattr(self, name) for name in ("slots", "index", "stray", "positions")}
        rest = {name: x if x is None else x.to(device, non_blocking=True) for name, x in rest.items()}
        return replace(self, values=moved, **rest)

    def on_line(self, tokens: Tensor) -> RowImages:
        """The images of a packed line of tokens [N], given by their index in the flattened rows."""
        stray = None if self.stray is None else self.stray.flatten()[tokens][None]
        positions = None if self.positions is None else self.positions.flatten(1)[:, tokens][:, None]
        slots = self.slots.flatten()[tokens]
        return replace(self, slots=slots[None], index=slots[slots >= 0], stray=stray, positions=positions)

    def alone(self, tail: int) -> RowImages:
        """The images of rows without padding, whose positions the model counts itself, with `tail` tokens appended."""
        stray = None if self.stray is None else F.pad(self.stray, (0, tail))
        return replace(self, slots=F.pad(self.slots, (0, tail), value=-1), stray=stray, positions=None)

    @contextlib.contextmanager
    def inserted(self, model: Any, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Inside this context a forward pass with the inputs that it gives inserts the images; see the module."""
        base, ids = unwrapped(model).base_model, inputs["input_ids"]
        features, index = base.get_image_features, self.index

        def of_rows(*args: Any, **kwargs: Any) -> Any:
            with describing(False):
                found = features(*args, **{name: x for name, x in kwargs.items() if name == "return_dict"})
            found.pooler_output = _chosen(found.pooler_output, index)
            if (layers := getattr(found, "deepstack_features", None)) is not None:
                found.deepstack_features = [_chosen(layer, index) for layer in layers]
            return found

        def restored(embedding: Any, args: Any, out: Tensor) -> Tensor:
            assert self.stray is not None
            own = type(embedding).forward(embedding, torch.tensor([[self.placeholder]], device=out.device))
            return torch.where(self.stray[..., None], own, out)

        given = {**inputs, **self.values}
        if self.positions is not None:
            given["position_ids"] = self.positions
        if self.keyword is not None:
            given[self.keyword] = (self.slots >= 0).to(ids.dtype)
        hook = None
        if self.stray is not None:
            given["input_ids"] = ids.masked_fill(self.stray, 0)
            hook = base.get_input_embeddings().register_forward_hook(restored)
        base.get_image_features = of_rows
        try:
            yield given
        finally:
            del base.get_image_features
            if hook is not None:
                hook.remove()
            if hasattr(base, "rope_deltas"):
                base.rope_deltas = None  # of these rows; other rows would be counted with them


def _chosen(features: Any, index: Tensor) -> Any:
    """Some features [n D], in the form in which a model gives them: [images, tokens, D], or a tensor for each image."""
    if isinstance(features, Tensor):
        return features.flatten(0, 1)[index].unflatten(0, (-1, features.shape[1]))
    return (torch.cat(list(features))[index],)


class ImageRows:
    """Places the images of rows for a model.

    Raises:
        ConfigError: it is a text model, or of a family that was not tried with images.
    """

    def __init__(self, model: Any, name: str = "actor.model"):
        config = unwrapped(model).config
        self.base, self.config = unwrapped(model).base_model, config
        vision = getattr(config, "vision_config", None)
        self.placeholder: Any = getattr(config, "image_token_id", None)
        self.counts, self.has_grids = ImageCounts(config), hasattr(self.base, "get_rope_index")
        is_known = self.counts.per_image is not None or (self.has_grids and self.counts.patches)
        if vision is None or self.placeholder is None or not is_known:
            raise ConfigError(
                f"{name} is a {type(unwrapped(model)).__name__}, and the prompts have images: "
                + ("it reads text alone. " if vision is None else "images were not tried with its family. ")
                + "Choose an image-text model of the families Qwen-VL, SmolVLM, Idefics3 or Gemma 3."
            )

    def of_media(self, media: Sequence[RowMedia], ids: Tensor, attention: Tensor) -> RowImages | None:
        """The images of rows of token ids, of which equal digests are one item; all on the CPU.

        Args:
            ids, attention: [b S].
        Returns:
            None if no row has an image.
        Raises:
            ConfigError: a row has fewer placeholders than its images need.
        """
        if not (items := {key: x for key, x in media if x is not None}):
            return None
        counts = {key: int(self.counts.of(x).sum()) for key, x in items.items()}
        places = dict(zip(counts, itertools.accumulate(counts.values(), initial=0), strict=False))
        starts = torch.tensor([places.get(key, 0) for key, _ in media])
        needed = torch.tensor([counts.get(key, 0) for key, _ in media])
        is_placeholder = (ids == self.placeholder) & attention.bool()
        rank = is_placeholder.cumsum(dim=1) - 1
        slots = torch.where(is_placeholder & (rank < needed[:, None]), starts[:, None] + rank, -1)
        found = (slots >= 0).sum(dim=1)
        if bool((found < needed).any()):
            row = int((found < needed).nonzero()[0])
            raise ConfigError(
                f"actor.model makes {int(needed[row])} features of the images of a prompt with {int(found[row])} "
                "placeholders for them. Make its tokens with the processor of the model."
            )
        stray = is_placeholder & (slots < 0)
        names = next(iter(items.values()))
        values = {name: torch.cat([x[name] for x in items.values()]) for name in names}
        keyword = positions = None
        shifts = [0] * len(ids)
        if self.has_grids:
            keyword = "mm_token_type_ids"
            grids = [x[GRIDS] for _, x in media if x is not None]
            types = (slots >= 0).to(torch.int32)
            positions, deltas = self.base.get_rope_index(
                ids, mm_token_type_ids=types, image_grid_thw=torch.cat(grids), attention_mask=attention
            )
            shifts = deltas.flatten().tolist()
        elif sees_ahead(self.config):
            keyword = "token_type_ids"
        strays = stray if bool(stray.any()) else None
        return RowImages(values, slots, slots[slots >= 0], strays, self.placeholder, positions, shifts, keyword)


def row_media(batch: DataProto, rows: Sequence[int] | None = None) -> list[RowMedia]:
    """The digest and the tensors of the images of all or some rows, by the model's keywords."""
    fields = {name.removeprefix(MEDIA): x for name, x in batch.ragged.items() if name.startswith(MEDIA)}
    keys = batch[KEYS].tolist() if KEYS in batch.batch else [0] * len(batch)
    chosen = range(len(batch)) if rows is None else rows
    return [(keys[row], {name: x[row] for name, x in fields.items()} if keys[row] else None) for row in chosen]


def with_images(paths: ModelPaths, model: Any) -> ModelPaths:
    """The execution paths of a model for rows with images: a packed line knows causal masks alone."""
    if paths.scoring == "right_padded":
        return paths.limited_to("equal_lengths")
    ahead = sees_ahead(unwrapped(model).config)
    return replace(paths.limited_to("padded"), shares_prompts=False) if ahead else paths


def sees_ahead(config: Any) -> bool:
    """Whether tokens of an image see later ones of it."""
    return config.model_type.startswith("gemma3") and getattr(config, "vision_config", None) is not None


def with_media(names: Sequence[str], batch: DataProto) -> list[str]:
    """Names of tensors, with that of the digests of images if the batch has it."""
    return [*names, *([KEYS] if KEYS in batch.batch else [])]


def has_images(batch: DataProto) -> bool:
    """Whether some rows of a batch have images."""
    return KEYS in batch.batch and bool(batch.batch[KEYS].any())
