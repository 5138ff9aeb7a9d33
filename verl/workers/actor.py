"""The actor: one set of weights that generates, scores and trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verl import config
from verl.algorithms.algorithm import Algorithm
from verl.description import BuildContext
from verl.dispatch import by_rows, by_rows_to_one, on_all
from verl.engines.engine import TrainingEngine
from verl.engines.sharding import Parallel
from verl.engines.token_scores import TokenScores, plain_log_probs, score_tokens
from verl.model_paths.check import paths_for
from verl.model_paths.micro_batch import MicroBatch
from verl.models.output_head import OutputHead
from verl.ops.aggregate import Totals, aggregate
from verl.protocol import DataProto
from verl.rollout.base import Request, Rollout, RolloutEngine, Synced
from verl.utils.device_memory import release_cached
from verl.workers.first_batch import FirstBatch
from verl.workers.state import Restore
from verl.workers.training import TrainedRole, TrainedWorker


@dataclass(frozen=True, kw_only=True)
class Actor(TrainedRole):
    """The policy pi(response | prompt): any Hugging Face causal language model. See `TrainedRole` for the arguments."""

    def start(
        self,
        context: BuildContext,
        parallel: Parallel,
        algorithm: Algorithm,
        rollout: Rollout,
        total_updates: int,
        restore: Restore | None = None,
    ) -> ActorWorker:
        """Load the weights, those of a checkpoint if one is given, and attach the engines that train and sample.

        Raises:
            ConfigError: the model cannot be trained as a policy.
        """
        model = self.load("causal_lm", context.device, restore, "actor", parallel)
        paths_for(model, context.row_tokens or rollout.max_new_tokens, "actor.model")
        parallel.divide(model, self.autocast)
        engine = self.engine(model, parallel, total_updates)
        if restore is not None:
            restore.optimizer(engine, "actor")
        sampler = rollout.attach(model, context.tokenizer, context.seed, self.autocast, context)
        return ActorWorker(engine, algorithm, sampler, rollout.temperature, context.tokenizer)


class ActorWorker(TrainedWorker):
    """The running actor.

    Attributes:
        model: the Hugging Face model, with its adapter if it has one.
        version: optimizer updates made so far; sampled rows carry it as `policy_version`.
    """

    def __init__(
        self,
        engine: TrainingEngine,
        algorithm: Algorithm,
        sampler: RolloutEngine,
        temperature: float,
        tokenizer: Any,
    ):
        super().__init__(engine, tokenizer)
        self.algorithm, self.sampler, self.temperature = algorithm, sampler, temperature
        self.head = OutputHead(engine.model)
        self.first_batch = FirstBatch("actor.model", engine, self._score_in_parts, self._score_plainly)
        self._version_sampled: int | None = None

    @property
    def model(self) -> Any:
        return self.engine.model

    @property
    def version(self) -> int:
        return self.engine.updates

    @by_rows
    def generate(self, prompts: DataProto, request: Request) -> DataProto:
        """Draw responses; see `rollout.base.RolloutEngine.generate`."""
        if self._version_sampled != self.version:  # a step that was cut short ended without a sync
            self.sync()
        rows = self.sampler.generate(prompts, request)
        self.engine.parallel.assert_siblings_agree(rows["responses"])
        if config.auto_cache_clear:
            release_cached(self.engine.device)
        return rows.union(DataProto.from_dict({"policy_version": torch.full((len(rows),), self.version)}))

    @by_rows_to_one
    def begin_generate(self, prompts: DataProto, request: Request) -> None:
        """Begin to draw responses with the engine's present weights, while this process goes on to other calls."""
        if self._version_sampled != self.version:
            self.sync()
        self.sampler.begin(prompts, request)
        self._begun_at = self.version

    @by_rows
    def finish_generate(self, prompts: DataProto, request: Request) -> DataProto:
        """The responses that were begun for these prompts, as `generate` gives them."""
        rows = self.sampler.finish()
        assert len(rows) == len(prompts) * request.num_samples
        version = self.version if self.sampler.has_redrawn else self._begun_at
        return rows.union(DataProto.from_dict({"policy_version": torch.full((len(rows),), version)}))

    @by_rows
    def compute_log_probs(self, batch: DataProto) -> DataProto:
        """`old_log_probs` and `entropies` [B T] of the responses under the present weights."""
        self.sampler.rest()
        self.first_batch.look(batch)
        return DataProto.from_dict(self.engine.infer(batch, self._score))

    @by_rows_to_one
    def update(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step on a mini-batch of experience; returns metrics of the whole mini-batch."""
        self.sampler.rest()
        self.first_batch.look(batch)
        return self.engine.update(batch, self._loss)

    @on_all
    def sync(self) -> Synced:
        """Give the rollout engine the present weights."""
        synced = self.sampler.sync()
        self._version_sampled = self.version
        return synced

    def close(self) -> None:
        """End what the rollout engine has started."""
        self.sampler.close()

    def _score(self, model: nn.Module, micro: MicroBatch) -> dict[str, Tensor]:
        scores = score_tokens(model, self.head, micro, self.temperature, entropy="value")
        return {"old_log_probs": scores.log_probs, "entropies": scores.entropies}

    def _score_in_parts(self, model: nn.Module, micro: MicroBatch) -> dict[str, Tensor]:
        return {"log_probs": score_tokens(model, self.head, micro, self.temperature, parts=3).log_probs}

    def _score_plainly(self, model: nn.Module, micro: MicroBatch) -> dict[str, Tensor]:
        return {"log_probs": plain_log_probs(model, micro, self.temperature)}

    def _loss(self, model: nn.Module, micro: MicroBatch, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        algorithm, x = self.algorithm, dict(micro.tensors)
        mask, is_first = x["response_mask"], "old_log_probs" not in x
        rewarded = algorithm.entropy_coef > 0
        scores = score_tokens(
            model, self.head, micro, self.temperature, entropy="grad" if rewarded else "value" if is_first else None
        )
        if is_first:  # the only update of a step: the weights are still those that sampled
            x["old_log_probs"] = scores.log_probs.detach()
        per_token, stats = algorithm.policy_loss(scores.log_probs, x)
        penalty = algorithm.kl.loss(scores.log_probs, x)
        if penalty is not None:
            per_token = per_token + penalty
            stats["kl_loss"] = penalty
        if is_first:
            stats |= self._before_the_update(scores, x, penalty)
        if rewarded:
            per_token = per_token - algorithm.entropy_coef * scores.entropies
            stats["entropy"] = scores.entropies
        loss = aggregate(per_token, mask, algorithm.aggregation, totals, algorithm.norm_length)
        return loss, {name: aggregate(stat, mask, "token-mean", totals) for name, stat in stats.items()}

    def _before_the_update(
        self, scores: TokenScores, x: dict[str, Tensor], penalty: Tensor | None
    ) -> dict[str, Tensor]:
        """What `experience_metrics` and the KL control tell if log-probs are computed before the update."""
        gap = (x["rollout_log_probs"] - x["old_log_probs"]).abs()
        stats = {"rollout/entropy_nats": scores.entropies, "rollout/log_prob_gap_nats": gap}
        if penalty is not None:
            stats["kl/reference_nats"] = penalty / self.algorithm.kl.coef
        return stats
