"""A key-value cache of slots: rows of individual lengths, and prompts that several rows share.

prompts [p H P D] ── read once for all the slots behind each ──┐
slots [s H L D] ── written where they lie, token by token ─────┴──> attention
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from verl.ops.attention import PromptGroups
from verl.ops.sampling import plain_kernels

FIRST_LENGTH = 64  # tokens of a slot; it grows by half


@dataclass
class CacheCall:
    """Keys and values that a `SlotCache` writes and reads in a forward pass of b rows with q new tokens each.

    Attributes:
        first: slot or prompt of the first row; the other rows follow.
        columns: [b q], column of each new token in its row, or a slice for all rows.
        num_rows, length: slots or prompts, and tokens of each, that need memory; later ones are empty.
        width: tokens of a slot that attention reads; with 0 the new tokens see no earlier ones.
        is_prompt: the rows are prompts to be shared, not slots.
        groups: prompts whose first `prompt_width` tokens attention reads in addition to the slots; None for none.
    """

    first: int
    columns: Tensor | slice
    num_rows: int
    length: int
    width: int = 0
    is_prompt: bool = False
    groups: PromptGroups | None = None
    prompt_width: int = 0

    @functools.cached_property
    def numbers(self) -> Tensor:
        """[b 1], of the rows from 0, where `columns` is a tensor."""
        assert isinstance(self.columns, Tensor)
        return torch.arange(len(self.columns), device=self.columns.device)[:, None]


class StoredRows:
    """Keys and values of one layer, [rows H L D] each.

    Args:
        max_rows, max_length: more memory than that is not taken in advance.
        shrinks: if few rows become longer, the memory of the others is freed.
    Attributes:
        num_grown: number of times that `tensors` were replaced by larger ones.
    """

    def __init__(self, max_rows: int, max_length: int, shrinks: bool = True):
        self.max_rows, self.max_length, self.shrinks, self.num_grown = max_rows, max_length, shrinks, 0
        self.tensors: list[Tensor] = []

    def write(self, call: CacheCall, states: tuple[Tensor, Tensor]) -> None:
        """Store new keys and values [b H q D]."""
        shape = self.tensors[0].shape if self.tensors else (0, 0, 0)
        if shape[0] < call.num_rows or shape[2] < call.length:
            self._grow(call.num_rows, call.length, states)
        for stored, new in zip(self.tensors, states, strict=True):
            rows = stored[call.first : call.first + len(new)]
            if isinstance(call.columns, slice):
                rows[:, :, call.columns] = new
            else:  # scatter_ would copy all of the rows first, on a CPU
                with plain_kernels(rows.device):  # no two tokens of a row have the same column
                    rows[call.numbers, :, call.columns] = new.transpose(1, 2)

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int, places: Tensor | None) -> None:
        """Copy the first `length` tokens of rows [m] to rows [m], which may overlap; `places` [2 m]: both, if m > 1."""
        if self.tensors and len(self.tensors[0]) <= max(targets):
            self._grow(max(targets) + 1, length, self.tensors)
        for stored in self.tensors:
            if places is None:  # by far the most frequent case: a view is copied
                stored[targets[0], :, :length] = stored[sources[0], :, :length]
            else:
                rows = stored[:, :, :length]
                with plain_kernels(rows.device):  # no two rows have the same target
                    rows.index_copy_(0, places[1], rows.index_select(0, places[0]))

    def _grow(self, rows: int, length: int, states: Sequence[Tensor]) -> None:
        before = self.tensors[0].shape if self.tensors else (0, 0, 0)
        num_kept, are_few = min(rows, before[0]), self.shrinks and 2 * rows <= before[0]
        self.num_grown += 1
        if not are_few:
            rows = max(rows, min(before[0] * 3 // 2, self.max_rows), before[0])
        length = max(length, min(max(FIRST_LENGTH, before[2] * 3 // 2), self.max_length), before[2])
        grown = [new.new_empty(rows, new.shape[1], length, new.shape[3]) for new in states]
        for index, larger in enumerate(grown):  # unwritten memory is masked, but must be finite
            larger[:num_kept, :, before[2] :] = 0.0
            larger[num_kept:] = 0.0
            if num_kept:
                larger[:num_kept, :, : before[2]] = self.tensors[index][:num_kept]
        self.tensors = grown


class SlotLayer(DynamicLayer):
    """One layer of a `SlotCache`.

    Attributes:
        call: the current forward pass.
    """

    call: CacheCall

    def __init__(self, max_slots: int, max_length: int, shrinks: bool):
        super().__init__()
        self.slots, self.prompts = StoredRows(max_slots, max_length, shrinks), StoredRows(max_slots, 0)

    @property
    def shared(self) -> tuple[PromptGroups, Tensor, Tensor] | None:
        """Prompts that attention reads in addition to the keys and values from `update`; None for none."""
        call = self.call
        if call.groups is None:
            return None
        keys, values = (stored[: call.groups.count, :, : call.prompt_width] for stored in self.prompts.tensors)
        return call.groups, keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        call, states = self.call, (key_states, value_states)
        (self.prompts if call.is_prompt else self.slots).write(call, states)
        if not call.width:
            return states
        end = call.first + len(key_states)
        keys, values = self.slots.tensors
        return keys[call.first : end, :, : call.width], values[call.first : end, :, : call.width]

    def get_seq_length(self) -> int:
        return 0


class SlotCache(DynamicCache):
    """The layers of a model, each a `SlotLayer`.

    Args:
        max_slots, max_length, shrinks: see `StoredRows`.
    """

    def __init__(self, config: Any, max_slots: int, max_length: int, shrinks: bool = True):
        super().__init__(config=config)
        self.layers = [SlotLayer(max_slots, max_length, shrinks) for _ in self.layers]

    @property
    def num_grown(self) -> int:
        """Number of times that keys and values have moved to other memory."""
        return self.layers[0].slots.num_grown  # type: ignore[union-attr]

    def begin(self, max_slots: int, max_length: int) -> None:
        """Forget all rows, and serve others in the same memory."""
        for layer in self.layers:
            slots: StoredRows = layer.slots  # type: ignore[union-attr]
            slots.max_rows, slots.max_length = max_slots, max_length
            for stored in slots.tensors:
                stored.zero_()  # values that are not numbers would stay, though masked

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def prepare(self, call: CacheCall) -> None:
        """Set what the next forward pass writes and reads."""
        for layer in self.layers:
            layer.call = call  # type: ignore[union-attr]

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int, *, prompts: bool = False) -> None:
        """Copy the first tokens of some slots to other slots, or of prompts to prompts; see `StoredRows.copy`."""
        places = None
        for layer in self.layers:
            rows: StoredRows = layer.prompts if prompts else layer.slots  # type: ignore[union-attr]
            if places is None and len(sources) > 1 and rows.tensors:  # sent to the device once
                places = torch.tensor([sources, targets], device=rows.tensors[0].device)
            rows.copy(sources, targets, length, places)


def keeps_all_tokens(config: Any) -> bool:
    """Whether the cache of a model keeps all keys and values in each of its layers, and nothing else."""
    layers = DynamicCache(config=config).layers
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


def select_rows(cache: Any, rows: Tensor) -> None:
    """Select rows of a batch, in the given order and with repetitions, in a model's own cache.

    Raises:
        NotImplementedError: the kind of cache is unknown.
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
