"""Micro-batches: the tensors of one forward pass, as padded rows or as packed rows in which a shared prompt stands
once.

    plan ──> rows of each micro-batch ──> MicroBatch ──> predict(call) ──> what predicts each response token [n ...]

Which form is used is up to the paths of the model (`verl.model_paths.families`), and changes no result but by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl.model_paths.context_attention import ContextGroup, ContextLine
from verl.model_paths.families import ModelPaths
from verl.model_paths.packed_attention import call_packed
from verl.ops.batching import micro_batches, micro_batches_of_groups
from verl.ops.logprobs import response_positions
from verl.ops.packing import PackedRows, gather_rows, own_tokens, pack
from verl.protocol import DataProto
from verl.protocol.fields import FIELDS

PADDED = ModelPaths(scoring="padded")
ALWAYS = 2**62  # tokens, than which packing leaves fewer
WORTH_IT = 0.85  # packing, and sharing prompts, must leave at most this share of the tokens


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a batch, as narrow as they can be.

    Attributes:
        rows: [b] which rows of the batch these are.
        tensors: the fields, with P and T cut to the longest prompt and response among the rows.
        response_width: T of these tensors.
        packing: how the rows make one line of tokens, or this process's share of that line; None if they are run as
            rows.
        is_left_aligned: rows run with all their padding on the right.
        is_unpadded: rows are of one length, and the model counts positions by itself.
        tail: tokens behind each row that it is run with, which no causal model sees; of rows run as rows.
        positions: [n], [n] row and column of each response token on the mask, as `response_mask.nonzero()` gives them;
            found once, in main memory, since a device that looks for them makes this process wait for it.
    """

    rows: Tensor
    tensors: dict[str, Tensor]
    packing: PackedRows | ContextLine | None = None
    is_left_aligned: bool = False
    is_unpadded: bool = False
    tail: int = 0
    positions: tuple[Tensor, Tensor] | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """A copy on the model's device.

        Nothing here waits for the device, which is busy with the micro-batch before: copies from memory that is not
        pinned are staged at once, so that what they were made of may go.
        """
        if device.type == "cpu":
            return self
        tensors = {name: x.to(device, non_blocking=True) for name, x in self.tensors.items()}
        packing = None if self.packing is None else self.packing.to(device)
        row, t = (x.to(device, non_blocking=True) for x in self.on_mask)
        return replace(self, tensors=tensors, packing=packing, positions=(row, t))

    @property
    def on_mask(self) -> tuple[Tensor, Tensor]:
        """Row and column of each response token on the mask."""
        if self.positions is not None:
            return self.positions
        row, t = self.tensors["response_mask"].nonzero(as_tuple=True)
        return row, t

    def chosen(self, name: str) -> Tensor:
        """Values of a field [b t] at the masked response tokens, [n]."""
        return self.tensors[name][self.on_mask]

    def scatter(self, values: Tensor) -> Tensor:
        """The other way round: values [n] of the response tokens on the mask in their places [b t], zeros elsewhere."""
        mask = self.tensors["response_mask"]
        whole = torch.zeros(mask.shape, dtype=values.dtype, device=values.device)
        return whole.index_put(self.on_mask, values)

    @property
    def response_width(self) -> int:
        return self.tensors["responses"].shape[1]

    def predict(self, call: Callable[..., Tensor]) -> Tensor:
        """Outputs at the positions that predict each masked response token, [n ...], in the order of
        `response_mask.nonzero()`.

        Where processes share the tokens, it is what predicts those tokens alone that are this one's; `targets` gives
        them, and `scatter_shared` puts what is computed for them together.

        Args:
            call: runs the model on `input_ids`, `attention_mask`, `position_ids` and further keywords, and gives
                something for each token, [b s ...]; with `logits_to_keep=k`, for the last k of them or for all.
        """
        x = self.tensors
        if self.packing is not None:
            return gather_rows(call_packed(call, x["input_ids"], self.packing)[0], self.packing.predictors)
        if self.is_left_aligned:
            return self._predict_left_aligned(call)
        names = ("input_ids",) if self.is_unpadded else ("input_ids", "attention_mask", "position_ids")
        inputs = {name: torch.cat([x[name], x[name][:, -1:].expand(-1, self.tail)], dim=1) for name in names}
        states = call(**inputs, logits_to_keep=self.response_width + 1 + self.tail)
        states = states[:, : states.shape[1] - self.tail]
        return response_positions(states, self.response_width)[self.on_mask]

    def targets(self, name: str = "responses") -> Tensor:
        """Values of a field [b t] for the tokens predicted by `predict`, [n]."""
        tokens = self.chosen(name)
        return tokens[self.packing.shard.predicted] if isinstance(self.packing, ContextLine) else tokens

    def scatter_shared(self, *columns: Tensor) -> tuple[Tensor, ...]:
        """Each [n] of the predicted tokens as [b t], 0 off the mask; of all processes that share them."""
        if isinstance(self.packing, ContextLine):
            line, kinds = self.packing, [x.dtype for x in columns]
            wide = max((kind for kind in kinds if kind.is_floating_point), key=lambda kind: torch.finfo(kind).bits)
            joined = line.join(torch.stack([x.to(wide) for x in columns], dim=1)).unbind(dim=1)
            columns = tuple(x.to(kind) for x, kind in zip(joined, kinds, strict=True))
        return tuple(self.scatter(x) for x in columns)

    def model_tokens(self) -> tuple[Tensor, Tensor]:
        """Index [n], in the flattened rows [b * S], of each token that the model runs on, and how many response
        tokens on the mask it predicts [n]: several where rows share a prompt, none for padding.
        """
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
        """Columns [b S] that rows without padding on the left are made of, their mask, and that padding [b 1]."""
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
) -> Iterator[MicroBatch]:
    """Cut a batch by a budget of tokens, padding included, over its rows sorted by length.

    How a batch is cut changes no result but by rounding: losses are normalised by the counts of the whole batch.

    Args:
        batch: holds `input_ids`, `attention_mask` [B S] and `responses`, `response_mask` [B T].
        token_budget: tokens of a micro-batch, padding included, unless a single row is longer.
        paths: how the rows may be run. They are packed only where that leaves clearly fewer tokens.
        context: the processes that share the tokens of these rows, each of which has the budget; rows are packed then.
        multiple: of which the lengths of blocks of packed rows are.
    """
    if context is not None:
        assert paths.scoring == "packed", paths
        token_budget *= context.size
    attention = batch.batch["attention_mask"]
    response_width = batch.batch["responses"].shape[1]
    prompt_width = attention.shape[1] - response_width
    prompts = attention[:, :prompt_width].sum(dim=1).cpu()
    responses = attention[:, prompt_width:].sum(dim=1).cpu()
    parts, prompt_of, share = micro_batches(prompts + responses, token_budget), None, False
    if paths.scoring == "equal_lengths":
        kinds = _alike(prompts, responses)
        parts = [kind[rows] for kind in kinds for rows in micro_batches((prompts + responses)[kind], token_budget)]
    if paths.scoring == "packed" and len(batch):
        padded = sum(len(rows) * int((prompts + responses)[rows[0]]) for rows in parts)
        padded = padded if context is None else ALWAYS
        packed = _packed(batch, prompts, responses, padded, token_budget, paths.shares_prompts)
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
            line = pack(prompts[rows], responses[rows], prompt_of[rows], mask.cpu(), p, share, multiple)
            packing = (line if context is None else context.shard(line)).to(mask.device)
        yield MicroBatch(rows, tensors, packing, paths.scoring == "right_padded", paths.scoring == "equal_lengths")


def _counts(index: Tensor, size: int) -> Tensor:
    """[size]: how often each entry is in an index; `bincount` asks a device for the largest."""
    return torch.zeros(size, dtype=torch.int64, device=index.device).scatter_add_(0, index, torch.ones_like(index))


def empty_micro_batch(batch: DataProto) -> MicroBatch:
    """No row of a batch, in the form of one without a response token: its loss is zero, and so are its gradients.

    For a process that has nothing left to do, while its siblings need it in theirs.
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
    """Rows of each micro-batch, the prompt of each row, and whether prompts are shared; None if it is not worth it."""
    width = batch.batch["attention_mask"].shape[1] - batch.batch["responses"].shape[1]
    text = torch.cat([batch.batch["input_ids"][:, :width].cpu(), prompts[:, None]], dim=1)
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
    """Rows whose prompts, and whose responses, are of one length, longest first."""
    lengths = torch.stack([prompts + responses, prompts], dim=1)
    kinds, kind_of = torch.unique(lengths, dim=0, return_inverse=True)
    return [(kind_of == kind).nonzero()[:, 0] for kind in range(len(kinds) - 1, -1, -1)]
