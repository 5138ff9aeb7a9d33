"""Micro-batches: the tensors of one forward pass, as padded rows or as packed rows with shared prompts once.

    plan ──> rows of each micro-batch ──> MicroBatch ──> predict(call) ──> what predicts each response token [n ...]

The form depends on the paths of the model (`verl.model_paths.families`) and affects results only through rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from verl.model_paths.context_attention import ContextGroup, ContextLine
from verl.model_paths.families import ModelPaths
from verl.model_paths.images import KEYS, ImageRows, RowImages, has_images, row_media
from verl.model_paths.packed_attention import call_packed
from verl.ops.batching import micro_batches, micro_batches_of_groups
from verl.ops.logprobs import response_positions
from verl.ops.packing import PackedRows, gather_rows, own_tokens, pack
from verl.protocol import DataProto
from verl.protocol.fields import FIELDS

PADDED = ModelPaths(scoring="padded")
ALWAYS = 2**62  # tokens; packing always leaves fewer
WORTH_IT = 0.85  # packing, and sharing prompts, must leave at most this share of the tokens


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a batch, cut to their longest prompt and response.

    Attributes:
        rows: [b] indices of the rows in the batch.
        tensors: the fields, with P and T cut to the longest prompt and response among the rows.
        response_width: T of these tensors.
        packing: packed line of the rows, or this process's share of it; None if they run as a padded batch.
        is_left_aligned: whether rows run with all padding on the right.
        is_unpadded: whether rows have equal length, and the model counts positions itself.
        tail: number of tokens appended to each row, which causal models do not see; only for padded batches.
        images: of the rows, or of the packed line; None without images.
        positions: ([n], [n]) row and column of each masked response token, as from `response_mask.nonzero()`; computed
            once in main memory, because on a device it would synchronise.
    """

    rows: Tensor
    tensors: dict[str, Tensor]
    packing: PackedRows | ContextLine | None = None
    is_left_aligned: bool = False
    is_unpadded: bool = False
    tail: int = 0
    images: RowImages | None = None
    positions: tuple[Tensor, Tensor] | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """A copy on the model's device.

        Does not wait for the device, which is busy with the previous micro-batch: copies from unpinned memory are
        staged immediately, so that their sources may be freed.
        """
        if device.type == "cpu":
            return self
        tensors = {name: x.to(device, non_blocking=True) for name, x in self.tensors.items()}
        packing = None if self.packing is None else self.packing.to(device)
        images = None if self.images is None else self.images.to(device)
        row, t = (x.to(device, non_blocking=True) for x in self.on_mask)
        return replace(self, tensors=tensors, packing=packing, images=images, positions=(row, t))

    @property
    def on_mask(self) -> tuple[Tensor, Tensor]:
        """Row and column of each masked response token."""
        if self.positions is not None:
            return self.positions
        row, t = self.tensors["response_mask"].nonzero(as_tuple=True)
        return row, t

    def chosen(self, name: str) -> Tensor:
        """Values of a field [b t] at the masked response tokens, [n]."""
        return self.tensors[name][self.on_mask]

    def scatter(self, values: Tensor) -> Tensor:
        """Inverse of `chosen`: values [n] at the masked response tokens of [b t], zeros elsewhere."""
        mask = self.tensors["response_mask"]
        whole = torch.zeros(mask.shape, dtype=values.dtype, device=values.device)
        return whole.index_put(self.on_mask, values)

    @property
    def response_width(self) -> int:
        return self.tensors["responses"].shape[1]

    def predict(self, call: Callable[..., Tensor]) -> Tensor:
        """Outputs at the positions that predict each masked response token, [n ...], in the order of
        `response_mask.nonzero()`.

        If processes share the tokens, only outputs of this process; `targets` gives the tokens they predict, and
        `scatter_shared` joins results of all processes.

        Args:
            call: runs the model on `input_ids`, `attention_mask`, `position_ids` and further keywords, and returns an
                output per token, [b s ...]; with `logits_to_keep=k`, for the last k tokens or for all.
        """
        x = self.tensors
        further: dict[str, Any] = {} if self.images is None else {"images": self.images}
        if self.packing is not None:
            return gather_rows(call_packed(call, x["input_ids"], self.packing, **further)[0], self.packing.predictors)
        if self.is_left_aligned:
            return self._predict_left_aligned(call)
        names = ("input_ids",) if self.is_unpadded else ("input_ids", "attention_mask", "position_ids")
        inputs = {name: torch.cat([x[name], x[name][:, -1:].expand(-1, self.tail)], dim=1) for name in names}
        if self.images is not None and self.is_unpadded:
            further = {"images": self.images.alone(self.tail)}
        states = call(**inputs, **further, logits_to_keep=self.response_width + 1 + self.tail)
        states = states[:, : states.shape[1] - self.tail]
        return response_positions(states, self.response_width)[self.on_mask]

    def targets(self, name: str = "responses") -> Tensor:
        """Values of a field [b t] for the tokens predicted by `predict`, [n]."""
        tokens = self.chosen(name)
        return tokens[self.packing.shard.predicted] if isinstance(self.packing, ContextLine) else tokens

    def scatter_shared(self, *columns: Tensor) -> tuple[Tensor, ...]:
        """Each column [n] of predicted tokens as [b t], 0 outside the mask, joined over processes that share tokens."""
        if isinstance(self.packing, ContextLine):
            line, kinds = self.packing, [x.dtype for x in columns]
            wide = max((kind for kind in kinds if kind.is_floating_point), key=lambda kind: torch.finfo(kind).bits)
            joined = line.join(torch.stack([x.to(wide) for x in columns], dim=1)).unbind(dim=1)
            columns = tuple(x.to(kind) for x, kind in zip(joined, kinds, strict=True))
        return tuple(self.scatter(x) for x in columns)

    def model_tokens(self) -> tuple[Tensor, Tensor]:
        """Index [n], in the flattened rows [b * S], of each token that the model runs on, and how many response tokens
        on the mask it predicts [n]: several if rows share a prompt, 0 for padding."""
        row, t = self.on_mask
        if self.packing is not None:
            entries = self.packing.tokens
            return entries, _counts(self.packing.predictors.index, len(entries))
        attention = self.tensors["attention_mask"]
        width, columns = attention.shape[1], attention.shape[1] - self.response_width - 1 + t
        first = torch.arange(len(attention), device=attention.device)[:, None] * width
        source = torch.arange(width, device=attention.device)
        if self.is_left_aligned:
            source, _, padding = self._left_aligned()
            columns = columns - padding[row, 0]
        return (first + source).flatten(), _counts(row * width + columns, attention.numel())

    def _left_aligned(self) -> tuple[Tensor, Tensor, Tensor]:
        """Source columns [b S] of rows shifted left by their padding, their mask, and that padding [b 1]."""
        attention = self.tensors["attention_mask"]
        padding = attention.long().argmax(dim=1, keepdim=True)  # of the prompt
        column = torch.arange(attention.shape[1], device=attention.device)
        source = (column + padding).clamp(max=attention.shape[1] - 1)
        return source, attention.gather(1, source) * (column + padding < attention.shape[1]), padding

    def _predict_left_aligned(self, call: Callable[..., Tensor]) -> Tensor:
        x = self.tensors
        attention = x["attention_mask"]
        source, mask, padding = self._left_aligned()
        ids = x["input_ids"].gather(1, source) * mask
        states = call(input_ids=ids, attention_mask=mask)
        row, t = self.on_mask
        prompt_width = attention.shape[1] - self.response_width
        return states[row, prompt_width - padding[row, 0] + t - 1]


