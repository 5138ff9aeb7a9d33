"""The critic: values of every state along a response, and their regression on returns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verl.algorithms.algorithm import Algorithm
from verl.description import BuildContext
from verl.dispatch import by_rows, by_rows_to_one, on_all
from verl.engines.engine import TrainingEngine
from verl.engines.micro import MicroBatch
from verl.engines.sharding import Parallel
from verl.models.heads import ValueModel
from verl.models.padding import refuse_padding_blind
from verl.ops.aggregate import Totals, aggregate
from verl.protocol import DataProto
from verl.workers.training import TrainedRole


@dataclass(frozen=True, kw_only=True)
class Critic(TrainedRole):
    """The value function V(prompt, response so far): any Hugging Face backbone and a linear head.

    The head is read from the model's directory if a critic was saved there, and starts at zero otherwise. See
    `TrainedRole` for the arguments.
    """

    def start(
        self, context: BuildContext, parallel: Parallel, algorithm: Algorithm, total_updates: int
    ) -> CriticWorker:
        """Load the weights and attach the engine that trains them.

        Raises:
            ConfigError: the model cannot be padded on the left.
        """
        backbone = self.model.load_backbone(context.device)
        refuse_padding_blind(backbone, "critic.model")
        if self.lora is not None:
            backbone = self.lora.apply(backbone, causal_lm=False)
        model = ValueModel(backbone)
        if (head := self.model.value_head()) is not None:
            model.load_head(head)
        return CriticWorker(self.engine(model, parallel, total_updates), algorithm, context.tokenizer)


class CriticWorker:
    """The running critic."""

    def __init__(self, engine: TrainingEngine, algorithm: Algorithm, tokenizer: Any):
        self.engine, self.algorithm, self.tokenizer = engine, algorithm, tokenizer

    @by_rows
    def compute_values(self, batch: DataProto) -> DataProto:
        """`values` [B T]: of the state in which each response token was chosen."""
        return DataProto.from_dict(self.engine.infer(batch, lambda model, micro: {"values": _values(model, micro)}))

    @by_rows_to_one
    def update(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step of regression on `returns`; returns metrics of the whole mini-batch."""
        return self.engine.update(batch, self._loss)

    @on_all
    def save(self, directory: Path) -> None:
        """Write the backbone as a Hugging Face directory with the head beside it; rank 0 writes."""
        if self.engine.parallel.rank == 0:
            self.engine.model.save_pretrained(directory)
            self.tokenizer.save_pretrained(directory)

    def _loss(self, model: nn.Module, micro: MicroBatch, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        mask = micro.tensors["response_mask"]
        per_token, stats = self.algorithm.value_loss(_values(model, micro), micro.tensors)
        loss = aggregate(per_token, mask, "token-mean", totals)
        return loss, {name: aggregate(stat, mask, "token-mean", totals) for name, stat in stats.items()}


def _values(model: Any, micro: MicroBatch) -> Tensor:
    def values_of(logits_to_keep: int = 0, **inputs: Any) -> Tensor:
        return model(**inputs).values

    values, mask = micro.predict(values_of), micro.tensors["response_mask"]
    return torch.zeros(mask.shape, dtype=values.dtype, device=mask.device).masked_scatter(mask, values)
