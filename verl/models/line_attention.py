"""Attention over a packed line of tokens, for any Hugging Face model that takes its attention function by name.

    line [1 H N D] ── take ──> blocks of padded segments [count H queries D] ── attention ──> take ──> line

The model runs on one row that holds all tokens (see `verl.ops.packing`); this function alone knows which of them
belong together. Without a packing it is the `sdpa` attention of transformers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verl.models.pretrained import quiet_transformers
from verl.ops.packing import Block, Packing, Take, pack

NAME = "verl_line"
NOT_DONE_HERE = ("softcap", "s_aux", "position_bias")


def enable(model: Any) -> str | None:
    """Let a Hugging Face model run on packed lines; on rows it does what it did.

    Whether it can is found by trying: packed and padded runs of two tiny rows must agree.

    Returns:
        None, or why it cannot; then the model is as it was.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    before = model.config._attn_implementation
    if before == NAME:
        return None
    if before != "sdpa":
        return f"its attention is {before}, and only sdpa has a packed form"
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    try:
        with quiet_transformers():
            model.set_attn_implementation(NAME)
        why = None if _agrees(model) else "packed and padded rows do not agree"
    except Exception as error:  # noqa: BLE001 - whatever a model's own code has against it
        why = f"{type(error).__name__}: {error}"
    if why is not None:
        with quiet_transformers():
            model.set_attn_implementation(before)
    return why


def is_enabled(model: Any) -> bool:
    """Whether `enable` has succeeded on a model."""
    return model.config._attn_implementation == NAME


