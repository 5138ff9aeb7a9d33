"""The SFT worker: a causal language model trained on the likelihood of given text."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from verl.component import BuildContext
from verl.engines.chunked_logprobs import token_log_probs
from verl.engines.engine import TrainingEngine
from verl.engines.parallel_dims import Parallelism
from verl.model_paths.images import with_media
from verl.model_paths.micro_batch import MicroBatch
from verl.models.heads import LMHead
from verl.ops.masking import LossTotals, aggregate
from verl.protocol import DataProto
from verl.protocol.dispatch import by_rows_to_one
from verl.workers.actor import Actor
from verl.workers.base import TrainedWorker
from verl.workers.first_batch_check import FirstBatchCheck
from verl.workers.load_state import RestoreSource


class SFTWorker(TrainedWorker):
    """A causal language model under supervised fine-tuning.

    Batches hold `input_ids`, `attention_mask`, `position_ids`, `loss_mask` [B S], padded on the right.
    """

    def __init__(self, engine: TrainingEngine, tokenizer: Any):
        super().__init__(engine, tokenizer)
        self.head = LMHead(engine.model)
        self.first_batch = FirstBatchCheck.of_tokens("actor.model", engine, self.head)

    @classmethod
    def start(
        cls,
        role: Actor,
        context: BuildContext,
        parallel: Parallelism,
        total_updates: int,
        restore: RestoreSource | None = None,
    ) -> SFTWorker:
        """Load the weights, from a checkpoint if one is given, and attach the engine that trains them."""
        model = role.load("causal_lm", context.device, restore, "actor", parallel)
        worker = cls(role.engine(model, context, parallel, total_updates, restore, "actor"), context.tokenizer)
        worker.engine.balance_routers(role.router_aux_loss_coef, worker.head)
        return worker

    @by_rows_to_one
    def update(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step on the mean negative log-likelihood of the tokens in `loss_mask`."""
        rows = _as_continuation(batch)
        self.first_batch.check(rows)
        return self.engine.update(rows, self.micro_batch_loss)

    @by_rows_to_one
    def evaluate(self, batch: DataProto) -> dict[str, float]:
        """Sums over the masked tokens: `nll` in nats, `correct` greedy predictions, and `tokens`."""
        rows = _as_continuation(batch)
        self.first_batch.check(rows)
        scores = self.engine.infer(rows, self.micro_batch_scores)
        sums = {name: float(x.double().sum()) for name, x in scores.items()}
        return self.engine.parallel.sums({**sums, "tokens": float(rows.batch["response_mask"].sum())})

    def micro_batch_loss(
        self, model: nn.Module, micro: MicroBatch, totals: LossTotals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Summand of the mini-batch's mean negative log-likelihood."""
        log_probs = token_log_probs(model, self.head, micro).log_probs
        return aggregate(-log_probs, micro.tensors["response_mask"], "token-mean", totals), {}

    def micro_batch_scores(self, model: nn.Module, micro: MicroBatch) -> dict[str, Tensor]:
        """Negative log-likelihood in nats, and whether the token is the likeliest, each [B T]."""
        scores = token_log_probs(model, self.head, micro, rank=True)
        assert scores.is_likeliest is not None
        return {"nll": -scores.log_probs, "correct": scores.is_likeliest.float()}


def _as_continuation(batch: DataProto) -> DataProto:
    """Treat a text as a prompt of one token and its continuation, so that SFT and RL share one forward pass."""
    x = batch.batch
    return DataProto.from_dict(
        {
            "input_ids": x["input_ids"],
            "attention_mask": x["attention_mask"],
            "position_ids": x["position_ids"],
            "responses": x["input_ids"][:, 1:],
            "response_mask": x["loss_mask"][:, 1:],
            **{name: x[name] for name in with_media((), batch)},
        },
        meta_info=batch.meta_info,
        ragged=batch.ragged,
    )
