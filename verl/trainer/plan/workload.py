"""Inputs of a plan: rows and tokens of a step, the processes of each role, and the rates of a device."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from verl.engines.sharding import NoSharding, Sharding
from verl.errors import ConfigError
from verl.trainer.config import PPOSettings
from verl.utils.main_memory import free_main_memory
from verl.utils.memory import bfloat16_here, gpu_memory_from_outside, gpu_name_from_outside

WORTH_PACKING = 0.85  # fraction of the padded tokens below which rows are packed
GB, GIB, TERA = 10**9, 2**30, 10**12
_PROCESS_BYTES = 450 * 2**20  # a Python process with torch and transformers, on the CPU


# -- processes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoleLayout:
    """The processes of a role, and the division of its work.

    Attributes:
        shares, token_shares: divisions of the rows of a step, and of its tokens (by rows and within rows).
        generation_shares: divisions of the generated rows, where processes that share tokens or stages have full
            weights.
        siblings: divisions of each layer.
    """

    sharding: Sharding
    processes: int
    shares: int
    token_shares: int
    generation_shares: int
    siblings: int

    @classmethod
    def of(cls, sharding: Sharding, processes: int) -> RoleLayout:
        degrees, rows = sharding.degrees(processes), sharding.row_shares(processes)
        tokens, generated = sharding.token_shares(processes), rows * degrees.pp * degrees.cp
        return cls(sharding, processes, rows, tokens, generated, sharding.mesh_sizes(processes)[2])


def process_groups(run: Any) -> list[tuple[tuple[str, ...], int]]:
    """Roles that share processes, with the number of those: by `trainer.placement` if it is set."""
    settings = run.trainer
    world: int = settings.n_gpus_per_node * settings.nnodes
    if settings.placement is None:
        return [(tuple(run.shardings()), world)]
    roles = getattr(run, "placed_roles", None) or run.shardings()  # with rollout workers, which are not sharded
    return settings.placement.worker_groups(tuple(roles), world)


def role_processes(run: Any) -> dict[str, int]:
    """Number of processes of each role."""
    return {role: count for roles, count in process_groups(run) for role in roles}


def machine_processes(run: Any) -> int:
    """Processes with roles on each machine."""
    apart = getattr(run, "num_rollout_workers", 0) if run.trainer.placement is None else 0
    return -(-sum(count for _, count in process_groups(run)) // run.trainer.nnodes) + apart


def role_layouts(run: Any) -> dict[str, RoleLayout]:
    shardings, counts, alone = run.shardings(), role_processes(run), NoSharding()
    return {role: RoleLayout.of(x if counts[role] > 1 else alone, counts[role]) for role, x in shardings.items()}


# -- rows and tokens ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """Rows of a step.

    Attributes:
        generates: rows are sampled and scored in the step; otherwise they come from a data set.
        prompt, response: maximum tokens of a row; rows of a group share the prompt.
        updates_per_row: number of updates on a row.
    """

    generates: bool
    rows: int
    group_size: int
    prompt: int
    response: int
    mini_batches: int = 1
    updates_per_row: int = 1

    @property
    def width(self) -> int:
        """Maximum tokens of a row."""
        return self.prompt + self.response

    @property
    def updates(self) -> int:
        """Optimizer steps per step."""
        return self.mini_batches * self.updates_per_row

    def patches_per_row(self, patches: int, is_whole: bool = True) -> float:
        """Patches of images that a row adds to a micro-batch if its prompt consists of images alone.

        Args:
            patches: of a token.
            is_whole: samples of a prompt, which share its images, are together.
        """
        return patches * (self.prompt or self.width) / (self.group_size if is_whole else 1)

    def tokens_per_row(self, run: Any, role: str, is_whole: bool = True, response: int | None = None) -> float:
        """Tokens that a row adds to a packed sequence, in which samples share their prompt.

        Args:
            is_whole: all samples of a prompt are in one micro-batch; not the case for shuffled mini-batches.
            response: tokens of a response; None for the maximum.
        """
        response = self.response if response is None else response
        packs = getattr(run.actor if role == "reference" else getattr(run, role), "packing", "off") == "auto"
        shared, padded = response + self.prompt / self.group_size, self.prompt + response
        return shared if packs and is_whole and shared <= WORTH_PACKING * padded else padded


def workload(run: Any) -> Workload:
    """The rows of a step of a `PPORun` or an `SFTRun`."""
    settings = run.trainer
    if not isinstance(settings, PPOSettings):
        length = getattr(run.data, "max_length", None) or run.actor.micro_batch_tokens
        return Workload(False, settings.batch_size * run.rows_per_sample, 1, 0, length)
    rows, prompt = settings.prompts_per_step * settings.group_size, getattr(run.data, "max_prompt_length", 0)
    updates = run.algorithm.mini_batches, run.algorithm.epochs
    return Workload(True, rows, settings.group_size, prompt, run.response_tokens, *updates)


# -- devices -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """Peak rates of a device, in bytes and operations per second, and the fractions reached in practice.

    Attributes:
        memory: bytes.
        products: by dtype, of matrix products without sparsity.
        bandwidth: of its memory.
        link, network: between processes on the same machine, and on different machines.
        host_link: between the device and main memory.
        context: bytes of the device context of each process.
        layer_s: minimum seconds of one layer's forward pass, for launching kernels: in an engine with CUDA graphs, of a
            width of `WIDE` and more.
        trained_layer_s: the same of a role that scores or trains, kernel by kernel; backward takes twice as much.
        decode_s: seconds of an engine per token, in addition to the model: scheduling, sampling, replies.
        sync_layer_s, sync_rate: of a sync to an engine, seconds of a layer, and bytes per second, proof included.
    """

    name: str
    memory: int
    products: Mapping[str, float]
    bandwidth: float
    link: float
    network: float = 50 * GB
    host_link: float = 25 * GB
    context: int = 0
    layer_s: float = 2e-4
    trained_layer_s: float = 2e-3  # H200: 0.20 s for an update of SmolLM2-135M in one micro-batch
    decode_s: float = 4e-3
    sync_layer_s: float = 5.7e-3  # H200: 0.20 s for SmolLM2-135M, 0.50 s for a Qwen2 of 1.5B, tensor by tensor
    sync_rate: float = 9 * GB
    products_share: float = 0.36  # published for training of dense models on H100s are 0.33 to 0.39
    bandwidth_share: float = 0.7
    is_gpu: bool = True

    def flops(self, dtype: str) -> float:
        """Achievable operations per second in this data type."""
        return self.products.get(dtype, self.products["float32"]) * self.products_share

    def reads(self) -> float:
        """Achievable bytes per second when reading its memory."""
        return self.bandwidth * self.bandwidth_share


def _gpu(name: str, mib: int, half: float, single: float, bandwidth: float, link: float, host: float) -> DeviceRates:
    """Memory in MiB, operations in 10^12 per second, the rest in 10^9 bytes per second."""
    rates = {"bfloat16": half * TERA, "float16": half * TERA, "float32": single * TERA, "float64": single * TERA / 2}
    moved: Any = {"bandwidth": bandwidth * GB, "link": link * GB, "host_link": host * GB}
    return DeviceRates(name=name, memory=mib << 20, products=rates, context=GIB // 2, **moved)


# Memory as nvidia-smi (rocm-smi) reports it, less than on the data sheet. Rates are those of the vendors' data sheets:
# dense ones of the SXM form where there is one; links in one direction.
DEVICES = {
    device.name: device
    for device in (
        _gpu("a100-40", 40960, 312, 19.5, 1555, 300, 25),
        _gpu("a100", 81920, 312, 19.5, 2039, 300, 25),
        _gpu("l4", 23034, 121, 30.3, 300, 25, 25),
        _gpu("l40s", 46068, 362, 91.6, 864, 25, 25),
        _gpu("rtx4090", 24564, 165, 82.6, 1008, 25, 25),
        _gpu("h100", 81559, 989, 67, 3350, 450, 50),
        _gpu("h200", 143771, 989, 67, 4800, 450, 50),
        _gpu("b200", 183359, 2250, 80, 8000, 900, 50),
        _gpu("mi300x", 196592, 1307, 163.4, 5300, 448, 50),
    )
}


def device_named(name: str) -> DeviceRates:
    """The rates of a device of the table, or of `cpu`: the memory of this machine with rates of two common cores.

    Raises:
        ConfigError: there is no device of that name.
    """
    if name == "cpu":
        return this_cpu()
    if (rates := DEVICES.get(name.lower())) is None:
        raise ConfigError(f"--device is {name!r}: known are {', '.join(DEVICES)} and cpu.")
    return rates


def device_here(device: str) -> DeviceRates:
    """The device of a run on this machine, by its `trainer.device`: the CPU, or the GPU with its actual memory and the
    rates of the table; unknown ones get those of an A100."""
    if device == "cpu" or not torch.cuda.is_available():
        return this_cpu()
    gpu = gpu_memory_from_outside(0)  # opens no CUDA context in this process
    memory = torch.cuda.get_device_properties(0).total_memory if gpu is None else gpu.total
    name = gpu_name_from_outside(0) or torch.cuda.get_device_name(0)
    plain = name.lower().replace(" ", "").replace("geforce", "")
    known = next((rates for key, rates in reversed(DEVICES.items()) if key.partition("-")[0] in plain), None)
    if known is None:
        known, name = DEVICES["a100"], f"{name} (not in the table: the rates of an a100)"
    return replace(known, name=name, memory=memory)


def this_cpu() -> DeviceRates:
    """The CPU of this machine with its actual memory and conservative rates."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    rate = 60e9 * cores  # cores with AVX2 reach 70 to 100 in isolated products of these sizes
    return DeviceRates(
        name="cpu",
        memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        products={"float32": rate, "float64": rate / 2, "bfloat16": rate * (2 if bfloat16_here() else 0.25)},
        bandwidth=10 * GB,
        link=5 * GB,
        host_link=5 * GB,
        layer_s=5e-4,
        trained_layer_s=5e-4,
        decode_s=0.0,
        sync_layer_s=0.0,
        sync_rate=10 * GB,
        products_share=1.0,
        bandwidth_share=1.0,
        is_gpu=False,
    )


def free_memory(device: str, processes: int) -> int | None:
    """Free bytes for each of `processes` processes on this machine; None if unknown."""
    if device.startswith("cuda"):  # called by the driver, which must not create a context on a GPU
        gpu = gpu_memory_from_outside(torch.device(device).index or 0)
        return None if gpu is None else gpu.free
    free = free_main_memory()
    return None if free is None else max(0, free // processes - _PROCESS_BYTES * (processes > 1))


def free_disk(directory: Path) -> int:
    """Free bytes on the file system of a directory, which may not exist yet."""
    return shutil.disk_usage(next(path for path in (directory, *directory.parents) if path.exists())).free
