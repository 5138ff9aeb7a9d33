"""From a batch to the tensors of one forward pass: rows chosen, and trimmed to the longest among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from verl.fields import FIELDS
from verl.ops.batching import micro_batches
from verl.protocol import DataProto


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a batch, as narrow as they can be.

    Attributes:
        rows: [b] which rows of the batch these are.
        tensors: the fields, with P and T cut to the longest prompt and response among the rows.
        response_width: T of these tensors.
    """

    rows: Tensor
    tensors: dict[str, Tensor]

    @property
    def response_width(self) -> int:
        return self.tensors["responses"].shape[1]


def cut_into_micro_batches(batch: DataProto, token_budget: int) -> Iterator[MicroBatch]:
    """Cut a batch by a budget of tokens, padding included, over its rows sorted by length.

    How a batch is cut changes no result but by rounding: losses are normalised by the counts of the whole batch.

    Args:
        batch: holds `input_ids`, `attention_mask` [B S] and `responses` [B T].
        token_budget: rows x longest row of a micro-batch stays within it, unless a single row is longer.
    """
    attention = batch.batch["attention_mask"]
    response_width = batch.batch["responses"].shape[1]
    prompt_width = attention.shape[1] - response_width
    prompt_lengths = attention[:, :prompt_width].sum(dim=1)
    response_lengths = attention[:, prompt_width:].sum(dim=1)
    for rows in micro_batches(prompt_lengths + response_lengths, token_budget):
        p, t = max(1, int(prompt_lengths[rows].max())), int(response_lengths[rows].max())
        windows = {
            "P": slice(prompt_width - p, prompt_width),
            "T": slice(0, t),
            "S": slice(prompt_width - p, prompt_width + t),
        }
        yield MicroBatch(rows, {name: _cut(name, x, rows, windows) for name, x in batch.batch.items()})


def _cut(name: str, x: Tensor, rows: Tensor, windows: dict[str, slice]) -> Tensor:
    dims = FIELDS[name].dims if name in FIELDS else ("B",)
    return x[rows][(slice(None), *(windows[dim] for dim in dims[1:]))]
