"""Attention over packed rows, for any Hugging Face model with a configurable attention function.

    line [1 H N D] ── variable-length flash attention (`verl.ops.attention`), if the device supports it ──> line
    line [1 H N D] ── take ──> blocks of padded segments [count H queries D] ── attention ──> take ──> line

The model runs on one row that holds all tokens (see `verl.ops.packing`); only this function knows which tokens belong
together. Without a packing it is the `sdpa` attention of transformers.

A packing replaces the masks of the model, so these must be known: the mask function of the model is evaluated, and
layers receive a description of the mask. A layer with any other mask or an unknown keyword is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verl.model_paths.context_attention import ContextLine
from verl.models.pretrained import quiet_transformers
from verl.ops.attention import attend_behind_prompts, attend_heads, attend_varlen, layout_of, takes_varlen
from verl.ops.packing import AttentionBlock, BlockSlots, PackedRows, gather_rows

NAME = "verl_line"
LAYER_TYPES = {"full_attention", "sliding_attention"}
# Keywords that affect neither the mask nor the scores
HARMLESS = {"position_ids", "cache_position", "use_cache", "output_attentions", "logits_to_keep", "return_dict"}
MASK_ROWS = 16  # number of queries that are evaluated to describe a mask


@dataclass(frozen=True)
class MaskShape:
    """A causal mask, of the last `window` keys or of all."""

    window: int | None = None


_describing: ContextVar[bool] = ContextVar("describing masks", default=False)


def enable(model: Any) -> str | None:
    """Make a Hugging Face model use this attention function; unpacked rows are computed as before.

    `verl.model_paths.check` determines whether packed rows are correct for the model.

    Returns: None, or why it is not possible; the model is then unchanged.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    before = model.config._attn_implementation
    if before == NAME:
        return None
    if before != "sdpa":
        return f"its attention is {before}, and only sdpa has a packed form"
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or LAYER_TYPES)
    if others := sorted(kinds - LAYER_TYPES):
        return f"it has layers of the kind {', '.join(others)}"
    AttentionInterface.register(NAME, _registered)
    AttentionMaskInterface.register(NAME, make_mask)
    try:
        with quiet_transformers():
            model.set_attn_implementation(NAME)
    except Exception as error:  # noqa: BLE001 - whatever a model's own code has against it
        disable(model, before)
        return f"{type(error).__name__}: {error}"
    return None


def disable(model: Any, before: str = "sdpa") -> None:
    """Restore a model's original attention."""
    if model.config._attn_implementation != before:
        with quiet_transformers():
            model.set_attn_implementation(before)


def is_enabled(model: Any) -> bool:
    """Whether `enable` has succeeded on a model."""
    return model.config._attn_implementation == NAME


@contextlib.contextmanager
def describing(is_packed: bool) -> Iterator[None]:
    """Inside this context masks are those of a packed line, or usual ones."""
    token = _describing.set(is_packed)
    try:
        yield
    finally:
        _describing.reset(token)


def call_packed(call: Callable[..., Any], ids: Tensor, packing: PackedRows | ContextLine, **inputs: Any) -> Any:
    """Run a model on the packed line of some rows.

    Args:
        call: the model, or a function with its signature.
        ids: [b S] of the rows.
    """
    line = ids.flatten()[packing.tokens].unsqueeze(0)
    with describing(True):
        return call(
            input_ids=line,
            attention_mask=torch.ones_like(line),
            position_ids=packing.positions.unsqueeze(0),
            packing=packing,
            **inputs,
        )


