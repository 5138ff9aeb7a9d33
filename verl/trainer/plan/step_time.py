"""Seconds of a step by stage: operations and bytes over the rates of a device, and launch overhead per layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from verl.models.model_stats import ModelStats
from verl.trainer.plan.memory import MemoryPlan, RoleMemory
from verl.trainer.plan.workload import DeviceRates, workload

LAST_ROWS = 4  # number of rows that are decoded to the maximum length, if most are shorter
SCORES = {"actor": "old log-probs", "critic": "values", "reference": "reference log-probs"}


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage of a step.

    Attributes:
        bound: the limiting resource.
        sent_bytes: bytes that a process sends for forward and backward passes.
    """

    name: str
    seconds: float
    bound: str
    sent_bytes: int = 0


@dataclass(frozen=True)
class _Work:
    """The model of a role on a device.

    Attributes:
        ways: tensor-parallel processes, times the speed-up by pipeline stages.
    """

    role: RoleMemory
    device: DeviceRates
    ways: float

    @classmethod
    def of(cls, role: RoleMemory, device: DeviceRates) -> _Work:
        layout = role.layout
        return cls(role, device, layout.siblings * layout.sharding.pipeline_ways(layout.processes))

    def pass_s(self, tokens: float, length: int, calls: int = 1) -> tuple[float, str]:
        """Seconds of a forward pass of `tokens` tokens in rows of a given length, divided into calls."""
        role, sizes, device = self.role, self.role.sizes, self.device
        used = active_parameters(role.config, sizes)
        attention = 2 * sizes.layers * sizes.attention * length  # two products, half of them masked
        dtype = str(role.dtype).removeprefix("torch.")
        products = tokens * (2 * used + attention) / self.ways / device.flops(dtype)
        reads = calls * used * role.dtype.itemsize / self.ways / device.reads()
        starts, longer = calls * sizes.layers * device.layer_s, max(products, reads)
        bound = "starting operations" if starts > longer else "products" if products > reads else "memory"
        return longer + (max(0.0, starts - products) if device.is_gpu else starts), bound


def active_parameters(config: Any, sizes: ModelStats) -> int:
    """Parameters in the matrix products of one token: with the output head, without the embeddings; of experts only the
    chosen ones."""
    count = sizes.parameters - (0 if sizes.tied else sizes.vocabulary * sizes.hidden)
    if sizes.top_k:
        return count - sizes.expert_elements * (sizes.experts - sizes.top_k) // sizes.experts
    text = config.get_text_config()  # a family with an unknown form of experts
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    chosen = getattr(text, "num_experts_per_tok", None)
    if experts and chosen and chosen < experts:
        width = getattr(text, "moe_intermediate_size", None) or sizes.mlp
        count -= sizes.layers * (experts - chosen) * 3 * sizes.hidden * width
    return count


def stage_times(run: Any, memory: MemoryPlan, device: DeviceRates, response: int | None = None) -> list[StageTime]:
    """The stages of one step, in order.

    Args:
        response: average tokens of a response; None: the maximum.
    """
    step, stages = workload(run), list[StageTime]()
    new = (response or step.response) if step.generates else step.response
    width = step.prompt + new

    def tokens_of(role: RoleMemory, is_whole: bool = True, times: int = 1) -> int:
        per_row = step.tokens_per_row(run, role.name, is_whole, new)
        return int(times * step.rows / role.layout.token_shares * per_row)

    if step.generates and run.rollout.location != "server":
        stages.append(engine_of(run, memory, device).stage(run, new))
    for role in memory.roles if step.generates else ():
        if role.name != "actor" or run.algorithm.needs_old_log_probs:
            tokens = tokens_of(role)
            seconds, bound = _Work.of(role, device).pass_s(tokens, width, _calls(role, tokens))
            stages.append(StageTime(SCORES.get(role.name, role.name), seconds, bound))
    for role in memory.roles:
        if role.gradients:
            tokens = max(1, tokens_of(role, step.mini_batches == 1, step.updates_per_row))
            stages.append(_update(run, role, device, tokens, width, step.updates))
    if step.generates and hasattr(run.rollout, "kv_cache_gib"):
        size = memory.roles[0].sizes.parameters * memory.roles[0].dtype.itemsize
        stages.append(StageTime("sync", size / (device.link if device.is_gpu else device.reads()), "memory"))
    return stages


