"""The components of a policy-gradient run, and how its trainer is built of them, in five phases:

    read_tokenizer    description                        ──> tokenizer, chat template, tools
    load_data         tokenizer                          ──> training and held-out rows, their order
    build_reward      rows                               ──> reward, unless it is a role; trackers
    find_checkpoint   all that identifies the training   ──> save directory, the checkpoint that is resumed
    start_roles       checkpoint                         ──> processes with actor, critic, reference; sampling; guards

`verl.trainer.ppo` is the algorithm on top of it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.functions import PartState, built_part, keeps_state
from verl.checkpoint.config import Checkpointing
from verl.cluster.local_worker_group import LocalWorkerGroup
from verl.cluster.placement import ROLLOUT, RoleGroups
from verl.cluster.rpc import RoleHandle, WorkerGroup, role_handles
from verl.component import BuildContext, Description, as_plain, component
from verl.data.base import PromptSource
from verl.data.chat_template import ChatTemplate
from verl.engines.sharding import NoSharding, Sharding
from verl.environments.base import EnvironmentDescription
from verl.environments.observation_tokens import check_template
from verl.errors import ConfigError, faults_below
from verl.models.interfaces import tokenizer_fault
from verl.models.parallel_info import Numerics
from verl.monitoring.nonfinite import NonFiniteGuard
from verl.monitoring.ppo_metrics import (
    clipped_ratio,
    evaluated_rows,
    evaluation_metrics,
    experience_metrics,
    sample_rows,
    token_rows,
)
from verl.ops.sampling import EVALUATION
from verl.protocol import DataProto
from verl.replay.config import TieredReplay
from verl.replay.mixing import ReplayMixing
from verl.rewards.async_rewards import AsyncRewards
from verl.rewards.base import Reward, RewardDescription, in_time, missing_columns
from verl.rollout.base import GenerationRequest, Rollout
from verl.rollout.data_responses import DataResponses
from verl.sandbox.base import Sandbox
from verl.storage.config import Storage
from verl.tracking.base import Trackers
from verl.trainer.config import PPOSettings
from verl.trainer.guards import PPOGuards, stage
from verl.trainer.sampling import RolloutQueue, Sampling, rollout_worker_errors
from verl.trainer.setup import prepare_saving, rank_writers_of, restore_of, start_cluster
from verl.trainer.state.driver_state import GeneratorStates, LossStates, RewardStats, Stateful
from verl.trainer.state.lineage import environment_record
from verl.trainer.state.run_date import RunDate, with_day
from verl.trainer.state.training_identity import replay_identity
from verl.trainer.timers import StageTimers
from verl.trainer.train_loop import LoopTrainer
from verl.utils.env_check import num_cores
from verl.utils.redact import redact_tree
from verl.utils.seeding import derive_seed, seed_everything
from verl.workers.actor import Actor
from verl.workers.colocated import RLHost, reference_sharding, with_tokenizer
from verl.workers.critic import Critic
from verl.workers.reference import Reference
from verl.workers.reward import RemoteRewardModel
from verl.workers.rollout_worker import RolloutHost, RolloutWorker
from verl.workers.schedule import ScheduleOptions, read_schedule

log = logging.getLogger(__name__)


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
    def has_rollout_worker(self) -> bool:
        """Whether separate processes generate, the role `rollout`, with a copy of the model."""
        return self.trainer.staleness is not None and (not self.rollout.runs_ahead or self.is_in_flight)

    @property
    def actor_generates(self) -> bool:
        """Whether the actor has a rollout engine: one in its own process generates for evaluations at least."""
        return not (self.has_rollout_worker and self.rollout.runs_ahead)

    @property
    def placed_roles(self) -> dict[str, Sharding]:
        """Sharding of each role that `trainer.placement` places; rollout workers are not sharded."""
        return self.shardings() | ({ROLLOUT: NoSharding()} if self.has_rollout_worker else {})

    @property
    def num_rollout_workers(self) -> int:
        """Number of processes of the role `rollout`, each with an engine; 0 without it."""
        placement, world = self.trainer.placement, self.trainer.nnodes * self.trainer.n_gpus_per_node
        counts = {ROLLOUT: 1} if placement is None else placement.sizes(tuple(self.placed_roles), world)
        return counts[ROLLOUT] if self.has_rollout_worker else 0

    @property
    def devices_apart(self) -> int:
        """Devices of rollout workers that hold no other role."""
        placement, world = self.trainer.placement, self.trainer.nnodes * self.trainer.n_gpus_per_node
        return 0 if placement is None else placement.apart(tuple(self.placed_roles), world)

    @property
    def is_in_flight(self) -> bool:
        """Whether weights change during the generation of responses."""
        return bool(self.trainer.staleness) and self.rollout.weight_update == "in_flight"

    @property
    def response_tokens(self) -> int:
        """Maximum number of tokens of a row after its prompt."""
        return self.rollout.max_new_tokens if self.environment is None else self.environment.max_tokens

    @property
    def response_key(self) -> str:
        return "rollout.max_new_tokens" if self.environment is None else "environment.max_tokens"

    @property
    def updates_per_step(self) -> int:
        return self.algorithm.epochs * self.algorithm.mini_batches


class PolicyTrainer(LoopTrainer):
    """Base of a running policy-gradient trainer, without its step: components, evaluation, state, close.

    Attributes:
        actor, critic, reference: handles to the roles, in any process; None if a role is not needed.
        sampling: responses and rewards; None before the roles run.
        replay: the replay buffer.
    """

    reward: Any = None
    replay: Any = None
    sampling: Any = None
    rollout_workers: WorkerGroup | None = None
    _divided_threads = 0  # threads of this process before half were given to the rollout worker

    def __init__(self, run: PPODescription, context: BuildContext):
        super().__init__(run, with_day(context))

    def _build(self, run: PPODescription, context: BuildContext) -> None:
        self.algorithm, self.async_rewards = run.algorithm, AsyncRewards()
        self.reward = self.replay = self.sampling = self.rollout_workers = None
        context = self.read_tokenizer(run, context)
        self.load_data(run, context)
        self.build_reward(run, context)
        context = self.find_checkpoint(run, context)
        self.start_roles(run, context)

    def read_tokenizer(self, run: PPODescription, context: BuildContext) -> BuildContext:
        """Phase 1. Needs the description only; loads nothing but the tokenizer.

        Sets `tokenizer` and `date`; returns the context with tokenizer, chat template and tools for data and rewards.

        Raises:
            ConfigError: critic or reference have another tokenizer, whose token ids would differ from the actor's.
        """
        self._schedule = _schedule_options(run)
        context = with_tokenizer(context, run.actor, run.data)
        assert context.run_dir is not None
        if run.trainer.placement is None:  # else the actor may be on another machine or device
            run.rollout.check_here(context.device)
        self.context, self.run_dir, self.tokenizer = context, context.run_dir, context.tokenizer
        needed = {
            "critic.model": run.critic.model if run.critic and run.algorithm.needs_values else None,
            "reference.model": run.reference.model if run.reference and run.algorithm.needs_reference else None,
        }
        others = {name: model for name, model in needed.items() if model is not None and model != run.actor.model}
        faults = [tokenizer_fault(name, model, self.tokenizer) for name, model in others.items()]
        if present := [fault for fault in faults if fault is not None]:
            raise ConfigError(present)
        context = replace(
            context,
            max_pixels=getattr(run.data, "max_pixels", None),
            tools=() if run.environment is None else run.environment.tool_schemas(),
            prompts=None if run.environment is None else run.environment.prompts,
        )
        with faults_below("data"):
            self.date = RunDate(context)
        return context

    def load_data(self, run: PPODescription, context: BuildContext) -> None:
        """Phase 2. Needs the tokenizer, and tools and chat template of the prompts.

        Sets `train_data`, `eval_data`, their order `sampler`, `num_steps`, and `data_responses`.

        Raises:
            ConfigError: the data lack a column that the reward or the algorithm names.
        """
        with faults_below("data"):
            splits = run.data.build(context)
        self._use_data(splits, self.settings.prompts_per_step, "trainer.prompts_per_step")
        self.eval_data_without_tools = None
        if run.trainer.eval_without_tools:
            self.eval_data_without_tools = splits.eval
            if context.tools and ChatTemplate(context.tokenizer).reads_tools:
                with faults_below("data"):
                    self.eval_data_without_tools = run.data.build(replace(context, tools=())).eval
        self._refuse_missing_columns(run.reward)
        self.data_responses = DataResponses(run, self.train_data, context.tokenizer)

    def build_reward(self, run: PPODescription, context: BuildContext) -> None:
        """Phase 3. Needs the columns of the rows, to check the template of an environment.

        Sets `reward` (None if it is a role, started in phase 5), `tracker` and `stages`.
        """
        self.has_tools = run.environment is not None and (run.environment.has_tools or bool(context.tools))
        chat = ChatTemplate(context.tokenizer)
        has_chats = "prompt_messages" in getattr(self.train_data, "columns", ())
        if run.environment is not None and run.environment.images and (chat.images.token is None or not has_chats):
            raise ConfigError(
                "environment.images is true: it needs an actor.model that reads images, and chats as prompts."
            )
        if run.environment is not None and self.has_tools:
            check_template(run.environment, chat, has_chats)
        if run.reward_as_role is None:
            with faults_below("reward"):
                self.reward = in_time(run.reward.build(context))
        self.tracker = run.tracker.build(context)
        self.stages = StageTimers(self.tracker)

    def find_checkpoint(self, run: PPODescription, context: BuildContext) -> BuildContext:
        """Phase 4. Needs all that identifies the training: description, tokenizer, settings determined by the data.

        Sets `saving`, with the checkpoint that is resumed; returns the context with the start date of the run. Rows
        whose template contains the date are read again.
        """
        uses = ("ref_log_probs",) if run.algorithm.needs_reference else ()
        self.saving = prepare_saving(
            run, context, "actor/loss", uses, is_restart=bool(self.restarts), data=self.settled_data
        )
        if self.date.go_on_from(self.saving.resumed, self.tokenizer):
            context = replace(context, day=self.date.day)
            self.context = replace(self.context, day=self.date.day)
            self.load_data(run, context)
        if self.reward is not None:
            self.saving.messages += self._check_rows(self.reward)
        return context

    def start_roles(self, run: PPODescription, context: BuildContext) -> None:
        """Phase 5. Needs the number of steps, the longest row, and the checkpoint that roles are built from.

        Sets `cluster` with the handles `actor`, `critic` and `reference`, what the driver computes with them (`kl`,
        `advantage`, `replay`, `sampling`), and the guards of the stages.
        """
        self._divide_threads(run)
        self.guards = PPOGuards(self, NonFiniteGuard(run.trainer.safety, self.run_dir))
        self.kl, self.advantage = run.algorithm.kl.build(context), built_part(run.algorithm.advantage, context)
        self.replay = ReplayMixing(run, context, self.saving.directory)
        plan = self._plan(context)
        run = run if plan is None else plan.decided(run)
        limit, behaviour = run.trainer.safety.log_prob_gap, run.algorithm.proximal == "behaviour"
        gap_stops = limit is not None and limit.on_excess == "stop" and not behaviour and not run.trainer.staleness
        trainer_bytes = plan and plan.memory.trainer_bytes
        self._start_processes(run, replace(context, trainer_bytes=trainer_bytes, gap_stops=gap_stops))
        self.reward_stats = RewardStats(run.reward, self.reward)
        self.async_rewards.use(self.reward, self.reward_stats)
        losses = {"policy_loss": self.actor, "value_loss": self.critic}
        self._loss_states = {
            name: LossStates(role, f"algorithm.{name}")
            for name, role in losses.items()
            if role is not None and role.loss_keeps_state().result()
        }
        self.guards.monitor.numerics = self._numerics(run)
        seed_everything(derive_seed(self.settings.seed, "driver"))  # used while roles were built here

    def _start_processes(self, run: PPODescription, context: BuildContext) -> None:
        longest = self.longest_row()
        most = longest or getattr(run.data, "max_prompt_length", None)
        rollout = run.rollout if longest is None else run.rollout.with_room_for(longest, run.response_tokens)
        worker = None
        if run.has_rollout_worker:
            worker = RolloutHost(actor=run.actor, rollout=rollout, environment=run.environment, schedule=self._schedule)
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
            rollout_worker=None if run.trainer.placement is None else worker,
            actor_generates=run.actor_generates,
        )
        # without checkpoints the directory has no owner, and episodes are never resumed
        journal_dir = None if run.checkpoint is None else Path(self.saving.directory) / "episode_journal"
        row_tokens = None if most is None else most + run.response_tokens
        shares = worker is not None and host.rollout_worker is None  # it is on the first GPU, as the actor
        context = replace(context, row_tokens=row_tokens, journal_dir=journal_dir, shares_device=shares)
        self.cluster = start_cluster(host, run.trainer, context)
        roles = role_handles(self.cluster, host)
        self.actor, self.critic, self.reference = roles["actor"], roles.get("critic"), roles.get("reference")
        self.saving.rank_writers = rank_writers_of(self.cluster, self.trained, run.checkpoint)
        if host.rollout_worker is not None:
            assert isinstance(self.cluster, RoleGroups)
            self.rollout_workers = self.cluster.group_of[ROLLOUT]
        elif worker is not None:
            with rollout_worker_errors():
                self.rollout_workers = LocalWorkerGroup(worker, context, 1, torch.get_num_threads(), name=ROLLOUT)
        if run.reward_as_role is not None:
            self.reward = run.reward_as_role.scaled(RemoteRewardModel(roles["rm"]))
        depth = min(run.trainer.staleness or 0, self.num_steps)
        options = {"in_flight": run.is_in_flight, "actor_generates": run.actor_generates, "run_dir": self.run_dir}
        queue = RolloutQueue(self.actor, depth, self.rollout_workers, rewards=self.async_rewards, **options)
        self.sampling = Sampling(self, queue)

    def _refuse_missing_columns(self, reward: RewardDescription) -> None:
        """Refuse data without the columns that the reward names, before any weight is loaded."""
        named = {"training rows": self.train_data, "evaluation rows": self.eval_data}
        known = {name: columns for name, data in named.items() if (columns := getattr(data, "columns", None))}
        with faults_below("reward"):
            if faults := [x for name, columns in known.items() for x in missing_columns(reward, columns, name)]:
                raise ConfigError(faults)

    def _check_rows(self, reward: Reward) -> list[str]:
        """Let the reward check the rows that it will score; returns messages to show at the start."""
        named = {"training rows": self.train_data, "evaluation rows": self.eval_data}
        with faults_below("reward"):
            return [x for name, data in named.items() if data is not None for x in reward.check_rows(name, data)]

    def _divide_threads(self, run: PPODescription) -> None:
        """Leave half of the threads to the rollout worker on the same cores, until `close`."""
        if run.has_rollout_worker and run.trainer.staleness and 2 * (threads := torch.get_num_threads()) > num_cores():
            torch.set_num_threads(max(1, threads // 2))
            self._divided_threads = threads

    def _numerics(self, run: PPODescription) -> Numerics:
        numerics: Numerics = self.actor.numerics().result()
        if run.actor_generates or self.rollout_workers is None:
            return numerics
        kind, compute_type = RoleHandle(self.rollout_workers, ROLLOUT, RolloutWorker).engine_kind().result()
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

    @stage
    def observe(self, experience: DataProto, step: int) -> dict[str, float]:
        """Metrics of the responses of a step; the first step and steps with an evaluation also record tokens."""
        rows = self.replay.new(experience)
        if self.settings.sample_rows and (step == 1 or self.evaluates_after(step)):
            self.tracker.token_rows(token_rows(rows, self.settings.sample_rows, self.tokenizer), step)
        metrics, rollout = experience_metrics(rows) | self.sampler.metrics, self.description.rollout
        if self.description.environment is None and self.tokenizer.eos_token_id is not None:
            stops = [self.tokenizer.eos_token_id, *rollout.stop_token_ids]
            metrics["rollout/clipped_ratio"] = clipped_ratio(rows, rollout.max_new_tokens, stops)
        return metrics

    def evaluate(self, step: int) -> dict[str, float]:
        """Greedy accuracy on the held-out prompts, and mean@k, best@k of k sampled responses."""
        if self.eval_data is None:
            return {}
        responses = self.evaluated(range(len(self.eval_data)), step)
        records = evaluated_rows(responses, self.settings.success_score)
        samples = sample_rows(responses["greedy"], self.settings.sample_rows)
        pictures = getattr(self.eval_data, "pictures", lambda _: [])
        for row, sample in enumerate(samples):
            if shown := pictures(row):
                sample["pictures"] = shown
        self.tracker.samples(samples, step, "eval")
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
        with self.async_rewards.lock, self.reward.frozen():
            greedy = self.sampling.evaluate(prompts, GenerationRequest(step, greedy=True, stream=EVALUATION))
            sampled = bare = None
            if k:
                sampled = self.sampling.evaluate(prompts, GenerationRequest(step, num_samples=k, stream=EVALUATION))
            if self.eval_data_without_tools is not None:
                prompts = self.eval_data_without_tools.collate(rows)
                request = GenerationRequest(step, greedy=True, stream=EVALUATION, uses_environment=False)
                bare = self.sampling.evaluate(prompts, request)
        return {"greedy": greedy, "sampled": sampled, "without_tools": bare}

    @property
    def parts(self) -> dict[str, Stateful]:
        assert self.cluster is not None, "it is closed"
        queue = self.sampling.queue
        ahead = {"drawn_ahead": queue, "async_rewards": self.async_rewards} if queue.depth else {}
        kept = {"advantage": PartState(self.advantage, "algorithm.advantage")} if keeps_state(self.advantage) else {}
        return {
            "sampler": self.sampler,
            "kl": self.kl,
            "reward": self.reward_stats,
            "safety": self.guards.monitor,
            **ahead,
            **kept,
            **self._loss_states,
            **self.date.parts,
            "replay_buffer": self.replay,
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
        with self.async_rewards.lock:
            self.reward.close()
            self.reward, self.reward_stats = reward, RewardStats(described, reward)
            self.async_rewards.use(reward, self.reward_stats)
        self.description = replace(self.description, reward=described)
        self.saving.reconfigured(as_plain(self.description))

    def close(self) -> None:
        if self.rollout_workers is not None:
            if self.sampling is not None:
                self.sampling.close()
            self.rollout_workers.close()
        if torch.get_num_threads() == self._divided_threads // 2:  # else another run in this process has changed them
            torch.set_num_threads(self._divided_threads)
        self._divided_threads = 0
        super().close()
        for part in (self.reward, self.replay):
            if part is not None:
                part.close()


def _schedule_options(run: PPODescription) -> ScheduleOptions | None:
    """Options of the schedule of an in-flight run; None for others.

    Raises:
        ConfigError: the replayed schedule was recorded under other conditions.
    """
    if not run.is_in_flight:
        return None
    head = replay_identity(redact_tree(as_plain(run))) | environment_record()
    source = run.trainer.replay_schedule
    if source is None:
        return ScheduleOptions(json.dumps(head))
    engines = range(run.num_rollout_workers)
    return ScheduleOptions(json.dumps(head), tuple(read_schedule(source, head, engine) for engine in engines))
