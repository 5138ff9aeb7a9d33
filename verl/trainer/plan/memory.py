"""Memory of a run: bytes of each part in each phase of a step, and of checkpoints, from configurations alone.

roles (`Sharding.cost`, traced activations) ──┐
engine, or the key-value cache of the actor ──┼──> bytes by part and phase in each group of processes
copies for saves and rollout workers ─────────┘

Memory used by libraries themselves, and unused memory held by allocators, are not included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch

from verl.engines.parallel_degrees import ShardingCost
from verl.engines.sharding import NoSharding
from verl.errors import faults_below
from verl.models.model_stats import ModelStats, model_stats, sizes_config
from verl.ops.cpu_matmul import chosen_library, packs
from verl.trainer.plan.activations import Activations, trace_activations
from verl.trainer.plan.workload import (
    GIB,
    DeviceRates,
    RoleLayout,
    Workload,
    machine_processes,
    process_groups,
    role_layouts,
    workload,
)
from verl.utils.memory import DeviceMemory
from verl.workers.base import TrainedRole, roles_on_device

ASLEEP = "sleeping engine"  # what it keeps while the trainer works
AWAKE_SHARE = 0.9  # of the limit, for a run whose engine never sleeps; the rest covers what the plan leaves out
NOT_TRACED = Activations()
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
        activations: of a micro-batch, with experts chosen equally often.
        pixels: bytes of the images of a micro-batch.
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
    pixels: int = 0


@dataclass(frozen=True)
class PhaseMemory:
    """One phase of a step in a group of processes: bytes by part, without empty ones."""

    name: str
    roles: tuple[str, ...]
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Memory of a run, in bytes.

    Attributes:
        phases: of every group of processes.
        limit: available to a process on its device.
        processes: with roles, on each of `machines`.
        saving: of one checkpoint; at most `num_checkpoints` are on disk at a time.
        copied: host buffers of a machine for asynchronous saves.
        host: main memory of each machine of a run on GPUs.
        stays_awake: the engine keeps its GPU memory while the trainer works; that of `rollout=hf` its keys and values.
        trainer_bytes: that the actor's processes need on the device while an engine there is awake.
    """

    roles: tuple[RoleMemory, ...]
    phases: tuple[PhaseMemory, ...] = ()
    limit: int
    processes: int
    machines: int
    saving: int
    num_checkpoints: int
    copied: int
    host: int
    stays_awake: bool
    trainer_bytes: int = 0

    @property
    def peak(self) -> PhaseMemory:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def engine_cache(self) -> int:
        """Keys and values of an engine."""
        return max(phase.parts.get("keys and values", 0) for phase in self.phases)

    @property
    def fits(self) -> bool:
        return self.peak.total <= self.limit

    def lines(self) -> Iterator[str]:
        """A table of parts by phase for each group of processes; * marks the peak."""
        name, unit = ("GiB", GIB) if self.peak.total >= GIB else ("MiB", 2**20)
        yield f"{name} of each process, of {self.limit / unit:.2f}; * the most"
        for roles in dict.fromkeys(phase.roles for phase in self.phases):
            phases = [phase for phase in self.phases if phase.roles == roles]
            for heads in zip_longest(*(phase.name.split() for phase in phases), fillvalue=""):
                yield _row(", ".join(roles), heads)
                roles = ()
            for part in dict.fromkeys(part for phase in phases for part in phase.parts):
                sizes = [phase.parts.get(part, 0) / unit for phase in phases]
                if max(sizes) >= 0.005:
                    yield _row(part, (f"{size:.2f}" if size else "" for size in sizes))
            yield _row("total", ("*" * (phase is self.peak) + f"{phase.total / unit:.2f}" for phase in phases))
        if self.host:
            yield f"main memory of each machine: {self.host / GIB:.2f} GiB"
        for role in self.roles:
            if (why := role.activations.why_counted) is not None:
                yield f"activations of {role.name}: by a formula for Llama, not traced ({why[:100]})"


def _row(name: str, cells: Iterable[str]) -> str:
    return f"  {name:<24}{''.join(f'{cell:>9}' for cell in cells)}".rstrip()


