"""Memory of a run by role and phase, and disk space, computed from configurations before weights are loaded.

estimate_memory ──> persistent bytes of each role, of caches and of checkpoints, by counts alone
    └─ memory_plan ──> + traced activations and the engine ──> bytes of each process in each phase of a step

Memory used by libraries themselves, and unused memory held by allocators, are not included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from verl.engines.parallel_degrees import ShardingCost
from verl.engines.sharding import NoSharding
from verl.models.model_stats import ModelStats, model_stats, sizes_config
from verl.ops.cpu_matmul import chosen_library
from verl.trainer.plan.activations import Activations, num_experts, trace_activations
from verl.trainer.plan.workload import GIB, DeviceRates, RoleLayout, Workload, placed_roles, role_layouts, workload
from verl.utils.memory import DeviceMemory
from verl.workers.base import TrainedRole, roles_on_device

AWAKE_SHARE = 0.9  # of the limit, for a run whose engine never sleeps; the rest covers what the plan leaves out
ASLEEP = "sleeping engine"  # memory of its process on a GPU, outside of generation
NOT_TRACED = Activations(0, 0, 0, 0)
_HEADS = {"critic": "backbone", "reward": "classifier"}  # models that give no logits over the vocabulary


@dataclass(frozen=True, kw_only=True)
class RoleMemory(ShardingCost):
    """A role, and its bytes in each of its processes; weights with their copy in the dtype of computation.

    Attributes:
        config: Hugging Face configuration of its model.
        sizes: of that model, with the head that the role has.
        dtype, stored: of computation, and of the weights.
        group: roles with the same number share their processes.
        saved: bytes of the whole role in a checkpoint.
        tokens: maximum of a micro-batch; an update has `micro_batches`.
        activations: of a micro-batch; with expert parallelism, for the share of tokens of a process.
    """

    name: str
    layout: RoleLayout
    config: Any
    sizes: ModelStats
    dtype: torch.dtype
    stored: torch.dtype
    group: int = 0
    saved: int = 0
    tokens: int = 0
    micro_batches: int = 1
    recomputed: bool = False
    activations: Activations = NOT_TRACED


@dataclass(frozen=True)
class PhaseMemory:
    """One phase of a step in a group of processes: bytes by name."""

    name: str
    roles: tuple[str, ...]
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryEstimate:
    """Persistent memory, and disk space.

    Attributes:
        cache: key-value cache in a process of the actor during generation; 0 if it does not generate.
        processes: with roles on this machine; `rollout_workers` of these have that role alone, which saves nothing.
        machines: each with that many processes.
        saving: bytes of one checkpoint; at most `num_checkpoints` are on disk at a time.
        copied: bytes of host buffers on this machine for asynchronous saves.
        on_host: roles are in main memory, because there is no GPU.
        stays_awake: the engine keeps its GPU memory while the trainer works.
        sent: bytes of main memory for weights that are sent to the role `rollout`.
    """

    roles: tuple[RoleMemory, ...]
    cache: int
    processes: int
    saving: int
    num_checkpoints: int
    copied: int = 0
    on_host: bool = True
    machines: int = 1
    stays_awake: bool = False
    sent: int = 0
    rollout_workers: int = 0

    @property
    def host(self) -> int:
        """Bytes of main memory on each machine of a run on GPUs."""
        offloaded = sum(role.persistent_bytes for role in self.roles if role.is_offloaded)
        return 0 if self.on_host else self.copied + self.sent + offloaded * (self.processes - self.rollout_workers)


def estimate_memory(run: Any, on_gpu: bool) -> MemoryEstimate:
    """Persistent memory of a `PPORun` or an `SFTRun`, by counts alone.

    Args:
        on_gpu: roles are in GPU memory; otherwise in main memory.
    """
    run = roles_on_device(run, on_gpu)
    settings, layouts, step = run.trainer, role_layouts(run), workload(run)
    world, placement = settings.n_gpus_per_node * settings.nnodes, settings.placement
    groups = [(tuple(layouts), world)] if placement is None else placement.worker_groups(placed_roles(run), world)
    group_of = {role: number for number, (members, _) in enumerate(groups) for role in members}
    group_of["reward"] = group_of["actor"] if placement is None else group_of.get("rm", group_of["actor"])
    roles = [_role_memory(run, name, layout, group_of[name]) for name, layout in _layouts_of_models(run, layouts)]
    has_engine = step.generates and run.rollout.runs_ahead  # or a server, with its own weights and cache
    cache = _cache_bytes(run, roles[0]) if step.generates and not has_engine else 0
    if not cache:
        roles[0] = replace(roles[0], generating=0)
    naps = has_engine and getattr(run.rollout, "sleep", False) and not settings.staleness
    saves, apart = run.checkpoint, getattr(run, "num_rollout_workers", 0)
    saved = sum(role.saved for role in roles) if saves is not None else 0
    return MemoryEstimate(
        roles=tuple(roles),
        cache=cache,
        processes=-(-sum(count for _, count in groups) // settings.nnodes) + (apart if placement is None else 0),
        machines=settings.nnodes,
        saving=saved,
        num_checkpoints=(saves.keep_last_n or 0) + 1 if saves is not None else 0,
        copied=saved // settings.nnodes if saves is not None and saves.save_async else 0,
        on_host=not on_gpu,
        stays_awake=has_engine and run.rollout.location == "process" and on_gpu and not naps,
        sent=(1 + settings.staleness) * roles[0].weights if apart else 0,
        rollout_workers=apart,
    )


def _cache_bytes(run: Any, actor: RoleMemory) -> int:
    step = workload(run)
    sampled = min(-(-step.rows // actor.layout.generation_shares), getattr(run.rollout, "max_rows", step.rows))
    return actor.sizes.cache_elements // actor.layout.siblings * sampled * step.width * actor.dtype.itemsize


def _layouts_of_models(run: Any, layouts: dict[str, RoleLayout]) -> Iterator[tuple[str, RoleLayout]]:
    """Roles with their own weights, and their processes; the actor first."""
    for name in ("actor", "critic", "reference"):
        if name not in layouts or (name == "reference" and not run.reference.model and run.actor.lora is not None):
            continue  # the reference of an adapter is the base model
        yield name, layouts[name]
    reward = getattr(run, "reward", None)
    if reward is not None and reward.is_model:  # each process has a copy of its own
        yield "reward", RoleLayout.of(NoSharding(), 1 if run.reward_as_role is None else layouts["rm"].processes)


def _role_memory(run: Any, name: str, layout: RoleLayout, group: int = 0) -> RoleMemory:
    role = getattr(run, name)
    source = getattr(role, "model", None) or run.actor.model
    autocast = getattr(run.actor if name == "reference" else role, "autocast", None)  # it computes like the actor
    stored, dtype = getattr(torch, source.dtype), getattr(torch, autocast or source.dtype)
    config, kind, trains = sizes_config(source), _HEADS.get(name, "causal_lm"), isinstance(role, TrainedRole)
    sizes = model_stats(config, kind=kind)
    counted = model_stats(config, role.lora, kind) if trains else sizes
    tokens = role.micro_batch_tokens if trains else 0
    cost = layout.sharding.cost(layout.processes, counted, tokens, stored.itemsize, dtype.itemsize, trains)
    saved = 3 * counted.trained * stored.itemsize if trains else 0
    described = {"config": config, "sizes": sizes, "dtype": dtype, "stored": stored}
    return RoleMemory(**vars(cost), **described, name=name, layout=layout, group=group, saved=saved)


def _traced(run: Any, memory: RoleMemory, step: Workload, device: DeviceRates, counted_below: int) -> RoleMemory:
    """The role with its micro-batches and their activations."""
    role, layout, sharding = getattr(run, memory.name), memory.layout, memory.layout.sharding
    most = micro_batch_limit(run, memory, step)
    tokens = sharding.micro_batch_tokens(role.micro_batch_tokens, most)
    micro_batches = -(-most // tokens)
    num_active = sharding.activation_share(micro_batches)
    recomputed = bool(getattr(role, "gradient_checkpointing", False))
    more = min(role.micro_batch_tokens, micro_batch_limit(run, memory, step, scores=True)) / tokens
    are_divided = (
        layout.expert_ways > 1 and (experts := num_experts(memory.config)) and not experts % layout.expert_ways
    )
    kind = {"counted_below": counted_below, "device_type": "cuda" if device.is_gpu else "cpu"}
    how = {"recomputed": recomputed, "siblings": layout.siblings, "expert_load": 1.0 if are_divided else None}
    traced = trace_activations(memory.config, tokens, memory.dtype, **kind, **how)
    training = int(traced.training + (num_active - 1) * traced.after_forward)
    after_forward, scoring = int(num_active * traced.after_forward), int(more * traced.scoring)
    logits = 0 if memory.name in _HEADS else traced.logits
    found = Activations(training, after_forward, scoring, logits, traced.why_counted)
    return replace(memory, tokens=tokens, micro_batches=micro_batches, recomputed=recomputed, activations=found)


def micro_batch_limit(run: Any, role: RoleMemory, step: Workload, *, scores: bool = False) -> int:
    """Maximum number of tokens of a step in one process, independent of the micro-batch limit.

    Args:
        scores: count all rows of the step instead of those of a mini-batch.
    """
    is_whole = scores or not role.gradients or step.mini_batches == 1
    rows = step.rows if is_whole else -(-step.rows // step.mini_batches)
    per_row = step.tokens_per_row(run, role.name, is_whole)
    if not step.generates:
        return max(1, -(-rows * int(per_row) // role.layout.token_shares))
    return max(1, int(-(-rows // role.layout.token_shares) * per_row))


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a run in each phase.

    Attributes:
        phases: of every group of processes.
        limit: bytes available to a process on its device.
        trainer_bytes: bytes that the actor's processes need there while an engine on the device is awake.
    """

    estimate: MemoryEstimate
    roles: tuple[RoleMemory, ...]
    phases: tuple[PhaseMemory, ...]
    limit: int
    trainer_bytes: int = 0

    @property
    def peak(self) -> PhaseMemory:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def engine_cache(self) -> int:
        """Bytes of the keys and values of an engine."""
        return max(phase.parts.get("keys and values", 0) for phase in self.phases)

    @property
    def fits(self) -> bool:
        return self.peak.total <= self.limit

    def lines(self) -> Iterator[str]:
        """A table of phases, the peak marked."""
        name, unit = ("GiB", GIB) if self.peak.total >= GIB else ("MiB", 2**20)
        yield f"{name} of each process, which has {self.limit / GIB:.1f} GiB; * the most"
        for roles in dict.fromkeys(phase.roles for phase in self.phases):
            yield f"{', '.join(roles)}:"
            for phase in (phase for phase in self.phases if phase.roles == roles):
                large = sorted((-size, part) for part, size in phase.parts.items() if size >= 0.005 * unit)
                words = [f"{part} {-size / unit:.2f}" for size, part in large]
                mark = "*" if phase is self.peak else " "
                yield f" {mark}{phase.name:<15}{phase.total / unit:>9.2f}   {', '.join(words)}"
        if self.estimate.host:
            yield f"main memory of each machine: {self.estimate.host / GIB:.2f} GiB"
        for role in self.roles:
            if (why := role.activations.why_counted) is not None:
                yield f"activations of {role.name}: by a formula for Llama, not traced ({why[:100]})"


