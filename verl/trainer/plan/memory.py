"""Bytes in each process, by phase and part, and bytes in main memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from verl.engines.sharding import FSDP
from verl.errors import ConfigError
from verl.models.known_shapes import sizes_config
from verl.models.model_stats import ModelStats, model_stats
from verl.ops.cpu_matmul import chosen_library
from verl.rollout.vllm.client.gpu_memory import cache_bytes, engine_shape
from verl.trainer.config import PPOSettings
from verl.trainer.plan.activations import Activations, num_experts, trace_activations
from verl.trainer.plan.devices import DeviceRates
from verl.trainer.plan.memory_estimate import GIB, MemoryEstimate, RoleMemory, estimate_ppo, estimate_sft
from verl.utils.memory import DeviceMemory
from verl.workers.base import roles_on_device

EXPERT_LOADS = 1.0, 2.0  # times its share of the tokens that the experts of a process get
WORTH_PACKING = 0.85  # of the tokens of padded rows, from which down the rows are packed
ASLEEP = "sleeping engine"  # what its process keeps on a GPU, outside of generation
_HEADS = {"critic": "backbone", "reward": "classifier"}  # models that give no logits over the vocabulary


@dataclass(frozen=True)
class RolePlan:
    """A role and the size of its micro-batches.

    Attributes:
        config: Hugging Face configuration of its model.
        sizes: of that model, with the head that the role has.
        tokens: of a micro-batch, at most.
        dtype: that it computes in.
        activations: of that micro-batch; of a mixture whose experts are divided over processes, where each gets its
            share of the tokens.
        unbalanced: likewise, where the experts of this process get twice their share; None without such experts.
    """

    memory: RoleMemory
    config: Any
    sizes: ModelStats
    tokens: int
    dtype: torch.dtype
    recomputed: bool
    activations: Activations
    unbalanced: Activations | None = None

    @property
    def name(self) -> str:
        return self.memory.name


@dataclass(frozen=True)
class PhaseMemory:
    """One phase of a step in the processes that hold some roles.

    Attributes:
        roles: in these processes.
        parts: bytes by name.
    """

    name: str
    roles: tuple[str, ...]
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def words(self, unit: int) -> str:
        """Its parts, the largest first, without those that round to 0.00."""
        large = sorted((-size, name) for name, size in self.parts.items() if size >= 0.005 * unit)
        return ", ".join(f"{name} {-size / unit:.2f}" for size, name in large)


def role_plans(run: Any, estimate: MemoryEstimate, device: DeviceRates, exact: bool) -> list[RolePlan]:
    """The roles of a run with traced activations; roles of equal models and micro-batches are traced once."""
    found = []
    for memory in estimate.roles:
        role = getattr(run, memory.name)
        config = sizes_config(getattr(role, "model", None) or run.actor.model)
        autocast = run.actor.autocast if memory.name == "reference" else getattr(role, "autocast", None)
        kind = getattr(torch, autocast or (getattr(role, "model", None) or run.actor.model).dtype)
        sharding = memory.layout.sharding
        limit = micro_batch_limit(run, memory)
        tokens = sharding.micro_batch_tokens(role.micro_batch_tokens, limit)
        under_way = sharding.activation_share(-(-limit // tokens))
        recomputed = bool(getattr(role, "gradient_checkpointing", False))
        device_type = "cuda" if device.is_gpu else "cpu"
        siblings = memory.layout.siblings
        more = min(role.micro_batch_tokens, micro_batch_limit(run, memory, scores=True)) / tokens
        experts = num_experts(config)
        are_divided = experts > 0 and memory.layout.expert_ways > 1 and experts % memory.layout.expert_ways == 0
        made = []
        for load in EXPERT_LOADS if are_divided else (None,):
            one = trace_activations(
                config,
                tokens,
                kind,
                recomputed=recomputed,
                siblings=siblings,
                exact=exact,
                device_type=device_type,
                expert_load=load,
            )
            one = replace(
                one,
                scoring=int(more * one.scoring),
                training=int(one.training + (under_way - 1) * one.kept),
                kept=int(under_way * one.kept),
            )
            made.append(replace(one, logits=0) if memory.name in _HEADS else one)
        sizes = model_stats(config, kind=_HEADS.get(memory.name, "causal_lm"))
        found.append(RolePlan(memory, config, sizes, tokens, kind, recomputed, made[0], *made[1:]))
    return found


def micro_batch_limit(run: Any, role: RoleMemory, *, scores: bool = False) -> int:
    """Maximum number of tokens of a step in one process, independent of the micro-batch limit.

    Args:
        scores: count all rows of the step, rather than those of a mini-batch.
    """
    settings = run.trainer
    if not isinstance(settings, PPOSettings):
        length = getattr(run.data, "max_length", None) or run.actor.micro_batch_tokens
        return max(1, -(-settings.batch_size * length // role.layout.token_shares))
    rows = settings.prompts_per_step * settings.group_size
    is_whole = scores or not role.gradients or run.algorithm.mini_batches == 1
    if not is_whole:
        rows = -(-rows // run.algorithm.mini_batches)
    per_row = tokens_per_row(run, role.name, run.response_tokens, is_whole)
    return max(1, int(-(-rows // role.layout.token_shares) * per_row))


def tokens_per_row(run: Any, role: str, response: int, is_whole: bool = True) -> float:
    """Tokens that a row adds to a packed sequence, in which samples share their prompt.

    Args:
        is_whole: all samples of a prompt are in one micro-batch, which is not so for mini-batches of shuffled rows.
    """
    prompt = getattr(run.data, "max_prompt_length", 0)
    packs = getattr(run.actor if role == "reference" else getattr(run, role), "packing", "off") == "auto"
    shared = response + prompt / run.trainer.group_size
    return shared if packs and is_whole and shared <= WORTH_PACKING * (prompt + response) else prompt + response


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a run in each phase.

    Attributes:
        phases: of every group of processes that hold roles.
        host: bytes of main memory on each machine, where the device is another.
        limit: bytes that a process has on its device.
        beside_engine: bytes that the actor's processes need there while an engine beside them is awake.
        reductions: sentences on what it costs and saves to reduce gradients once per update.
        unbalanced: the phases where the experts of this process get twice their share of the tokens; none without
            experts that are divided over processes.
    """

    estimate: MemoryEstimate
    roles: tuple[RolePlan, ...]
    phases: tuple[PhaseMemory, ...]
    host: int
    limit: int
    beside_engine: int = 0
    reductions: tuple[str, ...] = ()
    unbalanced: tuple[PhaseMemory, ...] = ()

    @property
    def peak(self) -> PhaseMemory:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def unbalanced_peak(self) -> PhaseMemory | None:
        """The most with twice the balanced load; None without experts that are divided over processes."""
        return max(self.unbalanced, key=lambda phase: phase.total, default=None)

    @property
    def fits(self) -> bool:
        return self.peak.total <= self.limit

    def lines(self) -> Iterator[str]:
        """A table of phases, the peak marked."""
        name, unit = ("GiB", GIB) if self.peak.total >= GIB else ("MiB", 2**20)
        for roles in dict.fromkeys(phase.roles for phase in self.phases):
            yield f"{name} in each process of {', '.join(roles)}:"
            for phase in self.phases:
                if phase.roles == roles:
                    mark = "*" if phase is self.peak else " "
                    yield f" {mark}{phase.name:<15}{phase.total / unit:>9.2f}   {phase.words(unit)}"
        yield f"* the most; a process has {self.limit / GIB:.1f} GiB"
        for balanced, twice in zip(self.phases, self.unbalanced, strict=False):
            if twice.total != balanced.total:
                yield (
                    f"With twice the balanced load on its experts {twice.name} takes {twice.total / unit:.2f} {name}"
                    + ("." if twice.total <= self.limit else ", which does not fit.")
                )
        yield from self.reductions
        for role in self.roles:
            if (why := role.activations.why_counted) is not None:
                yield f"Activations of {role.name} are counted as those of Llama, not traced ({why[:100]})."


