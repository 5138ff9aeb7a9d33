"""Trainers on rows of a data set, in the same loop as PPO: supervised fine-tuning, preferences, reward models.

SFTTrainer          maximum likelihood of given completions
PreferenceTrainer   DPO and its relatives, and reward models: row scores ── loss of R numbers ── update by coefficients
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from verl.algorithms.preference_losses import PreferenceLoss, PreferenceRows, evaluated
from verl.checkpoint.config import Checkpointing
from verl.cluster.rpc import role_handles
from verl.component import BuildContext, Description, component
from verl.data.base import DataSplits, PreferenceSource, TextSource
from verl.data.preference_dataset import PreferenceDataset
from verl.data.sampler import DataSampler
from verl.engines.sharding import Sharding
from verl.errors import ConfigError, faults_below
from verl.models.interfaces import tokenizer_fault
from verl.models.own_module import ModuleModel
from verl.monitoring.nonfinite import NonFiniteGuard
from verl.protocol import DataProto
from verl.storage.config import Storage
from verl.tracking.base import Trackers
from verl.trainer.config import SFTSettings
from verl.trainer.guards import Guards, stage
from verl.trainer.setup import (
    metric_faults,
    placement_faults,
    preflight_faults,
    prepare_saving,
    rank_writers_of,
    restore_of,
    sharding_faults,
    start_cluster,
)
from verl.trainer.state.driver_state import GeneratorStates, Stateful
from verl.trainer.timers import StageTimers
from verl.trainer.train_loop import LoopTrainer
from verl.workers.actor import Actor
from verl.workers.colocated import PreferenceHost, RewardModelHost, SFTHost, with_tokenizer
from verl.workers.load_state import RestoreSource
from verl.workers.reference import Reference


@component
class SFTRun(Description):
    """The components of a run of supervised fine-tuning: the root of `conf/sft.yaml`.

    Attributes:
        loss_key: metric of the training loss.
        evaluated: metrics of evaluations.
        rows_per_sample: rows of a sample of the data.
        host_type: of the roles.
        used_reference: the reference, if the loss reads its log-probs.
    """

    loss_key: ClassVar[str] = "sft/loss"
    evaluated: ClassVar[tuple[str, ...]] = ("eval/loss", "eval/token_accuracy")
    rows_per_sample: ClassVar[int] = 1
    host_type: ClassVar[type[SFTHost]] = SFTHost
    used_reference: ClassVar[Reference | None] = None

    actor: Actor
    sharding: Sharding
    data: TextSource | PreferenceSource
    trainer: SFTSettings
    tracker: Trackers
    checkpoint: Checkpointing | None = None
    storage: Storage | None = None
    resume: str | None = None

    def faults(self) -> Iterator[str]:
        """Faults between components, each with its full config path."""
        yield from sharding_faults(self)
        yield from placement_faults(self.trainer, self.shardings())
        yield from metric_faults(self, self.evaluated)
        if (fault := self.actor.model.policy_fault()) is not None:
            yield f"actor.model.{fault}"
        length, limit = getattr(self.data, "max_length", None), self.actor.model.max_positions()
        if length is not None and limit is not None and length > limit:
            yield f"data.max_length is {length}: actor.model holds {limit} tokens. Lower it."

    def shardings(self) -> dict[str, Sharding]:
        """Sharding of the actor, and of the reference if there is one."""
        of_roles = self.host(1, None).shardings()
        return {"actor": of_roles.pop("learner"), **of_roles}

    def preflight(self, context: BuildContext) -> Iterator[str]:
        yield from preflight_faults(self, context)

    def host(self, total_updates: int, restore: RestoreSource | None) -> SFTHost:
        """The roles of this run."""
        return self.host_type(
            learner=self.actor,
            sharding=self.sharding,
            total_updates=total_updates,
            restore=restore,
            reference=self.used_reference,
        )

    def build(self, context: BuildContext) -> SFTTrainer:
        """Load data and weights, and start the processes of the sharding."""
        return SFTTrainer(self, context)


@component
class PreferenceRun(SFTRun):
    """The components of a run of preference optimisation: the root of `conf/dpo.yaml`."""

    loss_key: ClassVar[str] = "preference/loss"
    evaluated: ClassVar[tuple[str, ...]] = (
        "eval/loss",
        *(f"eval/rewards/{name}" for name in ("accuracies", "margins", "chosen", "rejected")),
        "eval/logps/chosen",
        "eval/logps/rejected",
    )
    rows_per_sample: ClassVar[int] = 2
    host_type: ClassVar[type[SFTHost]] = PreferenceHost
    rates_scores: ClassVar[bool] = False

    data: PreferenceSource
    loss: PreferenceLoss
    reference: Reference | None = None

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if self.loss.rates_scores != self.rates_scores:
            fitting = "bradley_terry" if self.rates_scores else "sigmoid, ipo, kto, orpo or simpo"
            yield f"loss is {type(self.loss).__name__}: not a loss of this command. Set loss={fitting}."
        elif self.loss.needs_reference and self.reference is None:
            yield (
                f"reference is null: {type(self.loss).__name__} compares with one. Set reference=same_as_actor, or "
                "loss=simpo."
            )
        if not self.loss.is_paired and self.trainer.batch_size < 2:
            yield "trainer.batch_size is 1: the loss reads responses to other prompts of the batch. Set 2 or more."
        if not self.loss.is_paired and self.used_reference is not None and self.used_reference.precompute:
            kind = type(self.loss).__name__
            yield f"reference is a PrecomputedReference: {kind} reads other rows too. Set reference=same_as_actor."
        model = None if self.used_reference is None else self.used_reference.model
        if model is not None and (fault := model.policy_fault()) is not None:
            yield f"reference.model.{fault}"

    @property
    def used_reference(self) -> Reference | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.reference if self.loss.needs_reference else None

    def build(self, context: BuildContext) -> PreferenceTrainer:
        return PreferenceTrainer(self, context)


@component
class RewardModelRun(PreferenceRun):
    """The components of the training of a reward model: the root of `conf/reward_model.yaml`."""

    host_type: ClassVar[type[SFTHost]] = RewardModelHost
    rates_scores: ClassVar[bool] = True

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        actor, length = self.actor, getattr(self.data, "max_length", 0)
        if actor.router_aux_loss_coef:
            yield "actor.router_aux_loss_coef is set: reward models are trained without it. Set it to 0."
        if isinstance(actor.model, ModuleModel):
            yield f"actor.model is a {type(actor.model).__name__}: a reward model needs one of transformers."
        if length == actor.model.max_positions():
            yield f"data.max_length is {length}: a reward model needs one more token than its rows. Lower it by 1."


class SFTTrainer(LoopTrainer):
    """The running trainer. Call `close` when done, or use it as a context manager."""

    uses: tuple[str, ...] = ()

    def prepared(self, splits: DataSplits) -> DataSplits:
        """The data in the form that this trainer reads."""
        return splits

    def _build(self, run: SFTRun, context: BuildContext) -> None:
        self.context = context = with_tokenizer(context, run.actor, run.data)
        assert context.run_dir is not None
        self.run_dir = context.run_dir
        with faults_below("data"):
            splits = run.data.build(context)
        splits = self.prepared(splits)
        self._use_data(splits, run.trainer.batch_size, "trainer.batch_size")
        self.tracker = run.tracker.build(context)
        self.stages = StageTimers(self.tracker)
        self.saving = prepare_saving(run, context, run.loss_key, self.uses, is_restart=bool(self.restarts))
        self.guards = Guards(self, NonFiniteGuard(run.trainer.safety, self.run_dir))
        self._plan(context)
        restore = restore_of(self.saving)
        host = self.host(run, restore)
        context = replace(context, row_tokens=getattr(run.data, "max_length", None))
        self.cluster = start_cluster(host, run.trainer, context)
        roles = role_handles(self.cluster, host)
        self.learner, self.reference, self._saved_as = roles["learner"], roles.get("reference"), host.saved_as
        self.saving.rank_writers = rank_writers_of(self.cluster, self.trained, run.checkpoint)

    def host(self, run: SFTRun, restore: RestoreSource | None) -> SFTHost:
        """The roles that this trainer starts."""
        return run.host(self.num_steps, restore)

    @stage
    def step(self, batch: DataProto, step: int) -> dict[str, float]:
        """One optimizer step on the mean negative log-likelihood per learned token."""
        self.saving.wait_copied()
        with self.stages.stage("update") as note:
            metrics = self.optimizer_step(batch, "sft", self.learner, lambda: batch)
            note.say(f"{len(batch)} sequences, loss {metrics['loss']:.4f}")
        tokens = float(batch["loss_mask"].sum())
        metrics = {f"sft/{k}": v for k, v in metrics.items()}
        return {**metrics, "perf/samples": float(len(batch)), "perf/tokens": tokens}

    def evaluate(self, step: int) -> dict[str, float]:
        """Loss and next-token accuracy on the held-out rows."""
        if self.eval_data is None:
            return {}
        return self.evaluation_metrics(self.evaluation_records(range(len(self.eval_data)), step))

    def evaluation_records(self, rows: Sequence[int], step: int) -> list[dict[str, Any]]:
        """One record with the sums over some held-out rows."""
        assert self.eval_data is not None
        return [{"kind": "sequences", **self.learner.evaluate(self.eval_data.collate(rows)).result()}]

    def evaluation_metrics(self, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        nll, correct, tokens = (sum(sums[name] for sums in records) for name in ("nll", "correct", "tokens"))
        return {"eval/loss": nll / tokens, "eval/token_accuracy": correct / tokens}

    @property
    def trained(self) -> dict[str, Any]:
        """The role whose weights are updated, by its name in checkpoints."""
        return {self._saved_as: self.learner}

    @property
    def parts(self) -> dict[str, Stateful]:
        assert self.cluster is not None
        generators = GeneratorStates(self.cluster, self.learner, self.settings.seed)
        return {"sampler": self.sampler, "safety": self.guards.monitor, "rng": generators}


class ReferenceScores:
    """Log-probs of the reference, computed once for all pairs of the data (`ref_scores` of `PreferenceDataset`).

    Rows are scored in the batches of the first epoch and of an evaluation, so these log-probs equal, bit by bit, those
    that steps would compute. Later epochs have other batches, which changes rounding.
    """

    def __init__(self, train: Any, evaluation: Any):
        self._data: dict[str, PreferenceDataset] = {"train": train} | (
            {} if evaluation is None else {"eval": evaluation}
        )

    def compute(self, reference: Any, sampler: DataSampler) -> None:
        """Score the rows in the batches of a sampler at its start, and free the reference."""
        order, remaining = copy.copy(sampler), torch.ones(len(self._data["train"]), dtype=torch.bool)
        batches = [order.next_batch() for _ in range(order.batches_per_epoch)]
        remaining[torch.cat(batches)] = False
        batches += [rows for rows in remaining.nonzero()[:, 0].split(sampler.batch_size) if len(rows)]
        for name, data in self._data.items():
            scores = torch.zeros(len(data), 2, dtype=torch.float64)
            for rows in batches if name == "train" else [torch.arange(len(data))]:
                found = reference.compute_log_probs(data.collate(rows)).result()["ref_log_probs"]
                scores[rows] = found.double().sum(dim=1).view(2, -1).T
            data.ref_scores = scores
        reference.free().result()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: data.ref_scores for name, data in self._data.items() if data.ref_scores is not None}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the scores of a checkpoint; without any, the present scores are kept."""
        for name in self._data.keys() & state.keys():
            self._data[name].ref_scores = state[name]


