"""Policy optimisation: the algorithm, as it stands in the papers, for PPO, GRPO and their kin.

generate ──> score ──> assign_credit ──> update ──> sync
y ~ pi(.|x)  reward,    KL, advantages,  critic,    the sampler
             old, ref,  returns          actor      follows
             values
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.dynamic_sampling import (
    DynamicSampling,
    concat_groups,
    kept_groups,
    no_group_error,
    selection_metrics,
)
from verl.algorithms.importance_sampling import weight_advantages
from verl.algorithms.kl import AdaptiveKLController
from verl.checkpoint.config import Checkpointing
from verl.cluster.rpc import role_handles
from verl.component import BuildContext, Description, as_plain
from verl.data.base import PromptSource
from verl.data.sampler import EpochSampler, Mixture
from verl.engines.sharding import Sharding
from verl.errors import ConfigError, NonFiniteError, faults_below
from verl.models.interfaces import tokenizer_fault
from verl.monitoring.nonfinite import NonFiniteGuard, StepSkipped
from verl.monitoring.ppo_metrics import evaluation_metrics, experience_metrics, mean_of, sample_rows
from verl.ops.counter_rng import EVALUATION, TRAINING
from verl.ops.masking import masked_mean
from verl.protocol import DataProto
from verl.replay.config import TieredReplay
from verl.rewards.base import RewardDescription
from verl.rollout.base import GenerationRequest, Rollout
from verl.storage.config import Storage
from verl.tracking.base import Trackers
from verl.trainer import generators
from verl.trainer.ahead import RolloutAhead
from verl.trainer.budget import tell_budget
from verl.trainer.contents import DRAWN_AHEAD
from verl.trainer.expected_lengths import ExpectedLengths
from verl.trainer.loop import Result, fit
from verl.trainer.ppo_faults import faults_between
from verl.trainer.recovery import fit_through_losses
from verl.trainer.resume import ResumePoint
from verl.trainer.reuse import Reuse
from verl.trainer.reward_stats import RewardStats
from verl.trainer.settings import PPOSettings
from verl.trainer.setup import ProcessState, parts_of, prepare_context, prepare_saving, restore_of, start_cluster
from verl.trainer.stages import Stages
from verl.utils.seeding import derive_seed, seed_everything
from verl.workers.actor import Actor
from verl.workers.colocated import RLHost, reference_sharding, with_tokenizer
from verl.workers.critic import Critic
from verl.workers.load_state import SavedRoleState
from verl.workers.reference import Reference
from verl.workers.reward import RemoteRewardModel

PROMPT_FIELDS = ["prompts", "prompt_mask", "prompt_ids", "group_ids"]
DRIVER_FIELDS = [*PROMPT_FIELDS, "is_replayed", "is_on_policy"]  # that no role reads in an update
SEQUENCE_FIELDS = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask"]


@dataclass(frozen=True, kw_only=True)
class PPORun(Description):
    """Everything that one policy-gradient run is made of: the root of `conf/ppo.yaml`.

    A role that the algorithm does not need (a critic for GRPO, a reference without KL) is not built.
    """

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
    storage: Storage | None = None
    resume: str | None = None

    def faults(self) -> Iterator[str]:
        """What is wrong between components, each by its full config path."""
        yield from faults_between(self)

    def shardings(self) -> dict[str, Sharding]:
        """Role -> how it is divided where it has several processes: its own sharding, or that of the run."""
        own = {"actor": self.actor.sharding, "critic": self.critic and self.critic.sharding}
        own["reference"] = self.reference and reference_sharding(self.reference, self.actor)
        return {role: own.get(role) or self.sharding for role in self.roles}

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the roles that the algorithm needs and that can live elsewhere."""
        wanted = {
            "actor": True,
            "critic": self.critic is not None and self.algorithm.needs_values,
            "reference": self.reference is not None and self.algorithm.needs_reference,
            "rm": self.reward.is_model,
        }
        return tuple(role for role, is_needed in wanted.items() if is_needed)

    @property
    def reward_as_role(self) -> Any:
        """The reward, if it is a role of its own; None where the driver has it."""
        placement = self.trainer.placement
        return self.reward if placement is not None and self.reward.is_model and placement.holds_reward() else None

    @property
    def updates_per_step(self) -> int:
        return self.algorithm.epochs * self.algorithm.mini_batches

    def build(self, context: BuildContext) -> PPOTrainer:
        """Load data and weights, and start the processes that the sharding asks for."""
        return PPOTrainer(self, context)