@torch.no_grad()
def _agrees(model: Any) -> bool:
    """Whether a packed run gives what a padded run gives, for two responses to one prompt and one to another."""
    prompts, responses = torch.tensor([3, 3, 2]), torch.tensor([3, 2, 3])
    width, mask = 3, torch.arange(3) < responses[:, None]
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 5, 4, 0], [0, 3, 1, 6, 2, 4]], device=model.device)
    attention = torch.cat([torch.arange(width) >= width - prompts[:, None], mask], dim=1).long().to(model.device)
    positions = (attention.cumsum(dim=1) - 1).clamp_min(0)
    was_training = model.training
    model.eval()
    try:
        rows = model(input_ids=ids, attention_mask=attention, position_ids=positions, use_cache=False)[0]
        wanted = rows[:, width - 1 : -1][mask]
        packing = pack(prompts, responses, torch.tensor([0, 0, 1]), mask, width).to(model.device)
        line = model(
            input_ids=ids.flatten()[packing.tokens].unsqueeze(0),
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device),
            position_ids=packing.positions.unsqueeze(0),
            use_cache=False,
            packing=packing,
        )[0]
    finally:
        model.train(was_training)
    found = take(line[0], packing.predictors)
    rounding = 2**10 * torch.finfo(wanted.dtype).eps
    return bool((found - wanted).abs().max() <= rounding * wanted.abs().max())


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packing: Packing | None = None,
    prefix_of: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """One layer's attention: [1 H N D] queries, [1 K N D] keys and values to [1 N H D]. The interface is transformers'.

    Raises:
        NotImplementedError: the model asks for something that is not done here, such as capped scores.
    """
    shared = None if prefix_of is None else getattr(prefix_of.layers[module.layer_idx], "shared", None)
    if shared is not None:
        return _attend_shared(query, *shared, key, value, attention_mask, scaling), None
    if packing is None and query.shape[2] == 1 and sliding_window is None and not set(others) & set(NOT_DONE_HERE):
        return _attend_one(query, key, value, attention_mask, scaling), None
    if packing is None:
        from transformers import AttentionInterface

        plain = AttentionInterface._global_mapping["sdpa"]
        window: dict[str, Any] = {} if sliding_window is None else {"sliding_window": sliding_window}
        return plain(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **window, **others)
    if unknown := [name for name in NOT_DONE_HERE if others.get(name) is not None]:
        raise NotImplementedError(f"packed attention does not know {', '.join(unknown)}")
    assert dropout == 0.0
    q, k, v = (
        take(_as_line(x), how) for x, how in ((query, packing.queries), (key, packing.keys), (value, packing.keys))
    )
    queries = q.split([block.count * block.queries for block in packing.blocks])
    keys = [x.split([block.count * block.keys for block in packing.blocks]) for x in (k, v)]
    parts = []
    for block, q, k, v in zip(packing.blocks, queries, *keys, strict=True):
        mask = _mask(block, sliding_window, q.device)
        heads = F.scaled_dot_product_attention(
            q.unflatten(0, (block.count, block.queries)).transpose(1, 2),
            k.unflatten(0, (block.count, block.keys)).transpose(1, 2),
            v.unflatten(0, (block.count, block.keys)).transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        parts.append(heads.transpose(1, 2).flatten(0, 1))
    return take(torch.cat(parts), packing.out).unsqueeze(0), None


def _attend_one(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """A step of decoding, [B H 1 D] to [B 1 H D]: heads with the same keys are queries beside each other.

    So keys and values are read as they lie in the cache, and not repeated for each head.
    """
    grouped = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
    heads = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return heads.flatten(1, 2).unsqueeze(1)


def _attend_shared(
    query: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
) -> Tensor:
    """A step of decoding, [b n H 1 D] to [b n 1 H D], where n rows share a prefix [b K P D] that is read once.

    One softmax over the scores of both parts, so it is the same attention.
    """
    rows, kinds, groups = query.shape[0], key.shape[1], prefix_key.shape[0]
    n, size, width = rows // groups, query.shape[3], prefix_key.shape[2]
    own = query.reshape(rows, kinds, -1, size) * (size**-0.5 if scaling is None else scaling)
    heads = own.shape[2]
    together = own.unflatten(0, (groups, n)).transpose(1, 2).reshape(groups, kinds, n * heads, size)
    before = together @ prefix_key.transpose(2, 3)
    if mask is not None:
        allowed = mask if mask.dtype == torch.bool else mask > -1
        before = before.masked_fill(~allowed[::n, :, :, :width], float("-inf"))
    before = before.reshape(groups, kinds, n, heads, width).transpose(1, 2).reshape(rows, kinds, heads, width)
    weights = torch.cat([before, own @ key.transpose(2, 3)], dim=3).softmax(dim=3)
    head, tail = weights.split([width, key.shape[2]], dim=3)
    head = head.unflatten(0, (groups, n)).transpose(1, 2).reshape(groups, kinds, n * heads, width)
    found = (head @ prefix_value).reshape(groups, kinds, n, heads, size).transpose(1, 2)
    return (found.reshape(rows, kinds, heads, size) + tail @ value).flatten(1, 2).unsqueeze(1)


def take(line: Tensor, how: Take) -> Tensor:
    """Slots [M ...] from a line [N ...]."""
    return line if how.is_identity else _Take.apply(line, how)


class _Take(torch.autograd.Function):
    """A gather whose backward pass gathers as well, so that it is quick and its sums have one order."""

    @staticmethod
    def forward(ctx: Any, line: Tensor, how: Take) -> Tensor:
        ctx.how = how
        return line.index_select(0, how.index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        grad = torch.cat([grad, grad.new_zeros(1, *grad.shape[1:])])
        parts = [
            grad.index_select(0, uses.flatten()).unflatten(0, uses.shape).sum(dim=1)
            if uses.shape[1] != 1
            else grad.index_select(0, uses[:, 0])
            for uses in ctx.how.uses
            if len(uses)
        ]
        return torch.cat(parts) if len(parts) > 1 else parts[0], None


def _as_line(states: Tensor) -> Tensor:
    """[1 H N D] to [N H D]."""
    return states[0].transpose(0, 1)


def _mask(block: Block, window: int | None, device: torch.device) -> Tensor | None:
    """Which keys each query sees, [count or 1, 1, queries, keys]; None for a causal block."""
    if not block.prefix and (window is None or block.queries <= window):
        return None
    own = block.keys - block.prefix
    query = torch.arange(block.queries)[:, None]
    sees_own = query >= torch.arange(own)
    lengths = block.prefix_lengths.unique()[:, None, None] if _are_equal(block) else block.prefix_lengths[:, None, None]
    column = torch.arange(block.prefix)
    sees_prefix = (column < lengths).expand(-1, block.queries, -1)
    if window is not None:
        sees_own = sees_own & (query - torch.arange(own) < window)
        sees_prefix = sees_prefix & (lengths + query - column < window)
    mask = torch.cat([sees_prefix, sees_own.expand(len(lengths), -1, -1)], dim=2)
    return mask[:, None].to(device)


def _are_equal(block: Block) -> bool:
    return bool((block.prefix_lengths == block.prefix_lengths[0]).all())
