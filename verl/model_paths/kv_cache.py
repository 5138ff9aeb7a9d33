"""A preallocated key-value cache: a new token copies itself alone, not all that came before it.

prompts [b H P D] ── one for all n samples, as long as every sample is there ──┐
samples [b n H t D] ── written token by token, in buffers that grow ───────────┴──> attention
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

FIRST_ROOM = 32  # tokens; doubled whenever it is used up


class PreallocatedLayer(DynamicLayer):
    """One layer's keys and values [B H L D], preallocated for further tokens.

    Args:
        max_length: tokens that will be asked for at most; no more room than that is made.
        multiple: of which the keys are that `update` returns for a further token: zeros follow the real ones, and the
            mask leaves them out. Attention then meets one length per so many tokens.
    Attributes:
        shared: keys and values [B / n, H, P, D] before those that `update` returns, or None; see `share`.
    """

    keys: Tensor  # type: ignore[assignment]
    values: Tensor  # type: ignore[assignment]

    def __init__(self, max_length: int, multiple: int = 1):
        super().__init__()
        self.max_length, self.multiple = max_length, multiple
        self._buffers: tuple[Tensor, Tensor] | None = None
        self.shared: tuple[Tensor, Tensor] | None = None

    def share(self, repeats: int) -> None:
        """Keep what there is as a prefix that each `repeats` rows share; what comes is the rows' own."""
        if not self.is_initialized:
            raise NotImplementedError("a layer without keys and values has nothing to share")
        self.shared = (self.keys, self.values)
        self.keys, self.values = (x.new_empty(len(x) * repeats, x.shape[1], 0, x.shape[3]) for x in self.shared)

    def get_seq_length(self) -> int:
        return super().get_seq_length() + (self.shared[0].shape[2] if self.shared is not None else 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask is made for."""
        length, offset = super().get_mask_sizes(query_length)
        if not self.is_initialized:
            return length, offset
        prefix = self.shared[0].shape[2] if self.shared is not None else 0
        return prefix + self._up(length - prefix), offset

    def _up(self, length: int) -> int:
        return -(-length // self.multiple) * self.multiple

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if (
            not self.is_initialized
        ):  # the prompts: kept as they are, and moved to a larger buffer with the first new token
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            return key_states, value_states
        length, added = self.keys.shape[2], key_states.shape[2]
        if self._buffers is None or self._buffers[0].shape[2] < length + added:
            self._move(length + added)
        assert self._buffers is not None
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, length : length + added] = states
        self.keys, self.values = (buffer[:, :, : length + added] for buffer in self._buffers)
        if self.multiple == 1:
            return self.keys, self.values
        return self._buffers[0][:, :, : self._up(length + added)], self._buffers[1][:, :, : self._up(length + added)]

    def batch_select_indices(self, indices: Tensor) -> None:
        if not self.is_initialized:  # a layer that nothing was written to
            return
        if self.shared is not None:  # samples of some prompts leave: from here on each row has its own copy
            own = (self.keys, self.values)
            repeats = self.keys.shape[0] // self.shared[0].shape[0]
            self.keys, self.values = (
                torch.cat([prefix.repeat_interleave(repeats, dim=0), tail], dim=2)
                for prefix, tail in zip(self.shared, own, strict=True)
            )
            self.shared = None
        had_buffers = self._buffers is not None
        self._buffers = None
        self.keys, self.values = (x.index_select(0, indices) for x in (self.keys, self.values))
        if had_buffers:
            self._move(self.keys.shape[2] + 1)

    def _move(self, needed: int) -> None:
        """Move both into buffers for `needed` tokens and some more."""
        length = self.keys.shape[2]
        size = self._up(max(needed, min(self.max_length, length + max(FIRST_ROOM, length // 2))))
        made = []
        for states in (self.keys, self.values):
            make = states.new_empty if self.multiple == 1 else states.new_zeros
            buffer = make((*states.shape[:2], size, states.shape[3]))
            buffer[:, :, :length] = states
            made.append(buffer)
        self._buffers = (made[0], made[1])
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)


def select_rows(cache: Any, rows: Tensor) -> None:
    """Leave the given rows of a batch in a cache, in their order; one that is named twice is there twice.

    Raises:
        NotImplementedError: the cache is of a kind that is not known here.
    """
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise NotImplementedError(f"rows cannot be chosen from a {type(cache).__name__}")
    for layer in layers:
        is_state = isinstance(layer, LinearAttentionCacheLayerMixin)
        choose = getattr(layer, "reorder_cache" if is_state else "batch_select_indices", None)
        if choose is None:
            raise NotImplementedError(f"rows cannot be chosen from a {type(layer).__name__}")
        choose(rows)


def preallocated_cache(config: Any, max_length: int, multiple: int = 1) -> DynamicCache:
    """An empty cache for a model; layers that keep less than everything (sliding windows, states) are as they were."""
    cache = DynamicCache(config=config)
    cache.layers = [
        PreallocatedLayer(max_length, multiple) if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


def shared_prefix(cache: DynamicCache, repeats: int) -> bool:
    """Expand each row to `repeats` samples that share its keys and values; returns False if a layer does not support
    it."""
    if not all(isinstance(layer, PreallocatedLayer) for layer in cache.layers):
        return False
    for layer in cache.layers:
        layer.share(repeats)  # type: ignore[union-attr]
    return True