class PPOTrainer:
    """The running trainer. `close` it, or use it as a context manager.

    Attributes:
        actor, critic, reference: handles to the roles, wherever they live; None where a role is not needed.
        restarts: why it was built anew, once for each time.
    """

    def __init__(self, run: PPORun, context: BuildContext):
        self.restarts: list[str] = []
        self._context = context
        self._build(run, context)

    def _build(self, run: PPORun, context: BuildContext) -> None:
        self.description, self.settings, self.algorithm = run, run.trainer, run.algorithm
        self._state = ProcessState(run.trainer)
        self._cluster = self.reward = self.reuse = None
        self.reward_stats, self.lengths = RewardStats(run.reward), ExpectedLengths()
        self.saving: Any = None
        try:
            context = prepare_context(context, run.trainer)
            with faults_below("actor.model"):
                context = with_tokenizer(context, run.actor)
            assert context.run_dir is not None
            if run.trainer.placement is None:  # else the actor may live on another machine, or another device
                run.rollout.check_here(context.device)
            self.context = context
            self.run_dir, self.tokenizer = context.run_dir, context.tokenizer
            self._refuse_other_tokenizers(run)
            with faults_below("data"):
                splits = run.data.build(context)
            self.train_data, self.eval_data = splits.train, splits.eval
            self.sampler = self._make_sampler(len(self.train_data), splits.mixture)
            self.num_steps = self.settings.num_steps(self.sampler.batches_per_epoch)
            if run.reward_as_role is None:
                with faults_below("reward"):
                    self.reward = run.reward.build(context)
            self.tracker = run.tracker.build(context)
            self.stages = Stages(self.tracker)
            self.saving = prepare_saving(
                run, context, "actor/loss", ("ref_log_probs",) if run.algorithm.needs_reference else ()
            )
            self.guard = NonFiniteGuard(run.trainer.safety, self.run_dir, self.tokenizer)
            self.kl = run.algorithm.kl.build(context)
            self.reuse = Reuse(run, context, self.saving.directory)
            tell_budget(run, context, self.saving.directory)
            self._start_roles(run, context)
            self.guard.numerics = self.actor.numerics().result()
            seed_everything(derive_seed(self.settings.seed, "driver"))  # roles that are built here have drawn from it
            if self.saving.resumed is not None:
                self._go_on_from(self.saving.resumed)
        except BaseException:
            self.close()
            raise

    def _refuse_other_tokenizers(self, run: PPORun) -> None:
        """The critic and the reference read the actor's token ids, so their tokenizer must be the actor's."""
        needed = {
            "critic.model": run.critic.model if run.critic and run.algorithm.needs_values else None,
            "reference.model": run.reference.model if run.reference and run.algorithm.needs_reference else None,
        }
        others = {name: model for name, model in needed.items() if model is not None and model != run.actor.model}
        faults = [tokenizer_fault(name, model, self.tokenizer) for name, model in others.items()]
        if found := [fault for fault in faults if fault is not None]:
            raise ConfigError(found)

    def _make_sampler(self, size: int, mixture: Mixture | None) -> EpochSampler:
        seed, name = derive_seed(self.settings.seed, "data order"), "trainer.prompts_per_step"
        return EpochSampler(size, self.settings.prompts_per_step, seed, name, mixture=mixture)

    def _start_roles(self, run: PPORun, context: BuildContext) -> None:
        host = RLHost(
            actor=run.actor,
            critic=run.critic if run.algorithm.needs_values else None,
            reference=run.reference if run.algorithm.needs_reference else None,
            rollout=self._roomy(run.rollout),
            algorithm=run.algorithm,
            sharding=run.sharding,
            total_updates=self.num_steps * run.updates_per_step,
            restore=restore_of(self.saving),
            reward=run.reward_as_role,
        )
        context = replace(context, row_tokens=self._row_tokens(run))
        self._cluster = start_cluster(host, run.trainer, context, run.trainer.placement)
        roles = role_handles(self._cluster, host)
        self.actor, self.critic, self.reference = roles["actor"], roles.get("critic"), roles.get("reference")
        self.saving.parts = parts_of(self._cluster, self.trained, run.checkpoint)
        self.ahead = RolloutAhead(self.actor) if run.trainer.rollout_ahead else None
        if run.reward_as_role is not None:
            self.reward = RemoteRewardModel(roles["rm"], run.reward_as_role)

    def _roomy(self, rollout: Rollout) -> Rollout:
        """With room for every prompt of the data, as far as the data tell how long those are."""
        longest = self._longest_prompt()
        return rollout if longest is None else rollout.with_room_for(longest)

    def _longest_prompt(self) -> int | None:
        """Tokens of the longest prompt of the data, as far as the data tell."""
        longest = [getattr(data, "longest", None) for data in (self.train_data, self.eval_data) if data is not None]
        known = [tokens for tokens in longest if tokens is not None]
        return max(known) if len(known) == len(longest) else None

    def _row_tokens(self, run: PPORun) -> int | None:
        """Tokens of the longest row that the run can have."""
        longest = self._longest_prompt() or getattr(run.data, "max_prompt_length", None)
        return None if longest is None else longest + run.rollout.max_new_tokens

    def _go_on_from(self, point: ResumePoint) -> None:
        """Take over what the roles do not hold: the place in the data, KL control, statistics of rewards, old rows."""
        self.load_data_position(point)
        self.load_driver_state(point)
        self.reuse.load(point)

    def load_data_position(self, point: ResumePoint) -> None:
        """Take over the place in the data, and what was drawn ahead for the batch that stands there."""
        self.sampler.load_state_dict(point.read_json("dataloader/state.json"))
        if self.ahead is not None:
            self.ahead.load(point.read_tensors(DRAWN_AHEAD))

    def load_driver_state(self, point: ResumePoint) -> None:
        """Take over KL control, statistics of rewards, and how long responses are."""
        state = point.read_json("scheduler/state.json")
        if "lengths" in state:
            self.lengths.load_state_dict(state["lengths"])
        if isinstance(self.kl, AdaptiveKLController):
            self.kl.load_state_dict(state["kl"])
        self.reward_stats.load(self.reward, state)
        generators.restore_ranks(point, self._cluster, self.actor, self.settings.seed)

    # The algorithm

    def step(self, batch: DataProto, step: int) -> dict[str, float]:
        """One iteration on a batch of prompts [B P]; returns its metrics."""
        self._cluster.step = self.guard.step = step
        self.reuse.expect(step)
        rollout = self.generate(batch, GenerationRequest(step, self.settings.group_size))
        self._draw_ahead(step + 1)
        selected = {}
        if self.algorithm.selection is not None:
            rollout, selected = self.select(rollout, self.algorithm.selection, step)
            if not len(rollout):
                return selected
        scored = self.score(self.reuse.mixed(self._rewarded(rollout), step))
        experience, metrics = self.assign_credit(scored)
        metrics |= self.update(experience, step)
        metrics |= self.reuse.keep(experience, step, self.saving.is_busy)
        metrics |= self.sync()
        counted = {f"reward/{name}": x for name, x in self.reward.take().items()}
        metrics = {**experience_metrics(self.reuse.new(experience)), **counted, **selected, **metrics}
        self.guard.watch(metrics, experience)
        return metrics

    def generate(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        """Draw responses y ~ pi(. | x): rows of prompts with their responses, [B S], and their texts."""
        with self.stages.stage("gen") as note:
            rows = self._respond(prompts, request)
            if self.algorithm.needs_greedy_baseline:
                greedy = self._respond(prompts, replace(request, num_samples=1, greedy=True))
                with self.guard.rating(greedy):
                    greedy = greedy.union(self.reward.score(greedy))
                baseline = torch.tensor(greedy["score"].astype(float)).repeat_interleave(request.num_samples)
                rows = rows.union(DataProto.from_dict({"greedy_scores": baseline}))
            tokens = int(rows["response_mask"].sum())
            note.say(f"{len(rows)} responses to {len(prompts)} prompts, {tokens} tokens")
        return rows

    def select(self, rollout: DataProto, selection: DynamicSampling, step: int) -> tuple[DataProto, dict[str, float]]:
        """Keep the groups that teach something, and draw further prompts in place of the others."""
        drawn, kept = [self._rewarded(rollout)], []
        for round_ in range(1, selection.max_rounds + 1):
            kept = kept_groups(drawn, selection)
            wanted = self.settings.prompts_per_step
            if len(kept) >= wanted or round_ == selection.max_rounds:
                break
            seen = torch.cat([rows["prompt_ids"] for rows in drawn])
            further = self.train_data.collate(self.sampler.next_batch())
            further = further[~torch.isin(further["prompt_ids"], seen)]
            if not len(further):  # an epoch ended within the step: all that is left was drawn already
                break
            drawn.append(self._rewarded(self.generate(further, GenerationRequest(step, self.settings.group_size))))
        if not kept and selection.on_none == "error":
            raise no_group_error(drawn)
        chosen = concat_groups(kept[: self.settings.prompts_per_step]) if kept else drawn[0][:0]
        return chosen, selection_metrics(drawn, kept)

    def score(self, rollout: DataProto) -> DataProto:
        """Add what is known of each response: its reward, log-probs under pi_old and pi_ref, values."""
        rollout = self._rewarded(rollout)
        sequences = rollout.select(SEQUENCE_FIELDS, non_tensor_batch_keys=[])
        if self.algorithm.needs_old_log_probs:
            with self.stages.stage("old") as note:
                drawn = rollout.select([*SEQUENCE_FIELDS, "policy_version"], non_tensor_batch_keys=[])
                rollout = rollout.union(self.actor.compute_log_probs(drawn).result())
                note.say("log-probs of the responses under the present policy")
        if self.reference is not None:
            with self.stages.stage("ref") as note:
                rollout = rollout.union(self.reference.compute_log_probs(sequences).result())
                note.say("log-probs of the responses under the reference")
        if self.critic is not None:
            with self.stages.stage("values") as note:
                rollout = rollout.union(self.critic.compute_values(sequences).result())
                note.say(f"mean value {float(masked_mean(rollout['values'], rollout['response_mask'])):.4f}")
        self.guard.inspect(rollout, "score")
        return rollout

    def assign_credit(self, scored: DataProto) -> tuple[DataProto, dict[str, float]]:
        """From scores to advantages: subtract the KL penalty, and credit the rewards to tokens."""
        kl = copy.copy(self.kl)  # a step that is skipped leaves its coefficient as it was
        with self.stages.stage("adv") as note:
            rewards, metrics = self.kl.shape_rewards(scored)
            scored = scored.union(DataProto.from_dict({"token_level_rewards": rewards}))
            credit = self.algorithm.advantage(scored)
            weights, found = self.reuse.weights(scored)
            credit, metrics = (credit if weights is None else weight_advantages(credit, weights)), metrics | found
            experience = scored.union(credit)
            note.say(type(self.algorithm.advantage).__name__)
        try:
            self.guard.inspect(experience, "credit")
        except (NonFiniteError, StepSkipped):
            self.kl = kl
            raise
        return experience, metrics

    def update(self, experience: DataProto, step: int) -> dict[str, float]:
        """Ascend the clipped objective on shuffled mini-batches: the critic, then the actor."""
        metrics: dict[str, float] = {}
        self.saving.wait_copied()
        rows = experience.select([name for name in experience.batch if name not in DRIVER_FIELDS], [])
        for name, role in (("critic", self.critic), ("actor", self.actor)):
            if role is None:
                continue
            with self.stages.stage(f"update_{name}") as note:
                updates = []
                for part in self._mini_batches(len(rows), step):
                    updates.append(role.update(self.guard.planted(rows[part])).result())
                    self.guard.judge(name, updates[-1], lambda part=part: experience[part])
                metrics |= {key if "/" in key else f"{name}/{key}": x for key, x in mean_of(updates).items()}
                note.say(f"{len(updates)} optimizer steps, loss {metrics[f'{name}/loss']:.4f}")
        return metrics

    def sync(self) -> dict[str, float]:
        """The sampler follows the trained weights, and proves it."""
        if self.ahead is not None:
            with self.stages.stage("gen"):  # what is left of it
                self.ahead.collect()
        with self.stages.stage("sync") as note:
            synced = self.actor.sync().result()
            note.say(synced.note)
        return synced.metrics

    # Around it

    def evaluate(self, step: int) -> dict[str, float]:
        """Greedy accuracy on the held-out prompts, and mean@k, best@k of k drawn responses."""
        if self.eval_data is None:
            return {}
        prompts, k = self.eval_data.collate(range(len(self.eval_data))), self.settings.eval_samples
        with self.reward.frozen():
            greedy = self._judge(prompts, GenerationRequest(step, greedy=True, stream=EVALUATION))
            drawn = self._judge(prompts, GenerationRequest(step, num_samples=k, stream=EVALUATION)) if k else None
        self.tracker.samples(sample_rows(greedy, self.settings.sample_rows), step, "eval")
        return evaluation_metrics(greedy, drawn, k, self.settings.success_score)

    def save(self, directory: Path) -> list[Path]:
        """Write `actor/`, and `critic/` if there is one, as Hugging Face directories below `directory`."""
        paths = []
        for name, role in (("actor", self.actor), ("critic", self.critic)):
            if role is not None:
                (directory / name).mkdir(parents=True, exist_ok=True)  # transformers only logs that it cannot write
                role.save(directory / name).result()
                paths.append(directory / name)
        return paths

    def state(self) -> tuple[dict[str, SavedRoleState], dict[str, Any]]:
        """What a checkpoint holds: of the roles, and of everything else that a later run needs to go on."""
        roles = self.saving.states_of(self.trained, self._cluster.shares_memory)
        kl = self.kl.state_dict() if isinstance(self.kl, AdaptiveKLController) else {}
        ranks = generators.ranks_of(self._cluster, self.actor)
        plain = {"sampler": self.sampler.state_dict(), "kl": kl, **self.reward_stats.state(self.reward)}
        plain["lengths"] = self.lengths.state_dict()
        drawn = {} if self.ahead is None else {DRAWN_AHEAD: self.ahead.state()}
        return roles, {**plain, "ranks": ranks, **drawn, **self.reuse.state()}

    @property
    def trained(self) -> dict[str, Any]:
        """The roles whose weights are updated, by name."""
        named = {"actor": self.actor, "critic": self.critic}
        return {name: role for name, role in named.items() if role is not None}

    def replace_reward(self, described: RewardDescription) -> None:
        """Rate by another reward from here on; policy, optimizer and place in the data stay."""
        with faults_below("reward"):
            reward = described.build(self.context)
        self.reward.close()
        self.reward, self.reward_stats = reward, RewardStats(described)
        self.description = replace(self.description, reward=described)
        self.saving.reconfigured(as_plain(self.description))

    def fit(self) -> Result:
        """Train to the end; see `verl.trainer.loop.fit`. In Ray, a lost worker costs the steps since the last save."""
        return fit_through_losses(self, lambda: fit(self, as_plain(self.description)), self.max_restarts)

    @property
    def max_restarts(self) -> int:
        """How often a run that lost a worker goes on by itself."""
        return 0 if self.settings.placement is None else self.settings.placement.max_restarts

    def restart(self, resume: str | None, why: str) -> None:
        """Build everything anew, to go on from a checkpoint, or from the beginning if `resume` is None."""
        self.close()
        self.restarts.append(why)
        self._build(replace(self.description, resume=resume), self._context)

    def close(self) -> None:
        """End the workers, let go of the weights, and put back what the run changed in this process."""
        if self.saving is not None:
            self.saving.close()
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None
        if self.reward is not None:
            self.reward.close()
        if self.reuse is not None:
            self.reuse.close()
        self._state.restore()

    def __enter__(self) -> PPOTrainer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _rewarded(self, rollout: DataProto) -> DataProto:
        if "token_level_scores" in rollout:  # a selection has read them
            return rollout
        with self.stages.stage("reward") as note, self.guard.rating(rollout):
            rollout = rollout.union(self.reward.score(rollout))
            self.guard.inspect(rollout, "reward")  # before a selection reads them
            note.say(f"mean {float(np.mean(rollout['score'].astype(float))):.4f}")
        return rollout

    def _judge(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        rows = self._respond(prompts, request)
        return rows.union(self.reward.score(rows))

    def _respond(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        """Rows with responses, the columns of the data, and the response as text."""
        prompts = _grouped(prompts)
        asked, is_training = self._asked(prompts, request), request.stream == TRAINING and not request.greedy
        if self.ahead is not None and is_training:
            rows = self.ahead.take(asked, request)
        else:
            if self.ahead is not None:
                self.ahead.collect()
            rows = self.actor.generate(asked, request).result()
        if is_training:
            self.lengths.note(rows)
        tokens = [r[m].tolist() for r, m in zip(rows["responses"], rows["response_mask"], strict=True)]
        texts: Any = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        columns = prompts.select([], list(prompts.non_tensor_batch)).repeat(request.num_samples)
        return rows.union(columns).union(DataProto.from_dict(non_tensors={"response_text": texts}))

    def _draw_ahead(self, step: int) -> None:
        """Have the engine draw for the next step, if there is one and it may."""
        if self.ahead is not None and step <= self.num_steps:
            prompts, request = (
                self.train_data.collate(self.sampler.peek()),
                GenerationRequest(step, self.settings.group_size),
            )
            self.ahead.begin(self._asked(_grouped(prompts), request), request)

    def _asked(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        """What the actor is asked for."""
        return self.lengths.beside(prompts.select(PROMPT_FIELDS, []), request.num_samples)

    def _mini_batches(self, rows: int, step: int) -> Iterator[Tensor]:
        for epoch in range(self.algorithm.epochs):
            generator = torch.Generator().manual_seed(derive_seed(self.settings.seed, "mini-batches", step, epoch))
            order = torch.randperm(rows, generator=generator)
            yield from (part for part in order.tensor_split(self.algorithm.mini_batches) if len(part))


def _grouped(prompts: DataProto) -> DataProto:
    """Prompts, each the head of a group of its own."""
    return prompts.union(DataProto.from_dict({"group_ids": torch.arange(len(prompts))}))
