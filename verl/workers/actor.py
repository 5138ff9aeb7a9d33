"""The actor: one set of weights that generates, scores and trains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from pydantic import NonNegativeFloat
from torch import Tensor, nn

from verl import config
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.functions import built_part
from verl.component import BuildContext, component
from verl.engines.chunked_logprobs import token_log_probs
from verl.engines.engine import TrainingEngine
from verl.engines.parallel_degrees import ParallelDegrees
from verl.engines.parallel_dims import Parallelism
from verl.environments.base import EnvironmentDescription
from verl.environments.episode_loop import EpisodeGenerator
from verl.model_paths.micro_batch import MicroBatch
from verl.models.heads import LMHead
from verl.models.hf_state_dict import live_tensors
from verl.models.parallel_info import Numerics, compute_type
from verl.ops.logprobs import LogProbGap
from verl.ops.masking import LossTotals, aggregate
from verl.protocol import DataProto
from verl.protocol.dispatch import by_rows, by_rows_to_one, on_all
from verl.rollout.base import GenerationRequest, Rollout, RolloutEngine, SyncResult, stop_tokens
from verl.rollout.responses import ResponseGenerator
from verl.rollout.rows import refuse_wrong_responses
from verl.utils.memory import release_cached
from verl.workers.base import TrainedRole, TrainedWorker
from verl.workers.first_batch_check import FirstBatchCheck, with_tail
from verl.workers.load_state import RestoreSource

UNREPLAYED_ROWS = 8  # per process, whose log-probs are also computed without router replay
STOPPING = "stopping_gap_nats"
REPLAYED, UNREPLAYED = "rollout/log_prob_gap_nats", "rollout/log_prob_gap_without_replay_nats"


@component
class Actor(TrainedRole):
    """The policy pi(response | prompt): any Hugging Face causal language model.

    Args:
        router_aux_loss_coef: weight of the load balancing loss of a mixture of experts, as transformers defines it for
            the model, over all tokens of an update in all processes. 0 for none; otherwise each update first counts the
            load in an additional forward pass. See `TrainedRole` for the other arguments.
    """

    router_aux_loss_coef: NonNegativeFloat = 0.0

    def faults_with_degrees(self, degrees: ParallelDegrees) -> Iterator[str]:
        yield from super().faults_with_degrees(degrees)
        setting = f"router_aux_loss_coef is {self.router_aux_loss_coef:g}"
        if self.router_aux_loss_coef and (kind := self.model.experts()) is not None and kind[1] is None:
            yield f"{setting}: a {kind[0]} has no experts. Set it to 0."
        for name in ("tp", "pp"):
            if self.router_aux_loss_coef and getattr(degrees, name) > 1:
                yield f"{setting}: with {name} {getattr(degrees, name)} no process sees all routers. Set it to 0."

    def start(
        self,
        context: BuildContext,
        parallel: Parallelism,
        algorithm: Algorithm,
        rollout: Rollout,
        total_updates: int,
        restore: RestoreSource | None = None,
        environment: EnvironmentDescription | None = None,
        generates: bool = True,
    ) -> ActorWorker:
        """Load the weights, from a checkpoint if one is given, and attach the engines that train and sample.

        Raises:
            ConfigError: the model cannot be trained as a policy.
        """
        model = self.load("causal_lm", context.device, restore, "actor", parallel)
        longest = rollout.max_new_tokens
        engine = self.engine(model, context, parallel, total_updates, restore, "actor", longest=longest)
        if rollout.router_replay:
            engine.replay_routing("actor.model")
        if generates:
            generator = self.generator(model, rollout, environment, context)
        else:
            generator = ResponseGenerator(RolloutEngine(), rollout, context.tokenizer.pad_token_id)
        loss = built_part(algorithm.policy_loss, context)
        worker = ActorWorker(engine, algorithm, loss, generator, rollout.temperature, context.tokenizer)
        engine.balance_routers(self.router_aux_loss_coef, worker.head)
        return worker

    def generator(
        self, model: Any, rollout: Rollout, environment: EnvironmentDescription | None, context: BuildContext
    ) -> ResponseGenerator:
        """Attach a rollout engine to the loaded model; returns the generator of responses or episodes."""
        tokenizer = context.tokenizer
        engine = rollout.attach(model, tokenizer, context.seed, self.decided_autocast, context)
        if environment is None:
            return ResponseGenerator(engine, rollout, tokenizer.pad_token_id)
        stops = tuple(stop_tokens(model, tokenizer, rollout.stop_token_ids).tolist())
        arguments = engine, rollout, tokenizer, stops, context
        return environment.response_generator(*arguments) or EpisodeGenerator(environment, *arguments)


@component
class EvaluatedActor(Actor):
    """A policy that is evaluated, sampled from or served."""

    trains: ClassVar[bool] = False


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
        loss: Any,
        generator: ResponseGenerator,
        temperature: float,
        tokenizer: Any,
    ):
        super().__init__(engine, tokenizer, loss)
        self.algorithm, self.generator, self.temperature = algorithm, generator, temperature
        self.head = LMHead(engine.model)
        self.first_batch = FirstBatchCheck.of_tokens("actor.model", engine, self.head, temperature)
        self._version_sampled: int | None = None
        self._engine_follows = True
        self._gap = LogProbGap()
        self._unreplayed: dict[str, float] = {}  # gap of the rows of this step without router replay

    @property
    def model(self) -> Any:
        return self.engine.model

    @property
    def version(self) -> int:
        return self.engine.updates

    @by_rows
    def generate(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        """Sample responses; see `GenerationRequest`."""
        if self._version_sampled != self.version:  # an interrupted step ended without a sync
            self.sync()
        rows = self.generator.generate(prompts, request)
        refuse_wrong_responses(rows, self._num_tokens)
        self.engine.parallel.assert_siblings_agree(rows["responses"])
        if config.auto_cache_clear:
            release_cached(self.engine.device, always=True)
        return rows.union(DataProto.from_dict({"policy_version": torch.full((len(rows),), self.version)}))

    @by_rows_to_one
    def begin_generate(self, prompts: DataProto, request: GenerationRequest) -> None:
        """Start sampling responses with the engine's current weights; returns immediately."""
        if self._version_sampled != self.version:
            self.sync()
        self.generator.begin(prompts, request)
        self._begun_at = self.version

    @by_rows
    def finish_generate(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        """Wait for the responses of `begin_generate` to these prompts; returns the same fields as `generate`."""
        rows = self.generator.finish()
        refuse_wrong_responses(rows, self._num_tokens)
        assert len(rows) == len(prompts) * request.num_samples
        version = self.version if self.generator.has_regenerated else self._begun_at
        return rows.union(DataProto.from_dict({"policy_version": torch.full((len(rows),), version)}))

    @on_all
    def offload(self) -> None:
        """Free the rollout engine's memory; nothing is generated until the next sync."""
        self.generator.offload()

    @by_rows
    def compute_log_probs(self, batch: DataProto) -> DataProto:
        """`old_log_probs` and `entropies` [B T] of the responses under the current weights.

        If the batch has `policy_version`, also `is_on_policy` [B]: whether the current weights sampled the row.
        """
        self.generator.offload()
        self.first_batch.check(batch)
        self._unreplayed = self._gap_without_replay(batch)
        return self._with_origin(self.engine.infer(batch, self.micro_batch_scores), batch)

    @by_rows
    def plain_log_probs(self, batch: DataProto, lengthened: bool = False) -> DataProto:
        """`old_log_probs` [B T] and `is_on_policy` [B], from a separate forward pass of each row. `lengthened` appends
        tokens to each row and disables router replay."""
        self.generator.offload()
        plain = with_tail(self.first_batch.plain, self.engine, batch) if lengthened else self.first_batch.plain
        scores = self.engine.infer(batch, plain, alone=True, replays=False if lengthened else None)
        return self._with_origin({"old_log_probs": scores["log_probs"]} if scores else {}, batch)

    @by_rows_to_one
    def update(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step on a mini-batch of experience; returns metrics of the whole mini-batch.

        If `compute_log_probs` was not called for the batch, this measures the log-prob gap instead. Where that is above
        `stopping_gap_nats` of `meta_info`, the step is not made, and the gap alone is returned.
        """
        self.generator.offload()
        self.first_batch.check(batch)
        self._gap, measures = LogProbGap(), self._measures(batch.batch)
        if measures:
            self._unreplayed = self._gap_without_replay(batch)
        self.engine.forward_backward(batch, self.micro_batch_loss)
        gap = LogProbGap.metrics(*self.engine.parallel.of_each(self._gap.sums())) if measures else {}
        is_beyond = gap.get(REPLAYED, 0.0) > batch.meta_info.get(STOPPING, math.inf)
        if measures and self.engine.parallel.most(int(is_beyond)):  # all processes decide alike
            self.engine.release()
            return gap
        return self.engine.optim_step() | gap | self._unreplayed

    def _gap_without_replay(self, batch: DataProto) -> dict[str, float]:
        """Log-prob gap between trainer and engine without router replay, measured on some rows."""
        if not self.engine.replays_routing or "routed_experts" not in batch:
            return {}
        rows, gap = batch[:UNREPLAYED_ROWS], LogProbGap()
        scores = self.engine.infer(rows, self.micro_batch_scores, replays=False)
        if scores:
            x = rows.batch
            gap.add(x["rollout_log_probs"], scores["old_log_probs"], x["response_mask"], self._is_on_policy(x))
        metrics = LogProbGap.metrics(*self.engine.parallel.of_each(gap.sums()))
        return {UNREPLAYED: metrics[REPLAYED]} if REPLAYED in metrics else {}

    @on_all
    def sync(self) -> SyncResult:
        """Send the current weights to the rollout engine."""
        self.engine.release()
        synced = self.generator.sync()
        self._version_sampled, self._engine_follows = self.version, synced.is_current
        return synced

    @on_all
    def current_version(self) -> int:
        return self.version

    @on_all
    def rollout_weights(self) -> tuple[int, dict[str, Tensor]]:
        """On rank 0, the version and the full weights for a copy of the model; tied tensors appear once.

        The tensors are live if nothing is sharded and they are in main memory. With LoRA they are those of the adapter.
        """
        model = self.engine.model
        weights = self._whole_weights() if self.engine.parallel.divides_weights else live_tensors(model)
        once = {id(x): name for name, x in reversed(weights.items())}
        return self.version, {name: x.detach().cpu() for name, x in weights.items() if once[id(x)] == name}

    @on_all
    def numerics(self) -> Numerics:
        """Compute types of the log-probs of model and rollout engine."""
        dtype = compute_type(self.model, self.engine.autocast)
        engine = self.generator.engine
        return Numerics(dtype, engine.compute_type or dtype, type(engine).__name__, self.temperature)

    def close(self) -> None:
        self.generator.close()

    def micro_batch_scores(self, model: nn.Module, micro: MicroBatch) -> dict[str, Tensor]:
        """Log-probs under the current weights, and entropies in nats, each [B T]."""
        scores = token_log_probs(model, self.head, micro, self.temperature, entropy="value")
        assert scores.entropies is not None
        return {"old_log_probs": scores.log_probs, "entropies": scores.entropies}

    def micro_batch_loss(
        self, model: nn.Module, micro: MicroBatch, totals: LossTotals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Summand of the mini-batch's policy loss, and sums for metrics."""
        algorithm, x = self.algorithm, dict(micro.tensors)
        mask, measures = x["response_mask"], self._measures(x)
        entropy_coef = algorithm.entropy_coef_at(self.engine.updates, self.engine.total_updates)
        needs_entropy = measures or algorithm.has_entropy_bonus
        scores = token_log_probs(
            model,
            self.head,
            micro,
            self.temperature,
            entropy="grad" if entropy_coef > 0 else "value" if needs_entropy else None,
            candidates="ref_candidates" if algorithm.num_candidates else None,
        )
        now, is_sampled = scores.log_probs.detach(), x["policy_version"] >= 0 if "policy_version" in x else None
        x.setdefault("old_log_probs", now)  # absent if the step has a single update
        if is_sampled is not None:  # a response from the data set has no ratio
            x["old_log_probs"] = torch.where(is_sampled[:, None], x["old_log_probs"], now)
        per_token, stats = self.loss(scores.log_probs, x)
        if scores.candidate_log_probs is not None:
            assert algorithm.distill is not None
            per_token, divergence = algorithm.distill.mixed_loss(per_token, scores.candidate_log_probs, x)
            stats["distill/divergence_nats"] = divergence
        penalty = algorithm.kl.loss(scores.log_probs, x)
        if penalty is not None:
            per_token = per_token + penalty
            stats["kl_loss"] = penalty
        if measures:
            sampled_mask = mask if is_sampled is None else mask & is_sampled[:, None]
            self._gap.add(x["rollout_log_probs"], now, sampled_mask, self._is_on_policy(x))
            assert scores.entropies is not None
            stats["rollout/entropy_nats"] = scores.entropies
            if (kl := algorithm.kl.measure(now, x)) is not None:
                stats["kl/reference_nats"] = kl
        if algorithm.has_entropy_bonus:
            assert scores.entropies is not None
            if entropy_coef > 0:
                per_token = per_token - entropy_coef * scores.entropies
            stats["entropy"] = scores.entropies
        of_episodes = x.get("episode_tokens")
        loss = aggregate(per_token, mask, algorithm.aggregation, totals, algorithm.norm_length, of_episodes)
        return loss, {name: aggregate(stat, mask, "token-mean", totals) for name, stat in stats.items()}

    @property
    def _num_tokens(self) -> int:
        return self.model.config.get_text_config().vocab_size

    def _measures(self, rows: Mapping[str, Tensor]) -> bool:
        """Whether an update takes the measurements that usually accompany `compute_log_probs`."""
        return "old_log_probs" not in rows or self.algorithm.proximal == "behaviour"

    def _with_origin(self, found: dict[str, Tensor], batch: DataProto) -> DataProto:
        if found and (is_on_policy := self._is_on_policy(batch.batch)) is not None:
            found["is_on_policy"] = is_on_policy
        return DataProto.from_dict(found)

    def _is_on_policy(self, rows: Mapping[str, Tensor]) -> Tensor | None:
        """Whether the current weights sampled each row [B]; None for batches without `policy_version`."""
        version = rows.get("policy_version")
        return None if version is None else (version == self.version) & self._engine_follows
