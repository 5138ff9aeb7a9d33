"""Policy optimisation: the steps of PPO, GRPO and similar algorithms, as the papers describe them.

generate ──> score ──> assign_credit ──> update ──> sync
y ~ pi(.|x)  reward,    KL, advantages,  critic,    the rollout engine
             old, ref,  returns          actor      gets the weights
             values
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.dynamic_sampling import (
    DynamicSampling,
    concat_groups,
    kept_groups,
    no_group_error,
    selection_metrics,
)
from verl.algorithms.functions import copied_state
from verl.algorithms.importance_sampling import weight_advantages
from verl.environments.episode import per_episode, response_texts, training_rows, without_dropped
from verl.errors import NonFiniteError
from verl.monitoring.nonfinite import StepSkipped
from verl.monitoring.ppo_metrics import evaluated_rows, evaluation_metrics, mean_of, sample_rows
from verl.ops.masking import masked_mean
from verl.ops.sampling import EVALUATION, TRAINING
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest
from verl.trainer.ppo_lifecycle import PPOLifecycle
from verl.utils.seeding import derive_seed

PROMPT_FIELDS = ["prompts", "prompt_mask", "prompt_ids", "group_ids"]
EPISODE_FIELDS = ["turn_ids", "turn_rewards", "episode_ids"]
OF_ROWS = ["is_replayed", "is_on_policy", "token_versions"]
DRIVER_FIELDS = [*PROMPT_FIELDS, *EPISODE_FIELDS, *OF_ROWS]  # that no role reads in an update
SEQUENCE_FIELDS = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask"]
ROUTED_FIELDS = ["routed_experts", "rollout_log_probs"]  # that the actor reads before an update, under router replay


class PPOTrainer(PPOLifecycle):
    """The running trainer. Call `close` when done, or use it as a context manager."""

    def step(self, batch: DataProto, step: int) -> dict[str, float]:
        """One iteration on a batch of prompts [B P]; returns its metrics."""
        assert self.cluster is not None, "it is closed"
        assert self.reuse is not None
        assert self.reward is not None
        self.cluster.step = self.guard.step = step
        self.reuse.expect(step)
        rollout = self.generate(self.data_responses.drawn(batch, step), self._request(step))
        self._draw_ahead(step)
        selected = {}
        if self.algorithm.selection is not None:
            rollout, selected = self.select(rollout, self.algorithm.selection, step)
            if not len(rollout):
                return self.async_rewards.take_counts() | selected
        self._rest()
        if not len(rollout := self._rewarded(rollout)):
            return {**self.async_rewards.take_counts(), "perf/samples": 0.0, "perf/tokens": 0.0, **self.sync()}
        scored = self.score(self.reuse.mixed(rollout, step, self.pipeline.current_version))
        experience, metrics = self.assign_credit(scored)
        metrics |= self.update(self.with_data(experience, batch, step), step)
        metrics |= self.reuse.keep(experience, step, self.saving.is_busy)
        metrics |= self.sync()
        metrics = {**self.observe(experience, step), **self.async_rewards.take_counts(), **selected, **metrics}
        self.guard.watch(metrics, experience)
        return metrics

    def generate(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        """Sample responses y ~ pi(. | x), or episodes: prompts with all tokens after them, [B S], and their texts."""
        with self.stages.stage("gen") as note:
            rows = self._respond(prompts, request)
            if self.algorithm.needs_greedy_baseline:
                greedy = self._respond(prompts, replace(request, num_samples=1, greedy=True))
                with self.guard.rating(greedy):
                    greedy = self._rated(greedy, 0)
                baseline = torch.tensor(greedy["score"].astype(float)).repeat_interleave(request.num_samples)
                rows = rows.union(DataProto.from_dict({"greedy_scores": baseline}))
            tokens = int(rows["response_mask"].sum())
            note.say(f"{len(rows)} responses to {len(prompts)} prompts, {tokens} tokens")
        return rows

    def select(self, rollout: DataProto, selection: DynamicSampling, step: int) -> tuple[DataProto, dict[str, float]]:
        """Keep groups with mixed rewards, and sample further prompts to replace the others."""
        drawn, groups = [self._rewarded(rollout)], []
        for round_ in range(1, selection.max_rounds + 1):
            groups = kept_groups(drawn, selection)
            num_groups = self.settings.prompts_per_step
            if len(groups) >= num_groups or round_ == selection.max_rounds:
                break
            seen = torch.cat([rows["prompt_ids"] for rows in drawn])
            further = self.train_data.collate(self.sampler.next_batch())
            further = further[~torch.isin(further["prompt_ids"], seen)]
            if not len(further):  # an epoch ended within the step: all that is left was drawn already
                break
            drawn.append(self._rewarded(self.generate(further, self._request(step))))
        if not groups and selection.on_none == "error" and any(map(len, drawn)):
            raise no_group_error(drawn)
        chosen = concat_groups(groups[: self.settings.prompts_per_step]) if groups else drawn[0][:0]
        return chosen, selection_metrics(drawn, groups)

    def score(self, rollout: DataProto) -> DataProto:
        """Score responses: rewards, log-probs under pi_old and pi_ref, values."""
        rollout = self._rewarded(rollout)
        rows = training_rows(rollout)
        self.guard.compare(
            rows, lambda chosen, longer: self.actor.plain_log_probs(_drawn_fields(chosen), longer).result()
        )
        sequences = rows.select(SEQUENCE_FIELDS, non_tensor_batch_keys=[])
        computed = []
        if self.algorithm.needs_old_log_probs:
            with self.stages.stage("old") as note:
                computed.append(self.actor.compute_log_probs(_drawn_fields(rows)).result())
                note.say("log-probs of the responses under the present policy")
        elif self.algorithm.proximal == "behaviour":
            rollout = rollout.union(DataProto.from_dict({"old_log_probs": rollout["rollout_log_probs"]}))
        if self.reference is not None:
            with self.stages.stage("ref") as note:
                computed.append(self.reference.compute_log_probs(sequences).result())
                note.say("log-probs of the responses under the reference")
        if self.critic is not None:
            with self.stages.stage("values") as note:
                computed.append(values := self.critic.compute_values(sequences).result())
                note.say(f"mean value {float(masked_mean(values['values'], rows['response_mask'])):.4f}")
        rollout = rollout.union(*(per_episode(values, rollout) for values in computed))
        self.guard.inspect(rollout, "score")
        return rollout

    def assign_credit(self, scored: DataProto) -> tuple[DataProto, dict[str, float]]:
        """Compute advantages: subtract the KL penalty from the scores and assign credit to tokens."""
        kept = copy.copy(self.kl), copied_state(self.advantage)  # a step that is skipped leaves their state as it was
        with self.stages.stage("adv") as note:
            rewards, metrics = self.kl.shape_rewards(scored)
            scored = scored.union(DataProto.from_dict({"token_level_rewards": rewards}))
            credit, of_credit = self.algorithm.credit(scored, self.advantage)
            assert self.reuse is not None
            weights, of_weights = self.reuse.weights(scored)
            experience = scored.union(credit if weights is None else weight_advantages(credit, weights))
            note.say(type(self.algorithm.advantage).__name__)
        try:
            self.guard.inspect(experience, "credit")
        except (NonFiniteError, StepSkipped):
            self.kl, self.advantage = kept
            raise
        return experience, metrics | of_credit | of_weights

    def with_data(self, experience: DataProto, prompts: DataProto, step: int) -> DataProto:
        """The experience, and rows with responses of the data, scored by the teacher; see `DataResponses`."""
        if (rows := self.data_responses.rows(prompts, step)) is None:
            return experience
        assert self.reference is not None
        with self.stages.stage("ref") as note:
            teacher = self.reference.compute_log_probs(rows.select(SEQUENCE_FIELDS, [])).result()
            note.say(f"log-probs of {len(rows)} responses of the data under the teacher")
        return self.data_responses.joined(experience, rows.union(teacher))

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
                updates = []
                for part in self.mini_batches(experience, step):
                    updates.append(role.update(self.guard.planted(training_rows(fields[part]))).result())
                    self.guard.judge(name, updates[-1], lambda part=part: experience[part])
                metrics |= {key if "/" in key else f"{name}/{key}": x for key, x in mean_of(updates).items()}
                note.say(f"{len(updates)} optimizer steps, loss {metrics[f'{name}/loss']:.4f}")
        return metrics

    def sync(self) -> dict[str, float]:
        """Send the trained weights to the rollout engine and verify them."""
        if self.pipeline.holds_weights:
            with self.stages.stage("gen"):  # what is left of it
                self.pipeline.collect()
        with self.stages.stage("sync") as note:
            synced = self.pipeline.sync()
            note.say(synced.note)
        return synced.metrics

    def evaluate(self, step: int) -> dict[str, float]:
        """Greedy accuracy on the held-out prompts, and mean@k, best@k of k drawn responses."""
        if self.eval_data is None:
            return {}
        responses = self.evaluated(range(len(self.eval_data)), step)
        records = evaluated_rows(responses, self.settings.success_score)
        self.tracker.samples(sample_rows(responses["greedy"], self.settings.sample_rows), step, "eval")
        self.tracker.evaluated_rows(records, step)
        return self.evaluation_metrics(records)

    def evaluation_records(self, rows: Sequence[int], step: int) -> list[dict[str, Any]]:
        """A record for each response to some held-out prompts, with its text."""
        return evaluated_rows(self.evaluated(rows, step), self.settings.success_score, has_texts=True)

    def evaluation_metrics(self, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        return evaluation_metrics(records, self.has_tools)

    def evaluated(self, rows: Sequence[int], step: int) -> dict[str, Any]:
        """Scored responses to some held-out prompts, by their kind; see `evaluated_rows`."""
        assert self.eval_data is not None
        prompts, k = self.eval_data.collate(rows), self.settings.eval_samples
        assert self.reward is not None
        with self.async_rewards.lock, self.reward.frozen():
            greedy = self.judge(prompts, GenerationRequest(step, greedy=True, stream=EVALUATION))
            drawn = self.judge(prompts, GenerationRequest(step, num_samples=k, stream=EVALUATION)) if k else None
            bare = None
            if self.eval_data_without_tools is not None:
                prompts = self.eval_data_without_tools.collate(rows)
                request = GenerationRequest(step, greedy=True, stream=EVALUATION, uses_environment=False)
                bare = self.judge(prompts, request)
        return {"greedy": greedy, "drawn": drawn, "without_tools": bare}

    def _rewarded(self, rollout: DataProto) -> DataProto:
        if "token_level_scores" in rollout:  # a selection has read them
            return rollout
        with self.stages.stage("reward") as note, self.guard.rating(rollout):
            rollout = self._with_reward(self._rated(rollout, self.guard.step))
            self.guard.inspect(rollout, "reward")  # before a selection reads them
            scores = rollout["score"].astype(float)
            self.sampler.record(rollout["prompt_ids"], torch.tensor(scores) >= self.settings.success_score)
            note.say(f"mean {float(np.mean(scores)):.4f}" if len(scores) else "no response has one")
        return rollout

    def _with_reward(self, rollout: DataProto) -> DataProto:
        """The rows that have a reward and a greedy baseline, where there is one; the others (None) are left out."""
        is_unrated = torch.tensor(np.isnan(rollout["score"].astype(float)))
        is_unrated &= rollout["token_level_scores"].isfinite().all(dim=1)  # else the reward is not finite
        if "greedy_scores" in rollout:
            is_unrated |= rollout["greedy_scores"].isnan()
        if is_unrated.any():
            self.async_rewards.count("unrated", float(is_unrated.sum()))
        if is_unrated.all():
            self.tracker.message(f"Step {self.guard.step}: none of {len(rollout)} responses has a reward (None).")
        return rollout[~is_unrated] if is_unrated.any() else rollout

    def judge(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        """Sample responses without training and score them."""
        return self._rated(self._respond(prompts, request))

    def _rated(self, rollout: DataProto, step: int | None = None) -> DataProto:
        """Responses with their rewards; `step`: see `AsyncRewards.rating`, None in an evaluation."""
        assert self.reward is not None
        with self.async_rewards.lock:
            rating = self.reward.prepare(rollout) if step is None else self.async_rewards.rating(step, rollout)
            return rollout.union(self.reward.score(rollout, self.reward.apply(rating, rollout)))

    def _respond(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        """Responses or episodes, the data columns, and the response texts."""
        prompts = _grouped(prompts)
        asked, is_training = self._asked(prompts, request), request.stream == TRAINING and not request.greedy
        if is_training:
            self.async_rewards.expect(request.step, prompts, partial(self._described, prompts=prompts))
        rows = (self.pipeline.take if is_training else self.pipeline.generate)(asked, request)
        if is_training:
            self.lengths.note(rows)
        return self._described(rows, prompts)

    def _described(self, rows: DataProto, prompts: DataProto) -> DataProto:
        """Responses with the data columns of their prompts, and their texts."""
        texts: Any = response_texts(rows, self.tokenizer)
        columns = prompts.select([], list(prompts.non_tensor_batch))[rows["group_ids"]]
        return without_dropped(rows.union(columns, DataProto.from_dict(non_tensors={"response_text": texts})))

    def _rest(self) -> None:
        """Free the engine's GPU memory, because it generates nothing before the next sync."""
        if not self.pipeline.depth and self.description.rollout.can_rest:
            self.actor.rest().result()

    def _request(self, step: int) -> GenerationRequest:
        return GenerationRequest(step, self.settings.group_size)

    def _draw_ahead(self, step: int) -> None:
        """Start generation for the batches after this step's that `max_staleness` admits, and rate them early."""
        for ahead in range(len(self.pipeline), min(self.pipeline.depth, self.num_steps - step)):
            request = self._request(step + 1 + ahead)
            prompts = self.train_data.collate(self.sampler.peek(ahead))
            prompts = _grouped(self.data_responses.drawn(prompts, request.step))
            self.async_rewards.expect(request.step, prompts, partial(self._described, prompts=prompts))
            self.pipeline.begin(self._asked(prompts, request), request)

    def _asked(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        """The generation request for the actor."""
        columns = list(prompts.non_tensor_batch) if self.description.environment is not None else []
        return self.lengths.beside(prompts.select(PROMPT_FIELDS, columns), request.num_samples)

    def mini_batches(self, experience: DataProto, step: int) -> Iterator[Tensor]:
        """Responses or episodes of each update, in the order of the step's seed."""
        for epoch in range(self.algorithm.epochs):
            generator = torch.Generator().manual_seed(derive_seed(self.settings.seed, "mini-batches", step, epoch))
            order = torch.randperm(len(experience), generator=generator)
            yield from (part for part in order.tensor_split(self.algorithm.mini_batches) if len(part))


def _drawn_fields(rollout: DataProto) -> DataProto:
    """Fields of drawn rows that the actor reads before an update."""
    routed = ROUTED_FIELDS if "routed_experts" in rollout else []
    return rollout.select([*SEQUENCE_FIELDS, "policy_version", *routed], non_tensor_batch_keys=[])


def _grouped(prompts: DataProto) -> DataProto:
    """Prompts with group ids, one group per prompt."""
    return prompts.union(DataProto.from_dict({"group_ids": torch.arange(len(prompts))}))
