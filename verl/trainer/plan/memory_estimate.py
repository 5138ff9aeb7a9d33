"""Persistent memory by role, and disk space, computed from configurations before weights are loaded.

Memory used by libraries themselves, and unused memory held by allocators, are not included.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from verl.checkpoint.save.host_buffer import free_main_memory
from verl.engines.sharding import FSDP, NoSharding, Sharding
from verl.models.known_shapes import sizes_config
from verl.models.lora import LoRA
from verl.models.model_stats import ModelStats, model_stats
from verl.trainer.config import LoopSettings
from verl.utils.memory import gpu_memory_from_outside
from verl.workers.base import TrainedRole, roles_on_device

GIB = 2**30
_PROCESS_BYTES = 450 * 2**20  # a Python with torch and transformers, on the CPU


@dataclass(frozen=True)
class RoleLayout:
    """The processes of a role.

    Attributes:
        sharding: of the role; `NoSharding` for one process.
    """

    sharding: Sharding
    processes: int

    @property
    def shares(self) -> int:
        """Number of data-parallel shares of a step's rows."""
        return self.sharding.row_shares(self.processes)

    @property
    def token_shares(self) -> int:
        """Number of shares of a step's tokens, by rows and within rows."""
        return self.sharding.token_shares(self.processes)

    @property
    def generation_shares(self) -> int:
        """Number of shares of a step's rows where they are generated with the weights that train: each of the processes
        that share tokens or layers' stages has whole weights then.
        """
        degrees = self.sharding.degrees(self.processes)
        return self.shares * degrees.pp * degrees.cp

    @property
    def siblings(self) -> int:
        """Processes that share each layer."""
        return self.sharding.mesh_sizes(self.processes)[2]

    @property
    def expert_ways(self) -> int:
        """Processes that the experts of a layer are divided over."""
        return max(self.siblings, self.sharding.degrees(self.processes).ep)