class PreferenceTrainer(SFTTrainer):
    """The running trainer of a policy or a reward model on preferences."""

    scores: ReferenceScores | None = None

    def _build(self, run: SFTRun, context: BuildContext) -> None:
        assert isinstance(run, PreferenceRun)
        self.loss, reference = run.loss, run.used_reference
        self.uses, self.scores = () if reference is None else ("ref_log_probs",), None
        super()._build(run, context)
        if self.scores is not None and self.reference is not None:
            with self.stages.stage("ref"):
                self.scores.compute(self.reference, self.sampler)

    def host(self, run: SFTRun, restore: RestoreSource | None) -> SFTHost:
        """The roles; without the reference if a checkpoint has its log-probs."""
        host, point = super().host(run, restore), self.saving.resumed
        if host.reference is None or not host.reference.precompute:
            return host
        self.scores = ReferenceScores(self.train_data, self.eval_data)
        is_saved = point is not None and bool(point.read_tensors("reference_scores"))
        return replace(host, reference=None) if is_saved else host

    @property
    def parts(self) -> dict[str, Stateful]:
        return super().parts | ({} if self.scores is None else {"reference_scores": self.scores})

    def prepared(self, splits: DataSplits) -> DataSplits:
        """Split pairs for a loss of labelled responses, and check the tokenizer of the reference."""
        run = self.description
        model = None if run.used_reference is None else run.used_reference.model
        if model is not None and (fault := tokenizer_fault("reference.model", model, self.context.tokenizer)):
            raise ConfigError(fault)
        named = {"train": splits.train, "eval": splits.eval}
        if not self.loss.is_paired:
            taken = {name: x.unpaired() if getattr(x, "is_paired", False) else x for name, x in named.items()}
            each, mixture = len(taken["train"]) // len(splits.train), splits.mixture
            if mixture is not None:
                mixture = replace(mixture, sizes=tuple(each * size for size in mixture.sizes))
            return replace(splits, **taken, mixture=mixture)
        if any(x is not None and not x.is_paired for x in named.values()):
            raise ConfigError(
                f"data has single responses: {type(self.loss).__name__} compares pairs. Give columns of chosen and "
                f"rejected responses{'' if self.loss.rates_scores else ', or set loss=kto'}."
            )
        return splits

    @stage
    def step(self, batch: DataProto, step: int) -> dict[str, float]:
        """One optimizer step on the loss of a batch of pairs, or of labelled responses."""
        self.saving.wait_copied()
        with self.stages.stage("score"):
            coefs, metrics = self._evaluated(batch)
        rows = batch.union(DataProto.from_dict({"row_coefs": coefs}))
        rows = rows if self.loss.is_paired else rows[: len(rows) // 2]  # mismatched rows have no gradient
        with self.stages.stage("update") as note:
            update = self.optimizer_step(rows, "preference", self.learner, lambda: batch)
            loss = metrics.pop("loss")
            update["loss"] = loss if math.isfinite(update["loss"]) else update["loss"]
            note.say(f"{len(rows)} responses, loss {loss:.4f}")
        metrics |= {f"preference/{name}": x for name, x in update.items()}
        tokens = float(rows["response_mask"].sum())
        return {**metrics, "perf/samples": float(len(rows)), "perf/tokens": tokens}

    def evaluate(self, step: int) -> dict[str, float]:
        if self.eval_data is None:
            return {}
        metrics = self._evaluated(self.eval_data.collate(range(len(self.eval_data))))[1]
        return {f"eval/{name}": x for name, x in metrics.items()}

    def _evaluated(self, batch: DataProto) -> tuple[torch.Tensor, dict[str, float]]:
        """See `verl.algorithms.preference_losses.evaluated`."""
        known, reference = batch.batch.get("ref_scores"), self.reference
        pending = None if reference is None or known is not None else reference.compute_log_probs(batch)
        scores = self.learner.row_scores(batch).result()["row_scores"]
        x = batch.batch
        rows = PreferenceRows(
            scores,
            x["response_mask"].sum(dim=1).double(),
            x["is_chosen"],
            known if pending is None else pending.result()["ref_log_probs"].double().sum(dim=1),
            x["row_margins"].double() if "row_margins" in x else None,
        )
        return evaluated(self.loss, rows)