def memory_plan(run: Any, device: DeviceRates, exact: bool = False, limit: int | None = None) -> MemoryPlan:
    """Memory of a run on devices of one kind, computed from the configurations of its models.

    Args:
        limit: bytes available to a process; None: its share of the device.
    """
    settings, run = run.trainer, roles_on_device(run, device.is_gpu)
    is_ppo = isinstance(settings, PPOSettings)
    estimate = (estimate_ppo if is_ppo else estimate_sft)(run, on_host=not device.is_gpu)
    roles = role_plans(run, estimate, device, exact)
    if limit is None:
        limit = device.memory if device.is_gpu else device.memory // max(1, estimate.processes)
    phases: list[PhaseMemory] = []
    unbalanced: list[PhaseMemory] = []
    beside = 0
    for group in sorted({role.memory.group for role in roles}):
        members = [role for role in roles if role.memory.group == group]
        found = list(_phases(run, members, estimate, device, is_ppo, {}))
        holds_actor, engine = is_ppo and any(role.name == "actor" for role in members), {}
        if holds_actor:
            beside = _beside_engine(found, members, estimate)
            engine = _engine_parts(run, members, estimate, device, beside, limit)
            found = list(_phases(run, members, estimate, device, is_ppo, engine))
        phases += found
        worst = [role if role.unbalanced is None else replace(role, activations=role.unbalanced) for role in members]
        unbalanced += _phases(run, worst, estimate, device, is_ppo, engine)
    if all(role.unbalanced is None for role in roles):
        unbalanced = []
    reductions = tuple(_reductions(run, roles, phases, limit))
    return MemoryPlan(
        estimate, tuple(roles), tuple(phases), estimate.host, limit, beside, reductions, tuple(unbalanced)
    )


