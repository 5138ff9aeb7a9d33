"""The critic: values of every state along a response, and their regression on returns."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.functions import built_part
from verl.component import BuildContext, component
from verl.engines.engine import TrainingEngine
from verl.engines.parallel_dims import Parallelism
from verl.model_paths.micro_batch import MicroBatch
from verl.models.heads import ModelHead, ValueHeadModel
from verl.ops.masking import LossTotals, aggregate
from verl.protocol import DataProto
from verl.protocol.dispatch import by_rows, by_rows_to_one
from verl.workers.base import TrainedRole, TrainedWorker
from verl.workers.first_batch_check import FirstBatchCheck
from verl.workers.load_state import RestoreSource


@component
class Critic(TrainedRole):
    """The value function V(prompt, response so far): any Hugging Face backbone and a linear head.

    The head is loaded from the model's directory if a critic or a reward model was saved there, by verl or another
    library; otherwise it starts at zero. See `TrainedRole` for the arguments.

    Attributes:
        head: class that adds the head to a backbone.
    """

    lr_factor: ClassVar[float] = 10.0
    head: ClassVar[type[ModelHead]] = ValueHeadModel

    def start(
        self,
        context: BuildContext,
        parallel: Parallelism,
        algorithm: Algorithm,
        total_updates: int,
        restore: RestoreSource | None = None,
    ) -> CriticWorker:
        """Load the weights, from a checkpoint if one is given, and attach the engine that trains them.

        Raises:
            ConfigError: the model cannot be trained as a value function.
        """
        model = self.head(self.load("backbone", context.device, restore, "critic", parallel))
        if restore is not None:
            model.load(restore.file("critic", model.file).parent)
        elif (directory := self.model.directory()) is not None:
            model.load_initial(directory)
        engine = self.engine(model, context, parallel, total_updates, restore, "critic")
        return CriticWorker(engine, built_part(algorithm.value_loss, context), context.tokenizer)


class CriticWorker(TrainedWorker):
    """The running critic."""

    def __init__(self, engine: TrainingEngine, loss: Any, tokenizer: Any):
        super().__init__(engine, tokenizer, loss)
        self.first_batch = FirstBatchCheck("critic.model", engine, self._probe, self._probe)

    @by_rows
    def compute_values(self, batch: DataProto) -> DataProto:
        """`values` [B T] of the states from which each response token was sampled."""
        self.first_batch.check(batch)
        return DataProto.from_dict(self.engine.infer(batch, self._value))

    @by_rows_to_one
    def update(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step of regression on `returns`; returns metrics of the whole mini-batch."""
        self.first_batch.check(batch)
        return self.engine.update(batch, self.micro_batch_loss)

    def _value(self, model: nn.Module, micro: MicroBatch) -> dict[str, Tensor]:
        return {"values": state_values(model, micro)}

    def _probe(self, model: nn.Module, micro: MicroBatch) -> dict[str, Tensor]:
        return {"values": state_values(model, micro, probe=True)}

    def micro_batch_loss(
        self, model: nn.Module, micro: MicroBatch, totals: LossTotals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Summand of the mini-batch's value loss, and sums for metrics."""
        mask = micro.tensors["response_mask"]
        per_token, stats = self.loss(state_values(model, micro), micro.tensors)
        loss = aggregate(per_token, mask, "token-mean", totals)
        return loss, {name: aggregate(stat, mask, "token-mean", totals) for name, stat in stats.items()}


def state_values(model: Any, micro: MicroBatch, **options: bool) -> Tensor:
    """Values [b t] of a model with a value head, at the states that predict masked tokens; 0 elsewhere."""

    def values_of(logits_to_keep: int = 0, **inputs: Any) -> Tensor:
        return model(**inputs, **options).values

    return micro.scatter_shared(micro.predict(values_of))[0]
