"""Bytes in each process, by phase and part, and what of them lies in main memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from verl.models.model_stats import model_stats
from verl.trainer.config import PPOSettings
from verl.trainer.plan.activations import Activations, trace_activations
from verl.trainer.plan.devices import DeviceRates
from verl.trainer.plan.memory_estimate import GIB, MemoryEstimate, RoleMemory, estimate_ppo, estimate_sft

WORTH_PACKING = 0.85  # of the tokens of padded rows, from which down the rows are packed


@dataclass(frozen=True)
class RolePlan:
    """A role and what a micro-batch of it takes.

    Attributes:
        config: Hugging Face configuration of its model.
        tokens: of a micro-batch, at most.
        dtype: that it computes in.
        activations: of that micro-batch.
    """

    memory: RoleMemory
    config: Any
    tokens: int
    dtype: torch.dtype
    recomputed: bool
    activations: Activations

    @property
    def name(self) -> str:
        return self.memory.name


@dataclass(frozen=True)
class PhaseMemory:
    """One phase of a step in the processes that hold some roles.

    Attributes:
        roles: that live there.
        parts: what takes how many bytes.
    """

    name: str
    roles: tuple[str, ...]
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def words(self, unit: int) -> str:
        """Its parts, the largest first; those that would read 0.00 are left out."""
        large = sorted((-size, name) for name, size in self.parts.items() if size >= 0.005 * unit)
        return ", ".join(f"{name} {-size / unit:.2f}" for size, name in large)


def role_plans(run: Any, estimate: MemoryEstimate, device: DeviceRates, exact: bool) -> list[RolePlan]:
    """The roles of a run with traced activations; roles of equal models and micro-batches are traced once."""
    found, traced = [], {}
    world = run.trainer.n_gpus_per_node * run.trainer.nnodes
    for memory in estimate.roles:
        role = getattr(run, memory.name)
        source = getattr(role, "model", None) or run.actor.model
        config = source.load_config()
        autocast = run.actor.autocast if memory.name == "reference" else getattr(role, "autocast", None)
        kind = getattr(torch, autocast or source.dtype)
        sharding = getattr(role, "sharding", None) or run.sharding
        siblings = sharding.mesh_sizes(world)[2] if world > 1 else 1
        tokens = sharding.micro_batch_tokens(role.micro_batch_tokens, micro_batch_limit(run, memory.name))
        recomputed = bool(getattr(role, "gradient_checkpointing", False))
        key = (config.to_json_string(), tokens, kind, recomputed, siblings)
        if key not in traced:
            traced[key] = trace_activations(
                config,
                tokens,
                kind,
                recomputed=recomputed,
                siblings=siblings,
                exact=exact,
                device_type="cuda" if device.is_gpu else "cpu",
            )
        found.append(RolePlan(memory, config, tokens, kind, recomputed, traced[key]))
    return found


def micro_batch_limit(run: Any, role: str) -> int:
    """Tokens that a process has of a step at most, whatever its micro-batches may hold."""
    settings = run.trainer
    world = settings.n_gpus_per_node * settings.nnodes
    if not isinstance(settings, PPOSettings):
        length = getattr(run.data, "max_length", None) or run.actor.micro_batch_tokens
        return max(1, -(-settings.batch_size * length // world))
    rows = settings.prompts_per_step * settings.group_size
    sharding = run.shardings().get(role, run.sharding)
    shares = sharding.token_shares(world) if world > 1 else 1
    is_whole = role == "reference" or run.algorithm.mini_batches == 1
    if not is_whole:
        rows = -(-rows // run.algorithm.mini_batches)
    return max(1, int(-(-rows // shares) * tokens_per_row(run, role, run.rollout.max_new_tokens, is_whole)))


def tokens_per_row(run: Any, role: str, response: int, is_whole: bool = True) -> float:
    """Tokens that a row adds to the line of a micro-batch: the samples of a prompt share it where rows are packed.

    Args:
        is_whole: the samples of a prompt are trained on together; they are not in mini-batches of shuffled rows.
    """
    prompt = getattr(run.data, "max_prompt_length", 0)
    packs = getattr(run.actor if role == "reference" else getattr(run, role), "packing", "off") == "auto"
    shared = response + prompt / run.trainer.group_size
    return shared if packs and is_whole and shared <= WORTH_PACKING * (prompt + response) else prompt + response


@dataclass(frozen=True)
class MemoryPlan:
    """What a run takes in each phase.

    Attributes:
        phases: of every group of processes that hold roles.
        host: bytes of main memory on each machine, where the device is another.
        limit: bytes that a process has on its device.
    """

    estimate: MemoryEstimate
    roles: tuple[RolePlan, ...]
    phases: tuple[PhaseMemory, ...]
    host: int
    limit: int

    @property
    def peak(self) -> PhaseMemory:
        return max(self.phases, key=lambda phase: phase.total)

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
        for role in self.roles:
            if (why := role.activations.why_counted) is not None:
                yield f"Activations of {role.name} are counted as those of Llama, not traced ({why[:100]})."


def memory_plan(run: Any, device: DeviceRates, exact: bool = False) -> MemoryPlan:
    """What a run takes on devices of a kind, from the configurations of its models alone."""
    settings = run.trainer
    is_ppo = isinstance(settings, PPOSettings)
    estimate = (estimate_ppo if is_ppo else estimate_sft)(run, on_host=not device.is_gpu)
    roles = role_plans(run, estimate, device, exact)
    phases: list[PhaseMemory] = []
    for group in sorted({role.memory.group for role in roles}):
        members = [role for role in roles if role.memory.group == group]
        phases += _phases(run, members, estimate, device, is_ppo)
    limit = device.memory if device.is_gpu else device.memory // max(1, estimate.processes)
    return MemoryPlan(estimate, tuple(roles), tuple(phases), estimate.host, limit)


def _phases(
    run: Any, members: Sequence[RolePlan], estimate: MemoryEstimate, device: DeviceRates, is_ppo: bool
) -> Iterator[PhaseMemory]:
    names = tuple(role.name for role in members)
    resting: dict[str, int] = {"context": device.context} if device.context else {}
    for role in members:
        if not (device.is_gpu and role.memory.is_offloaded):
            resting[f"{role.name} weights"] = role.memory.weights
            resting[f"{role.name} optimizer"] = role.memory.optimizer
    if not device.is_gpu and estimate.copied:
        resting["copy for the writer"] = estimate.copied // max(1, estimate.processes)
    engine = _engine_parts(run, members, estimate, device) if is_ppo and "actor" in names else {}
    sleeps = device.is_gpu and getattr(run.rollout, "sleep", False)
    beside = {} if sleeps or "engine weights" not in engine else {k: v for k, v in engine.items() if k != "sampling"}
    yield PhaseMemory("rest", names, {**resting, **beside})
    actor = next((role for role in members if role.name == "actor"), None)
    if engine and actor is not None:
        own = {"gathered weights": actor.memory.generating} if actor.memory.generating else {}
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
        if not (device.is_gpu and role.memory.is_offloaded):
            working[f"{role.name} gradients"] = role.memory.gradients
        yield PhaseMemory(f"update {role.name}", names, {**resting, **beside, **working})
    if "engine weights" in engine and actor is not None:
        chunks = 2 * getattr(run.rollout, "chunk_mib", 0) * 2**20
        moving = {"chunks": chunks, "gathered weights": actor.memory.gathered}
        yield PhaseMemory("sync", names, {**resting, "engine weights": engine["engine weights"], **moving})
    if estimate.saving:
        yield PhaseMemory("save", names, {**resting, **beside})


def _engine_parts(
    run: Any, members: Sequence[RolePlan], estimate: MemoryEstimate, device: DeviceRates
) -> dict[str, int]:
    """What generation takes beside the trainer: an engine with its own weights, or keys and values alone."""
    actor = next(role for role in members if role.name == "actor")
    if not estimate.cache:
        return {}
    vocabulary = actor.config.get_text_config().vocab_size
    rows = getattr(run.rollout, "max_rows", None) or getattr(run.rollout, "max_num_seqs", 0)
    found = {"sampling": 3 * 4 * min(rows or 1, run.trainer.prompts_per_step * run.trainer.group_size) * vocabulary}
    space = getattr(run.rollout, "kv_cache_gib", None)
    if space is None:
        return {"keys and values": estimate.cache, **found}
    siblings = getattr(run.rollout, "tensor_parallel_size", 1)
    weights = model_stats(actor.config).parameters * actor.dtype.itemsize // siblings
    if device.context:
        found["engine context"] = device.context
    return {"engine weights": weights, "keys and values": int(space * GIB), **found}
