"""Scaled dot-product attention with fewer heads of keys than of queries, by the kernels that a device has for it.

On a GPU torch has three ways, and takes the first that can do what is asked for:

    flash               float16 and bfloat16, no mask but a causal one; heads of keys may be fewer
    memory-efficient    any mask, any type; each head of queries needs one of keys
    math                everything, but all scores [B, H, Q, K] are there at once

So keys and values are repeated for heads of queries where flash cannot be taken: with fewer heads the scores of a
block would be written down.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FLASH_TYPES = (torch.float16, torch.bfloat16)
FLASH_WIDTH = 256  # the widest head that flash takes


def attend_heads(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Attention [B, H, Q, D] of queries [B, H, Q, D] over keys and values [B, K, L, D], where K divides H.

    Args:
        mask: bool, which keys a query sees, for [B, H, Q, L]; None: causal.
        scaling: of the scores; None for 1 / sqrt(D).
    """
    heads, kinds = query.shape[1], key.shape[1]
    if heads != kinds and not takes_fewer_heads(query, value, mask):
        key, value = (x.repeat_interleave(heads // kinds, dim=1) for x in (key, value))
        kinds = heads
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=heads != kinds
    )


def takes_fewer_heads(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether a kernel that writes down no scores takes keys with fewer heads than queries."""
    if query.device.type == "cpu":
        return True
    return mask is None and query.dtype in FLASH_TYPES and query.shape[-1] == value.shape[-1] <= FLASH_WIDTH
