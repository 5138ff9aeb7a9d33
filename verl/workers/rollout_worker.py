"""The role `rollout`: a rollout engine in its own process, with a copy of the actor's model.

actor ── weights ──> load(version, weights) ──> the copy ──> digests, which the driver compares
                     generate(prompts)      ──> rows, with the version of the weights that sampled them

Calls run in the order in which they were made. With `rollout.weight_update=drain` weights change only between two
batches. With `in_flight` a `StepLoop` generates, and weights change between two tokens:

                     begin_batch(prompts), finished_groups(known), finish_batch(step)
                     save_rows(step)        ──> open rows and finished ones, for a checkpoint
                     restore_rows(state)

An engine with its own weights receives and verifies those of the copy, as in any sync. It is the only engine of the
run, and also generates for evaluations.

Each of N processes has a copy, an engine and a schedule, and generates for every N-th prompt of a batch. Calls with a
result per engine return a list by rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verl.checkpoint.core.hashing import digest_of, flat_view
from verl.component import BuildContext, Description, component
from verl.engines.sharding import NoSharding, Sharding
from verl.environments.base import EnvironmentDescription
from verl.model_paths.check import paths_for
from verl.models.hf_state_dict import live_tensors
from verl.ops.cpu_matmul import use_library
from verl.protocol import DataProto
from verl.protocol.dispatch import by_rows, on_all, on_each
from verl.protocol.serialization import raw_bytes
from verl.rollout.base import GenerationRequest, Rollout
from verl.rollout.responses import ResponseGenerator
from verl.rollout.rows import refuse_wrong_responses
from verl.utils.memory import computes_bfloat16, make_current
from verl.utils.seeding import derive_seed, seed_everything
from verl.workers.actor import Actor
from verl.workers.colocated import RoleProcess, with_tokenizer
from verl.workers.schedule import ScheduleOptions
from verl.workers.step_loop import StepLoop


class RolloutWorker:
    """The running role `rollout`.

    Args:
        model: the copy; its weights are arbitrary before the first `load`.
        loop: generator for weights that change in flight; None if they change between two batches.
        share: rank of this process, and number of processes of the role.
    """

    def __init__(
        self, model: Any, generator: ResponseGenerator, loop: StepLoop | None = None, share: tuple[int, int] = (0, 1)
    ):
        self.model, self.generator, self.version = model, generator, -1
        self.loop: Any = loop
        self._rank, self._size = share

    @on_each
    def load(self, version: int, weights: Mapping[str, Tensor]) -> dict[str, str]:
        """Load the weights of `ActorWorker.rollout_weights`; returns the digest of each tensor of the model."""
        take = partial(self._take, weights)
        held = take() if self.loop is None else self.loop.take_weights(version, take)
        self.version = version
        return weight_digests(held)

    @by_rows
    def generate(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        """Sample responses or episodes, as `ActorWorker.generate` does."""
        rows = (self.generator if self.loop is None else self.loop).generate(prompts, request)
        self._refuse_wrong(rows)
        return rows.union(DataProto.from_dict({"policy_version": torch.full((len(rows),), self.version)}))

    @on_all
    def begin_batch(self, prompts: DataProto, request: GenerationRequest) -> None:
        """Start sampling responses to this process's prompts of a batch, concurrently with earlier batches."""
        self.loop.begin(prompts[list(range(self._rank, len(prompts), self._size))], request)

    @on_each
    def finish_batch(self, step: int) -> tuple[DataProto, float, tuple[int, list[str]]]:
        """Responses of the batch of a training step, with the idle seconds and `Schedule.take_unwritten` since the last
        call."""
        rows = self.loop.finish(step)
        self._refuse_wrong(rows)
        return rows, self.loop.take_idle_s(), self.loop.schedule.take_unwritten()

    @on_each
    def finished_groups(
        self, known: Mapping[int, Collection[int]], awaited: int | None = None
    ) -> tuple[bool, dict[int, DataProto]]:
        return self.loop.finished_groups(known, awaited)

    @on_each
    def take_schedule(self) -> tuple[int, list[str]]:
        return self.loop.schedule.take_unwritten()

    @on_each
    def save_rows(self, step: int) -> dict[str, Tensor]:
        """Open rows and finished ones after a training step; see `StepLoop.save`."""
        return self.loop.save(step)

    @on_each
    def restore_rows(
        self, states: Sequence[Mapping[str, Tensor]], version: int, weights: Mapping[str, Tensor]
    ) -> dict[str, str]:
        """Continue from the states of `save_rows` and their weights, or from nothing if empty; returns the digest of
        each tensor."""
        held = self.loop.restore(states[self._rank] if states else {}, version, partial(self._take, weights))
        self.version = version
        return weight_digests(held)

    @on_all
    def engine_kind(self) -> tuple[str, str | None]:
        """Class name and compute dtype of the engine; a dtype of None is the model's."""
        engine = self.generator.engine
        return type(engine).__name__, engine.compute_type

    def close(self) -> None:
        if self.loop is not None:
            self.loop.close()
        self.generator.close()

    @torch.no_grad()
    def _take(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Load weights and return the tensors that hold them. A decoding model may hold narrower copies."""
        live = live_tensors(self.model)
        held = {name: live[name].copy_(x) for name, x in weights.items()}
        if self.loop is None or self.generator.rollout.runs_ahead:
            self.generator.sync()
        return held

    def _refuse_wrong(self, rows: DataProto) -> None:
        refuse_wrong_responses(rows, self.model.config.get_text_config().vocab_size)


@component
class RolloutHost(Description):
    """Host of the role `rollout`, which is alone in its processes.

    Args:
        actor: the role whose model is copied.
        environment: environment of the episodes, which run in these processes; None if a response is one turn.
        schedule: options if weights change between two tokens; None if they change between two batches.
    """

    actor: Actor
    rollout: Rollout
    environment: EnvironmentDescription | None = None
    schedule: ScheduleOptions | None = None

    def worker_types(self) -> dict[str, type]:
        return {"rollout": RolloutWorker}

    def shardings(self) -> dict[str, Sharding]:
        return {"rollout": NoSharding()}

    def build(self, context: BuildContext) -> RoleProcess:
        """Load the actor's initial model and attach the engine."""
        make_current(context.device)
        use_library(context.cpu_matmul)
        shared = context.device if context.shares_device else None
        host, actor = RoleProcess(shared_device=shared), self.actor.on_device(computes_bfloat16(context.device))
        context = with_tokenizer(context, actor)
        parallel = host.parallel(self.shardings()["rollout"], context)
        seed_everything(derive_seed(context.seed, "actor"))
        model = actor.load("causal_lm", context.device, None, "actor", parallel)
        paths_for(model, context.row_tokens or self.rollout.max_new_tokens, "actor.model", shares_tokens=False)
        parallel.shard_model(model, actor.decided_autocast)
        rollout, loop = self.rollout, None
        if hasattr(rollout, "sleep"):
            rollout = replace(rollout, sleep=False)  # it must always be able to generate
        generator = actor.generator(model, rollout, self.environment, context)
        if self.schedule is not None:
            loop = StepLoop(generator, context.row_tokens, self.schedule.build(context))
        host.workers["rollout"] = RolloutWorker(model, generator, loop, (context.rank, context.world_size))
        return host


def weight_digests(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """The BLAKE3 of the bytes of each tensor."""
    return {name: digest_of(flat_view(raw_bytes(x.detach().cpu()).numpy())) for name, x in weights.items()}