@dataclass(frozen=True)
class RoleMemory:
    """Bytes of one role in each of its processes.

    Attributes:
        layout: of its processes.
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
    weights: int
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    whole_gradients: int = 0
    generating: int = 0
    is_offloaded: bool = False
    group: int = 0
    saved: int = 0


def role_layouts(run: Any) -> dict[str, RoleLayout]:
    """Layout of each role, by `trainer.placement` if it is set."""
    settings = run.trainer
    world: int = settings.n_gpus_per_node * settings.nnodes
    shardings, placement = run.shardings(), settings.placement
    counts = dict.fromkeys(shardings, world) if placement is None else placement.sizes(tuple(shardings), world)
    alone = NoSharding()
    return {role: RoleLayout(shardings[role] if counts[role] > 1 else alone, counts[role]) for role in shardings}


@dataclass(frozen=True)
class MemoryEstimate:
    """Persistent memory, and disk space.

    Attributes:
        roles: that the run has.
        cache: key-value cache in a process of the actor during generation; 0 if an engine or a server has it, or
            nothing is generated.
        processes: number of processes with roles on this machine.
        machines: number of machines with as many processes.
        saving: bytes of one checkpoint.
        kept: checkpoints on disk at a time.
        copied: bytes of host buffers on this machine for asynchronous saves.
        on_host: roles are in main memory, because there is no GPU.
        stays_awake: the engine keeps its GPU memory while the trainer works.
    """

    roles: tuple[RoleMemory, ...]
    cache: int
    processes: int
    saving: int
    kept: int
    copied: int = 0
    on_host: bool = True
    machines: int = 1
    stays_awake: bool = False

    @property
    def host(self) -> int:
        """Bytes of main memory on each machine that a run on GPUs takes beside them."""
        offloaded = sum(role.weights + role.optimizer + role.gradients for role in self.roles if role.is_offloaded)
        return 0 if self.on_host else self.copied + offloaded * self.processes


def estimate_ppo(run: Any, *, on_host: bool | None = None) -> MemoryEstimate:
    """The memory of a policy-gradient run.

    Args:
        run: a `PPORun` whose models' configurations can be read.
        on_host: whether its roles live in main memory; None for what this machine has.
    """
    settings, rollout, layouts = run.trainer, run.rollout, role_layouts(run)
    is_here = _is_on_host(settings) if on_host is None else on_host
    run = roles_on_device(run, not is_here)
    world, placement, in_run = settings.n_gpus_per_node * settings.nnodes, settings.placement, tuple(layouts)
    groups = [(in_run, world)] if placement is None else placement.worker_groups(in_run, world)
    rows = settings.prompts_per_step * settings.group_size
    width = getattr(run.data, "max_prompt_length", 0) + run.response_tokens
    actor = model_stats(sizes_config(run.actor.model), run.actor.lora)
    roles = [_trained("actor", run.actor, actor, layouts["actor"])]
    if "critic" in layouts:
        critic = model_stats(sizes_config(run.critic.model), run.critic.lora, "backbone")
        roles.append(replace(_trained("critic", run.critic, critic, layouts["critic"]), generating=0))
    if "reference" in layouts and (run.reference.model or run.actor.lora is None):
        source = run.reference.model or run.actor.model
        sizes = model_stats(sizes_config(source))
        computed = run.actor.autocast or source.dtype  # it computes as the actor does
        roles.append(_scoring("reference", sizes, layouts["reference"], source.dtype, computed))
    if run.reward.is_model:
        source = run.reward.model
        sizes = model_stats(sizes_config(source), kind="classifier")
        processes = layouts["rm"].processes if run.reward_as_role is not None else 1  # each has a copy of its own
        roles.append(_scoring("reward", sizes, RoleLayout(NoSharding(), processes), source.dtype, source.dtype))
    own = -(-rows // layouts["actor"].generation_shares)
    drawn = min(own, getattr(rollout, "max_rows", own))
    cache = actor.cache_elements // layouts["actor"].siblings * drawn * width * _computed_in(run.actor)
    stays_awake = False
    if rollout.runs_ahead:  # an engine or a server with weights of its own has the cache
        cache = 0
        roles[0] = replace(roles[0], generating=0)
        naps = getattr(rollout, "sleep", False) and not settings.rollout_ahead
        stays_awake = rollout.generates_here and not is_here and not naps
    group_of = {role: number for number, (members, _) in enumerate(groups) for role in members}
    group_of["reward"] = group_of["actor"] if placement is None else group_of.get("rm", group_of["actor"])
    roles = [replace(role, group=group_of[role.name]) for role in roles]
    saves = run.checkpoint
    saved = sum(role.saved for role in roles) if saves is not None else 0
    return MemoryEstimate(
        roles=tuple(roles),
        cache=cache,
        processes=-(-sum(count for _, count in groups) // settings.nnodes),
        machines=settings.nnodes,
        saving=saved,
        kept=(saves.keep_last_n or 0) + 1 if saves is not None else 0,
        copied=saved // settings.nnodes if saves is not None and saves.save_async else 0,
        on_host=is_here,
        stays_awake=stays_awake,
    )


def estimate_sft(run: Any, *, on_host: bool | None = None) -> MemoryEstimate:
    """The memory of a run of supervised fine-tuning.

    Args:
        run: an `SFTRun` whose model's configuration can be read.
        on_host: whether its role lives in main memory; None for what this machine has.
    """
    settings, saves, layout = run.trainer, run.checkpoint, role_layouts(run)["actor"]
    is_here = _is_on_host(settings) if on_host is None else on_host
    run = roles_on_device(run, not is_here)
    sizes = model_stats(sizes_config(run.actor.model), run.actor.lora)
    role = replace(_trained("actor", run.actor, sizes, layout), generating=0)
    return MemoryEstimate(
        roles=(role,),
        cache=0,
        processes=-(-layout.processes // settings.nnodes),
        machines=settings.nnodes,
        saving=role.saved if saves is not None else 0,
        kept=(saves.keep_last_n or 0) + 1 if saves is not None else 0,
        copied=role.saved // settings.nnodes if saves is not None and saves.save_async else 0,
        on_host=is_here,
    )


def _is_on_host(settings: LoopSettings) -> bool:
    return settings.device == "cpu" or not torch.cuda.is_available()


def free_memory(device: str, processes: int) -> int | None:
    """Free bytes for each of this many processes on this machine; None if unknown."""
    if device.startswith("cuda"):  # asked by the driver, which has no context on a GPU and shall not get one
        found = gpu_memory_from_outside(torch.device(device).index or 0)
        return None if found is None else found.free
    free = free_main_memory()
    return None if free is None else max(0, free // processes - _PROCESS_BYTES * (processes > 1))


def free_disk(directory: Path) -> int:
    """Free bytes on the file system of a directory, which may not exist yet."""
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free


def _trained(name: str, role: TrainedRole, sizes: ModelStats, layout: RoleLayout) -> RoleMemory:
    """Of an actor or critic."""
    itemsize = getattr(torch, role.model.dtype).itemsize
    cost = layout.sharding.cost(layout.processes, sizes, role.micro_batch_tokens, itemsize, _computed_in(role))
    return RoleMemory(
        name=name,
        layout=layout,
        weights=cost.weights,
        gradients=cost.gradients,
        optimizer=cost.optimizer,
        gathered=cost.gathered,
        whole_gradients=cost.whole_gradients,
        generating=cost.generating,
        is_offloaded=cost.is_offloaded,
        saved=3 * sizes.trained * itemsize,
    )


def _scoring(name: str, sizes: ModelStats, layout: RoleLayout, dtype: str, computed: str) -> RoleMemory:
    """Of a model that is not trained."""
    itemsize, in_products = getattr(torch, dtype).itemsize, getattr(torch, computed).itemsize
    cost = layout.sharding.cost(layout.processes, sizes, weight_bytes=itemsize, compute_bytes=in_products, trains=False)
    return RoleMemory(name, layout, cost.weights, gathered=cost.gathered, is_offloaded=cost.is_offloaded)


def _computed_in(role: TrainedRole) -> int:
    """Size of a number in the role's data type."""
    return getattr(torch, role.autocast or role.model.dtype).itemsize


