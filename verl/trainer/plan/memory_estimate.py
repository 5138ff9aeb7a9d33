"""Memory estimate before any weight is loaded: memory by role and phase, disk space, floating-point operations.

Estimates from configurations and counts. Memory that libraries use themselves and that allocators leave unused is not
included, so a run without a warning may still run out of memory.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from verl.component import BuildContext
from verl.engines.sharding import FSDP, NoSharding, Sharding
from verl.errors import ConfigError
from verl.models.lora import LoRA
from verl.models.model_stats import ModelStats, model_stats
from verl.rollout.vllm.client.gpu_memory import CACHE_ON_CPU_GIB
from verl.trainer.config import LoopSettings, PPOSettings
from verl.utils.memory import free_main_memory, gpu_memory_from_outside
from verl.workers.base import TrainedRole

_log = logging.getLogger(__name__)
GIB = 2**30
_WORTH = 0.02  # of what a phase needs, for a remedy to be named
_MOST_REMEDIES = 3
_NO_REMEDY = "No setting makes it much smaller: take a smaller model, more GPUs, or a machine with more memory."
_PROCESS_BYTES = 450 * 2**20  # a Python with torch and transformers, on the CPU


@dataclass(frozen=True)
class RoleMemory:
    """Bytes that one role takes in each process that holds it.

    Attributes:
        weights: with the copy in the type it computes in, if that is another.
        gradients, optimizer: of what is trained; gradients only while it is updated.
        working: activations of one micro-batch, while it is updated.
        scoring: likewise while it only scores, one layer at a time.
        gathered: weights of siblings that lie here while it is updated or scores.
        generating: likewise while it generates.
        is_offloaded: weights, gradients and optimizer state rest in main memory.
        group: roles of one number share their processes.
        saved: in a checkpoint, of the whole role.
    """

    name: str
    weights: int
    gradients: int = 0
    optimizer: int = 0
    working: int = 0
    scoring: int = 0
    gathered: int = 0
    generating: int = 0
    is_offloaded: bool = False
    group: int = 0
    saved: int = 0

    @property
    def resident(self) -> int:
        """What stays from step to step."""
        return self.weights + self.optimizer


@dataclass(frozen=True)
class MemoryEstimate:
    """What a run takes.

    Attributes:
        roles: that live side by side in each process.
        cache: keys and values while responses are drawn; of an engine beside the trainer its weights too. 0 where none
            are drawn.
        processes: that hold the roles, on this machine.
        machines: that have as many each.
        saving: bytes of one checkpoint.
        kept: checkpoints on disk at a time.
        flops: of one step, at most.
        copied: bytes of main memory on this machine from which a checkpoint is written while training goes on.
        on_host: what roles have is in main memory, for there is no GPU.
        stays_awake: an engine beside the trainer keeps its GPU memory while the trainer works.
    """

    roles: tuple[RoleMemory, ...]
    cache: int
    processes: int
    saving: int
    kept: int
    flops: int
    copied: int = 0
    on_host: bool = True
    machines: int = 1
    stays_awake: bool = False

    @property
    def beside_engine(self) -> int:
        """Bytes that the roles in the actor's processes need on their device while an engine beside them is awake: what
        rests there, with the weights that a sync gathers; or where it never sleeps, the most that a phase takes."""
        here = [role for role in self.roles if role.group == self.roles[0].group]
        sleeping = replace(self, roles=tuple(here), cache=1, stays_awake=False)  # a byte: phases that an engine brings
        found = sleeping.phases()
        at_rest = found["generate"] + max(role.gathered for role in here)
        return max([at_rest, *found.values()]) if self.stays_awake else at_rest

    def phases(self) -> dict[str, int]:
        """Phase -> bytes that a process needs in it, on its device."""
        there = [role for role in self.roles if self.on_host or not role.is_offloaded]
        resident = dict.fromkeys((role.group for role in self.roles), self.copied // self.processes * self.on_host)
        for role in there:
            resident[role.group] += role.resident
        found: dict[str, int] = {}
        if self.cache and self.roles:
            actor = self.roles[0]
            found["generate"] = resident[actor.group] + actor.generating + self.cache
            found["score"] = max(resident[role.group] + role.scoring + role.gathered for role in self.roles)
        for role in self.roles:
            if role.gradients:
                gradients = role.gradients if role in there else 0
                found[f"update {role.name}"] = resident[role.group] + role.working + role.gathered + gradients
                if self.stays_awake and role.group == self.roles[0].group:
                    found[f"update {role.name}"] += self.cache
        if self.stays_awake and "score" in found:
            found["score"] += self.cache
        return found

    @property
    def host(self) -> int:
        """Bytes of main memory on this machine that a run on GPUs takes beside them."""
        offloaded = sum(role.resident + role.gradients for role in self.roles if role.is_offloaded)
        return 0 if self.on_host else self.copied + offloaded * self.processes

    @property
    def _offloads(self) -> bool:
        return any(role.is_offloaded for role in self.roles)

    @property
    def peak(self) -> tuple[str, int]:
        """The phase that needs most, and how much."""
        return max(self.phases().items(), key=lambda entry: entry[1])

    def warnings(
        self, memory: int | None, disk: int | None, host: int | None = None, remedies: Sequence[str] = ()
    ) -> Iterator[str]:
        """What may not suffice.

        Args:
            remedies: settings that make the phase smaller which needs most, each with what it saves.
            memory: bytes that are free for one process on its device; None if unknown.
            disk: bytes that are free where checkpoints go.
            host: bytes of main memory that are free on this machine, where the device is another.
        """
        phase, needed = self.peak
        if memory is not None and needed > memory:
            yield (
                f"Memory may not suffice: {phase} needs about {needed / GIB:.1f} GiB in each process, and "
                f"{memory / GIB:.1f} GiB are free for it. "
                + (f"What would help: {', '.join(remedies)}." if remedies else _NO_REMEDY)
            )
        if host is not None and self.host > host:
            yield (
                f"Main memory may not suffice: what is saved and offloaded needs about {self.host / GIB:.1f} GiB on "
                f"this machine, and {host / GIB:.1f} GiB are free. Set "
                + " or ".join(["checkpoint=sync"] * (self.copied > 0) + ["sharding.cpu_offload=false"] * self._offloads)
                + "."
            )
        if disk is not None and self.saving * self.kept > disk:
            yield (
                f"Disk may not suffice: {self.kept} checkpoints of {self.saving / GIB:.1f} GiB, and "
                f"{disk / GIB:.1f} GiB are free. "
                + ("Lower checkpoint.keep_last_n, or set" if self.kept > 2 else "Set")
                + " checkpoint.save_dir to a larger disk."
            )

    def lines(self) -> Iterator[str]:
        """The budget as a table in plain text."""
        yield f"{'role':<14}{'weights':>10}{'gradients':>11}{'optimizer':>11}{'working':>10}   GiB in each process"
        for role in self.roles:
            cells = (role.weights, role.gradients, role.optimizer, max(role.working, role.scoring))
            yield f"{role.name:<14}" + "".join(
                f"{x / GIB:>{w}.2f}" for x, w in zip(cells, (10, 11, 11, 10), strict=True)
            )
        yield "phase         " + ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in self.phases().items())
        each = f" on each of {self.machines} machines" if self.machines > 1 else ""
        yield f"processes     {self.processes}{each}, operations of a step at most {self.flops:.2e}"
        yield f"checkpoint    {self.saving / GIB:.2f} GiB, {self.kept} at a time"


def estimate_ppo(run: Any, *, on_host: bool | None = None) -> MemoryEstimate:
    """The budget of a policy-gradient run.

    Args:
        run: a `PPORun` whose models' configurations can be read.
        on_host: whether its roles live in main memory; None for what this machine has.
    """
    settings, rollout = run.trainer, run.rollout
    world = settings.n_gpus_per_node * settings.nnodes
    shardings, placement = run.shardings(), settings.placement
    counts = dict.fromkeys(shardings, world) if placement is None else placement.sizes(tuple(shardings), world)
    alone = NoSharding()
    divided = {role: (shardings[role] if counts[role] > 1 else alone, counts[role]) for role in shardings}
    groups = [(tuple(shardings), world)] if placement is None else placement.worker_groups(tuple(shardings), world)
    rows = settings.prompts_per_step * settings.group_size
    width = getattr(run.data, "max_prompt_length", 0) + rollout.max_new_tokens
    own = {role: -(-rows // sharding.row_shares(count)) for role, (sharding, count) in divided.items()}
    actor = model_stats(run.actor.model.load_config(), run.actor.lora)
    roles = [_trained("actor", run.actor, actor, own["actor"] * width, *divided["actor"])]
    passes = 2 * rows * width * (3 * run.algorithm.epochs + 1)  # forward, and a backward of twice that
    flops = actor.parameters * passes
    if run.critic is not None and run.algorithm.needs_values:
        critic = model_stats(run.critic.model.load_config(), run.critic.lora)
        trained = _trained("critic", run.critic, critic, own["critic"] * width, *divided["critic"])
        roles.append(replace(trained, generating=0))
        flops += critic.parameters * passes
    if run.reference is not None and run.algorithm.needs_reference and (run.reference.model or run.actor.lora is None):
        source = run.reference.model or run.actor.model
        sizes = model_stats(source.load_config())
        itemsize = getattr(torch, source.dtype).itemsize
        computed = getattr(torch, run.actor.autocast or source.dtype).itemsize  # it computes as the actor does
        scoring = sizes.layer_elements * min(run.reference.micro_batch_tokens, own["reference"] * width) * computed
        sharding, count = divided["reference"]
        cost = sharding.cost(count, sizes, weight_bytes=itemsize, compute_bytes=computed, trains=False)
        roles.append(RoleMemory("reference", cost.weights, scoring=scoring, gathered=cost.gathered))
        flops += sizes.forward_flops(rows * width)
    drawn = min(own["actor"], getattr(rollout, "max_rows", own["actor"]))
    sharding, count = divided["actor"]
    siblings = count // sharding.row_shares(count)  # each has the keys and values of its own heads
    cache = actor.cache_elements // siblings * drawn * width * _computed_in(run.actor)
    is_here = _is_on_host(settings) if on_host is None else on_host
    stays_awake = False
    if hasattr(rollout, "kv_cache_gib"):  # an engine with weights of its own
        least = actor.cache_elements // siblings * width * _computed_in(run.actor)  # it takes what is left beside it
        space = CACHE_ON_CPU_GIB if rollout.kv_cache_gib is None and is_here else rollout.kv_cache_gib
        cache = (least if space is None else int(space * GIB)) + actor.parameters * _computed_in(run.actor)
        roles[0] = replace(roles[0], generating=0)
        stays_awake = not is_here and not (rollout.sleep and not settings.rollout_ahead)
    group_of = {role: number for number, (members, _) in enumerate(groups) for role in members}
    roles = [replace(role, group=group_of.get(role.name, 0)) for role in roles]
    saves = run.checkpoint
    saved = sum(role.saved for role in roles) if saves is not None else 0
    return MemoryEstimate(
        roles=tuple(roles),
        cache=cache,
        processes=-(-sum(count for _, count in groups) // settings.nnodes),
        machines=settings.nnodes,
        saving=saved,
        kept=(saves.keep_last_n or 0) + 1 if saves is not None else 0,
        flops=flops,
        copied=saved // settings.nnodes if saves is not None and saves.save_async else 0,
        on_host=is_here,
        stays_awake=stays_awake,
    )


def estimate_sft(run: Any, *, on_host: bool | None = None) -> MemoryEstimate:
    """The budget of a run of supervised fine-tuning.

    Args:
        run: an `SFTRun` whose model's configuration can be read.
        on_host: whether its role lives in main memory; None for what this machine has.
    """
    settings, saves = run.trainer, run.checkpoint
    world = settings.n_gpus_per_node * settings.nnodes
    sharding = (run.actor.sharding or run.sharding) if world > 1 else NoSharding()
    own = -(-settings.batch_size // sharding.row_shares(world))
    length = getattr(run.data, "max_length", None) or run.actor.micro_batch_tokens
    sizes = model_stats(run.actor.model.load_config(), run.actor.lora)
    role = replace(_trained("actor", run.actor, sizes, own * length, sharding, world), generating=0)
    return MemoryEstimate(
        roles=(role,),
        cache=0,
        processes=-(-world // settings.nnodes),
        machines=settings.nnodes,
        saving=role.saved if saves is not None else 0,
        kept=(saves.keep_last_n or 0) + 1 if saves is not None else 0,
        flops=6 * sizes.parameters * settings.batch_size * length,
        copied=role.saved // settings.nnodes if saves is not None and saves.save_async else 0,
        on_host=_is_on_host(settings) if on_host is None else on_host,
    )


def _is_on_host(settings: LoopSettings) -> bool:
    return settings.device == "cpu" or not torch.cuda.is_available()


def free_memory(device: str, processes: int) -> int | None:
    """Bytes that are free for each of so many processes on this machine; None where it cannot be told."""
    if device.startswith("cuda"):  # asked by the driver, which has no context on a GPU and shall not get one
        found = gpu_memory_from_outside(torch.device(device).index or 0)
        return None if found is None else found.free
    free = free_main_memory()
    return None if free is None else max(0, free // processes - _PROCESS_BYTES * (processes > 1))


def free_disk(directory: Path) -> int:
    """Bytes that are free where a directory is, or will be."""
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free


def _trained(
    name: str, role: TrainedRole, sizes: ModelStats, tokens: int, sharding: Sharding, count: int
) -> RoleMemory:
    """Of an actor or critic that has so many tokens of a step in its process."""
    tokens = min(tokens, role.micro_batch_tokens)
    itemsize = getattr(torch, role.model.dtype).itemsize
    cost = sharding.cost(count, sizes, tokens, itemsize, _computed_in(role))
    return RoleMemory(
        name=name,
        weights=cost.weights,
        gradients=cost.gradients,
        optimizer=cost.optimizer,
        gathered=cost.gathered,
        generating=cost.generating,
        is_offloaded=cost.is_offloaded,
        working=sizes.activation_elements(tokens, role.gradient_checkpointing) * _computed_in(role),
        scoring=sizes.layer_elements * tokens * _computed_in(role),
        saved=3 * sizes.trained * itemsize,
    )


def _computed_in(role: TrainedRole) -> int:
    """Bytes of a number in the type that a role computes in."""
    return getattr(torch, role.autocast or role.model.dtype).itemsize


def log_estimate(run: Any, context: BuildContext, checkpoints: Path) -> MemoryEstimate | None:
    """Estimate what the run takes, before any weight is loaded, and warn where it may not suffice.

    Raises:
        ConfigError: an engine that never sleeps does not fit beside the trainer.
    """
    try:
        budget = estimate_ppo(run) if isinstance(run.trainer, PPOSettings) else estimate_sft(run)
    except Exception as error:  # noqa: BLE001 - whatever is odd about a configuration, an estimate stops no run
        _log.warning("What this run takes cannot be estimated: %s: %s", type(error).__name__, error)
        return None
    assert context.run_dir is not None
    (context.run_dir / "budget.txt").write_text("\n".join(budget.lines()) + "\n")
    memory = free_memory(context.device, budget.processes)
    is_short = memory is not None and budget.peak[1] > memory
    found = remedies(run, budget) if is_short else []
    if is_short and budget.stays_awake:
        raise ConfigError(awake_fault(run, budget, memory))
    for warning in budget.warnings(memory, free_disk(checkpoints), free_main_memory(), found):
        _log.warning("%s", warning)
    return budget


def awake_fault(run: Any, budget: MemoryEstimate, memory: int) -> str:
    """That an engine which keeps its GPU memory does not fit beside the trainer."""
    phase, needed = budget.peak
    if run.trainer.rollout_ahead:
        why, remedy = "trainer.rollout_ahead is 1: the engine draws while the trainer works", "trainer.rollout_ahead=0"
    else:
        why, remedy = "rollout.sleep is false: the engine keeps its GPU memory", "rollout.sleep=true"
    return (
        f"{why}, so {phase} needs about {needed / GIB:.1f} GiB of each GPU, of which the engine has "
        f"{budget.cache / GIB:.1f}, and {memory / GIB:.1f} GiB are free. Set {remedy}, or an engine on other devices."
    )


def remedies(run: Any, budget: MemoryEstimate) -> list[str]:
    """Settings that make the phase smaller which needs most memory, with what each saves, the largest first: what does
    not help there is not named."""
    estimate = estimate_ppo if isinstance(run.trainer, PPOSettings) else estimate_sft
    phase, needed = budget.peak
    found: dict[str, int] = {}
    for setting, changed in changes(run, budget):
        if setting.partition("=")[0] in {one.partition("=")[0] for one in found}:  # a smaller change does it
            continue
        try:
            saved = needed - estimate(changed()).phases()[phase]
        except (ConfigError, KeyError):  # it does not go with the rest
            continue
        if saved >= _WORTH * needed:
            found[setting] = saved
    best = sorted(found, key=lambda setting: -found[setting])[:_MOST_REMEDIES]
    return [f"{setting} ({found[setting] / GIB:.1f} GiB less)" for setting in best]


def changes(
    run: Any, budget: MemoryEstimate, gpus: Sequence[int] | None = None
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Settings that could make a run smaller, and the run that each gives.

    Args:
        gpus: numbers of them that a machine may give to the run; None for as many as this machine has.
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
    has_place = getattr(run.trainer, "placement", None) is not None
    for count in counts if not smaller and not has_place else ():
        if count > max(1, run.trainer.n_gpus_per_node):
            divided = {"sharding": FSDP(), "trainer": replace(run.trainer, n_gpus_per_node=count)}
            yield f"sharding=fsdp trainer.n_gpus_per_node={count}", lambda divided=divided: replace(run, **divided)
