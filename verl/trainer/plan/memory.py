"""Memory of a run by role and phase, and disk space, computed from configurations before weights are loaded.

estimate_memory ──> bytes of each role at rest, of caches and of checkpoints, by counts alone
    └─ memory_plan ──> + traced activations and the engine ──> bytes of each process in each phase of a step

Memory used by libraries themselves, and unused memory held by allocators, are not included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from verl.engines.sharding import FSDP, NoSharding
from verl.errors import ConfigError
from verl.models.model_stats import ModelStats, model_stats, sizes_config
from verl.ops.cpu_matmul import chosen_library
from verl.rollout.vllm.client.gpu_memory import cache_bytes, engine_shape
from verl.trainer.plan.activations import Activations, num_experts, trace_activations
from verl.trainer.plan.workload import DeviceRates, RoleLayout, Workload, placed_roles, role_layouts, workload
from verl.utils.memory import DeviceMemory
from verl.workers.base import TrainedRole, roles_on_device

GIB = 2**30
EXPERT_LOADS = 1.0, 2.0  # times its share of the tokens that the experts of a process get
ASLEEP = "sleeping engine"  # what its process keeps on a GPU, outside of generation
_HEADS = {"critic": "backbone", "reward": "classifier"}  # models that give no logits over the vocabulary


@dataclass(frozen=True)
class RoleMemory:
    """A role, and the bytes that it has in each of its processes.

    Attributes:
        layout: of its processes.
        config: Hugging Face configuration of its model.
        sizes: of that model, with the head that the role has.
        dtype: that it computes in.
        stored: dtype of its weights.
        weights: including a copy in the computation's data type, if that is different.
        gradients, optimizer: of trained parameters; gradients only during an update.
        gathered: gathered weights of other shards during updates and scoring.
        whole_gradients: gradients of other shards during an update of several micro-batches.
        generating: the same during generation.
        is_offloaded: weights, gradients and optimizer state are kept in main memory.
        group: roles with the same number share their processes.
        saved: size of the whole role in a checkpoint.
    """

    name: str
    layout: RoleLayout
    config: Any
    sizes: ModelStats
    dtype: torch.dtype
    stored: torch.dtype
    weights: int
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    whole_gradients: int = 0
    generating: int = 0
    is_offloaded: bool = False
    group: int = 0
    saved: int = 0


@dataclass(frozen=True)
class RolePlan:
    """A role and the size of its micro-batches.

    Attributes:
        tokens: of a micro-batch, at most.
        micro_batches: of an update.
        activations: of that micro-batch; of a mixture whose experts are divided over processes, where each gets its
            share of the tokens.
        unbalanced: likewise, where the experts of this process get twice their share; None without such experts.
    """

    memory: RoleMemory
    tokens: int
    micro_batches: int
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
        """Parts of the sum, the largest first, without those that round to 0.00."""
        large = sorted((-size, name) for name, size in self.parts.items() if size >= 0.005 * unit)
        return ", ".join(f"{name} {-size / unit:.2f}" for size, name in large)


@dataclass(frozen=True)
class MemoryEstimate:
    """Persistent memory, and disk space.

    Attributes:
        roles: that the run has.
        cache: key-value cache in a process of the actor during generation; 0 if nothing is generated there.
        processes: number of processes with roles on this machine.
        samplers: of these, with the role `sampler` alone, which saves nothing.
        machines: number of machines with as many processes.
        saving: bytes of one checkpoint.
        num_checkpoints: checkpoints on disk at a time.
        copied: bytes of host buffers on this machine for asynchronous saves.
        on_host: roles are in main memory, because there is no GPU.
        stays_awake: the engine keeps its GPU memory while the trainer works.
        sent: bytes of main memory of weights on their way to the role `sampler`.
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
    samplers: int = 0

    @property
    def host(self) -> int:
        """Bytes of main memory on each machine that a run on GPUs takes beside them."""
        offloaded = sum(role.weights + role.optimizer + role.gradients for role in self.roles if role.is_offloaded)
        return 0 if self.on_host else self.copied + self.sent + offloaded * (self.processes - self.samplers)


