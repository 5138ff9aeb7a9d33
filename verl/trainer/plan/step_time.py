"""Seconds of a step by stage: operations and bytes divided by the rates of a device, plus launch overhead per
layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from verl.models.model_stats import ModelStats
from verl.trainer.plan.memory import MemoryPlan, RolePlan
from verl.trainer.plan.workload import DeviceRates, workload

LAST_ROWS = 4  # that are drawn to the greatest length, where most are shorter
# A step over its plan, for published steps of dense models and of mixtures of experts: see docs/results.md
RANGES = {False: (0.8, 1.5), True: (1.0, 3.0)}


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage of a step.

    Attributes:
        bound: the limiting resource.
        sent: bytes that a process sends to others for forward and backward passes.
    """

    name: str
    seconds: float
    bound: str
    sent: int = 0


@dataclass(frozen=True)
class _Work:
    """A model on a device.

    Attributes:
        parameters: used in the matrix products of one token.
        ways: tensor-parallel processes, times the speed-up by pipeline stages.
    """

    sizes: ModelStats
    parameters: int
    itemsize: int
    dtype: str
    device: DeviceRates
    ways: float = 1

    def pass_s(self, tokens: float, length: int, calls: int = 1) -> tuple[float, str]:
        """Seconds of a forward pass of this many tokens in rows of a given length, divided into calls."""
        attention = 2 * self.sizes.layers * self.sizes.attention * length  # two products, half of them masked
        products = tokens * (2 * self.parameters + attention) / self.ways / self.device.flops(self.dtype)
        reads = calls * self.parameters * self.itemsize / self.ways / self.device.reads()
        starts = calls * self.sizes.layers * self.device.layer_s
        return max(products, reads) + (starts if not self.device.is_gpu else max(0.0, starts - products)), (
            "starting operations" if starts > max(products, reads) else "products" if products > reads else "memory"
        )


def stage_times(run: Any, memory: MemoryPlan, device: DeviceRates, response: int | None = None) -> list[StageTime]:
    """The stages of one step, in order.

    Args:
        response: average tokens of a response; None: the maximum.
    """
    work = {role.name: _work(role, device) for role in memory.roles}
    step, stages = workload(run), list[StageTime]()
    new = (response or step.response) if step.generates else step.response
    rows, width = step.rows, step.prompt + new
    if step.generates and run.rollout.location != "server":
        stages.append(engine_of(run, memory, device).stage(run, new))
    for role in memory.roles if step.generates else ():
        if role.name == "actor" and not run.algorithm.needs_old_log_probs:
            continue
        tokens = int(rows / role.memory.layout.token_shares * step.tokens_per_row(run, role.name, response=new))
        seconds, bound = work[role.name].pass_s(tokens, width, _calls(role, tokens))
        named = {"actor": "old log-probs", "critic": "values", "reference": "reference log-probs"}  # reward: its name
        stages.append(StageTime(named.get(role.name, role.name), seconds, bound))
    for role in memory.roles:
        if role.memory.gradients:
            per_row = step.tokens_per_row(run, role.name, step.mini_batches == 1, new)
            tokens = max(1, int(step.updates_per_row * rows / role.memory.layout.token_shares * per_row))
            stages.append(_update(run, role, work[role.name], tokens, width, step.updates, device))
    if step.generates and hasattr(run.rollout, "kv_cache_gib"):
        size = work["actor"].sizes.parameters * work["actor"].itemsize
        stages.append(StageTime("sync", size / (device.link if device.is_gpu else device.reads()), "memory"))
    return stages


def _work(role: RolePlan, device: DeviceRates) -> _Work:
    memory, layout = role.memory, role.memory.layout
    return _Work(
        sizes=memory.sizes,
        parameters=active_parameters(memory.config, memory.sizes),
        itemsize=memory.dtype.itemsize,
        dtype=str(memory.dtype).removeprefix("torch."),
        device=device,
        ways=layout.siblings * layout.sharding.pipeline_ways(layout.processes),
    )


def active_parameters(config: Any, sizes: ModelStats) -> int:
    """Parameters in the products of one token: the output head, but not the table of embeddings; of the experts those
    that are chosen."""
    count = sizes.parameters - (0 if sizes.tied else sizes.vocabulary * sizes.hidden)
    if sizes.top_k:
        return count - sizes.expert_elements * (sizes.experts - sizes.top_k) // sizes.experts
    text = config.get_text_config()  # of a family whose experts are in no common form
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    chosen = getattr(text, "num_experts_per_tok", None)
    if experts and chosen and chosen < experts:
        width = getattr(text, "moe_intermediate_size", None) or sizes.mlp
        count -= sizes.layers * (experts - chosen) * 3 * sizes.hidden * width
    return count