def memory_plan(run: Any, device: DeviceRates, limit: int | None = None, counted_below: int = 0) -> MemoryPlan:
    """Memory of a run on devices of one kind, computed from the configurations of its models.

    Args:
        limit: bytes available to a process; None: its share of the device.
        counted_below: see `trace_activations`.
    """
    run, step = roles_on_device(run, device.is_gpu), workload(run)
    estimate = estimate_memory(run, device.is_gpu)
    roles = [_traced(run, role, step, device, counted_below) for role in estimate.roles]
    if limit is None:
        limit = device.memory if device.is_gpu else device.memory // max(1, estimate.processes)
    plan = _memory_plan(run, step, roles, estimate, device, limit)
    if device.is_gpu and getattr(getattr(run, "rollout", None), "sleep", None) == "auto" and not estimate.stays_awake:
        awake = _memory_plan(run, step, roles, replace(estimate, stays_awake=True), device, limit)
        if awake.peak.total <= AWAKE_SHARE * limit and awake.engine_cache == plan.engine_cache:
            return awake
    return plan


def _memory_plan(
    run: Any, step: Workload, roles: Sequence[RoleMemory], estimate: MemoryEstimate, device: DeviceRates, limit: int
) -> MemoryPlan:
    """The plan of a run with `rollout.sleep` resolved."""
    phases: list[PhaseMemory] = []
    trainer_bytes = 0
    for group in sorted({role.group for role in roles}):
        members, engine = [role for role in roles if role.group == group], dict[str, int]()
        if step.generates and roles[0] in members and getattr(run, "actor_generates", True):
            alone = [*_phases(run, members, estimate, device, {})]  # without engine; with weights that a sync gathers
            needs = [alone[0].total + max(role.gathered for role in members)]
            trainer_bytes = max(needs + [phase.total for phase in alone if estimate.stays_awake])
            engine = _engine_parts(run, roles[0], estimate, device, trainer_bytes, limit)
        phases += _phases(run, members, estimate, device, engine)
    if getattr(run, "has_rollout_worker", False):  # a process with a whole copy of the actor's model
        memory = _role_memory(run, "actor", RoleLayout.of(NoSharding(), run.num_rollout_workers))
        if not run.actor_generates:  # it does not compute with the copy, so there is none in the dtype of computation
            memory = replace(memory, weights=memory.sizes.parameters * memory.stored.itemsize)
        parts = {"context": device.context, "weights": memory.weights}
        if device.is_gpu and run.trainer.placement is None:
            parts["the actor's process"] = max(phase.total for phase in phases)
        trainer_bytes = trainer_bytes if run.actor_generates else sum(parts.values())
        own = replace(estimate, cache=_cache_bytes(run, memory))
        engine = _engine_parts(run, memory, own, device, sum(parts.values()), limit)
        phases.append(PhaseMemory("generate", ("rollout",), parts | engine))
    return MemoryPlan(estimate, tuple(roles), tuple(phases), limit, trainer_bytes)