def changes(
    run: Any, budget: MemoryEstimate, gpus: Sequence[int] | None = None
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Settings that may reduce the memory of a run, each with the resulting run.

    Args:
        gpus: numbers of GPUs per machine to consider; None: up to those of this machine.
    """

    def of(role: str, **fields: Any) -> Callable[[], Any]:
        return lambda: replace(run, **{role: replace(getattr(run, role), **fields)})

    for role in ("actor", "critic", "reference"):
        described = getattr(run, role, None)
        if described is None:
            continue
        for part in (4, 16, 64):  # it may be more than a step has
            if (tokens := described.micro_batch_tokens // part) >= 1:
                yield f"{role}.micro_batch_tokens={tokens}", of(role, micro_batch_tokens=tokens)
        if getattr(described, "gradient_checkpointing", True) is False:
            yield f"{role}.gradient_checkpointing=true", of(role, gradient_checkpointing=True)
        if getattr(described, "lora", described) is None:
            yield f"{role}.lora={{_target_:verl.models.lora.LoRA,rank:8}}", of(role, lora=LoRA(rank=8))
    rollout = getattr(run, "rollout", None)
    for name in ("kv_cache_gib", "max_rows"):
        if (value := getattr(rollout, name, None)) is not None:
            half = max(1, value // 2) if isinstance(value, int) else value / 2
            yield f"rollout.{name}={half:g}", of("rollout", **{name: half})
    if budget.on_host and budget.copied:
        yield "checkpoint=sync", of("checkpoint", save_async=False)
    if budget.on_host:
        return
    smaller, counts = list(run.sharding.smaller()), [torch.cuda.device_count()] if gpus is None else gpus
    for setting, sharding in smaller:
        yield setting, lambda sharding=sharding: replace(run, sharding=sharding)
    has_place = run.trainer.placement is not None
    for count in counts if not smaller and not has_place else ():
        if count > max(1, run.trainer.n_gpus_per_node):
            divided = {"sharding": FSDP(), "trainer": replace(run.trainer, n_gpus_per_node=count)}
            yield f"sharding=fsdp trainer.n_gpus_per_node={count}", lambda divided=divided: replace(run, **divided)
