"""Roles that share one process, and how that process builds them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from verl.algorithms.algorithm import Algorithm
from verl.component import BuildContext, Description, component
from verl.data.chat_template import pin_date, template_in_use, use_template
from verl.engines.parallel_dims import Parallelism
from verl.engines.sharding import NoSharding, Sharding
from verl.environments.base import EnvironmentDescription
from verl.errors import faults_below
from verl.ops.cpu_matmul import use_library
from verl.rewards.reward_model import RewardModel
from verl.rollout.base import Rollout
from verl.utils.main_memory import give_back
from verl.utils.memory import computes_bfloat16, make_current, release_cached
from verl.utils.seeding import derive_seed, seed_everything
from verl.workers.actor import Actor, ActorWorker
from verl.workers.base import TrainedRole, TrainedWorker, roles_on_device
from verl.workers.critic import Critic, CriticWorker
from verl.workers.load_state import RestoreSource
from verl.workers.preference import PreferenceWorker, RewardModelWorker
from verl.workers.rank_checkpoint import RankCheckpointWriter
from verl.workers.reference import Reference, ReferenceWorker
from verl.workers.reward import RewardWorker
from verl.workers.sft import SFTWorker


@dataclass
class RoleProcess:
    """The roles of one process.

    Attributes:
        parallels: layout of the process for each sharding; the first one opened the process group.
        workers: role name -> the running role.
        rank_writer: writes this process's part of checkpoints.
        shared_device: the device, if other processes use it too: torch's cached memory is freed after each call. None
            for an exclusive device.
    """

    parallels: dict[Sharding, Parallelism] = field(default_factory=dict)
    workers: dict[str, Any] = field(default_factory=dict)
    rank_writer: RankCheckpointWriter | None = None
    shared_device: str | None = None

    def saves(self, trained: Mapping[str, TrainedWorker]) -> None:
        """Set up roles, by component name, to write their parts of checkpoints."""
        self.rank_writer = RankCheckpointWriter(next(iter(self.parallels.values())), trained)
        for worker in trained.values():
            worker.rank_writer = self.rank_writer

    def parallel(self, sharding: Sharding, context: BuildContext) -> Parallelism:
        """Layout of this process; roles with the same sharding share it."""
        if sharding not in self.parallels:
            self.parallels[sharding] = sharding.build(context)
        return self.parallels[sharding]

    def call(self, role: str, method: str, args: tuple[Any, ...]) -> Any:
        result = getattr(self.workers[role], method)(*args)
        if self.shared_device is not None:
            release_cached(self.shared_device, always=True)
        return result

    def close(self) -> None:
        """Free the models, stop their processes, and leave the process group."""
        if self.rank_writer is not None:
            self.rank_writer.close()
        for worker in self.workers.values():
            if hasattr(worker, "close"):
                worker.close()
        self.workers.clear()
        for parallel in reversed(self.parallels.values()):
            parallel.close()
        self.parallels.clear()
        give_back()


@component
class RLHost(Description):
    """Actor and optional other roles, colocated in each process.

    Args:
        sharding: default for roles without their own.
        total_updates: optimizer steps of the whole run, for learning-rate schedules.
        restore: the checkpoint that actor and critic continue from.
        environment: environment for episodes with the actor's engine; None if a response is one turn.
        reward: reward model of the role `rm`; None if the driver computes the reward.
        rollout_worker: the host of the role `rollout`, for `only`; None if there is none or it is started separately.
        actor_generates: whether the actor has a rollout engine; if not, only rollout workers have one.
        chosen: the roles of this host; None for all.
        is_alone: whether there is only one process, so that nothing is sharded.
    """

    actor: Actor
    critic: Critic | None
    reference: Reference | None
    rollout: Rollout
    algorithm: Algorithm
    sharding: Sharding
    total_updates: int
    restore: RestoreSource | None = None
    environment: EnvironmentDescription | None = None
    reward: RewardModel | None = None
    rollout_worker: Any = None
    actor_generates: bool = True
    chosen: tuple[str, ...] | None = None
    is_alone: bool = False

    def worker_types(self) -> dict[str, type]:
        """Role name -> class of the running role, known before anything is built."""
        types: dict[str, type] = {"actor": ActorWorker}
        if self.critic is not None:
            types["critic"] = CriticWorker
        if self.reference is not None:
            types["reference"] = ReferenceWorker
        if self.reward is not None:
            types["rm"] = RewardWorker
        if self.rollout_worker is not None:
            types |= self.rollout_worker.worker_types()
        return {role: kind for role, kind in types.items() if self.chosen is None or role in self.chosen}

    def shardings(self) -> dict[str, Sharding]:
        shardings = {"actor": self.actor.sharding}
        shardings["critic"] = None if self.critic is None else self.critic.sharding
        shardings["reference"] = None if self.reference is None else reference_sharding(self.reference, self.actor)
        alone = shardings["rollout"] = NoSharding()
        return {role: alone if self.is_alone else shardings.get(role) or self.sharding for role in self.worker_types()}

    def only(self, roles: Collection[str], size: int) -> Any:
        """Description of some of the roles, for `size` separate processes; rollout workers have their own host."""
        return self.rollout_worker if "rollout" in roles else replace(self, chosen=tuple(roles), is_alone=size == 1)

    def build(self, context: BuildContext) -> RoleProcess:
        """Load every role. Each is seeded by its name, so that its random numbers do not depend on other roles."""
        make_current(context.device)
        use_library(context.cpu_matmul)
        host = RoleProcess(shared_device=context.device if context.shares_device else None)
        try:
            here = roles_on_device(self, computes_bfloat16(context.device))
            here = here if self.restore is None else replace(here, restore=self.restore.here())
            here._start_roles(host, with_tokenizer(context, self.actor))
            host.saves({name: role for name, role in host.workers.items() if isinstance(role, TrainedWorker)})
        except BaseException:
            host.close()
            raise
        return host

    def _start_roles(self, host: RoleProcess, context: BuildContext) -> None:
        types, actor, progress = self.worker_types(), None, (self.total_updates, self.restore)
        parallels = {role: host.parallel(sharding, context) for role, sharding in self.shardings().items()}
        if "actor" in types:
            seed_everything(derive_seed(context.seed, "actor"))
            actor = host.workers["actor"] = self.actor.start(
                context,
                parallels["actor"],
                self.algorithm,
                self.rollout,
                *progress,
                self.environment,
                self.actor_generates,
            )
        if self.critic is not None and "critic" in types:
            seed_everything(derive_seed(context.seed, "critic"))
            host.workers["critic"] = self.critic.start(context, parallels["critic"], self.algorithm, *progress)
        if self.reference is not None and "reference" in types:
            scoring = self.rollout.temperature, self.algorithm.num_candidates
            host.workers["reference"] = self.reference.start(
                context, parallels["reference"], self.actor, actor, *scoring
            )
        if self.reward is not None and "rm" in types:
            host.workers["rm"] = RewardWorker.start(self.reward, context)


@component
class SFTHost(Description):
    """The learner of SFT or preferences in each process, with the reference for a preference loss if there is one.

    Attributes:
        worker: class of the running learner.
        saved_as: name of the learner in checkpoints.
    """

    worker: ClassVar[type[SFTWorker | RewardModelWorker]] = SFTWorker
    saved_as: ClassVar[str] = "actor"

    learner: Actor
    sharding: Sharding
    total_updates: int
    restore: RestoreSource | None = None
    reference: Reference | None = None

    def worker_types(self) -> dict[str, type]:
        return {"learner": self.worker} | ({} if self.reference is None else {"reference": ReferenceWorker})

    def shardings(self) -> dict[str, Sharding]:
        shardings = {"learner": self.learner.sharding or self.sharding}
        if self.reference is not None:
            shardings["reference"] = reference_sharding(self.reference, self.learner) or self.sharding
        return shardings

    def only(self, roles: Collection[str], size: int) -> SFTHost:
        """This host: its roles cannot be split over processes."""
        return self

    def build(self, context: BuildContext) -> RoleProcess:
        make_current(context.device)
        use_library(context.cpu_matmul)
        host, learner = RoleProcess(), self.learner.on_device(computes_bfloat16(context.device))
        parallels = {role: host.parallel(sharding, context) for role, sharding in self.shardings().items()}
        seed_everything(derive_seed(context.seed, "learner"))
        context = with_tokenizer(context, self.learner)
        restore = None if self.restore is None else self.restore.here()
        running = self.worker.start(learner, context, parallels["learner"], self.total_updates, restore)
        host.workers["learner"] = running
        if self.reference is not None:
            host.workers["reference"] = self.reference.start(context, parallels["reference"], learner, running, 1.0)
        host.saves({self.saved_as: running})
        return host


@component
class PreferenceHost(SFTHost):
    worker = PreferenceWorker


@component
class RewardModelHost(SFTHost):
    worker = RewardModelWorker
    saved_as = "reward_model"


def reference_sharding(reference: Reference, actor: Actor) -> Sharding | None:
    """Sharding of the reference; the actor's if the reference is the actor without its adapter. None for the run's."""
    is_the_actor = reference.model is None and actor.lora is not None
    return reference.sharding or (actor.sharding if is_the_actor else None)


def with_tokenizer(context: BuildContext, role: TrainedRole, data: Any = None) -> BuildContext:
    """The context with the role's tokenizer, loaded if it has none, and the data's chat template."""
    if context.tokenizer is None:
        with faults_below("actor.model"):
            context = replace(context, tokenizer=role.model.load_tokenizer())
    if data is not None:
        with faults_below("data"):
            context = replace(context, chat_template=template_in_use(context.tokenizer, data))
    use_template(context.tokenizer, context.chat_template)
    if context.day:
        pin_date(context.tokenizer, context.day)
    return context
