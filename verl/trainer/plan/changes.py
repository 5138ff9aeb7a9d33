"""Settings that make a run fit its devices, each planned again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from verl.engines.sharding import FSDP
from verl.errors import ConfigError
from verl.models.lora import LoRA
from verl.trainer.plan.devices import DeviceRates
from verl.trainer.plan.memory import GIB, MemoryEstimate, MemoryPlan, memory_plan
from verl.trainer.plan.step_time import stage_times

MOST_CHANGES = 3  # that are named
GPUS = (2, 4, 8)  # that a machine of a data centre may give to a run


@dataclass(frozen=True)
class FittingChange:
    """Settings that make a run fit.

    Attributes:
        peak: bytes then.
        slower: seconds of a step then, relative to before.
    """

    settings: tuple[str, ...]
    peak: int
    slower: float

    def words(self) -> str:
        return f"{' '.join(self.settings)} -> {self.peak / GIB:.1f} GiB, {self.slower - 1:+.0%} time"


def changes_that_fit(
    run: Any, device: DeviceRates, memory: MemoryPlan, step_s: float, response: int | None
) -> list[FittingChange]:
    """Single settings that make a run fit; pairs if no single one does."""

    def planned(*names: str) -> FittingChange | None:
        try:
            changed_run = run
            for name in names:
                changed_run = dict(changes(changed_run, memory.estimate, GPUS))[name]()
            changed = memory_plan(changed_run, device, limit=memory.limit)
            seconds = sum(stage.seconds for stage in stage_times(changed_run, changed, device, response))
        except (ConfigError, KeyError, ValueError):  # it does not go with the rest
            return None
        return (
            FittingChange(names, changed.peak.total, seconds / step_s)
            if changed.peak.total < memory.peak.total
            else None
        )

    names = [name for name, _ in changes(run, memory.estimate, GPUS)]
    tried = [change for name in names if (change := planned(name)) is not None]
    fitting = _one_of_each([change for change in tried if change.peak <= memory.limit])
    if not fitting:
        helpful = sorted(_one_of_each(tried, by_peak=True), key=lambda change: change.peak)[:4]
        firsts = [change.settings[0] for change in helpful]
        keys = {name: name.partition("=")[0] for name in names}
        both = {frozenset(pair): pair for pair in product(firsts, names) if keys[pair[0]] != keys[pair[1]]}
        pairs = [change for pair in both.values() if (change := planned(*pair)) is not None]
        fitting = [change for change in pairs if change.peak <= memory.limit]
    return sorted(fitting, key=lambda change: (round(change.slower, 2), change.peak))[:MOST_CHANGES]


def _one_of_each(changes: list[FittingChange], *, by_peak: bool = False) -> list[FittingChange]:
    """Cheapest change of each key, or with `by_peak` the one that saves most."""
    best: dict[str, FittingChange] = {}
    for change in changes:
        key = change.settings[0].partition("=")[0]
        if key not in best or (by_peak and change.peak < best[key].peak):
            best[key] = change
    return list(best.values())


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
            sharded = {"sharding": FSDP(), "trainer": replace(run.trainer, n_gpus_per_node=count)}
            yield (
                f"sharding=fsdp trainer.n_gpus_per_node={count}",
                lambda sharded=sharded: replace(run, **sharded),
            )
