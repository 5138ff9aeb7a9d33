"""PPODescription: the components of a policy-gradient run, and what follows from several of them."""

from __future__ import annotations

from typing import Any

from verl.algorithms.algorithm import Algorithm
from verl.checkpoint.config import Checkpointing
from verl.cluster.placement import SAMPLER
from verl.component import Description, component
from verl.data.base import PromptSource
from verl.engines.sharding import NoSharding, Sharding
from verl.environments.base import EnvironmentDescription
from verl.replay.config import TieredReplay
from verl.rewards.base import RewardDescription
from verl.rollout.base import Rollout
from verl.sandbox.base import Sandbox
from verl.storage.config import Storage
from verl.tracking.base import Trackers
from verl.trainer.config import PPOSettings
from verl.workers.actor import Actor
from verl.workers.colocated import reference_sharding
from verl.workers.critic import Critic
from verl.workers.reference import Reference


@component
class PPODescription(Description):
    """The components of a policy-gradient run; `verl.trainer.ppo_config.PPORun` adds checks and the trainer."""

    actor: Actor
    critic: Critic | None
    reference: Reference | None
    reward: RewardDescription
    rollout: Rollout
    sharding: Sharding
    algorithm: Algorithm
    data: PromptSource
    trainer: PPOSettings
    tracker: Trackers
    checkpoint: Checkpointing | None = None
    replay: TieredReplay | None = None
    environment: EnvironmentDescription | None = None
    storage: Storage | None = None
    sandbox: Sandbox | None = None
    resume: str | None = None

    def shardings(self) -> dict[str, Sharding]:
        """Sharding of each role: its own, or that of the run."""
        by_role = {"actor": self.actor.sharding, "critic": self.critic and self.critic.sharding}
        by_role["reference"] = self.reference and reference_sharding(self.reference, self.actor)
        return {role: by_role.get(role) or self.sharding for role in self.roles}

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the roles that the algorithm needs and that can run in other processes."""
        needs = {
            "actor": True,
            "critic": self.critic is not None and self.algorithm.needs_values,
            "reference": self.reference is not None and self.algorithm.needs_reference,
            "rm": self.reward.is_model,
        }
        return tuple(role for role, is_needed in needs.items() if is_needed)

    @property
    def reward_as_role(self) -> Any:
        """The reward, if it is a separate role; None if the driver runs it."""
        placement = self.trainer.placement
        return self.reward if placement is not None and self.reward.is_model and placement.holds_reward() else None

    @property
    def has_sampler(self) -> bool:
        """Whether the engine generates in a process of its own, the role `sampler`, with a copy of the model."""
        return self.trainer.staleness is not None and (not self.rollout.runs_ahead or self.is_in_flight)

    @property
    def actor_generates(self) -> bool:
        """Whether the actor has a rollout engine: one in its own process generates for evaluations at least."""
        return not (self.has_sampler and self.rollout.runs_ahead)

    @property
    def placed_roles(self) -> dict[str, Sharding]:
        """Sharding of each role that `trainer.placement` places: the sampler too, which is not sharded."""
        return self.shardings() | ({SAMPLER: NoSharding()} if self.has_sampler else {})

    @property
    def num_samplers(self) -> int:
        """Processes of the role `sampler`, an engine in each; 0 without it."""
        placement, world = self.trainer.placement, self.trainer.nnodes * self.trainer.n_gpus_per_node
        counts = {SAMPLER: 1} if placement is None else placement.sizes(tuple(self.placed_roles), world)
        return counts[SAMPLER] if self.has_sampler else 0

    @property
    def devices_apart(self) -> int:
        """Devices of the sampler alone, beside those of the other roles."""
        placement, world = self.trainer.placement, self.trainer.nnodes * self.trainer.n_gpus_per_node
        return 0 if placement is None else placement.apart(tuple(self.placed_roles), world)

    @property
    def is_in_flight(self) -> bool:
        """Whether weights change while responses are open."""
        return bool(self.trainer.staleness) and self.rollout.weight_update == "in_flight"

    @property
    def response_tokens(self) -> int:
        """Maximum number of tokens of a row after its prompt."""
        return self.rollout.max_new_tokens if self.environment is None else self.environment.max_tokens

    @property
    def response_key(self) -> str:
        """The path of `response_tokens`."""
        return "rollout.max_new_tokens" if self.environment is None else "environment.max_tokens"

    @property
    def updates_per_step(self) -> int:
        return self.algorithm.epochs * self.algorithm.mini_batches