def estimate_memory(run: Any, on_gpu: bool) -> MemoryEstimate:
    """Memory at rest, by counts alone.

    Args:
        run: a `PPORun` or an `SFTRun` whose models' configurations can be read.
        on_gpu: its roles live in the memory of GPUs; otherwise in main memory.
    """
    run = roles_on_device(run, on_gpu)
    settings, layouts, step = run.trainer, role_layouts(run), workload(run)
    world, placement, in_run = settings.n_gpus_per_node * settings.nnodes, settings.placement, tuple(layouts)
    groups = [(in_run, world)] if placement is None else placement.worker_groups(placed_roles(run), world)
    group_of = {role: number for number, (members, _) in enumerate(groups) for role in members}
    group_of["reward"] = group_of["actor"] if placement is None else group_of.get("rm", group_of["actor"])
    roles = [replace(_role_memory(run, *role), group=group_of[role[0]]) for role in _layouts_of_models(run, layouts)]
    has_engine = step.generates and run.rollout.runs_ahead  # or a server, with weights and a cache of its own
    cache = _cache_bytes(run, roles[0]) if step.generates and not has_engine else 0
    if not cache:
        roles[0] = replace(roles[0], generating=0)
    naps = has_engine and getattr(run.rollout, "sleep", False) and not settings.staleness
    stays_awake = has_engine and run.rollout.location == "process" and on_gpu and not naps
    saves, samplers = run.checkpoint, getattr(run, "num_samplers", 0)
    saved = sum(role.saved for role in roles) if saves is not None else 0
    return MemoryEstimate(
        roles=tuple(roles),
        cache=cache,
        processes=-(-sum(count for _, count in groups) // settings.nnodes) + (samplers if placement is None else 0),
        machines=settings.nnodes,
        saving=saved,
        num_checkpoints=(saves.keep_last_n or 0) + 1 if saves is not None else 0,
        copied=saved // settings.nnodes if saves is not None and saves.save_async else 0,
        on_host=not on_gpu,
        stays_awake=stays_awake,
        sent=(1 + settings.staleness) * roles[0].weights if samplers else 0,
        samplers=samplers,
    )


def _cache_bytes(run: Any, actor: RoleMemory) -> int:
    step = workload(run)
    drawn = min(-(-step.rows // actor.layout.generation_shares), getattr(run.rollout, "max_rows", step.rows))
    return actor.sizes.cache_elements // actor.layout.siblings * drawn * step.width * actor.dtype.itemsize


def _layouts_of_models(run: Any, layouts: dict[str, RoleLayout]) -> Iterator[tuple[str, RoleLayout]]:
    """Roles with weights of their own, and their processes; the actor first."""
    for name in ("actor", "critic", "reference"):
        if name not in layouts or (name == "reference" and not run.reference.model and run.actor.lora is not None):
            continue  # the reference of an adapter is the model below it
        yield name, layouts[name]
    reward = getattr(run, "reward", None)
    if reward is not None and reward.is_model:  # each process has a copy of its own
        yield "reward", RoleLayout(NoSharding(), 1 if run.reward_as_role is None else layouts["rm"].processes)


def _role_memory(run: Any, name: str, layout: RoleLayout) -> RoleMemory:
    role = getattr(run, name)
    source = getattr(role, "model", None) or run.actor.model
    autocast = getattr(run.actor if name == "reference" else role, "autocast", None)  # it computes as the actor does
    config, kind = sizes_config(source), _HEADS.get(name, "causal_lm")
    sizes, dtype = model_stats(config, kind=kind), getattr(torch, autocast or source.dtype)
    itemsize, trains = getattr(torch, source.dtype).itemsize, isinstance(role, TrainedRole)
    counted = model_stats(config, role.lora, kind) if trains else sizes
    tokens = role.micro_batch_tokens if trains else 0
    cost = layout.sharding.cost(layout.processes, counted, tokens, itemsize, dtype.itemsize, trains)
    return RoleMemory(
        name=name,
        layout=layout,
        config=config,
        sizes=sizes,
        dtype=dtype,
        stored=getattr(torch, source.dtype),
        weights=cost.weights,
        gradients=cost.gradients if trains else 0,
        optimizer=cost.optimizer if trains else 0,
        gathered=cost.gathered,
        whole_gradients=cost.whole_gradients if trains else 0,
        generating=cost.generating if name == "actor" else 0,
        is_offloaded=cost.is_offloaded,
        saved=3 * counted.trained * itemsize if trains else 0,
    )


def _role_plan(
    run: Any, memory: RoleMemory, step: Workload, device: DeviceRates, exact: bool, counted_below: int
) -> RolePlan:
    """A role with traced activations; equal models and micro-batches are traced once."""
    role, layout, sharding = getattr(run, memory.name), memory.layout, memory.layout.sharding
    limit = micro_batch_limit(run, memory, step)
    tokens = sharding.micro_batch_tokens(role.micro_batch_tokens, limit)
    micro_batches = -(-limit // tokens)
    under_way = sharding.activation_share(micro_batches)
    recomputed = bool(getattr(role, "gradient_checkpointing", False))
    more = min(role.micro_batch_tokens, micro_batch_limit(run, memory, step, scores=True)) / tokens
    experts = num_experts(memory.config)
    are_divided = experts > 0 and layout.expert_ways > 1 and experts % layout.expert_ways == 0
    by_load = []
    for load in EXPERT_LOADS if are_divided else (None,):
        traced = trace_activations(
            memory.config,
            tokens,
            memory.dtype,
            recomputed=recomputed,
            siblings=layout.siblings,
            exact=exact,
            counted_below=counted_below,
            device_type="cuda" if device.is_gpu else "cpu",
            expert_load=load,
        )
        by_load.append(
            replace(
                traced,
                scoring=int(more * traced.scoring),
                training=int(traced.training + (under_way - 1) * traced.after_forward),
                after_forward=int(under_way * traced.after_forward),
                logits=0 if memory.name in _HEADS else traced.logits,
            )
        )
    return RolePlan(memory, tokens, micro_batches, recomputed, *by_load)


def micro_batch_limit(run: Any, role: RoleMemory, step: Workload, *, scores: bool = False) -> int:
    """Maximum number of tokens of a step in one process, independent of the micro-batch limit.

    Args:
        scores: count all rows of the step, rather than those of a mini-batch.
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


def memory_plan(
    run: Any, device: DeviceRates, exact: bool = False, limit: int | None = None, counted_below: int = 0
) -> MemoryPlan:
    """Memory of a run on devices of one kind, computed from the configurations of its models.

    Args:
        exact, counted_below: see `trace_activations`.
        limit: bytes available to a process; None: its share of the device.
    """
    run, step = roles_on_device(run, device.is_gpu), workload(run)
    estimate = estimate_memory(run, device.is_gpu)
    roles = [_role_plan(run, memory, step, device, exact, counted_below) for memory in estimate.roles]
    if limit is None:
        limit = device.memory if device.is_gpu else device.memory // max(1, estimate.processes)
    phases: list[PhaseMemory] = []
    unbalanced: list[PhaseMemory] = []
    beside = 0
    for group in sorted({role.memory.group for role in roles}):
        members = [role for role in roles if role.memory.group == group]
        engine: dict[str, int] = {}
        if step.generates and any(role.name == "actor" for role in members) and getattr(run, "actor_generates", True):
            beside = _beside_engine(list(_phases(run, members, estimate, device, {})), members, estimate)
            engine = _engine_parts(run, members, estimate, device, beside, limit)
        phases += _phases(run, members, estimate, device, engine)
        worst = [role if role.unbalanced is None else replace(role, activations=role.unbalanced) for role in members]
        unbalanced += _phases(run, worst, estimate, device, engine)
    if getattr(run, "has_sampler", False):
        shares = device.is_gpu and run.trainer.placement is None
        other = {"the actor's process": max(phase.total for phase in phases)} if shares else {}
        phases.append(_sampler_phase(run, roles[0], estimate, device, limit, other))
        if not run.actor_generates:
            beside = sum(phases[-1].parts[name] for name in ("context", "weights", *other))
    worse = () if all(role.unbalanced is None for role in roles) else tuple(unbalanced)
    reductions = tuple(_reductions(run, roles, phases, limit))
    return MemoryPlan(estimate, tuple(roles), tuple(phases), estimate.host, limit, beside, reductions, worse)


def _reductions(run: Any, roles: Sequence[RolePlan], phases: Sequence[PhaseMemory], limit: int) -> Iterator[str]:
    """Whether there is memory to reduce gradients once per update, where each micro-batch reduces them."""
    for role in roles:
        layout, peak = role.memory.layout, [phase for phase in phases if phase.name == f"update {role.name}"]
        if not isinstance(layout.sharding, FSDP) or not peak or layout.sharding.reduce_gradients == "update":
            continue
        sharding, sizes = replace(layout.sharding, reduce_gradients="update"), role.memory.sizes
        itemsize = getattr(torch, getattr(run, role.name).model.dtype).itemsize
        cost = sharding.cost(layout.processes, sizes, role.tokens, itemsize, role.memory.dtype.itemsize)
        if cost.whole_gradients and role.micro_batches > 1:
            fits = "fits" if peak[0].total + cost.whole_gradients <= limit else "does not fit"
            more, less = cost.whole_gradients / GIB, (role.micro_batches - 1) * cost.per_update / GIB
            yield (
                f"sharding.reduce_gradients=update: {role.name} would take {more:.2f} GiB more in an update, which "
                f"{fits}, and send {less:.2f} GiB less for each update of {role.micro_batches} micro-batches."
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
    engine: dict[str, int],
) -> Iterator[PhaseMemory]:
    names = tuple(role.name for role in members)
    resting: dict[str, int] = {"context": device.context} if device.context else {}
    for role in members:
        if not (device.is_gpu and role.memory.is_offloaded):
            resting[f"{role.name} weights"] = role.memory.weights
            resting[f"{role.name} optimizer"] = role.memory.optimizer
        if role.name == "actor" and estimate.sent and not device.is_gpu:
            resting["weights for the sampler"] = estimate.sent
    if not device.is_gpu and estimate.copied:
        resting["copy for the writer"] = estimate.copied // max(1, estimate.processes - estimate.samplers)
    asleep = {part: size for part, size in engine.items() if part == ASLEEP}
    engine = {part: size for part, size in engine.items() if part != ASLEEP}
    is_awake = "engine weights" in engine and not asleep
    beside = {k: v for k, v in engine.items() if k != "sampling"} if is_awake else asleep
    yield PhaseMemory("rest", names, {**resting, **beside})
    actor = next((role for role in members if role.name == "actor"), None)
    if engine and actor is not None:
        extra = {"gathered weights": actor.memory.generating} if actor.memory.generating else {}
        uses_training_weights = "engine weights" not in engine
        if uses_training_weights and not device.is_gpu and chosen_library(run.trainer.cpu_matmul) == "onednn":
            extra["packed weights"] = max(actor.memory.weights, actor.memory.generating)
        yield PhaseMemory("generate", names, {**resting, **engine, **extra})
    if workload(run).generates:
        asked = max(members, key=lambda role: role.activations.scoring + role.memory.gathered)
        working = {"activations": asked.activations.scoring, "gathered weights": asked.memory.gathered}
        working["logits"] = asked.activations.logits
        yield PhaseMemory("score", names, {**resting, **beside, **working})
    for role in members:
        if not role.memory.gradients:
            continue
        activations = role.activations
        # gone when layers are recomputed
        on_top = max(0, activations.after_forward + activations.logits - activations.training)
        working = {
            "activations": activations.training,
            "logits": on_top if role.name == "actor" else 0,
            "gathered weights": role.memory.gathered,
        }
        if role.micro_batches > 1:
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


def _sampler_phase(
    run: Any, actor: RolePlan, estimate: MemoryEstimate, device: DeviceRates, limit: int, other: dict[str, int]
) -> PhaseMemory:
    """A process of the role `sampler`, with a whole copy of the actor's model, beside `other` on its device."""
    memory = _role_memory(run, "actor", RoleLayout(NoSharding(), run.num_samplers))
    if not run.actor_generates:  # it computes nothing with the copy: there is none in the type of autocast
        memory = replace(memory, weights=memory.sizes.parameters * getattr(torch, run.actor.model.dtype).itemsize)
    estimate = replace(estimate, cache=_cache_bytes(run, memory))
    parts = {"context": device.context, "weights": memory.weights, **other}
    engine = _engine_parts(run, [replace(actor, memory=memory)], estimate, device, sum(parts.values()), limit)
    return PhaseMemory("generate", ("sampler",), {**parts, **engine})


def _engine_parts(
    run: Any, members: Sequence[RolePlan], estimate: MemoryEstimate, device: DeviceRates, beside: int, limit: int
) -> dict[str, int]:
    """Memory of generation: an engine with its own weights, or only the key-value cache."""
    actor, rollout = next(role for role in members if role.name == "actor"), run.rollout
    if rollout.location == "server":
        return {}
    vocabulary = actor.memory.config.get_text_config().vocab_size
    rows = getattr(rollout, "max_rows", None) or getattr(rollout, "max_num_seqs", 0)
    working = {"sampling": 3 * 4 * min(rows or 1, run.trainer.prompts_per_step * run.trainer.group_size) * vocabulary}
    if not hasattr(rollout, "kv_cache_gib"):
        return {"keys and values": estimate.cache, **working}
    room = rollout.with_room_for(getattr(run.data, "max_prompt_length", 0), run.response_tokens)
    shape = engine_shape(room, actor.memory.config, actor.memory.dtype, device.is_gpu)
    memory = None
    if device.is_gpu:
        working = {"engine working": shape.overhead}
        if getattr(rollout, "sleep", False) and not estimate.stays_awake:
            working[ASLEEP] = shape.asleep
        memory = DeviceMemory(device.memory, min(device.memory - device.context, limit))
    try:
        cache = cache_bytes(rollout, shape, memory, beside)
    except ConfigError:  # it does not fit: the plan shows by how much
        cache = shape.cache_of(1)
    return {"engine weights": shape.weights, "keys and values": cache, **working}
