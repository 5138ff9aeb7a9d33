"""PPORun: a policy-gradient run with the checks across its components."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from verl.component import BuildContext, component
from verl.engines.parallel_degrees import ParallelDegrees
from verl.environments.base import environment_faults
from verl.errors import ConfigError
from verl.models.own_module import ModuleModel
from verl.monitoring.ppo_metrics import evaluation_keys
from verl.rewards.base import missing_columns
from verl.rollout.data_responses import missing_completions
from verl.trainer.build import PPODescription
from verl.trainer.plan.workload import role_processes
from verl.trainer.setup import metric_faults, placement_faults, preflight_faults, sharding_faults

if TYPE_CHECKING:
    from verl.trainer.ppo import PPOTrainer


SET_TEACHER = "Set teacher=MODEL, a directory or hub name."


def faults_between(run: Any) -> Iterator[str]:
    """Each fault of a `verl.trainer.ppo_config.PPORun` by its full config path."""
    settings, algorithm = run.trainer, run.algorithm
    estimator = type(algorithm.advantage).__name__
    if algorithm.needs_groups and settings.group_size < 2:
        comparing = estimator if algorithm.advantage.needs_groups else type(algorithm.selection).__name__
        yield (
            f"trainer.group_size is {settings.group_size}: {comparing} compares a response with its siblings. "
            "Set trainer.group_size >= 2, or algorithm=ppo."
        )
    if algorithm.needs_values and run.critic is None:
        yield f"critic is null: {estimator} needs values. Set critic=tiny or another critic, or algorithm=grpo."
    if algorithm.needs_reference and run.reference is None:
        if algorithm.distill is None:
            yield "reference is null: algorithm.kl needs one. Set reference=same_as_actor, or algorithm.kl.coef=0."
        else:
            yield f"reference is null: algorithm.distill needs a teacher. {SET_TEACHER}"
    elif algorithm.distill is not None and run.reference.model in (None, run.actor.model):
        yield (
            f"reference.model is that of the actor: algorithm.distill would learn from the policy itself. {SET_TEACHER}"
        )
    if run.reference is not None and run.reference.precompute:
        yield "reference is a PrecomputedReference: responses are new in each step. Set reference=same_as_actor."
    rows = settings.prompts_per_step * settings.group_size
    if rows % algorithm.mini_batches:
        fitting = [n for n in range(1, rows + 1) if rows % n == 0]
        near = min(fitting, key=lambda n: abs(n - algorithm.mini_batches))
        yield (
            f"algorithm.mini_batches is {algorithm.mini_batches}: it does not divide the {rows} responses of a "
            f"step (trainer.prompts_per_step {settings.prompts_per_step} x trainer.group_size "
            f"{settings.group_size}); {near} would."
        )
    yield from _sharding_faults(run)
    yield from _async_faults(run)
    yield from _rollout_faults(run)
    yield from environment_faults(run)
    yield from _replay_faults(run)
    yield from _data_response_faults(run)
    yield from placement_faults(run.trainer, run.placed_roles)
    yield from _context_faults(run)
    for name, columns in run.data.columns().items():
        where = "rows of data" if name == "data" else f"rows of data.{name}"
        yield from (f"reward.{fault}" for fault in missing_columns(run.reward, columns, where))
    yield from _model_faults(run)
    yield from metric_faults(run, evaluation_keys(settings.eval_samples, run.environment is not None))


def _sharding_faults(run: Any) -> Iterator[str]:
    shardings = run.shardings()
    if run.reference is not None and run.reference.sharding is not None:
        is_the_actor = run.reference.model is None and run.actor.lora is not None
        if is_the_actor and "reference" in shardings and shardings["reference"] != shardings["actor"]:
            yield (
                "reference.sharding differs from that of the actor, and under actor.lora the reference is the "
                "actor with its adapter off. Set reference.sharding=null, or give reference.model."
            )
    yield from sharding_faults(run)


def _async_faults(run: Any) -> Iterator[str]:
    """Faults of a `verl.trainer.ppo_config.PPORun` that generates and trains at the same time, by full config path."""
    settings, rollout, algorithm = run.trainer, run.rollout, run.algorithm
    if settings.staleness is None:
        if settings.replay_schedule is not None:
            yield "trainer.replay_schedule: trainer.mode is sync, which has no schedule. Set it to null."
        return
    setting, remedy = "trainer.mode is async", "trainer.mode=sync"
    kind = type(rollout).__name__
    if rollout.router_replay:
        yield f"{setting}: rollout.router_replay was not tried with it. Set {remedy}."
    if not rollout.runs_ahead and "rollout_worker" not in rollout.supports:
        yield f"{setting}: {kind} cannot generate while the weights are trained. Set rollout=hf, or {remedy}."
    if run.is_in_flight and run.environment is not None and not run.environment.plays_in_flight:
        yield (
            f"rollout.weight_update is in_flight: environment is {type(run.environment).__name__}, and weights do not "
            "change within its episodes. Set rollout.weight_update=drain."
        )
    if run.num_rollout_workers > settings.prompts_per_step:
        yield (
            f"trainer.placement has {run.num_rollout_workers} workers of role rollout, and trainer.prompts_per_step "
            f"is {settings.prompts_per_step}: the responses to a prompt are generated by one engine. Use fewer workers."
        )
    is_in_flight = rollout.weight_update == "in_flight"
    if rollout.runs_ahead and not is_in_flight and settings.staleness > 1:
        other = "" if rollout.location == "server" else ", or rollout.weight_update=in_flight"
        yield (
            f"trainer.max_staleness is {settings.staleness}: a sync of {kind} waits for what it has begun, so that "
            f"more than 1 makes responses older and nothing faster. Set trainer.max_staleness=1{other}."
        )
    if is_in_flight and rollout.location == "server":
        yield (
            f"rollout.weight_update is in_flight: the API of {kind} pauses, but does not say which tokens were "
            "generated before, so that their versions are unknown. Set rollout.weight_update=drain."
        )
    if settings.replay_schedule is not None and not (is_in_flight and settings.staleness):
        yield (
            "trainer.replay_schedule: only a run with rollout.weight_update=in_flight and trainer.max_staleness above "
            "0 has a schedule; others are repeated by their settings. Set trainer.replay_schedule=null."
        )
    if not settings.staleness:
        return
    if algorithm.correction is None and algorithm.proximal == "trainer":
        yield (
            f"{setting}: responses come from older weights, which requires importance weights. "
            "Set algorithm.correction.level=token, "
            f"algorithm.proximal=behaviour, or {remedy}."
        )
    if algorithm.selection is not None:
        yield f"{setting}: algorithm.selection draws further batches within a step. Set {remedy}."
    if algorithm.needs_greedy_baseline:
        yield f"{setting}: the greedy baseline would be that of other weights. Set {remedy}."


def _rollout_faults(run: Any) -> Iterator[str]:
    shardings, adapter = run.shardings(), run.actor.lora
    count = role_processes(run)["actor"]
    is_divided = shardings["actor"].parameter_shards(count) > 1
    if run.algorithm.proximal == "behaviour" and getattr(run.rollout, "log_probs", None) == "trainer":
        yield (
            "algorithm.proximal is behaviour, and rollout.log_probs is trainer: the engine records no log-probs of its "
            "own. Set rollout.log_probs=server, or algorithm.proximal=trainer."
        )
    yield from run.rollout.faults_with_actor(None if adapter is None else adapter.rank)
    if isinstance(run.actor.model, ModuleModel) and "modules" not in run.rollout.supports:
        yield (
            f"rollout is a {type(run.rollout).__name__}: it takes models of transformers alone, and actor.model is a "
            f"{type(run.actor.model).__name__}. Set rollout=hf, where its own forward draws the responses."
        )
    degrees = shardings["actor"].degrees(count)
    stages, ep = degrees.pp, degrees.ep
    if stages > 1 and "stages" not in run.rollout.supports:
        yield (
            f"rollout is a {type(run.rollout).__name__}: it takes no weights from an actor in {stages} pipeline stages "
            "(sharding.pp). Set rollout=hf, or sharding.pp=1."
        )
    if ep > 1 and "experts" not in run.rollout.supports:
        yield (
            f"rollout is a {type(run.rollout).__name__}: it was not tried with an actor whose experts are divided over "
            f"{ep} processes (sharding.ep). Set rollout=hf, or sharding.ep=1."
        )
    if run.rollout.router_replay:
        yield from _router_replay_faults(run, degrees)
    limit_s = getattr(shardings["actor"], "timeout_s", float("inf"))
    if is_divided and run.rollout.call_timeout_s >= limit_s:
        yield (
            f"rollout.call_timeout_s is {run.rollout.call_timeout_s:g}: while a process waits so long for its engine, "
            f"its siblings give it up after sharding.timeout_s {limit_s:g}. Set rollout.call_timeout_s lower, or "
            "sharding.timeout_s higher."
        )


def _router_replay_faults(run: Any, degrees: ParallelDegrees) -> Iterator[str]:
    kind = run.actor.model.experts()
    if kind is not None and kind[1] is None:
        yield f"rollout.router_replay is true: actor.model is a {kind[0]}, which has no experts. Set it to false."
    for name in ("tp", "pp"):
        if (size := getattr(degrees, name)) > 1:
            yield (
                f"rollout.router_replay is true: it was not tried with {name} {size}, where a process does not see all "
                "that routers choose. Set it to false, or divide the actor by FSDP and sharding.ep."
            )
    if run.environment is not None:
        yield (
            f"rollout.router_replay is true: it was not tried with episodes (environment is "
            f"{type(run.environment).__name__}). Set it to false."
        )


def _replay_faults(run: Any) -> Iterator[str]:
    if run.algorithm.replay_fraction and run.replay is None:
        yield (
            f"algorithm.replay_fraction is {run.algorithm.replay_fraction}: there is no replay buffer to take old rows "
            "from. Set replay=tiered, or algorithm.replay_fraction=0."
        )
    share, rows = run.algorithm.replay_fraction, run.trainer.prompts_per_step * run.trainer.group_size
    count, least = round(rows * share / (1 - share)), run.trainer.group_size if run.algorithm.needs_groups else 1
    if share and count < least:
        yield (
            f"algorithm.replay_fraction is {share}: with the {rows} responses of a step that is {count} old rows, "
            f"fewer than the least that are taken, {least}, so that none is ever reused. Raise it, or "
            "trainer.prompts_per_step."
        )
    limit, updates = run.algorithm.replay_max_staleness, run.updates_per_step
    ahead = (run.trainer.staleness or 0) if run.rollout.weight_update == "drain" else 0
    youngest = updates * (1 + ahead)  # of the step before
    if run.algorithm.replay_fraction and limit is not None and limit < youngest:
        older = f" and its rows are drawn {ahead} syncs before (trainer.max_staleness)," if ahead else ""
        yield (
            f"algorithm.replay_max_staleness is {limit}: a step makes {updates} optimizer steps (algorithm.epochs "
            f"x algorithm.mini_batches),{older} so even the rows of the step before are too old, and none is ever "
            f"reused. Set it to {youngest} or a multiple, or null for any."
        )


def _data_response_faults(run: Any) -> Iterator[str]:
    distill, algorithm, count = run.algorithm.distill, run.algorithm, run.trainer.prompts_per_step
    if distill is None or not distill.data_fraction:
        return
    prefix = f"algorithm.distill.data_fraction is {distill.data_fraction}"
    if distill.data_fraction < 1 and not 0 < round(distill.data_fraction * count) < count:
        yield (
            f"{prefix}: of trainer.prompts_per_step {count} that is none or all. Set it to 0, 1 or a share of at least "
            "one prompt that leaves one, or more prompts per step."
        )
    refused = (
        (run.environment, "environment is set, and a response of the data is no episode. Set environment=none."),
        (algorithm.selection, "algorithm.selection fills a step with responses of the policy. Set it to null."),
        (algorithm.needs_values, "a critic does not learn from responses of the data. Set algorithm.distill.coef=1."),
    )
    yield from (f"{prefix}: {why}" for part, why in refused if part not in (None, False))
    for name, columns in run.data.columns().items():
        if name != "eval_files":
            yield from missing_completions(
                distill, columns, "rows of data" if name == "data" else f"rows of data.{name}"
            )


def _context_faults(run: Any) -> Iterator[str]:
    prompt, response = getattr(run.data, "max_prompt_length", None), run.response_tokens
    shorter: dict[int, list[str]] = {}
    for role in ("actor", "critic"):
        described = getattr(run, role) if role in run.roles else None  # one that is not built holds nothing
        limit = None if described is None else described.model.max_positions()
        if limit is None or (prompt or 1) + response <= limit:
            continue
        shorter.setdefault(limit, []).append(f"{role}.model")
    for limit, models in shorter.items():
        holders = f"{' and '.join(models)} {'hold' if models[1:] else 'holds'} {limit}"
        if prompt is None:
            yield (
                f"{run.response_key} is {response}: {holders} tokens, prompt and response together. "
                f"Set {run.response_key}={max(1, limit // 2)}."
            )
            continue
        fitting = f"{run.response_key}={limit - prompt}"
        if prompt > limit // 2:
            fitting = f"data.max_prompt_length={max(1, limit // 2)} {run.response_key}={max(1, limit - limit // 2)}"
        yield (
            f"data.max_prompt_length is {prompt}: with {run.response_key} {response} that makes "
            f"{prompt + response} tokens, and {holders}. Set {fitting}."
        )


def _model_faults(run: Any) -> Iterator[str]:
    """Faults of models that are not decoders, by path."""
    for role in ("actor", "critic", "reference"):
        model = getattr(getattr(run, role), "model", None) if role in run.roles else None
        if role == "critic" and isinstance(model, ModuleModel):
            yield (
                f"critic.model is a {type(model).__name__}: a value head needs a model of transformers. Choose an "
                "algorithm without a critic, such as algorithm=grpo, or give critic.model."
            )
        if model is not None and (fault := model.policy_fault()) is not None:
            yield f"{role}.model.{fault}"


@component
class PPORun(PPODescription):
    """A policy-gradient run: the root of `conf/ppo.yaml`, with its checks.

    A role that the algorithm does not need (a critic for GRPO, a reference without KL) is not built.
    """

    def faults(self) -> Iterator[str]:
        """Faults between components, each with its full config path."""
        yield from faults_between(self)

    def machine_faults(self) -> Iterator[str]:
        if self.trainer.placement is None:  # else the actor may be on another machine
            device = "cuda" if self.trainer.device == "auto" and torch.cuda.is_available() else self.trainer.device
            try:
                self.rollout.check_here(device)
            except ConfigError as error:
                yield from error.faults

    def preflight(self, context: BuildContext) -> Iterator[str]:
        yield from preflight_faults(self, context, self.replay is not None)

    def preflight_fields(self) -> Iterator[str]:
        away = () if self.trainer.placement is None else ("rollout",)  # checked on the machine of the actor
        yield from (name for name in super().preflight_fields() if name not in away)

    def build(self, context: BuildContext) -> PPOTrainer:
        """Load data and weights, and start the processes of the sharding."""
        from verl.trainer.ppo import PPOTrainer

        return PPOTrainer(self, context)