def memory_plan(run: Any, device: DeviceRates, limit: int | None = None, counted_below: int = 0) -> MemoryPlan:
    """Memory of a run on devices of one kind, computed from the configurations of its models.

    Args:
        limit: bytes available to a process; None: its share of the device.
        counted_below: see `trace_activations`.
    """
    run, step, processes = roles_on_device(run, device.is_gpu), workload(run), machine_processes(run)
    groups = [names for names, _ in process_groups(run)]
    has_engine = step.generates and run.rollout.runs_ahead  # or a server, with its own weights and cache
    roles = []
    for name, layout in _layouts_of_models(run):
        placed = {"reward": "rm" if any("rm" in names for names in groups) else "actor"}.get(name, name)
        role = _role_memory(run, name, layout, next(n for n, names in enumerate(groups) if placed in names))
        if name == "actor" and (has_engine or not step.generates):
            role = replace(role, generating=0)
        roles.append(_traced(run, role, step, device, counted_below))
    saves, apart, nodes = run.checkpoint, getattr(run, "num_rollout_workers", 0), run.trainer.nnodes
    saved = sum(role.saved for role in roles) if saves is not None else 0
    copied = saved // nodes if saves is not None and saves.save_async else 0
    sent = (1 + run.trainer.staleness) * roles[0].weights if apart else 0
    offloaded = sum(role.persistent_bytes for role in roles if role.is_offloaded) * (processes - apart)
    sleeps = getattr(run.rollout, "sleep", False if has_engine else None) if step.generates else None
    keeps = sleeps is False or (has_engine and (not sleeps or run.trainer.staleness))
    plan = MemoryPlan(
        roles=tuple(roles),
        limit=(device.memory if device.is_gpu else device.memory // max(1, processes)) if limit is None else limit,
        processes=processes,
        machines=nodes,
        saving=saved,
        num_checkpoints=(saves.keep_last_n or 0) + 1 if saves is not None else 0,
        copied=copied,
        host=copied + sent + offloaded if device.is_gpu else 0,
        stays_awake=bool(keeps and device.is_gpu and run.rollout.location != "server"),
    )
    on_host = {} if device.is_gpu else {"copy for the writer": copied // max(1, processes - apart)}
    plan = _with_phases(run, plan, device, on_host, sent)
    if sleeps == "auto" and device.is_gpu and not plan.stays_awake:
        awake = _with_phases(run, replace(plan, stays_awake=True), device, on_host, sent)
        if awake.peak.total <= AWAKE_SHARE * plan.limit and awake.engine_cache == plan.engine_cache:
            return awake
    return plan


def _layouts_of_models(run: Any) -> Iterator[tuple[str, RoleLayout]]:
    """Roles with their own weights, and their processes; the actor first."""
    layouts = role_layouts(run)
    for name in ("actor", "critic", "reference"):
        if name not in layouts or (name == "reference" and not run.reference.model and run.actor.lora is not None):
            continue  # the reference of an adapter is the base model
        yield name, layouts[name]
    reward = getattr(run, "reward", None)
    if reward is not None and reward.is_model:  # each process has a copy of its own
        yield "reward", RoleLayout.of(NoSharding(), 1 if run.reward_as_role is None else layouts["rm"].processes)


def _role_memory(run: Any, name: str, layout: RoleLayout, group: int = 0) -> RoleMemory:
    """The role by counts alone, without activations."""
    role = getattr(run, name)
    source = getattr(role, "model", None) or run.actor.model
    autocast = getattr(run.actor if name == "reference" else role, "autocast", None)  # it computes like the actor
    stored, dtype = getattr(torch, source.dtype), getattr(torch, autocast or source.dtype)
    with faults_below(f"{name}.model"):
        config = sizes_config(source)
    kind, trains = _HEADS.get(name, "causal_lm"), isinstance(role, TrainedRole)
    sizes = model_stats(config, kind=kind, frozen=source.freeze)
    counted = model_stats(config, role.lora, kind, source.freeze) if trains else sizes
    tokens = role.micro_batch_tokens if trains else 0
    cost = layout.sharding.cost(layout.processes, counted, tokens, stored.itemsize, dtype.itemsize, trains)
    saved = 3 * counted.trained * stored.itemsize if trains else 0
    described = {"config": config, "sizes": sizes, "dtype": dtype, "stored": stored}
    return RoleMemory(**vars(cost), **described, name=name, layout=layout, group=group, saved=saved)


def _traced(run: Any, memory: RoleMemory, step: Workload, device: DeviceRates, counted_below: int) -> RoleMemory:
    """The role with its micro-batches and their activations."""
    role, layout, sharding = getattr(run, memory.name), memory.layout, memory.layout.sharding
    most = _tokens_of_step(run, memory, step)
    tokens = sharding.micro_batch_tokens(role.micro_batch_tokens, most)
    micro_batches = -(-most // tokens)
    active = sharding.activation_share(micro_batches)
    recomputed = bool(getattr(role, "gradient_checkpointing", False))
    more = min(role.micro_batch_tokens, _tokens_of_step(run, memory, step, scores=True)) / tokens
    traced = trace_activations(
        memory.config,
        tokens,
        memory.dtype,
        recomputed=recomputed,
        siblings=layout.siblings,
        counted_below=counted_below,
        device_type="cuda" if device.is_gpu else "cpu",
    )
    found = replace(
        traced,
        training=int(traced.training + (active - 1) * traced.after_forward),
        after_forward=int(active * traced.after_forward),
        scoring=int(more * traced.scoring),
        logits=0 if memory.name in _HEADS else traced.logits,
    )
    memory = replace(memory, tokens=tokens, micro_batches=micro_batches, recomputed=recomputed, activations=found)
    return _with_images(run, memory, step, more)


def _with_images(run: Any, memory: RoleMemory, step: Workload, more: float) -> RoleMemory:
    """The role with the images of its micro-batches; scoring has `more` times the tokens of a micro-batch."""
    if (tower := memory.sizes.tower) is None:
        return memory
    is_whole = not memory.gradients or step.mini_batches == 1
    patches = step.patches_per_row(tower.patches, is_whole) / step.tokens_per_row(run, memory.name, is_whole)
    patches *= memory.tokens
    layer = int(patches * tower.layer_elements * memory.dtype.itemsize)  # is kept if the tower is trained
    kept, of = layer * tower.layers * tower.is_trained, memory.activations
    found = replace(
        of,
        training=max(of.training, layer) if not kept else of.training + kept,
        after_forward=of.after_forward + kept,
        scoring=max(of.scoring, int(more * layer)),
    )
    return replace(memory, activations=found, pixels=int(more * patches * tower.patch_elements * 4))


def _tokens_of_step(run: Any, role: RoleMemory, step: Workload, *, scores: bool = False) -> int:
    """Tokens of a mini-batch in one process, or of all rows of the step with `scores`, if a role does not train."""
    is_whole = scores or not role.gradients or step.mini_batches == 1
    rows = step.rows if is_whole else -(-step.rows // step.mini_batches)
    per_row = step.tokens_per_row(run, role.name, is_whole)
    if not step.generates:
        return max(1, -(-rows * int(per_row) // role.layout.token_shares))
    return max(1, int(-(-rows // role.layout.token_shares) * per_row))


def _with_phases(run: Any, plan: MemoryPlan, device: DeviceRates, on_host: Mapping[str, int], sent: int) -> MemoryPlan:
    """The plan with its phases, for the plan's `stays_awake`.

    Args:
        on_host: parts of each process on a CPU.
        sent: bytes of main memory for weights that are sent to rollout workers.
    """
    phases: list[PhaseMemory] = []
    trainer_bytes, actor, context = 0, plan.roles[0], {"context": device.context}
    for number in sorted({role.group for role in plan.roles}):
        members, engine = [role for role in plan.roles if role.group == number], dict[str, int]()
        fixed = dict(context)
        for role in members:
            if not (device.is_gpu and role.is_offloaded):
                fixed |= {f"{role.name} weights": role.weights, f"{role.name} optimizer": role.optimizer}
        fixed |= {} if device.is_gpu or actor not in members else {"weights for rollout workers": sent}
        fixed |= on_host
        if workload(run).generates and actor in members and getattr(run, "actor_generates", True):
            alone = [phase.total for phase in _phases(run, members, fixed, {}, device, False)]
            gathered = alone[0] + max(role.gathered for role in members)  # weights that a sync gathers
            trainer_bytes = max([gathered, *alone] if plan.stays_awake else [gathered])
            engine = _engine_parts(run, actor, plan, device, trainer_bytes)
        phases += _phases(run, members, fixed, engine, device, plan.stays_awake)
    if getattr(run, "has_rollout_worker", False):  # a process with a whole copy of the actor's model
        worker = _role_memory(run, "actor", RoleLayout.of(NoSharding(), run.num_rollout_workers))
        # without computing with the copy there is none in the dtype of computation
        weights = worker.weights if run.actor_generates else worker.sizes.parameters * worker.stored.itemsize
        parts = context | {"weights": weights}
        if device.is_gpu and run.trainer.placement is None:
            parts["the actor's process"] = max(phase.total for phase in phases)
        trainer_bytes = trainer_bytes if run.actor_generates else sum(parts.values())
        parts |= _engine_parts(run, worker, plan, device, sum(parts.values()))
        phases.append(PhaseMemory("generate", ("rollout",), parts))
    return replace(plan, phases=tuple(phases), trainer_bytes=trainer_bytes)


def _phases(
    run: Any,
    roles: Sequence[RoleMemory],
    fixed: Mapping[str, int],
    engine: Mapping[str, int],
    device: DeviceRates,
    stays_awake: bool,
) -> Iterator[PhaseMemory]:
    """The phases of a step in processes with the same roles, by part.

    Args:
        fixed: bytes in every phase: weights and optimizer states among them.
        engine: of generation; empty if these processes do not generate.
        stays_awake: see `MemoryPlan`.
    """
    first, has_engine = roles[0], "engine weights" in engine
    awake = {part: size for part, size in engine.items() if part != ASLEEP}
    kept = {part: size for part, size in awake.items() if part != "sampling"} if has_engine or stays_awake else {}
    if ASLEEP in engine:
        kept = {ASLEEP: engine[ASLEEP]}
    phases = {"rest": kept}
    if engine:
        is_packed = not (has_engine or device.is_gpu) and packs(first.dtype, chosen_library(run.trainer.cpu_matmul))
        size, stored = first.dtype.itemsize, first.stored.itemsize
        share = size / (stored + (first.dtype != first.stored) * size)  # of weights with their copies
        packed = int(max(first.weights, first.generating) * share * is_packed)
        phases["generate"] = awake | {"gathered weights": first.generating, "packed weights": packed}
    if workload(run).generates:
        role = max(roles, key=lambda role: role.activations.scoring + role.gathered)
        of = role.activations
        phases["score"] = kept | {"activations": of.scoring, "logits": of.logits, "gathered weights": role.gathered}
        phases["score"]["pixels"] = role.pixels
    for role in (role for role in roles if role.gradients):
        of = role.activations
        phases[f"update {role.name}"] = kept | {
            "activations": of.training,
            "pixels": role.pixels,
            # beyond the peak of the layers: with recomputed ones, their backward pass needs more than the logits
            "logits": max(0, of.after_forward + of.logits - of.training),
            "gathered weights": role.gathered,
            "gradients": 0 if device.is_gpu and role.is_offloaded else role.gradients,
            "whole gradients": role.whole_gradients * (role.micro_batches > 1),
        }
    if has_engine:
        weights = {"engine weights": engine["engine weights"], "gathered weights": first.gathered}
        phases["sync"] = kept | weights | {"chunks": 2 * getattr(run.rollout, "chunk_mib", 0) * 2**20}
    for name, parts in phases.items():
        sizes = {part: size for part, size in (dict(fixed) | parts).items() if size}
        yield PhaseMemory(name, tuple(role.name for role in roles), sizes)


def _engine_parts(
    run: Any, actor: RoleMemory, plan: MemoryPlan, device: DeviceRates, trainer_bytes: int
) -> dict[str, int]:
    """Memory of generation: an engine with its own weights, or only the key-value cache; none with a server."""
    rollout, step = run.rollout, workload(run)
    if rollout.location == "server":
        return {}
    rows = min(getattr(rollout, "max_rows", None) or getattr(rollout, "max_num_seqs", 1), step.rows)
    working = {"sampling": 3 * 4 * rows * actor.config.get_text_config().vocab_size}
    room = rollout.with_room_for(getattr(run.data, "max_prompt_length", 0), run.response_tokens)
    memory = DeviceMemory(device.memory, min(device.memory - device.context, plan.limit)) if device.is_gpu else None
    engine = room.engine_memory(actor.config, actor.dtype, memory, trainer_bytes)
    if engine is None:
        here = min(-(-step.rows // actor.layout.generation_shares), getattr(rollout, "max_rows", step.rows))
        row = actor.sizes.cache_elements // actor.layout.siblings * step.width * actor.dtype.itemsize
        return {"keys and values": here * row, **working}
    if device.is_gpu:
        working = {"engine working": engine["overhead"]}
        if getattr(rollout, "sleep", False) and not plan.stays_awake:
            working[ASLEEP] = engine["asleep"]
    return {"engine weights": engine["weights"], "keys and values": engine["cache"], **working}
