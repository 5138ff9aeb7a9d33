"""Building, restoring, saving and closing a policy-gradient run; `verl.trainer.ppo` is the algorithm on top of it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from verl.algorithms.functions import PartState, built_part, keeps_state
from verl.cluster.local_worker_group import LocalWorkerGroup
from verl.cluster.placement import SAMPLER, RoleGroups
from verl.cluster.rpc import RoleHandle, WorkerGroup, role_handles
from verl.component import BuildContext, as_plain
from verl.data.chat_template import ChatTemplate
from verl.environments.observation_tokens import check_template
from verl.errors import ConfigError, faults_below
from verl.models.interfaces import tokenizer_fault
from verl.models.parallel_info import Numerics
from verl.monitoring.nonfinite import NonFiniteGuard
from verl.monitoring.ppo_metrics import clipped_ratio, experience_metrics, token_rows
from verl.protocol import DataProto
from verl.replay.mixing import ReplayMixing
from verl.rewards.async_rewards import AsyncRewards
from verl.rewards.base import Reward, RewardDescription, in_time, missing_columns
from verl.rollout.data_responses import DataResponses
from verl.trainer.ppo_description import PPODescription
from verl.trainer.rollout_pipeline import LengthPredictor, RolloutPipeline, sampler_errors
from verl.trainer.setup import (
    LoopTrainer,
    fit_with_restarts,
    prepare_saving,
    rank_writers_of,
    restore_of,
    start_cluster,
)
from verl.trainer.state.driver_state import (
    GeneratorStates,
    LossStates,
    RewardStats,
    Stateful,
    go_on_from,
    run_date,
    with_day,
)
from verl.trainer.state.lineage import environment_record
from verl.trainer.state.training_identity import replay_identity
from verl.trainer.timers import StageTimers
from verl.trainer.train_loop import TrainResult, fit
from verl.utils.env_check import num_cores
from verl.utils.redact import redact_tree
from verl.utils.seeding import derive_seed, seed_everything
from verl.workers.colocated import RLHost, with_tokenizer
from verl.workers.reward import RemoteRewardModel
from verl.workers.sampler import SamplerHost, SamplerWorker
from verl.workers.schedule import ScheduleOptions, read_schedule

log = logging.getLogger(__name__)


class PPOLifecycle(LoopTrainer):
    """Everything of a running trainer except the step: roles, data, reward, tracker, checkpoints.

    Attributes:
        actor, critic, reference: handles to the roles, in any process; None if a role is not needed.
    """

    reward: Reward | None = None
    reuse: ReplayMixing | None = None
    data_responses: DataResponses
    sampler_group: WorkerGroup | None = None
    _divided_threads = 0  # of this process, before half of them were left to the sampler

    def __init__(self, run: PPODescription, context: BuildContext):
        super().__init__(run, with_day(context))

    def _build(self, run: PPODescription, context: BuildContext) -> None:
        self.algorithm, self.lengths = run.algorithm, LengthPredictor()
        self.reward = self.reuse = self.sampler_group = None
        self.async_rewards = AsyncRewards()
        self._divide_threads(run)
        self._schedule = _schedule_options(run)
        with faults_below("actor.model"):
            context = with_tokenizer(context, run.actor)
        assert context.run_dir is not None
        if run.trainer.placement is None:  # else the actor may live on another machine, or another device
            run.rollout.check_here(context.device)
        self.context = context
        self.run_dir, self.tokenizer = context.run_dir, context.tokenizer
        self._refuse_other_tokenizers(run)
        context = replace(
            context,
            chat_template=getattr(run.data, "chat_template", None),
            tools=() if run.environment is None else run.environment.tool_schemas(),
            prompts=None if run.environment is None else run.environment.prompts,
        )
        self.date = run_date(context, context.chat_template)
        self._load_data(run, context)
        self._refuse_missing_columns(run.reward)
        self.data_responses = DataResponses(run, self.train_data, context.tokenizer)
        self.has_tools = run.environment is not None and (run.environment.has_tools or bool(context.tools))
        if run.environment is not None and self.has_tools:
            chat = ChatTemplate(context.tokenizer, context.chat_template)
            check_template(run.environment, chat, "prompt_messages" in getattr(self.train_data, "columns", ()))
        if run.reward_as_role is None:
            with faults_below("reward"):
                self.reward = in_time(run.reward.build(context))
        self.tracker = run.tracker.build(context)
        self.stages = StageTimers(self.tracker)
        uses = ("ref_log_probs",) if run.algorithm.needs_reference else ()
        self.saving = prepare_saving(
            run, context, "actor/loss", uses, is_restart=bool(self.restarts), data=self.settled_data
        )
        if go_on_from(self.date, self.saving.resumed, self.tokenizer):
            context = replace(context, day=self.date.day)
            self.context = replace(self.context, day=self.date.day)
            self._load_data(run, context)
        if self.reward is not None:
            self.saving.messages += self._check_rows(self.reward)
        self.guard = NonFiniteGuard(run.trainer.safety, self.run_dir, self.tokenizer)
        self.kl, self.advantage = run.algorithm.kl.build(context), built_part(run.algorithm.advantage, context)
        self.reuse = ReplayMixing(run, context, self.saving.directory)
        plan = self._plan(context)
        beside = None if plan is None else plan.memory.beside_engine
        self.start_roles(run, replace(context, bytes_beside_engine=beside))
        assert self.reward is not None
        self.reward_stats = RewardStats(run.reward, self.reward)
        self.async_rewards.use(self.reward, self.reward_stats)
        losses = {"policy_loss": self.actor, "value_loss": self.critic}
        self._loss_states = {
            name: LossStates(role, f"algorithm.{name}")
            for name, role in losses.items()
            if role is not None and role.loss_keeps_state().result()
        }
        self.guard.numerics = self._numerics(run)
        seed_everything(derive_seed(self.settings.seed, "driver"))  # roles that are built here have drawn from it

    def _load_data(self, run: PPODescription, context: BuildContext) -> None:
        with faults_below("data"):
            splits = run.data.build(context)
        self._use_data(splits, self.settings.prompts_per_step, "trainer.prompts_per_step")
        self.eval_data_without_tools = None
        if run.trainer.eval_without_tools:
            self.eval_data_without_tools = splits.eval
            if context.tools and ChatTemplate(context.tokenizer, context.chat_template).reads_tools:
                with faults_below("data"):
                    self.eval_data_without_tools = run.data.build(replace(context, tools=())).eval

    def _refuse_other_tokenizers(self, run: PPODescription) -> None:
        """Refuse other tokenizers of critic and reference, because they get the actor's token ids."""
        needed = {
            "critic.model": run.critic.model if run.critic and run.algorithm.needs_values else None,
            "reference.model": run.reference.model if run.reference and run.algorithm.needs_reference else None,
        }
        others = {name: model for name, model in needed.items() if model is not None and model != run.actor.model}
        faults = [tokenizer_fault(name, model, self.tokenizer) for name, model in others.items()]
        if present := [fault for fault in faults if fault is not None]:
            raise ConfigError(present)

    def _refuse_missing_columns(self, reward: RewardDescription) -> None:
        """Refuse data without the columns that the reward names, before any weight is loaded."""
        named = {"training rows": self.train_data, "evaluation rows": self.eval_data}
        known = {name: columns for name, data in named.items() if (columns := getattr(data, "columns", None))}
        with faults_below("reward"):
            if faults := [x for name, columns in known.items() for x in missing_columns(reward, columns, name)]:
                raise ConfigError(faults)

    def _check_rows(self, reward: Reward) -> list[str]:
        """Let the reward check the rows that it will score; returns sentences to show at the start."""
        named = {"training rows": self.train_data, "evaluation rows": self.eval_data}
        with faults_below("reward"):
            return [x for name, data in named.items() if data is not None for x in reward.check_rows(name, data)]

    def start_roles(self, run: PPODescription, context: BuildContext) -> None:
        """Start the processes of the roles and build actor, critic and reference in them."""
        longest = self.longest_row()
        most = longest or getattr(run.data, "max_prompt_length", None)
        rollout = run.rollout if longest is None else run.rollout.with_room_for(longest, run.response_tokens)
        sampler = None
        if run.has_sampler:
            sampler = SamplerHost(
                actor=run.actor, rollout=rollout, environment=run.environment, schedule=self._schedule
            )
        host = RLHost(
            actor=run.actor,
            critic=run.critic if run.algorithm.needs_values else None,
            reference=run.reference if run.algorithm.needs_reference else None,
            rollout=rollout,
            environment=run.environment,
            algorithm=run.algorithm,
            sharding=run.sharding,
            total_updates=self.num_steps * run.updates_per_step,
            restore=restore_of(self.saving),
            reward=run.reward_as_role,
            sampler=None if run.trainer.placement is None else sampler,
            actor_generates=run.actor_generates,
        )
        # without checkpoints nobody claims the directory, and no run comes back to its episodes
        journal_dir = None if run.checkpoint is None else Path(self.saving.directory) / "episode_journal"
        row_tokens = None if most is None else most + run.response_tokens
        context = replace(context, row_tokens=row_tokens, journal_dir=journal_dir)
        self.cluster = start_cluster(host, run.trainer, context)
        roles = role_handles(self.cluster, host)
        self.actor, self.critic, self.reference = roles["actor"], roles.get("critic"), roles.get("reference")
        self.saving.rank_writers = rank_writers_of(self.cluster, self.trained, run.checkpoint)
        if host.sampler is not None:
            assert isinstance(self.cluster, RoleGroups)
            self.sampler_group = self.cluster.group_of[SAMPLER]
        elif sampler is not None:
            with sampler_errors():
                self.sampler_group = LocalWorkerGroup(sampler, context, 1, torch.get_num_threads(), name=SAMPLER)
        depth = min(run.trainer.staleness or 0, self.num_steps)
        self.pipeline = RolloutPipeline(
            self.actor,
            depth,
            self.sampler_group,
            in_flight=run.is_in_flight,
            actor_generates=run.actor_generates,
            run_dir=self.run_dir,
            rewards=self.async_rewards,
        )
        if run.reward_as_role is not None:
            self.reward = run.reward_as_role.scaled(RemoteRewardModel(roles["rm"]))

    def _divide_threads(self, run: PPODescription) -> None:
        """Leave half of the threads to the sampler, on the same cores, until `close`."""
        threads = torch.get_num_threads()
        if run.has_sampler and run.trainer.staleness and 2 * threads > num_cores():
            torch.set_num_threads(max(1, threads // 2))
            self._divided_threads = threads

    def _numerics(self, run: PPODescription) -> Numerics:
        numerics: Numerics = self.actor.numerics().result()
        if run.actor_generates or self.sampler_group is None:
            return numerics
        kind, compute_type = RoleHandle(self.sampler_group, SAMPLER, SamplerWorker).engine_kind().result()
        return replace(numerics, engine_kind=kind, engine=compute_type or numerics.engine)

    @property
    def actor_worker(self) -> Any:
        """The actor's worker object.

        Raises:
            ConfigError: it is in another process.
        """
        if (worker := getattr(self.cluster, "worker", None)) is None:
            raise ConfigError("trainer: the actor lives in another process. Set trainer=local, with one process.")
        return worker("actor")

    def observe(self, experience: DataProto, step: int) -> dict[str, float]:
        """Metrics of the responses of a step; the first one and those that evaluate also record tokens."""
        assert self.reuse is not None
        rows = self.reuse.new(experience)
        if self.settings.sample_rows and (step == 1 or self.evaluates_after(step)):
            self.tracker.token_rows(token_rows(rows, self.settings.sample_rows, self.tokenizer), step)
        metrics, rollout = experience_metrics(rows) | self.sampler.metrics, self.description.rollout
        if self.description.environment is None and self.tokenizer.eos_token_id is not None:
            stops = [self.tokenizer.eos_token_id, *rollout.stop_token_ids]
            metrics["rollout/clipped_ratio"] = clipped_ratio(rows, rollout.max_new_tokens, stops)
        return metrics

    @property
    def parts(self) -> dict[str, Stateful]:
        """The driver's parts of a checkpoint."""
        assert self.cluster is not None
        assert self.reuse is not None
        ahead = {"drawn_ahead": self.pipeline, "async_rewards": self.async_rewards} if self.pipeline.depth else {}
        kept = {"advantage": PartState(self.advantage, "algorithm.advantage")} if keeps_state(self.advantage) else {}
        return {
            "sampler": self.sampler,
            "kl": self.kl,
            "reward": self.reward_stats,
            "lengths": self.lengths,
            "safety": self.guard,
            **ahead,
            **kept,
            **self._loss_states,
            **self.date.parts,
            "replay_buffer": self.reuse,
            "rng": GeneratorStates(self.cluster, self.actor, self.settings.seed),
        }

    @property
    def trained(self) -> dict[str, Any]:
        """The roles whose weights are updated, by name."""
        named = {"actor": self.actor, "critic": self.critic}
        return {name: role for name, role in named.items() if role is not None}

    def replace_reward(self, described: RewardDescription) -> None:
        """Replace the reward; policy, optimizer and position in the data are kept."""
        self._refuse_missing_columns(described)
        with faults_below("reward"):
            reward = in_time(described.build(self.context))
        for message in self._check_rows(reward):
            log.warning("%s", message)
        assert self.reward is not None
        with self.async_rewards.lock:
            self.reward.close()
            self.reward, self.reward_stats = reward, RewardStats(described, reward)
            self.async_rewards.use(reward, self.reward_stats)
        self.description = replace(self.description, reward=described)
        self.saving.reconfigured(as_plain(self.description))

    def fit(self) -> TrainResult:
        """Train to the end; see `verl.trainer.train_loop.fit`. In Ray, a lost worker costs the steps since the last
        save.
        """
        return fit_with_restarts(self, self._fit_once, self.settings.max_restarts)

    def _fit_once(self, may_restart: bool) -> TrainResult:
        return fit(self, as_plain(self.description), may_restart=may_restart)

    def close(self) -> None:
        if self.sampler_group is not None:
            self.async_rewards.close()
            self.pipeline.close()
            self.sampler_group.close()
        if torch.get_num_threads() == self._divided_threads // 2:  # else another run in this process has changed them
            torch.set_num_threads(self._divided_threads)
        self._divided_threads = 0
        super().close()
        if self.reward is not None:
            self.reward.close()
        if self.reuse is not None:
            self.reuse.close()


def _schedule_options(run: PPODescription) -> ScheduleOptions | None:
    """The schedule of a run whose weights change while responses are open; None for others.

    Raises:
        ConfigError: the schedule that it replays was made under other conditions.
    """
    if not run.is_in_flight:
        return None
    head = replay_identity(redact_tree(as_plain(run))) | environment_record()
    source = run.trainer.replay_schedule
    if source is None:
        return ScheduleOptions(json.dumps(head))
    engines = range(run.num_samplers)
    return ScheduleOptions(json.dumps(head), tuple(read_schedule(source, head, engine) for engine in engines))