def make_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask for transformers: that of `sdpa`, or a description of it for a packed line."""
    from transformers.masking_utils import sdpa_mask

    if not _describing.get():
        return sdpa_mask(*args, **kwargs)
    shape = describe_mask(kwargs["mask_function"], kwargs["q_length"]) if "mask_function" in kwargs else None
    if shape is None:
        raise NotImplementedError("packed attention knows causal and sliding masks only")
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=kwargs.get("device", "cpu"))
    mask.shape_of_mask = shape  # type: ignore[attr-defined]
    return mask


def describe_mask(mask_function: Callable[..., Any], length: int) -> MaskShape | None:
    """Classify a mask function of transformers on a row of this many tokens; None if it is neither causal nor
    sliding."""
    keys = torch.arange(length)
    spread = torch.linspace(0, length - 1, MASK_ROWS).round().long()
    queries = torch.unique(torch.cat([spread, (spread - 1).clamp_min(0)]))  # chunks differ between neighbours
    try:
        zero = torch.zeros((), dtype=torch.long)
        seen = torch.as_tensor(mask_function(zero, zero, queries[:, None], keys[None, :])).expand(len(queries), length)
    except Exception:  # noqa: BLE001 - a function with another signature
        return None
    window = int(seen[-1].sum())
    behind = queries[:, None] - keys
    if not torch.equal(seen, (behind >= 0) & (behind < window)):
        return None
    return MaskShape(None if window == length else window)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packing: PackedRows | ContextLine | None = None,
    prompts_of: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """One layer's attention: [1 H N D] queries, [1 K N D] keys and values to [1 N H D]. The interface is transformers'.

    Raises:
        NotImplementedError: the model needs an unsupported feature, such as capped scores.
    """
    if packing is not None:
        return _attend_packed(module, query, key, value, attention_mask, scaling, dropout, packing, others), None
    shared = getattr(None if prompts_of is None else _cache_layer(prompts_of, module), "shared", None)
    if shared is not None:
        refuse_unknown({**others, "sliding_window": None})
        return attend_behind_prompts(query, key, value, attention_mask, scaling, *shared), None
    is_per_head = attention_mask is not None and attention_mask.shape[1] != 1
    if query.shape[2] == 1 and not unknown_keywords(others) and not is_per_head:
        return attend_one(query, key, value, attention_mask, scaling), None
    from transformers import AttentionInterface

    plain = AttentionInterface._global_mapping["sdpa"]
    return plain(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **others)


_registered: Callable[..., Any] = attend


def leave_uncompiled() -> None:
    """Make compiled layers call this attention uncompiled, because compiled code would fit only one packing."""
    global _registered
    from transformers import AttentionInterface

    _registered = cast(Any, torch.compiler.disable(attend))
    AttentionInterface.register(NAME, _registered)


def unknown_keywords(given: dict[str, Any]) -> list[str]:
    """Keywords of a call that have a value and may change the output of attention."""
    known = {**given, "is_causal": None if given.get("is_causal") in (None, True) else False}
    return [name for name, x in known.items() if x is not None and x is not False and name not in HARMLESS] + (
        ["is_causal"] if known["is_causal"] is False else []
    )


def refuse_unknown(given: dict[str, Any]) -> None:
    """Raise NotImplementedError for unknown keywords."""
    if unknown := unknown_keywords(given):
        raise NotImplementedError(f"attention with {', '.join(unknown)} has no such form")


def _cache_layer(cache: Any, module: Any) -> Any:
    """The layer of a cache that a layer of the model uses; None if it has none."""
    layer, layers = getattr(module, "layer_idx", None), cache.layers
    return layers[layer] if layer is not None and layer < len(layers) else None


def _attend_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    packing: PackedRows | ContextLine,
    others: dict[str, Any],
) -> Tensor:
    shape = getattr(attention_mask, "shape_of_mask", MaskShape() if attention_mask is None else None)
    if shape is None:
        raise NotImplementedError("packed attention cannot tell what the mask of a layer was")
    refuse_unknown({**others, "sliding_window": None})  # the mask contains it
    if attention_mask is None and (others.get("sliding_window") or not getattr(module, "is_causal", True)):
        raise NotImplementedError("packed attention cannot tell what the mask of a layer was")
    if dropout or query.shape[2] != len(packing.tokens) or key.shape[2] != len(packing.tokens):
        raise NotImplementedError("packed attention knows neither dropout nor keys of another text")
    # [N H D]; the backward of `squeeze` is a view, that of `x[0]` a copy
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if isinstance(packing, ContextLine):
        return packing.attend(q, k, v, shape.window, scaling, attend_line).unsqueeze(0)
    return attend_line(q, k, v, packing, shape.window, scaling).unsqueeze(0)


def attend_line(
    query: Tensor, key: Tensor, value: Tensor, packing: PackedRows, window: int | None, scaling: float | None
) -> Tensor:
    """Attention [N H D] of the queries of a line over its keys and values [N K D]."""
    if takes_varlen(query, value):
        line = [(0, len(query))]
        layout = layout_of(packing.layouts, packing.segments, line, window, query.device)
        return attend_varlen(query, key, value, layout, scaling)
    slots = packing.slots(query.device)
    q, k, v = (gather_rows(x, how) for x, how in ((query, slots.queries), (key, slots.keys), (value, slots.keys)))
    queries = q.split([block.count * block.queries for block in slots.blocks])
    keys = [x.split([block.count * block.keys for block in slots.blocks]) for x in (k, v)]
    parts = []
    for number, (q, k, v) in enumerate(zip(queries, *keys, strict=True)):
        block = slots.blocks[number]
        mask = mask_of_block(slots, number, window, q.device)
        heads = attend_heads(
            q.unflatten(0, (block.count, block.queries)).transpose(1, 2),
            k.unflatten(0, (block.count, block.keys)).transpose(1, 2),
            v.unflatten(0, (block.count, block.keys)).transpose(1, 2),
            mask,
            scaling,
        )
        parts.append(heads.transpose(1, 2).flatten(0, 1))
    return gather_rows(torch.cat(parts), slots.out)


def attend_one(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """A step of decoding, [B H 1 D] to [B 1 H D], in which heads with the same keys are treated as several queries.

    This reads keys and values directly from the cache, without repeating them for each head.
    """
    grouped = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
    heads = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return heads.flatten(1, 2).unsqueeze(1)


def mask_of_block(slots: BlockSlots, number: int, window: int | None, device: torch.device) -> Tensor | None:
    """Mask of a block, created at first use."""
    if (number, window) not in slots.masks:
        slots.masks[number, window] = make_block_mask(slots.blocks[number], window, device)
    return slots.masks[number, window]


def make_block_mask(block: AttentionBlock, window: int | None, device: torch.device) -> Tensor | None:
    """Mask of the keys that each query sees, [count or 1, 1, queries, keys]; None for a causal block."""
    if not block.prefix and (window is None or block.queries <= window):
        return None
    width = block.keys - block.prefix  # created on the device: it is large, but made from a few numbers
    query = torch.arange(block.queries, device=device)[:, None]
    sees_own = query >= torch.arange(width, device=device)
    lengths = block.prefix_lengths.unique() if have_equal_lengths(block) else block.prefix_lengths
    lengths = lengths.to(device, non_blocking=True)[:, None, None]
    column = torch.arange(block.prefix, device=device)
    sees_prefix = (column < lengths).expand(-1, block.queries, -1)
    if window is not None:
        sees_own = sees_own & (query - torch.arange(width, device=device) < window)
        sees_prefix = sees_prefix & (lengths + query - column < window)
    mask = torch.cat([sees_prefix, sees_own.expand(len(lengths), -1, -1)], dim=2)
    return mask[:, None]


def have_equal_lengths(block: AttentionBlock) -> bool:
    """Whether all rows of a block have prefixes of equal length."""
    return bool((block.prefix_lengths == block.prefix_lengths[0]).all())
