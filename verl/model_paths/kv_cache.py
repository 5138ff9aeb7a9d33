"""A key-value cache of slots: rows of individual lengths, and prompts that several of them share.

prompts [p + 1, H, P, D] ── read once for all the slots behind each ──┐
slots [s + 1, H, L, D] ── written where they lie, token by token ─────┴──> attention

The last row of each is scratch: padding is written there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from verl.ops.attention import PromptGroups

FIRST_LENGTH = 64  # tokens of a slot; it grows by half
SCRATCH = -1


@dataclass
class CacheCall:
    """What the layers of a `SlotCache` write and read in a forward pass of b rows with q new tokens each.

    Attributes:
        is_prompt: the rows are prompts to be shared, not slots.
        rows: [b q] of each new token: number of its slot or prompt, or SCRATCH.
        columns: [b q] of each new token in its row; or the one of all, where the b first slots get one token each.
        count: number of slots, or of prompts, that room is needed for.
        width: tokens of a row that attention reads; where nothing was read before, those that are written.
        slots: that attention reads: a number for so many first ones, which are not copied, or [b]; None: the new tokens
            see nothing before them.
        prompts: [b] prompts whose first `prompt_width` tokens are copied before those of the slots; None for none.
        groups: prompts that attention itself reads before the slots, once for all of them; None for none.
    """

    is_prompt: bool
    rows: Tensor
    columns: Tensor | int
    count: int
    width: int
    slots: Tensor | int | None = None
    prompts: Tensor | None = None
    prompt_width: int = 0
    groups: PromptGroups | None = None


class StoredRows:
    """Keys and values of one layer, [rows + 1, H, L, D] each.

    Args:
        max_rows, max_length: more room than that is not made in advance.
    """

    def __init__(self, max_rows: int, max_length: int):
        self.max_rows, self.max_length = max_rows, max_length
        self.tensors: list[Tensor] = []

    def write(self, call: CacheCall, states: tuple[Tensor, Tensor]) -> None:
        """Store new keys and values [b H q D]."""
        self._reserve(call.count, call.width, states)
        for stored, new in zip(self.tensors, states, strict=True):
            if isinstance(call.columns, int):
                stored[: len(new), :, call.columns] = new[:, :, 0]
            else:
                stored[call.rows, :, call.columns] = new.transpose(1, 2)

    def read(self, rows: Tensor | int, width: int) -> tuple[Tensor, Tensor]:
        """Keys and values of some rows, or of so many first ones."""
        keys, values = self.tensors
        chosen = slice(rows) if isinstance(rows, int) else rows
        return keys[chosen, :, :width], values[chosen, :, :width]

    def copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy the first tokens of rows [m] to other rows [m], which may be among them; one source may serve all."""
        for stored in self.tensors:
            stored[targets, :, :length] = stored[sources, :, :length]

    def _reserve(self, rows: int, length: int, states: tuple[Tensor, Tensor]) -> None:
        before = self.tensors[0].shape if self.tensors else (0, 0, 0)
        if before[0] > rows and before[2] >= length:
            return
        rows = max(rows, min(before[0] * 3 // 2, self.max_rows), before[0] - 1)
        length = max(length, min(max(FIRST_LENGTH, before[2] * 3 // 2), self.max_length), before[2])
        made = [new.new_zeros(rows + 1, new.shape[1], length, new.shape[3]) for new in states]
        for stored, larger in zip(self.tensors, made):
            larger[: before[0], :, : before[2]] = stored
        self.tensors = made


class SlotLayer(DynamicLayer):
    """One layer of a `SlotCache`.

    Attributes:
        call: the forward pass that is under way.
    """

    call: CacheCall

    def __init__(self, max_slots: int, max_length: int):
        super().__init__()
        self.slots, self.prompts = StoredRows(max_slots, max_length), StoredRows(max_slots, 0)

    @property
    def shared(self) -> tuple[PromptGroups, Tensor, Tensor] | None:
        """Prompts that attention reads before the keys and values that `update` gives."""
        groups = self.call.groups
        return None if groups is None else (groups, *self.prompts.read(groups.count, self.call.prompt_width))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        call, states = self.call, (key_states, value_states)
        (self.prompts if call.is_prompt else self.slots).write(call, states)
        if call.slots is None:
            return states
        own = self.slots.read(call.slots, call.width)
        if call.prompts is None:
            return own
        prompts = self.prompts.read(call.prompts, call.prompt_width)
        return torch.cat([prompts[0], own[0]], dim=2), torch.cat([prompts[1], own[1]], dim=2)

    def get_seq_length(self) -> int:
        return 0


class SlotCache(DynamicCache):
    """The layers of a model, each a `SlotLayer`.

    Args:
        max_slots, max_length: more room than that is not made in advance.
    """

    def __init__(self, config: Any, max_slots: int, max_length: int):
        super().__init__(config=config)
        self.layers = [SlotLayer(max_slots, max_length) for _ in self.layers]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def prepare(self, call: CacheCall) -> None:
        """Say what the next forward pass writes and reads."""
        for layer in self.layers:
            layer.call = call  # type: ignore[union-attr]

    def copy(self, sources: Tensor, targets: Tensor, length: int, *, prompts: bool = False) -> None:
        """Copy the first tokens of slots [m] to slots [m], or of prompts to prompts; see `StoredRows.copy`."""
        for layer in self.layers:
            (layer.prompts if prompts else layer.slots).copy(sources, targets, length)  # type: ignore[union-attr]


def keeps_all_tokens(config: Any) -> bool:
    """Whether the cache of a model keeps all keys and values in each of its layers, and nothing else."""
    layers = DynamicCache(config=config).layers
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


def select_rows(cache: Any, rows: Tensor) -> None:
    """Leave the given rows of a batch in a model's own cache, in their order; one that is named twice is there twice.

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