def _phases(
    run: Any, members: Sequence[RoleMemory], estimate: MemoryEstimate, device: DeviceRates, engine: dict[str, int]
) -> Iterator[PhaseMemory]:
    """The phases of the processes that hold some roles.

    Args:
        engine: see `_engine_parts`; empty if there is none.
    """
    names, has_weights = tuple(role.name for role in members), "engine weights" in engine
    actor = next((role for role in members if role.name == "actor"), None)
    in_device = [role for role in members if not (device.is_gpu and role.is_offloaded)]
    persistent = {"context": device.context} if device.context else {}
    for role in in_device:
        persistent |= {f"{role.name} weights": role.weights, f"{role.name} optimizer": role.optimizer}
    if not device.is_gpu and actor is not None and estimate.sent:
        persistent["weights for rollout workers"] = estimate.sent
    if not device.is_gpu and estimate.copied:
        persistent["copy for the writer"] = estimate.copied // max(1, estimate.processes - estimate.rollout_workers)
    asleep = {part: size for part, size in engine.items() if part == ASLEEP}
    engine = {part: size for part, size in engine.items() if part != ASLEEP}
    awake = {part: size for part, size in engine.items() if part != "sampling"}
    outside = persistent | (awake if has_weights and not asleep else asleep)  # of generation
    yield PhaseMemory("rest", names, outside)
    if engine and actor is not None:
        extra = {"gathered weights": actor.generating} if actor.generating else {}
        if not has_weights and not device.is_gpu and chosen_library(run.trainer.cpu_matmul) == "onednn":
            extra["packed weights"] = max(actor.weights, actor.generating)
        yield PhaseMemory("generate", names, persistent | engine | extra)
    if workload(run).generates:
        largest = max(members, key=lambda role: role.activations.scoring + role.gathered)
        working = {"activations": largest.activations.scoring, "gathered weights": largest.gathered}
        yield PhaseMemory("score", names, outside | working | {"logits": largest.activations.logits})
    for role in (role for role in members if role.gradients):
        peak = role.activations
        on_top = max(0, peak.after_forward + peak.logits - peak.training)  # the rest is free when layers are recomputed
        working = {"activations": peak.training, "logits": on_top if role.name == "actor" else 0}
        working |= {"gathered weights": role.gathered}
        working |= {"whole gradients": role.whole_gradients} if role.micro_batches > 1 else {}
        working |= {f"{role.name} gradients": role.gradients} if role in in_device else {}
        yield PhaseMemory(f"update {role.name}", names, outside | working)
    if has_weights and actor is not None:
        moving = {"chunks": 2 * getattr(run.rollout, "chunk_mib", 0) * 2**20, "gathered weights": actor.gathered}
        moving["engine weights"] = engine["engine weights"]
        yield PhaseMemory("sync", names, persistent | asleep | moving)
    if estimate.saving:
        yield PhaseMemory("save", names, outside)


