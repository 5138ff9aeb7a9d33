"""Policy optimisation: the steps of PPO, GRPO and similar algorithms, as the papers describe them.

sample ──────> score ──> advantages ──> update ──> sync
y ~ pi(.|x),   old, ref,  KL, returns   critic,    the rollout engine
rewards        values                   actor      gets the weights

Methods decorated with `@stage` are wrapped by `verl.trainer.guards`; `verl.trainer.build` builds the components.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from verl.algorithms.importance_sampling import weight_advantages
from verl.environments.episode import per_episode, training_rows
from verl.model_paths.images import with_media
from verl.monitoring.ppo_metrics import mean_of
from verl.ops.masking import masked_mean
from verl.protocol import DataProto
from verl.trainer.build import PolicyTrainer
from verl.trainer.guards import stage
from verl.trainer.sampling import PROMPT_FIELDS
from verl.utils.seeding import derive_seed

OF_ROWS = ["turn_ids", "turn_rewards", "episode_ids", "is_replayed", "is_on_policy", "token_versions"]
DRIVER_FIELDS = [*PROMPT_FIELDS, *OF_ROWS]  # fields that no role reads in an update
SEQUENCE_FIELDS = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask"]
ROUTED_FIELDS = ["routed_experts", "rollout_log_probs"]  # fields that the actor reads before an update, with replay


class PPOTrainer(PolicyTrainer):
    """The running trainer. Call `close` when done, or use it as a context manager."""

    @stage
    def step(self, batch: DataProto, step: int) -> dict[str, float]:
        """One iteration on a batch of prompts [B P]; returns its metrics."""
        rollout, metrics = self.sample(batch, step)
        if len(rollout):
            experience, of_credit = self.advantages(self.score(rollout))
            metrics |= self.observe(experience, step) | of_credit
            metrics |= self.update(self.with_data(experience, batch, step), step)
            metrics |= self.replay.keep(experience, step, self.saving.is_busy)
        return metrics | self.sync()

    def sample(self, batch: DataProto, step: int) -> tuple[DataProto, dict[str, float]]:
        """Sample responses y ~ pi(. | x) with rewards, [B S], and add replayed rows of earlier steps."""
        self.replay.expect(step)
        rollout, metrics = self.sampling.sample(batch, step)
        rollout = self.sampling.add_rewards(rollout)
        metrics |= self.async_rewards.take_counts()
        if not len(rollout):
            return rollout, metrics | {"perf/samples": 0.0, "perf/tokens": 0.0}
        return self.replay.mixed(rollout, step, self.sampling.queue.current_version), metrics

    @stage
    def score(self, rollout: DataProto) -> DataProto:
        """Score responses: rewards if they have none, log-probs under pi_old and pi_ref, values."""
        rollout = self.sampling.add_rewards(rollout)
        computed = self.run_roles(training_rows(rollout))
        if self.algorithm.proximal == "behaviour" and not self.algorithm.needs_old_log_probs:
            rollout = rollout.union(DataProto.from_dict({"old_log_probs": rollout["rollout_log_probs"]}))
        return rollout.union(*(per_episode(values, rollout) for values in computed))

    @stage
    def run_roles(self, rows: DataProto) -> list[DataProto]:
        """Log-probs of actor and reference, and values of the critic, of rows [R S], as far as needed."""
        sequences, computed = rows.select(with_media(SEQUENCE_FIELDS, rows), []), []
        if self.algorithm.needs_old_log_probs:
            with self.stages.stage("old") as note:
                computed.append(self.actor.compute_log_probs(_actor_fields(rows)).result())
                note.say("log-probs of the responses under the present policy")
        if self.reference is not None:
            with self.stages.stage("ref") as note:
                computed.append(self.reference.compute_log_probs(sequences).result())
                note.say("log-probs of the responses under the reference")
        if self.critic is not None:
            with self.stages.stage("values") as note:
                computed.append(values := self.critic.compute_values(sequences).result())
                note.say(f"mean value {float(masked_mean(values['values'], rows['response_mask'])):.4f}")
        return computed

    @stage
    def advantages(self, scored: DataProto) -> tuple[DataProto, dict[str, float]]:
        """Subtract the KL penalty from the rewards and assign credit to tokens."""
        with self.stages.stage("adv") as note:
            rewards, metrics = self.kl.shape_rewards(scored)
            scored = scored.union(DataProto.from_dict({"token_level_rewards": rewards}))
            credit, of_credit = self.algorithm.credit(scored, self.advantage)
            weights, of_weights = self.replay.weights(scored)
            experience = scored.union(credit if weights is None else weight_advantages(credit, weights))
            note.say(type(self.algorithm.advantage).__name__)
        return experience, metrics | of_credit | of_weights

    def with_data(self, experience: DataProto, prompts: DataProto, step: int) -> DataProto:
        """The experience, with rows of responses from the data that the teacher scored; see `DataResponses`."""
        if (rows := self.sampling.data_responses.rows(prompts, step)) is None:
            return experience
        assert self.reference is not None
        with self.stages.stage("ref") as note:
            teacher = self.reference.compute_log_probs(rows.select(with_media(SEQUENCE_FIELDS, rows), [])).result()
            note.say(f"log-probs of {len(rows)} responses of the data under the teacher")
        return self.sampling.data_responses.joined(experience, rows.union(teacher))

    def update(self, experience: DataProto, step: int) -> dict[str, float]:
        """Update the critic, then the actor, on shuffled mini-batches."""
        metrics: dict[str, float] = {}
        self.saving.wait_copied()
        for name, role in (("critic", self.critic), ("actor", self.actor)):
            if role is None:
                continue
            unread = DRIVER_FIELDS if name == "actor" else [*DRIVER_FIELDS, "routed_experts"]  # of the actor's routers
            fields = experience.select([field for field in experience.batch if field not in unread], [])
            with self.stages.stage(f"update_{name}") as note:
                updates = [
                    self.optimizer_step(training_rows(fields[part]), name, role, lambda part=part: experience[part])
                    for part in self.mini_batches(experience, step)
                ]
                metrics |= {key if "/" in key else f"{name}/{key}": x for key, x in mean_of(updates).items()}
                note.say(f"{len(updates)} optimizer steps, loss {metrics[f'{name}/loss']:.4f}")
        return metrics

    def mini_batches(self, experience: DataProto, step: int) -> Iterator[Tensor]:
        """Responses or episodes of each update, in the order of the step's seed."""
        for epoch in range(self.algorithm.epochs):
            generator = torch.Generator().manual_seed(derive_seed(self.settings.seed, "mini-batches", step, epoch))
            order = torch.randperm(len(experience), generator=generator)
            yield from (part for part in order.tensor_split(self.algorithm.mini_batches) if len(part))

    def sync(self) -> dict[str, float]:
        """Send the trained weights to the rollout engine and verify them."""
        if self.sampling.queue.holds_weights:
            with self.stages.stage("gen"):  # what is left of it
                self.sampling.queue.collect()
        with self.stages.stage("sync") as note:
            synced = self.sampling.queue.sync()
            note.say(synced.note)
        return synced.metrics

    def plain_log_probs(self, rows: DataProto, lengthened: bool) -> DataProto:
        return self.actor.plain_log_probs(_actor_fields(rows), lengthened).result()


def _actor_fields(rows: DataProto) -> DataProto:
    """Fields of sampled rows that the actor reads before an update."""
    routed = ROUTED_FIELDS if "routed_experts" in rows else []
    return rows.select(with_media([*SEQUENCE_FIELDS, "policy_version", *routed], rows), non_tensor_batch_keys=[])
