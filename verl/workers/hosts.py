"""Which roles live together in one process, and how that process builds them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from verl.algorithms.algorithm import Algorithm
from verl.description import BuildContext, Description
from verl.engines.sharding import Parallel, Sharding
from verl.rewards.model import RewardModel
from verl.rollout.base import Rollout
from verl.utils.seeding import derive_seed, seed_everything
from verl.workers.actor import Actor, ActorWorker
from verl.workers.critic import Critic, CriticWorker
from verl.workers.learner import Learner
from verl.workers.reference import Reference, ReferenceWorker
from verl.workers.reward import RewardWorker
from verl.workers.state import Restore
from verl.workers.training import TrainedRole


@dataclass
class Host:
    """The roles of one process.

    Attributes:
        parallel: this process among its siblings.
        workers: role name -> the running role.
    """

    parallel: Parallel
    workers: dict[str, Any] = field(default_factory=dict)

    def call(self, role: str, method: str, args: tuple[Any, ...]) -> Any:
        return getattr(self.workers[role], method)(*args)

    def close(self) -> None:
        """Let go of the models, end what they started, and leave the group of processes."""
        for worker in self.workers.values():
            if hasattr(worker, "close"):
                worker.close()
        self.workers.clear()
        self.parallel.close()


@dataclass(frozen=True, kw_only=True)
class RLHost(Description):
    """Actor, and critic and reference where they are wanted, side by side in each process.

    Args:
        total_updates: optimizer steps of the whole run, for the schedules of the learning rates.
        restore: the checkpoint that actor and critic go on from.
        reward: a reward that is a model, to live here as the role `rm`; None where the driver has it.
        chosen: the roles that live here; None for all.
    """

    actor: Actor
    critic: Critic | None
    reference: Reference | None
    rollout: Rollout
    algorithm: Algorithm
    sharding: Sharding
    total_updates: int
    restore: Restore | None = None
    reward: RewardModel | None = None
    chosen: tuple[str, ...] | None = None

    def worker_types(self) -> dict[str, type]:
        """Role name -> class of the running role, known before anything is built."""
        types: dict[str, type] = {"actor": ActorWorker}
        if self.critic is not None:
            types["critic"] = CriticWorker
        if self.reference is not None:
            types["reference"] = ReferenceWorker
        if self.reward is not None:
            types["rm"] = RewardWorker
        return {role: kind for role, kind in types.items() if self.chosen is None or role in self.chosen}

    def only(self, roles: Collection[str], sharding: Sharding) -> RLHost:
        """Some of the roles, to live apart from the others."""
        return replace(self, chosen=tuple(roles), sharding=sharding)

    def build(self, context: BuildContext) -> Host:
        """Load every role. Each is seeded by its own name, so that what one draws never depends on another."""
        host = Host(self.sharding.build(context))
        try:
            self._start_roles(host, with_tokenizer(context, self.actor))
        except BaseException:
            host.close()
            raise
        return host

    def _start_roles(self, host: Host, context: BuildContext) -> None:
        wanted, actor = self.worker_types(), None
        if "actor" in wanted:
            seed_everything(derive_seed(context.seed, "actor"))
            actor = host.workers["actor"] = self.actor.start(
                context, host.parallel, self.algorithm, self.rollout, self.total_updates, self.restore
            )
        if self.critic is not None and "critic" in wanted:
            seed_everything(derive_seed(context.seed, "critic"))
            host.workers["critic"] = self.critic.start(
                context, host.parallel, self.algorithm, self.total_updates, self.restore
            )
        if self.reference is not None and "reference" in wanted:
            host.workers["reference"] = self.reference.start(
                context, host.parallel, self.actor, actor, self.rollout.temperature
            )
        if self.reward is not None and "rm" in wanted:
            host.workers["rm"] = RewardWorker.start(self.reward, context)


@dataclass(frozen=True, kw_only=True)
class SFTHost(Description):
    """The learner of supervised fine-tuning, alone in each process."""

    learner: TrainedRole
    sharding: Sharding
    total_updates: int
    restore: Restore | None = None

    def worker_types(self) -> dict[str, type]:
        return {"learner": Learner}

    def build(self, context: BuildContext) -> Host:
        """Load the model."""
        host = Host(self.sharding.build(context))
        seed_everything(derive_seed(context.seed, "learner"))
        context = with_tokenizer(context, self.learner)
        host.workers["learner"] = Learner.start(self.learner, context, host.parallel, self.total_updates, self.restore)
        return host


def with_tokenizer(context: BuildContext, role: TrainedRole) -> BuildContext:
    """The context with the role's tokenizer, loaded unless it is there already."""
    return context if context.tokenizer is not None else replace(context, tokenizer=role.model.load_tokenizer())