def cut_into_micro_batches(
    batch: DataProto,
    token_budget: int,
    paths: ModelPaths = PADDED,
    context: ContextGroup | None = None,
    multiple: int = 1,
    images: ImageRows | None = None,
) -> Iterator[MicroBatch]:
    """Split a batch, sorted by row length, into micro-batches of at most a number of tokens.

    The split affects results only through rounding: losses are normalised by counts of the whole batch.

    Args:
        batch: holds `input_ids`, `attention_mask` [B S] and `responses`, `response_mask` [B T]; maybe `prefix_of` and
            `prefix_tokens` [B]: rows of one number begin with as many equal tokens, which are then their shared prompt.
        token_budget: tokens of a micro-batch, padding included, unless a single row is longer.
        paths: execution paths of the model. Rows are packed only if that saves a significant share of tokens.
        context: the processes that share the tokens of these rows; each has the budget, and rows are always packed.
        multiple: lengths of blocks of packed rows are multiples of this.
        images: how the model reads those of the rows; None without images.
    """
    if context is not None:
        assert paths.scoring == "packed", paths
        token_budget *= context.size
    attention = batch.batch["attention_mask"]
    response_width = batch.batch["responses"].shape[1]
    prompt_width = attention.shape[1] - response_width
    prompts = attention[:, :prompt_width].sum(dim=1).cpu()
    responses = attention[:, prompt_width:].sum(dim=1).cpu()
    lengths, shared = prompts + responses, batch.batch.get("prefix_tokens", prompts)
    parts, prompt_of, share = micro_batches(lengths, token_budget), None, False
    if paths.scoring == "equal_lengths":
        kinds = _alike(prompts, responses)
        parts = [kind[rows] for kind in kinds for rows in micro_batches(lengths[kind], token_budget)]
    if paths.scoring == "packed" and len(batch):
        padded = sum(len(rows) * int(lengths[rows[0]]) for rows in parts)
        padded = padded if context is None else ALWAYS
        packed = _packed(batch, shared, lengths - shared, padded, token_budget, paths.shares_prompts)
        parts, prompt_of, share = packed or (parts, None, False)
    for rows in parts:
        p, t = max(1, int(prompts[rows].max())), int(responses[rows].max())
        windows = {
            "P": slice(prompt_width - p, prompt_width),
            "T": slice(0, t),
            "S": slice(prompt_width - p, prompt_width + t),
        }
        tensors = {name: _cut(name, x, rows.to(x.device), windows) for name, x in batch.batch.items()}
        packing = None
        if prompt_of is not None:
            mask = tensors["response_mask"]
            own = (lengths - shared)[rows]
            line = pack(shared[rows], own, prompt_of[rows], mask.cpu(), p, share, multiple, p - prompts[rows])
            packing = (line if context is None else context.shard(line)).to(mask.device)
        inserted = None
        if images is not None:
            media = row_media(batch, rows.tolist())
            inserted = images.of_media(media, tensors["input_ids"], tensors["attention_mask"])
            if inserted is not None and packing is not None:
                inserted = inserted.on_line(packing.tokens)
        kinds = paths.scoring == "right_padded", paths.scoring == "equal_lengths"
        yield MicroBatch(rows, tensors, packing, *kinds, images=inserted)