def _calls(role: RoleMemory, tokens: int) -> int:
    return max(1, -(-tokens // role.tokens))


def _update(run: Any, role: RoleMemory, device: DeviceRates, tokens: int, length: int, updates: int) -> StageTime:
    """Forward and backward passes over this many tokens, communication of gradients, and the optimizer step."""
    layout, calls = role.layout, max(updates, _calls(role, tokens))
    once, bound = _Work.of(role, device).pass_s(tokens, length, calls)
    compute, sent = once * (4 if role.recomputed else 3), 0
    if layout.processes > 1:
        itemsizes = role.stored.itemsize, role.dtype.itemsize
        cost = layout.sharding.cost(layout.processes, role.sizes, role.tokens, *itemsizes)
        sent = cost.per_step(calls, updates)
    sending = sent / (device.network if run.trainer.nnodes > 1 else device.link)
    moments = 7 * (role.gradients or role.weights) / device.reads() * updates  # AdamW reads 4, writes 3
    if role.is_offloaded:
        moments += 2 * role.weights / device.host_link * updates
    bound = "links between devices" if sending > compute else bound
    return StageTime(f"update {role.name}", max(compute, sending) + moments, bound, sent)


@dataclass(frozen=True)
class EngineTimes:
    """Decoding: each step reads the weights once, and the keys and values of every row.

    Attributes:
        work: of the model; pipeline stages of an engine run one after another, so only tensor parallelism saves time.
        rows, slots: rows of a step in this engine, and how many are decoded at a time.
        most_slots: maximum number of rows decoded at a time.
        engines: number of engines that share the rows of a step.
        prompt: tokens of a prompt.
    """

    work: _Work
    rows: int
    slots: int
    most_slots: int
    engines: int
    prompt: int

    def token_s(self, count: float, length: float) -> tuple[float, str]:
        """Seconds for one token of each of `rows` rows of this length, and the limiting resource."""
        device, role = self.work.device, self.work.role
        seconds, bound = self.work.pass_s(count, int(length))
        cache_bytes = role.sizes.cache_elements * role.dtype.itemsize / self.work.ways
        return seconds + device.decode_s + count * length * cache_bytes / device.reads(), bound

    def prompts_s(self, group_size: int) -> float:
        """Seconds of prefill; the prompt of a group is read once."""
        waves = -(-self.rows // self.slots)
        return self.work.pass_s(self.rows * self.prompt // max(1, group_size), max(1, self.prompt), waves)[0]

    def stage(self, run: Any, new: int) -> StageTime:
        """The stage for rows of `new` tokens on average; if that is below the maximum, the last few rows have the
        maximum."""
        each_s, bound = self.token_s(self.slots, self.prompt + new / 2)
        longest, waves = run.response_tokens, -(-self.rows // self.slots)
        last_s = (longest - new) * self.token_s(min(self.slots, LAST_ROWS), self.prompt + (new + longest) / 2)[0]
        seconds = self.prompts_s(run.trainer.group_size) + waves * new * each_s + max(0.0, last_s)
        return StageTime("generate", seconds, bound)


def engine_of(run: Any, memory: MemoryPlan, device: DeviceRates) -> EngineTimes:
    """Times of an engine of the run, which generates its share of a step's rows."""
    layout, step = memory.roles[0].layout, workload(run)  # of the actor
    in_process = -(-step.rows // (layout.shares if run.rollout.runs_ahead else layout.generation_shares))
    same = layout.processes // layout.shares if run.rollout.runs_ahead else 1  # processes with the same rows
    ways, siblings = getattr(run.rollout, "num_workers", 1), getattr(run.rollout, "tensor_parallel_size", 1)
    most = max(1, getattr(run.rollout, "max_rows", None) or getattr(run.rollout, "max_num_seqs", in_process))
    rows = in_process * max(1, ways // same)
    work = replace(_Work.of(memory.roles[0], device), ways=max(siblings, layout.siblings))
    return EngineTimes(work, rows, min(rows, most), most, max(1, step.rows // rows), step.prompt)