def _calls(role: RolePlan, tokens: int) -> int:
    return max(1, -(-tokens // role.tokens))


@dataclass(frozen=True)
class EngineTimes:
    """Decoding: for each token of all rows the weights are read once, and the keys and values of every row.

    Attributes:
        work: of the model; an engine's stages take turns, so that only its tensor-parallel processes share the time.
        rows, slots: of a step in this engine, and those of them that are drawn together.
        most_slots: of any rows.
        engines: that share the rows of a step.
        prompt: tokens.
    """

    work: _Work
    rows: int
    slots: int
    most_slots: int
    engines: int
    prompt: int

    def token_s(self, count: float, length: float) -> tuple[float, str]:
        """Seconds of a token of each of so many rows of this length, and what bounds them."""
        device, work = self.work.device, self.work
        seconds, bound = work.pass_s(count, int(length))
        cache_bytes = work.sizes.cache_elements * work.itemsize / work.ways
        return seconds + device.decode_s + count * length * cache_bytes / device.reads(), bound

    def prompts_s(self, group_size: int) -> float:
        """Seconds in which the prompts are read, those of a group once."""
        waves = -(-self.rows // self.slots)
        return self.work.pass_s(self.rows * self.prompt // max(1, group_size), max(1, self.prompt), waves)[0]

    def stage(self, run: Any, new: int) -> StageTime:
        """All rows, of `new` tokens on average; where that is less than they may have, the last few have as many."""
        each_s, bound = self.token_s(self.slots, self.prompt + new / 2)
        longest, waves = run.response_tokens, -(-self.rows // self.slots)
        last_s = (longest - new) * self.token_s(min(self.slots, LAST_ROWS), self.prompt + (new + longest) / 2)[0]
        seconds = self.prompts_s(run.trainer.group_size) + waves * new * each_s + max(0.0, last_s)
        return StageTime("generate", seconds, bound)


def engine_of(run: Any, memory: MemoryPlan, device: DeviceRates) -> EngineTimes:
    """An engine of the run, which draws its share of a step's rows."""
    layout, step = memory.roles[0].memory.layout, workload(run)  # of the actor
    in_process = -(-step.rows // (layout.shares if run.rollout.runs_ahead else layout.generation_shares))
    same = layout.processes // layout.shares if run.rollout.runs_ahead else 1  # processes with the same rows
    ways, siblings = getattr(run.rollout, "num_workers", 1), getattr(run.rollout, "tensor_parallel_size", 1)
    together = getattr(run.rollout, "max_rows", None) or getattr(run.rollout, "max_num_seqs", in_process)
    rows = in_process * max(1, ways // same)
    work = _work(memory.roles[0], device)
    engine = replace(work, ways=max(siblings, layout.siblings))
    together = max(1, together)
    return EngineTimes(engine, rows, min(rows, together), together, max(1, step.rows // rows), step.prompt)


def _update(
    run: Any, role: RolePlan, work: _Work, tokens: int, length: int, updates: int, device: DeviceRates
) -> StageTime:
    """Forward and backward passes over this many tokens, communication of gradients, and the optimizer step."""
    calls = max(updates, _calls(role, tokens))
    once, bound = work.pass_s(tokens, length, calls)
    compute = once * (4 if role.recomputed else 3)
    layout = role.memory.layout
    sent, sending = 0, 0.0
    if layout.processes > 1:
        itemsize = getattr(torch, getattr(run, role.name).model.dtype).itemsize
        cost = layout.sharding.cost(layout.processes, work.sizes, role.tokens, itemsize, work.itemsize)
        sent = cost.per_step(calls, updates)
        sending = sent / (device.network if run.trainer.nnodes > 1 else device.link)
    moments = 7 * (role.memory.gradients or role.memory.weights) / device.reads() * updates  # AdamW reads 4, writes 3
    if role.memory.is_offloaded:
        moments += 2 * role.memory.weights / device.host_link * updates
    bound = "links between devices" if sending > compute else bound
    return StageTime(f"update {role.name}", max(compute, sending) + moments, bound, sent)


def share_lines(stages: Sequence[StageTime]) -> list[str]:
    """Each stage with its share of the step."""
    total = sum(stage.seconds for stage in stages) or 1.0
    return [
        f"{stage.name:<22}{stage.seconds:>10.3f} s{stage.seconds / total:>7.0%}   bound by {stage.bound}"
        for stage in stages
    ]
