"""What a run will take, before any weight is loaded: memory by role and phase, disk, operations.

Estimates from configurations and counts: what a library takes for itself, and what an allocator leaves unused, comes on
top. A warning here is worth heeding; silence is no promise.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl.models.sizes import ModelSizes, sizes_of
from verl.workers.training import TrainedRole

GIB = 2**30
_PROCESS_BYTES = 450 * 2**20  # a Python with torch and transformers, on the CPU


@dataclass(frozen=True)
class RoleBudget:
    """Bytes that one role takes in each process that holds it.

    Attributes:
        weights: with the copy in the type it computes in, if that is another.
        gradients, optimizer: of what is trained; gradients only while it is updated.
        working: activations of one micro-batch, while it is updated.
        scoring: likewise while it only scores, one layer at a time.
        saved: in a checkpoint, of the whole role.
    """

    name: str
    weights: int
    gradients: int = 0
    optimizer: int = 0
    working: int = 0
    scoring: int = 0
    saved: int = 0

    @property
    def resident(self) -> int:
        """What stays from step to step."""
        return self.weights + self.optimizer


@dataclass(frozen=True)
class Budget:
    """What a run takes.

    Attributes:
        roles: that live side by side in each process.
        cache: keys and values while responses are drawn; of an engine beside the trainer its weights too.
        processes: that hold the roles, on this machine.
        saving: bytes of one checkpoint.
        kept: checkpoints on disk at a time.
        flops: of one step, at most.
    """

    roles: tuple[RoleBudget, ...]
    cache: int
    processes: int
    saving: int
    kept: int
    flops: int

    def phases(self) -> dict[str, int]:
        """Phase -> bytes that a process needs in it."""
        resident = sum(role.resident for role in self.roles)
        trained = [role for role in self.roles if role.gradients]
        scoring = max((role.scoring for role in self.roles), default=0)
        return {
            "generate": resident + self.cache,
            "score": resident + scoring,
            **{f"update {role.name}": resident + role.gradients + role.working for role in trained},
        }

    @property
    def peak(self) -> tuple[str, int]:
        """The phase that needs most, and how much."""
        return max(self.phases().items(), key=lambda entry: entry[1])

    def warnings(self, memory: int | None, disk: int | None) -> Iterator[str]:
        """What may not suffice.

        Args:
            memory: bytes that are free for one process on its device; None if unknown.
            disk: bytes that are free where checkpoints go.
        """
        phase, needed = self.peak
        if memory is not None and needed > memory:
            yield (
                f"Memory may not suffice: {phase} needs about {needed / GIB:.1f} GiB in each process, and "
                f"{memory / GIB:.1f} GiB are free for it. Lower micro_batch_tokens, set gradient_checkpointing=true, "
                "train a lora adapter, divide the model (sharding=fsdp), or take a smaller model."
            )
        if disk is not None and self.saving * self.kept > disk:
            yield (
                f"Disk may not suffice: {self.kept} checkpoints of {self.saving / GIB:.1f} GiB, and "
                f"{disk / GIB:.1f} GiB are free. Lower checkpoint.keep_last_n, or set checkpoint.save_dir to a larger "
                "disk."
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
        yield f"processes     {self.processes}, operations of a step at most {self.flops:.2e}"
        yield f"checkpoint    {self.saving / GIB:.2f} GiB, {self.kept} at a time"


def budget_of(run: Any) -> Budget:
    """The budget of a policy-gradient run.

    Args:
        run: a `PPORun` whose models' configurations can be read.
    """
    settings, rollout = run.trainer, run.rollout
    world = settings.n_gpus_per_node * settings.nnodes
    shards = run.sharding.parameter_shards(world)
    rows = settings.prompts_per_step * settings.group_size
    width = getattr(run.data, "max_prompt_length", 0) + rollout.max_new_tokens
    own = -(-rows // world)
    tokens = own * width
    actor = sizes_of(run.actor.model.load_config(), run.actor.lora)
    roles = [_trained("actor", run.actor, actor, shards, tokens)]
    passes = 2 * rows * width * (3 * run.algorithm.epochs + 1)  # forward, and a backward of twice that
    flops = actor.parameters * passes
    if run.critic is not None and run.algorithm.needs_values:
        critic = sizes_of(run.critic.model.load_config(), run.critic.lora)
        roles.append(_trained("critic", run.critic, critic, shards, tokens))
        flops += critic.parameters * passes
    if run.reference is not None and run.algorithm.needs_reference and (run.reference.model or run.actor.lora is None):
        source = run.reference.model or run.actor.model
        sizes = sizes_of(source.load_config())
        itemsize = getattr(torch, source.dtype).itemsize
        scoring = sizes.layer_elements * min(run.reference.micro_batch_tokens, tokens) * itemsize
        roles.append(RoleBudget("reference", sizes.parameters * itemsize // shards, scoring=scoring))
        flops += sizes.forward_flops(rows * width)
    drawn = min(own, getattr(rollout, "max_rows", own))
    cache = actor.cache_elements * drawn * width * _computed_in(run.actor)
    if (space := getattr(rollout, "kv_cache_gib", None)) is not None:  # an engine with weights of its own
        cache = int(space * GIB) + actor.parameters * _computed_in(run.actor)
    saves = run.checkpoint
    return Budget(
        roles=tuple(roles),
        cache=cache,
        processes=world,
        saving=sum(role.saved for role in roles) if saves is not None else 0,
        kept=(saves.keep_last_n or 0) + 1 if saves is not None else 0,
        flops=flops,
    )


def free_memory(device: str, processes: int) -> int | None:
    """Bytes that are free for each of so many processes on this machine; None where it cannot be told."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(torch.device(device))[0]
    free = _of_the_machine()
    return None if free is None else max(0, free // processes - _PROCESS_BYTES * (processes > 1))


def free_disk(directory: Path) -> int:
    """Bytes that are free where a directory is, or will be."""
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free


def _trained(name: str, role: TrainedRole, sizes: ModelSizes, shards: int, tokens: int) -> RoleBudget:
    """Of an actor or critic that has so many tokens of a step in its process."""
    tokens = min(tokens, role.micro_batch_tokens)
    itemsize = getattr(torch, role.model.dtype).itemsize
    copy = sizes.parameters * _computed_in(role) if role.autocast else 0
    moments = 2 * sizes.trained * itemsize
    return RoleBudget(
        name=name,
        weights=(sizes.parameters * itemsize + copy) // shards,
        gradients=sizes.trained * itemsize // shards,
        optimizer=moments // shards,
        working=sizes.activation_elements(tokens, role.gradient_checkpointing) * _computed_in(role),
        scoring=sizes.layer_elements * tokens * _computed_in(role),
        saved=sizes.trained * itemsize + moments,
    )


def _computed_in(role: TrainedRole) -> int:
    """Bytes of a number in the type that a role computes in."""
    return getattr(torch, role.autocast or role.model.dtype).itemsize


def _of_the_machine() -> int | None:
    """Free main memory: what the kernel says, or what is left of the limit of this container."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
        return min(free, int(limit) - int(used)) if limit != "max" else free
    except (OSError, ValueError):
        return free
