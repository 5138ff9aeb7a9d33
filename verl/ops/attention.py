"""Scaled dot-product attention with fewer key heads than query heads (grouped queries), by the kernels of the device.

On a GPU torch has three kernels, and runs the first that supports the call:

    flash               float16 and bfloat16, only a causal mask; may have fewer key heads
    memory-efficient    any mask and dtype; as many key heads as query heads
    math                everything, but materialises all scores [B, H, Q, K]

So where flash is not available keys and values are repeated per query head: otherwise the scores of a block would be
materialised.
"""

from __future__ import annotations

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
