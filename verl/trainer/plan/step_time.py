"""Seconds of a step by stage: operations and bytes over the rates of a device, and the start of operations.

pass      max(tokens (2 parameters + attention) / flops, calls weights / bandwidth), and calls layers starts
generate  prefill, and for each token one pass and the keys and values of all rows
update    3 passes (4 with recomputed layers), or the traffic if that takes longer, and the optimizer
sync      seconds of each layer, and weights / rate of an engine
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.models.model_stats import ModelStats
from verl.trainer.plan.memory import MemoryPlan, RoleMemory
from verl.trainer.plan.workload import DeviceRates, Workload, workload

WIDE = 1152  # H200, 256 rows: a token of SmolLM2-135M (576 wide) takes 7 ms in vLLM, of a Qwen2 of 1536 9.5
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


def active_parameters(sizes: ModelStats) -> int:
    """Parameters in the matrix products of one token: with the output head, without the embeddings; of experts only the
    chosen ones."""
    count = sizes.parameters - (0 if sizes.tied else sizes.vocabulary * sizes.hidden)
    count -= 0 if sizes.tower is None else sizes.tower.parameters
    return count - sizes.expert_elements * (sizes.experts - sizes.top_k) // max(1, sizes.experts)


def pass_time(
    role: RoleMemory, device: DeviceRates, ways: float, tokens: float, length: int, calls: int = 1, engine: bool = False
) -> tuple[float, str]:
    """Seconds of a forward pass of `tokens` tokens in rows of a given length, divided into calls, and what bounds them.

    Args:
        ways: tensor-parallel processes, times the speed-up by pipeline stages.
        engine: a rollout engine computes it.
    """
    sizes, used = role.sizes, active_parameters(role.sizes)
    attention = 2 * sizes.layers * sizes.attention * length  # two products, half of them masked
    products = tokens * (2 * used + attention) / ways / device.flops(str(role.dtype).removeprefix("torch."))
    reads = calls * used * role.dtype.itemsize / ways / device.reads()
    layer_s = device.layer_s * (min(1.0, sizes.hidden / WIDE) if device.is_gpu else 1.0)  # narrow kernels end sooner
    starts, longer = calls * sizes.layers * (layer_s if engine else device.trained_layer_s), max(products, reads)
    bound = "starting operations" if starts > longer else "products" if products > reads else "memory"
    return longer + (max(0.0, starts - products) if device.is_gpu else starts), bound


def images_time(role: RoleMemory, device: DeviceRates, step: Workload, rows: float) -> float:
    """Seconds of the vision tower for the images of so many rows."""
    if (tower := role.sizes.tower) is None:
        return 0.0
    products = 2 * tower.parameters * rows * step.patches_per_row(tower.patches)
    return products / role.layout.siblings / device.flops(str(role.dtype).removeprefix("torch."))


def stage_times(run: Any, memory: MemoryPlan, device: DeviceRates, response: int | None = None) -> list[StageTime]:
    """The stages of one step, in order.

    Args:
        response: average tokens of a response; None: the maximum.
    """
    step, stages = workload(run), list[StageTime]()
    new = (response or step.response) if step.generates else step.response

    def forward(role: RoleMemory, is_whole: bool, times: int, least_calls: int) -> tuple[int, float, str]:
        """Calls, seconds and bound of the forward passes over all rows."""
        per_row = step.tokens_per_row(run, role.name, is_whole, new)
        tokens = max(1, int(times * step.rows / role.layout.token_shares * per_row))
        calls = max(least_calls, -(-tokens // role.tokens))
        ways = role.layout.siblings * role.layout.sharding.pipeline_ways(role.layout.processes)
        return calls, *pass_time(role, device, ways, tokens, step.prompt + new, calls)

    if step.generates and run.rollout.location != "server":
        stages.append(engine_of(run, memory, device).stage(run, new))
    for role in memory.roles if step.generates else ():
        if role.name != "actor" or run.algorithm.needs_old_log_probs:
            _, seconds, bound = forward(role, True, 1, 1)
            seconds += images_time(role, device, step, step.rows / role.layout.token_shares)
            stages.append(StageTime(SCORES.get(role.name, role.name), seconds, bound))
    for role in (role for role in memory.roles if role.gradients):
        calls, seconds, bound = forward(role, step.mini_batches == 1, step.updates_per_row, step.updates)
        images = images_time(role, device, step, step.updates_per_row * step.rows / role.layout.token_shares)
        images *= 3 if role.sizes.tower is not None and role.sizes.tower.is_trained else 1
        compute, sent = seconds * (4 if role.recomputed else 3) + images, 0
        if (count := role.layout.processes) > 1:
            widths = role.stored.itemsize, role.dtype.itemsize
            sent = role.layout.sharding.cost(count, role.sizes, role.tokens, *widths).per_step(calls, step.updates)
        sending = sent / (device.network if run.trainer.nnodes > 1 else device.link)
        moments = 7 * role.gradients / device.reads()  # AdamW reads 4 tensors and writes 3
        moments += 2 * role.weights / device.host_link if role.is_offloaded else 0.0
        bound = "links between devices" if sending > compute else bound
        seconds = max(compute, sending) + moments * step.updates
        stages.append(StageTime(f"update {role.name}", seconds, bound, sent))
    if step.generates and hasattr(run.rollout, "kv_cache_gib"):
        sizes, size = (role := memory.roles[0]).sizes, role.sizes.parameters * role.dtype.itemsize
        seconds = sizes.layers * device.sync_layer_s + size / engine_of(run, memory, device).ways / device.sync_rate
        stages.append(StageTime("sync", seconds, "starting operations" if device.is_gpu else "memory"))
    return stages


@dataclass(frozen=True)
class EngineTimes:
    """Decoding: each step reads the weights once, and the keys and values of every row.

    Attributes:
        ways: of its tensor parallelism; pipeline stages of an engine run one after another.
        rows, slots: rows of a step in this engine, and how many are decoded at a time, at most `most_slots`.
        engines: number of engines that share the rows of a step.
        step: rows of a step.
    """

    role: RoleMemory
    device: DeviceRates
    ways: float
    rows: int
    most_slots: int
    engines: int
    step: Workload

    @property
    def slots(self) -> int:
        return min(self.rows, self.most_slots)

    def token_s(self, count: float, length: float) -> tuple[float, str]:
        """Seconds for one token of each of `count` rows of this length, and the limiting resource."""
        seconds, bound = pass_time(self.role, self.device, self.ways, count, int(length), engine=True)
        cache_bytes = self.role.sizes.cache_elements * self.role.dtype.itemsize / self.ways
        return seconds + self.device.decode_s + count * length * cache_bytes / self.device.reads(), bound

    def prompts_s(self, group_size: int) -> float:
        """Seconds of prefill; the prompt of a group is read once."""
        tokens, waves = self.rows * self.step.prompt // max(1, group_size), -(-self.rows // self.slots)
        seconds = pass_time(self.role, self.device, self.ways, tokens, max(1, self.step.prompt), waves, engine=True)[0]
        return seconds + images_time(self.role, self.device, self.step, self.rows)

    def stage(self, run: Any, new: int) -> StageTime:
        """The stage for rows of `new` tokens on average; if that is below the maximum, the last few rows have the
        maximum."""
        each_s, bound = self.token_s(self.slots, self.step.prompt + new / 2)
        longest, waves = run.response_tokens, -(-self.rows // self.slots)
        last_s = (longest - new) * self.token_s(min(self.slots, LAST_ROWS), self.step.prompt + (new + longest) / 2)[0]
        seconds = self.prompts_s(run.trainer.group_size) + waves * new * each_s + max(0.0, last_s)
        return StageTime("generate", seconds, bound)


def engine_of(run: Any, memory: MemoryPlan, device: DeviceRates) -> EngineTimes:
    """Times of an engine of the run, which generates its share of a step's rows."""
    role, step = memory.roles[0], workload(run)  # of the actor
    layout, rollout = role.layout, run.rollout
    in_process = -(-step.rows // (layout.shares if rollout.runs_ahead else layout.generation_shares))
    same = layout.processes // layout.shares if rollout.runs_ahead else 1  # processes with the same rows
    rows = in_process * max(1, getattr(rollout, "num_workers", 1) // same)
    most = max(1, getattr(rollout, "max_rows", None) or getattr(rollout, "max_num_seqs", in_process))
    ways = max(getattr(rollout, "tensor_parallel_size", 1), layout.siblings)
    return EngineTimes(role, device, ways, rows, most, max(1, step.rows // rows), step)