def _engine_parts(
    run: Any, actor: RoleMemory, estimate: MemoryEstimate, device: DeviceRates, trainer_bytes: int, limit: int
) -> dict[str, int]:
    """Memory of generation: an engine with its own weights, or only the key-value cache; none with a server."""
    rollout = run.rollout
    if rollout.location == "server":
        return {}
    rows = getattr(rollout, "max_rows", None) or getattr(rollout, "max_num_seqs", 1)
    rows = min(rows, run.trainer.prompts_per_step * run.trainer.group_size)
    working = {"sampling": 3 * 4 * rows * actor.config.get_text_config().vocab_size}
    room = rollout.with_room_for(getattr(run.data, "max_prompt_length", 0), run.response_tokens)
    memory = DeviceMemory(device.memory, min(device.memory - device.context, limit)) if device.is_gpu else None
    engine = room.engine_memory(actor.config, actor.dtype, memory, trainer_bytes)
    if engine is None:
        return {"keys and values": estimate.cache, **working}
    if device.is_gpu:
        working = {"engine working": engine["overhead"]}
        if getattr(rollout, "sleep", False) and not estimate.stays_awake:
            working[ASLEEP] = engine["asleep"]
    return {"engine weights": engine["weights"], "keys and values": engine["cache"], **working}
