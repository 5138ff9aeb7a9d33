"""Scaled dot-product attention with fewer key heads than query heads (grouped queries), by the kernels of the device.

On a GPU torch has three kernels, and runs the first that supports the call:

    flash               float16 and bfloat16, only a causal mask; may have fewer key heads
    memory-efficient    any mask and dtype; as many key heads as query heads
    math                everything, but materialises all scores [B, H, Q, K]

So where flash is not available keys and values are repeated per query head: otherwise the scores of a block would be
materialised.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

FLASH_TYPES = (torch.float16, torch.bfloat16)
FLASH_WIDTH = 256  # the largest head dimension that flash supports


def attend_heads(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Attention [B, H, Q, D] of queries [B, H, Q, D] over keys and values [B, K, L, D], where K divides H.

    Args:
        mask: bool, broadcastable to [B, H, Q, L]; true for the keys that a query attends to. None: causal.
        scaling: factor of the scores; None for 1 / sqrt(D).
    """
    heads, kinds = query.shape[1], key.shape[1]
    if heads != kinds and not takes_fewer_heads(query, value, mask):
        key, value = (x.repeat_interleave(heads // kinds, dim=1) for x in (key, value))
        kinds = heads
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=heads != kinds
    )


def takes_fewer_heads(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether a kernel other than math supports fewer key heads than query heads."""
    if query.device.type == "cpu":
        return True
    return mask is None and query.dtype in FLASH_TYPES and query.shape[-1] == value.shape[-1] <= FLASH_WIDTH


@dataclass(frozen=True)
class PromptGroups:
    """Groups of b rows by the p prompts that they stand behind.

    Attributes:
        rows: [p n] the rows behind each prompt; any row where there are fewer than n.
        cells: [b] where each row stands in `rows`, flattened.
        mask: [p 1 1 P] bool, true for tokens of the prompt; None: all are.
    """

    rows: Tensor
    cells: Tensor
    mask: Tensor | None = None

    @property
    def count(self) -> int:
        return len(self.rows)


def attend_behind_prompts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    groups: PromptGroups,
    prompt_key: Tensor,
    prompt_value: Tensor,
) -> Tensor:
    """Attention [b 1 H D] of one query per row over the keys of its prompt, which are read once for all rows behind it,
    and its own.

    Both parts are summed with the largest score of each taken out, and joined as one softmax:

        m   = max(m_1, m_2)
        out = sum_i exp(m_i - m) sum_j exp(s_ij - m_i) v_ij / sum_i exp(m_i - m) sum_j exp(s_ij - m_i)

    Args:
        query: [b H 1 D].
        key, value: [b K W D], where K divides H.
        mask: [b 1 1 W] bool, true for the row's own keys; None: all are.
        prompt_key, prompt_value: [p K P D].
    Raises:
        NotImplementedError: keys and values are not those that the cache has.
    """
    if value.shape[1::2] != prompt_value.shape[1::2] or key.shape[1::2] != prompt_key.shape[1::2]:
        raise NotImplementedError("the keys and values of this layer are not those of its cache")
    queries = query.reshape(len(query), key.shape[1], -1, query.shape[3])
    queries = queries * (query.shape[3] ** -0.5 if scaling is None else scaling)
    together = queries[groups.rows].transpose(1, 2)  # [p K n h D]
    joined = _summed(together.flatten(2, 3), prompt_key, prompt_value, groups.mask)
    cells = joined.unflatten(2, together.shape[2:4]).transpose(1, 2).flatten(0, 1)
    parts = [cells[groups.cells], _summed(queries, key, value, mask)]  # [b K h D + 2]
    largest = torch.maximum(parts[0][..., :1], parts[1][..., :1])
    prompt, rest = ((part[..., :1] - largest).exp() * part[..., 1:] for part in parts)
    summed = prompt + rest
    return (summed[..., 1:] / summed[..., :1]).flatten(1, 2).unsqueeze(1)


def _summed(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """[.. Q D + 2]: the largest score m, sum_j exp(s_j - m) and sum_j exp(s_j - m) v_j."""
    scores = query @ key.transpose(2, 3)
    if mask is not None:
        scores = scores.masked_fill_(~mask, float("-inf"))
    largest = scores.amax(dim=3, keepdim=True)
    weights = scores.sub_(largest).exp_()
    return torch.cat([largest, weights.sum(dim=3, keepdim=True), weights @ value], dim=3)
