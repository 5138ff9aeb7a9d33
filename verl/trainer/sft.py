"""Supervised fine-tuning: maximum likelihood of given completions, in the same loop as PPO."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from verl.checkpoint.config import Checkpointing
from verl.cluster.rpc import role_handles
from verl.component import BuildContext, Description, as_plain, component
from verl.data.base import TextSource
from verl.engines.sharding import Sharding
from verl.errors import faults_below
from verl.monitoring.batch_dump import Attribution
from verl.monitoring.nonfinite import NonFiniteGuard
from verl.protocol import DataProto
from verl.storage.config import Storage
from verl.tracking.base import Trackers
from verl.trainer.config import SFTSettings, unused_settings
from verl.trainer.setup import (
    LoopTrainer,
    fit_with_restarts,
    metric_faults,
    placement_faults,
    prepare_saving,
    rank_writers_of,
    restore_of,
    resume_faults,
    saving_faults,
    sharding_faults,
    start_cluster,
)
from verl.trainer.state.driver_state import (
    GeneratorStates,
    Stateful,
)
from verl.trainer.timers import StageTimers
from verl.trainer.train_loop import TrainResult, fit
from verl.workers.actor import Actor
from verl.workers.colocated import SFTHost, with_tokenizer


@component
class SFTRun(Description):
    """Everything that one run of supervised fine-tuning is made of: the root of `conf/sft.yaml`."""

    actor: Actor
    sharding: Sharding
    data: TextSource
    trainer: SFTSettings
    tracker: Trackers
    checkpoint: Checkpointing | None = None
    storage: Storage | None = None
    resume: str | None = None

    def faults(self) -> Iterator[str]:
        """Faults between components, each with its full config path."""
        yield from sharding_faults(self)
        yield from placement_faults(self.trainer, self.shardings())
        yield from metric_faults(self, ("eval/loss", "eval/token_accuracy"))
        if (fault := self.actor.model.policy_fault()) is not None:
            yield f"actor.model.{fault}"
        length, limit = getattr(self.data, "max_length", None), self.actor.model.max_positions()
        if length is not None and limit is not None and length > limit:
            yield f"data.max_length is {length}: actor.model holds {limit} tokens. Lower it."

    def shardings(self) -> dict[str, Sharding]:
        """Sharding of the actor: its own, or that of the run."""
        return {"actor": self.actor.sharding or self.sharding}

    def unused_settings(self, changed: Sequence[str]) -> str | None:
        """One line about the changed settings, by path, that this run never reads; None if it reads all."""
        return unused_settings(self, changed)

    def machine_faults(self) -> Iterator[str]:
        yield from resume_faults(self.resume)

    def preflight(self, context: BuildContext) -> Iterator[str]:
        placement, settings = self.trainer.placement, self.trainer
        if placement is not None:
            yield from placement.lacks(("actor",), settings.nnodes, settings.n_gpus_per_node, settings.device)
        yield from saving_faults(self, context)

    def build(self, context: BuildContext) -> SFTTrainer:
        """Load data and weights, and start the processes of the sharding."""
        return SFTTrainer(self, context)


class SFTTrainer(LoopTrainer):
    """The running trainer. Call `close` when done, or use it as a context manager."""

    def _build(self, run: SFTRun, context: BuildContext) -> None:
        with faults_below("actor.model"):
            self.context = context = with_tokenizer(context, run.actor)
        assert context.run_dir is not None
        self.run_dir = context.run_dir
        with faults_below("data"):
            splits = run.data.build(context)
        self._use_data(splits, run.trainer.batch_size, "trainer.batch_size")
        self.tracker = run.tracker.build(context)
        self.stages = StageTimers(self.tracker)
        self.saving = prepare_saving(run, context, "sft/loss", is_restart=bool(self.restarts))
        self.guard = NonFiniteGuard(run.trainer.safety, self.run_dir, context.tokenizer, self._blame)
        self._plan(context)
        restore = restore_of(self.saving)
        host = SFTHost(learner=run.actor, sharding=run.sharding, total_updates=self.num_steps, restore=restore)
        context = replace(context, row_tokens=getattr(run.data, "max_length", None))
        self.cluster = start_cluster(host, run.trainer, context)
        self.learner = role_handles(self.cluster, host)["learner"]
        self.saving.rank_writers = rank_writers_of(self.cluster, self.trained, run.checkpoint)

    def step(self, batch: DataProto, step: int) -> dict[str, float]:
        """One optimizer step on the mean negative log-likelihood per learned token."""
        assert self.cluster is not None
        self.cluster.step = self.guard.step = step
        self.saving.wait_copied()
        with self.stages.stage("update") as note:
            metrics = self.learner.update(self.guard.planted(batch)).result()
            self.guard.judge("sft", metrics, lambda: batch)
            note.say(f"{len(batch)} sequences, loss {metrics['loss']:.4f}")
        tokens = float(batch["loss_mask"].sum())
        metrics = {f"sft/{k}": v for k, v in metrics.items()}
        self.guard.watch(metrics, batch)
        return {**metrics, "perf/samples": float(len(batch)), "perf/tokens": tokens}

    def evaluate(self, step: int) -> dict[str, float]:
        """Loss and share of tokens predicted right, given the true text before them, on the held-out rows."""
        if self.eval_data is None:
            return {}
        sums = self.learner.evaluate(self.eval_data.collate(range(len(self.eval_data)))).result()
        return {
            "eval/loss": sums["nll"] / sums["tokens"],
            "eval/token_accuracy": sums["correct"] / sums["tokens"],
        }

    def _blame(self, metric: str, batch: DataProto) -> Attribution:
        """Rows ranked by their loss under the current weights; costs a forward pass, only after a fault."""
        sums = [self.learner.evaluate(batch[row]).result() for row in range(len(batch))]
        return Attribution("loss per token", torch.tensor([x["nll"] / max(1.0, x["tokens"]) for x in sums]))

    @property
    def trained(self) -> dict[str, Any]:
        """The role whose weights are updated, by its name in checkpoints."""
        return {"actor": self.learner}

    @property
    def parts(self) -> dict[str, Stateful]:
        """The driver's parts of a checkpoint."""
        assert self.cluster is not None
        generators = GeneratorStates(self.cluster, self.learner, self.settings.seed)
        return {"sampler": self.sampler, "safety": self.guard, "rng": generators}

    def fit(self) -> TrainResult:
        """Train to the end; see `verl.trainer.train_loop.fit`. In Ray, a lost worker costs the steps since the last
        save.
        """
        return fit_with_restarts(self, self._fit_once, self.settings.max_restarts)

    def _fit_once(self, may_restart: bool) -> TrainResult:
        return fit(self, as_plain(self.description), may_restart=may_restart)