def _reductions(run: Any, roles: Sequence[RolePlan], phases: Sequence[PhaseMemory], limit: int) -> Iterator[str]:
    """Whether there is memory to reduce gradients once per update, where each micro-batch reduces them."""
    for role in roles:
        layout, peak = role.memory.layout, [phase for phase in phases if phase.name == f"update {role.name}"]
        if not isinstance(layout.sharding, FSDP) or not peak or layout.sharding.reduce_gradients == "update":
            continue
        sharding = replace(layout.sharding, reduce_gradients="update")
        itemsize = getattr(torch, getattr(run, role.name).model.dtype).itemsize
        cost = sharding.cost(layout.processes, role.sizes, role.tokens, itemsize, role.dtype.itemsize)
        count = -(-micro_batch_limit(run, role.memory) // role.tokens)
        if cost.whole_gradients and count > 1:
            fits = "fits" if peak[0].total + cost.whole_gradients <= limit else "does not fit"
            more, less = cost.whole_gradients / GIB, (count - 1) * cost.per_update / GIB
            yield (
                f"sharding.reduce_gradients=update: {role.name} would take {more:.2f} GiB more in an update, which "
                f"{fits}, and send {less:.2f} GiB less for each update of {count} micro-batches."
            )


def _beside_engine(phases: Sequence[PhaseMemory], members: Sequence[RolePlan], estimate: MemoryEstimate) -> int:
    """Bytes that the roles in the actor's processes need while their engine is awake: resting state and the weights
    that a sync gathers, or the maximum over all phases if the engine never sleeps."""
    at_rest = phases[0].total + max(role.memory.gathered for role in members)
    return max([at_rest, *(phase.total for phase in phases)]) if estimate.stays_awake else at_rest


def _phases(
    run: Any,
    members: Sequence[RolePlan],
    estimate: MemoryEstimate,
    device: DeviceRates,
    is_ppo: bool,
    engine: dict[str, int],
) -> Iterator[PhaseMemory]:
    names = tuple(role.name for role in members)
    resting: dict[str, int] = {"context": device.context} if device.context else {}
    for role in members:
        if not (device.is_gpu and role.memory.is_offloaded):
            resting[f"{role.name} weights"] = role.memory.weights
            resting[f"{role.name} optimizer"] = role.memory.optimizer
    if not device.is_gpu and estimate.copied:
        resting["copy for the writer"] = estimate.copied // max(1, estimate.processes)
    asleep = {part: size for part, size in engine.items() if part == ASLEEP}
    engine = {part: size for part, size in engine.items() if part != ASLEEP}
    is_awake = "engine weights" in engine and not asleep
    beside = {k: v for k, v in engine.items() if k != "sampling"} if is_awake else asleep
    yield PhaseMemory("rest", names, {**resting, **beside})
    actor = next((role for role in members if role.name == "actor"), None)
    if engine and actor is not None:
        own = {"gathered weights": actor.memory.generating} if actor.memory.generating else {}
        uses_training_weights = "engine weights" not in engine
        if uses_training_weights and not device.is_gpu and chosen_library(run.trainer.cpu_matmul) == "onednn":
            own["packed weights"] = max(actor.memory.weights, actor.memory.generating)
        yield PhaseMemory("generate", names, {**resting, **engine, **own})
    if is_ppo:
        asked = max(members, key=lambda role: role.activations.scoring + role.memory.gathered)
        working = {"activations": asked.activations.scoring, "gathered weights": asked.memory.gathered}
        working["logits"] = asked.activations.logits
        yield PhaseMemory("score", names, {**resting, **beside, **working})
    for role in members:
        if not role.memory.gradients:
            continue
        made = role.activations
        on_top = max(0, made.kept + made.logits - made.training)  # gone when layers are recomputed
        working = {
            "activations": made.training,
            "logits": on_top if role.name == "actor" else 0,
            "gathered weights": role.memory.gathered,
        }
        if micro_batch_limit(run, role.memory) > role.tokens:
            working["whole gradients"] = role.memory.whole_gradients
        if not (device.is_gpu and role.memory.is_offloaded):
            working[f"{role.name} gradients"] = role.memory.gradients
        yield PhaseMemory(f"update {role.name}", names, {**resting, **beside, **working})
    if "engine weights" in engine and actor is not None:
        chunks = 2 * getattr(run.rollout, "chunk_mib", 0) * 2**20
        moving = {"chunks": chunks, "gathered weights": actor.memory.gathered}
        yield PhaseMemory("sync", names, {**resting, **asleep, "engine weights": engine["engine weights"], **moving})
    if estimate.saving:
        yield PhaseMemory("save", names, {**resting, **beside})


def _engine_parts(
    run: Any, members: Sequence[RolePlan], estimate: MemoryEstimate, device: DeviceRates, beside: int, limit: int
) -> dict[str, int]:
    """Memory of generation: an engine with its own weights, or only the key-value cache."""
    actor, rollout = next(role for role in members if role.name == "actor"), run.rollout
    if not rollout.generates_here:
        return {}
    vocabulary = actor.config.get_text_config().vocab_size
    rows = getattr(rollout, "max_rows", None) or getattr(rollout, "max_num_seqs", 0)
    found = {"sampling": 3 * 4 * min(rows or 1, run.trainer.prompts_per_step * run.trainer.group_size) * vocabulary}
    if not hasattr(rollout, "kv_cache_gib"):
        return {"keys and values": estimate.cache, **found}
    room = rollout.with_room_for(getattr(run.data, "max_prompt_length", 0), run.response_tokens)
    shape = engine_shape(room, actor.config, actor.dtype, device.is_gpu)
    memory = None
    if device.is_gpu:
        found = {"engine working": shape.overhead}
        if getattr(rollout, "sleep", False) and not estimate.stays_awake:
            found[ASLEEP] = shape.asleep
        memory = DeviceMemory(device.memory, min(device.memory - device.context, limit))
    try:
        cache = cache_bytes(rollout, shape, memory, beside)
    except ConfigError:  # it does not fit: the plan shows by how much
        cache = shape.cache_of(1)
    return {"engine weights": shape.weights, "keys and values": cache, **found}