def _counts(index: Tensor, size: int) -> Tensor:
    """[size]: how often each entry is in an index; unlike `bincount`, without synchronising with the device."""
    return torch.zeros(size, dtype=torch.int64, device=index.device).scatter_add_(0, index, torch.ones_like(index))


def empty_micro_batch(batch: DataProto) -> MicroBatch:
    """An empty micro-batch, as one row without masked tokens: its loss and gradients are zero.

    For a process without rows that must take part in its siblings' collective operations.
    """
    widths = {"P": 1, "T": 1, "S": 2}
    tensors = {}
    for name, x in batch.batch.items():
        dims = FIELDS[name].dims if name in FIELDS else ("B",)
        shape = (widths.get(dim, size) for dim, size in zip(dims[1:], x.shape[1:], strict=len(dims) > 1))
        tensors[name] = x.new_zeros(1, *shape)
    tensors["attention_mask"][:] = 1
    return MicroBatch(torch.zeros(0, dtype=torch.int64), tensors)


def _packed(
    batch: DataProto, prompts: Tensor, responses: Tensor, padded: int, token_budget: int, may_share: bool
) -> tuple[list[Tensor], Tensor, bool] | None:
    """Rows of each micro-batch, the prompt of each row, and whether prompts are shared; None if it saves too little."""
    width = batch.batch["attention_mask"].shape[1] - batch.batch["responses"].shape[1]
    text = torch.cat([batch.batch["input_ids"][:, :width].cpu(), prompts[:, None]], dim=1)
    if has_images(batch):  # equal tokens with other images are another prompt
        text = torch.cat([text, batch.batch[KEYS][:, None].cpu()], dim=1)
    if "prefix_of" in batch.batch:
        text = batch.batch["prefix_of"].cpu()[:, None]
    prompt_of = torch.unique(text, dim=0, return_inverse=True)[1]
    counts = own_tokens(responses)
    separate = int((counts + prompts).sum())
    of_prompt = torch.zeros(int(prompt_of.max()) + 1, dtype=torch.int64).scatter_(0, prompt_of, prompts)
    shared = int(counts.sum()) + int(of_prompt.sum())
    share = may_share and shared <= WORTH_IT * separate
    if (min(shared, separate) if may_share else separate) > WORTH_IT * padded:
        return None
    if share:
        return micro_batches_of_groups(counts, prompts, prompt_of, token_budget), prompt_of, True
    alone = torch.arange(len(counts))
    return micro_batches_of_groups(counts + prompts, torch.zeros_like(counts), alone, token_budget), prompt_of, False


def _cut(name: str, x: Tensor, rows: Tensor, windows: dict[str, slice]) -> Tensor:
    dims = FIELDS[name].dims if name in FIELDS else ("B",)
    return x[rows][(slice(None), *(windows.get(dim, slice(None)) for dim in dims[1:]))]


def _alike(prompts: Tensor, responses: Tensor) -> list[Tensor]:
    """Groups of rows with equal prompt length and equal response length, longest first."""
    lengths = torch.stack([prompts + responses, prompts], dim=1)
    kinds, kind_of = torch.unique(lengths, dim=0, return_inverse=True)
    return [(kind_of == kind).nonzero()[:, 0] for kind in range(len(kinds) - 1, -1, -1)]
