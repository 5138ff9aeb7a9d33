"""The plan of a run: memory, batch arithmetic, time, disk, and the cheapest changes that make it fit.

run ── workload.py ──> rows and tokens ── memory.py ──> bytes by phase ──┐
                                       ── step_time.py ──> seconds ──────┼──> RunPlan ── too large? ──> changes
                                       ── batch, disk ───────────────────┘
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from verl.component import BuildContext
from verl.engines.sharding import FSDP
from verl.errors import ConfigError
from verl.models.lora import LoRA
from verl.trainer.plan.async_plan import AsyncPlan
from verl.trainer.plan.memory import MemoryPlan, memory_plan
from verl.trainer.plan.step_time import StageTime, stage_times
from verl.trainer.plan.workload import (
    GIB,
    DeviceRates,
    device_here,
    free_disk,
    free_main_memory,
    free_memory,
    machine_processes,
    workload,
)

MOST_CHANGES = 3  # that are named
GPUS = (2, 4, 8)  # that a machine of a data centre may give to a run
SMALL_SHARE = 16  # fraction of the memory: smaller activations are not traced at the start of a run
# A step over its plan, for published steps of dense models and of mixtures of experts: see docs/results.md
RANGES = {False: (0.8, 1.5), True: (1.0, 3.0)}
_log = logging.getLogger(__name__)


def changes_that_fit(run: Any, device: DeviceRates, memory: MemoryPlan) -> tuple[str, ...]:
    """Single settings that make a run fit, each planned again; of those of a key the first, at most `MOST_CHANGES`."""
    found = dict[str, str]()
    for setting, changed_run in changes(run, memory, device):
        key = setting.partition("=")[0]
        with suppress(ConfigError, KeyError, ValueError):  # it is not compatible with other settings
            if key not in found and memory_plan(changed_run(), device, limit=memory.limit).fits:
                found[key] = setting
        if len(found) == MOST_CHANGES:
            break
    return tuple(found.values())


def changes(run: Any, memory: MemoryPlan, device: DeviceRates) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Settings that may reduce the memory of a run, each with the resulting run."""

    def of(part: str, **fields: Any) -> Callable[[], Any]:
        return lambda: replace(run, **{part: replace(getattr(run, part), **fields)})

    for role in ("actor", "critic", "reference"):
        if (described := getattr(run, role, None)) is None:
            continue
        for part in (4, 16, 64):  # it may be more than a step has
            if (tokens := described.micro_batch_tokens // part) >= 1:
                yield f"{role}.micro_batch_tokens={tokens}", of(role, micro_batch_tokens=tokens)
        if getattr(described, "gradient_checkpointing", True) is False:
            yield f"{role}.gradient_checkpointing=true", of(role, gradient_checkpointing=True)
        if getattr(described, "lora", described) is None:
            yield f"{role}.lora.rank=8", of(role, lora=LoRA(rank=8))
    for name in ("kv_cache_gib", "max_rows"):
        if (value := getattr(getattr(run, "rollout", None), name, None)) is not None:
            half = max(1, value // 2) if isinstance(value, int) else value / 2
            yield f"rollout.{name}={half:g}", of("rollout", **{name: half})
    if memory.stays_awake and not run.trainer.staleness:
        yield "rollout.sleep=true", of("rollout", sleep=True)
    if not device.is_gpu:
        if memory.copied:
            yield "checkpoint=sync", of("checkpoint", save_async=False)
        return
    smaller = list(run.sharding.smaller())
    for setting, sharding in smaller:
        yield setting, lambda sharding=sharding: replace(run, sharding=sharding)
    for count in GPUS if not smaller and run.trainer.placement is None else ():
        if count > max(1, run.trainer.n_gpus_per_node):
            sharded = {"sharding": FSDP(), "trainer": replace(run.trainer, n_gpus_per_node=count)}
            name = f"sharding=fsdp trainer.n_gpus_per_node={count}"
            yield name, lambda sharded=sharded: replace(run, **sharded)


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run on devices of one kind.

    Attributes:
        batch: sentences about rows, micro-batches and optimizer steps; disk: one about checkpoints.
        changes: settings that make it fit; empty if it fits.
        asynchronous: the result of `verl plan --async`.
    """

    device: DeviceRates
    memory: MemoryPlan
    stages: tuple[StageTime, ...]
    batch: tuple[str, ...]
    disk: str
    changes: tuple[str, ...]
    asynchronous: AsyncPlan | None = None

    @property
    def step_s(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def range_s(self) -> tuple[float, float]:
        """Best and worst seconds of a step, by errors for published steps; equal on a CPU."""
        low, high = RANGES[self.memory.roles[0].sizes.experts > 0] if self.device.is_gpu else (1.0, 1.0)
        return low * self.step_s, high * self.step_s

    @property
    def fits(self) -> bool:
        return self.memory.fits

    def decided(self, run: Any) -> Any:
        """The run with `rollout.sleep=auto` resolved as in the plan."""
        if getattr(run.rollout, "sleep", None) != "auto":
            return run
        return replace(run, rollout=replace(run.rollout, sleep=not self.memory.stays_awake))

    def summary(self) -> str:
        """One line."""
        peak, role = self.memory.peak, self.memory.roles[0]
        dtype, stored = (str(x).removeprefix("torch.") for x in (role.dtype, role.stored))
        return (
            f"{role.sizes.parameters / 1e6:.4g}M weights in {stored}, {role.name} computes in {dtype}; {peak.name} "
            f"needs most, {peak.total / GIB:.2f} of {self.memory.limit / GIB:.1f} GiB in each process; "
            f"about {self.step_s:.3g} s a step on {self.device.name}"
            + "; the engine keeps its GPU memory while the trainer works"
            * self.memory.stays_awake
        )

    def lines(self) -> Iterator[str]:
        """The whole plan in plain text."""
        memory, device = self.memory, self.device
        machines = f" on each of {memory.machines} machines" if memory.machines > 1 else ""
        yield f"{memory.processes} process{'es' * (memory.processes > 1)}{machines}, device {device.name}"
        yield ""
        yield from memory.lines()
        yield "it fits" if self.fits else f"it does not fit: {memory.peak.name}"
        yield from () if self.fits else (f"  {line}" for line in self._what_helps())
        yield ""
        yield from self.batch
        yield ""
        low, high = self.range_s
        for stage in self.stages:
            share = stage.seconds / (self.step_s or 1.0)
            yield f"  {stage.name:<22}{stage.seconds:>10.3f} s{share:>7.0%}   bound by {stage.bound}"
        between = f"   {low:.3g} to {high:.3g} s for published steps" if low != high else ""
        yield f"  {'a step':<22}{self.step_s:>10.3f} s   100%{between}"
        yield ""
        yield self.disk
        if self.asynchronous is not None:
            yield ""
            yield from self.asynchronous.lines()

    def _what_helps(self) -> Sequence[str]:
        return self.changes or ["no setting alone helps: take a smaller model, more devices, or several settings"]

    def warnings(self, disk: int | None, host: int | None) -> Iterator[str]:
        """Warnings about insufficient memory or disk space.

        Args:
            disk: free bytes for checkpoints; None if unknown.
            host: free bytes of main memory on this machine.
        """
        memory, peak, count = self.memory, self.memory.peak, self.memory.num_checkpoints
        offloads = any(role.is_offloaded for role in memory.roles)
        settings = ["checkpoint=sync"] * (memory.copied > 0) + ["sharding.cpu_offload=false"] * offloads
        lower, helps = "lower checkpoint.keep_last_n, or " * (count > 2), "; ".join(self._what_helps())
        needs = [
            (f"Memory: {peak.name}, in each process", peak.total, memory.limit, helps),
            ("Main memory: saves and offloaded weights", memory.host, host, f"set {' or '.join(settings)}"),
            (f"Disk: {count} checkpoints", count * memory.saving, disk, f"{lower}set checkpoint.save_dir"),
        ]
        for what, needed, free, remedy in needs:
            if free is not None and needed > free:
                yield f"{what}: about {needed / GIB:.1f} GiB needed, {free / GIB:.1f} free: {remedy}"

    def to_json(self) -> dict[str, Any]:
        """All of it as numbers: bytes and seconds."""
        memory = self.memory
        return ({} if self.asynchronous is None else {"async": self.asynchronous.to_json()}) | {
            "device": self.device.name,
            "fits": self.fits,
            "limit_bytes": memory.limit,
            "peak": {"phase": memory.peak.name, "bytes": memory.peak.total},
            "phases": [{**asdict(phase), "bytes": phase.total} for phase in memory.phases],
            "host_bytes": memory.host,
            "batch": self.batch,
            "step_seconds": self.step_s,
            "step_seconds_range": self.range_s,
            "stages": [asdict(stage) for stage in self.stages],
            "checkpoint_bytes": memory.saving,
            "checkpoints_kept": memory.num_checkpoints,
            "changes": self.changes,
        }


def plan_run(
    run: Any,
    device: DeviceRates,
    *,
    response: int | None = None,
    free_disk: int | None = None,
    limit: int | None = None,
    counted_below: int = 0,
) -> RunPlan:
    """Plan a run from its configuration; no weight is loaded and no process started.

    Args:
        counted_below: bytes: smaller activations are counted, not traced.
        response: average tokens of a response, for the time; None: the maximum.
        free_disk: free bytes for checkpoints.
        limit: bytes available to a process; None: its share of the device.
    """
    run = replace(run, rollout=run.rollout.planned(device.is_gpu)) if hasattr(run, "rollout") else run
    memory = memory_plan(run, device, limit, counted_below)
    stages = tuple(stage_times(run, memory, device, response))
    found = () if memory.fits else changes_that_fit(run, device, memory)
    disk = _disk(run.checkpoint, memory, free_disk)
    return RunPlan(device, memory, stages, tuple(_batch(run, memory)), disk, found)


def log_plan(run: Any, context: BuildContext, checkpoints: Path) -> RunPlan | None:
    """Plan a run that starts now, with the free memory: writes `plan.txt` and `plan.json`, and logs warnings.

    Args:
        checkpoints: their directory.
    Returns:
        The plan; None if planning failed. Neither stops the run.
    """
    try:
        device = device_here(context.device)
        limit = free_memory(context.device, machine_processes(run))
        disk, small = free_disk(checkpoints), (limit or 0) // SMALL_SHARE
        plan = plan_run(run, device, free_disk=disk, limit=limit, counted_below=small)
    except Exception as error:  # noqa: BLE001 - a failed plan does not stop a run
        _log.warning("The plan of this run could not be made: %s: %s", type(error).__name__, error)
        return None
    assert context.run_dir is not None
    (context.run_dir / "plan.txt").write_text("\n".join(plan.lines()) + "\n", "utf-8")
    (context.run_dir / "plan.json").write_text(json.dumps(plan.to_json(), indent=2) + "\n", "utf-8")
    for warning in plan.warnings(disk, free_main_memory()):
        _log.warning("%s", warning)
    return plan


def _batch(run: Any, memory: MemoryPlan) -> Iterator[str]:
    """Batch arithmetic; a division with a remainder says so."""
    step = workload(run)
    rows = f"{step.rows} rows"
    if step.generates:
        rows = f"{step.rows // step.group_size} prompts x {step.group_size} samples = {rows}"
    updates = f"{step.mini_batches} mini-batches x {step.updates_per_row} = {step.updates} optimizer steps"
    yield f"{rows}{_remainder(step.rows, step.mini_batches)}; {updates}"
    count = step.rows // step.mini_batches
    for role in (role for role in memory.roles if role.gradients):
        shares = f"{role.layout.shares} shares{_remainder(count, role.layout.shares)}"
        micro = f"{role.micro_batches} micro-batches of up to {role.tokens} tokens"
        yield f"{role.name}: {count} rows of an optimizer step in {shares}, each of {micro}"


def _remainder(count: int, parts: int) -> str:
    return f" with a remainder of {count % parts}" if count % parts else ""


def _disk(saves: Any, memory: MemoryPlan, free: int | None) -> str:
    size, count = memory.saving, memory.num_checkpoints
    if saves is None or not size:
        return "nothing is saved"
    is_full = free is not None and (saves.keep_last_n is None or count * size > free)
    kept = "all are kept" if saves.keep_last_n is None else f"at most {count} of them, {count * size / GIB:.2f} GiB"
    full = f"; {free / GIB:.2f} GiB are free, full with checkpoint {free // size + 1}" if free is not None else ""
    return f"a checkpoint takes {size / GIB:.2f} GiB, {kept}{full * is_full}"
