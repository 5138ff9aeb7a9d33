"""GPU memory of a vLLM engine that shares a device with a trainer: weights, key-value cache and overhead.

    total = other processes + trainer (during generation) + engine weights + overhead + keys and values
                                                                                     `rollout.kv_cache_gib`, or a share

vLLM compares `gpu_memory_utilization` with the free memory when it starts, even if the size of the cache is set, and
its default is 0.92 of the whole device. So verl sets it to the fraction of the device that this engine needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from verl.errors import ConfigError
from verl.models.model_stats import ModelStats, model_stats
from verl.rollout.vllm.options import VLLMOptions
from verl.utils.memory import DeviceMemory

GIB = 1 << 30
CACHE_ON_CPU_GIB = 1.0
SHARE = 0.9  # fraction of the free memory for keys and values; the rest covers fragmentation and unknown parts
SHARE_BESIDE_UNKNOWN = 0.5  # if the trainer's memory is unknown
CONTEXT_BYTES = 600 << 20  # of a process that uses a GPU: kernels, cuBLAS workspaces
GRAPH_BYTES = 1 << 30  # CUDA graphs, where the model is compiled
NCCL_BYTES = 512 << 20  # buffers of communicators, where an engine has several GPUs
BLOCK_TOKENS = 128  # of the cache, at most


@dataclass(frozen=True)
class EngineShape:
    """The quantities that determine the memory of an engine.

    Attributes:
        weights: bytes in each of its processes.
        row: bytes of the keys and values of one token, in each of its processes.
        overhead: bytes in addition to weights, keys and values.
        asleep: bytes that remain while it sleeps. CUDA graphs are in main memory then; NCCL buffers count, because
            freeing them is experimental in vLLM.
        max_model_len: tokens of the longest row; None if not known.
    """

    weights: int
    row: int
    overhead: int
    asleep: int
    max_model_len: int | None

    def cache_of(self, count: int) -> int:
        """Bytes of the keys and values of `rows` rows of the maximum length."""
        blocks = count * math.ceil((self.max_model_len or BLOCK_TOKENS) / BLOCK_TOKENS) + 1  # vLLM keeps one for itself
        return blocks * BLOCK_TOKENS * self.row


def engine_shape(options: VLLMOptions, config: Any, dtype: torch.dtype, is_on_gpu: bool = True) -> EngineShape:
    """The shape of an engine with these options for a model with this configuration."""
    stats, siblings, stages = model_stats(config), options.tensor_parallel_size, options.pipeline_parallel_size
    # twice one layer of a pass, and three copies of the logits in float32: raw, scaled, and log-probs
    layer = options.max_num_batched_tokens * (stats.hidden * 6 + 3 * stats.mlp // siblings) * dtype.itemsize * 2
    logits = 3 * 4 * options.max_num_seqs * stats.vocabulary
    compiled = 0 if options.runs_eager(is_on_gpu) else GRAPH_BYTES
    asleep = CONTEXT_BYTES + (NCCL_BYTES if options.num_workers > 1 else 0)
    return EngineShape(
        weights=_largest_stage(stats, stages) * dtype.itemsize // siblings,
        row=stats.cache_elements * dtype.itemsize * _layers_share(stats, stages) // siblings,
        overhead=asleep + compiled + layer + logits,
        asleep=asleep,
        max_model_len=options.max_model_len or getattr(config.get_text_config(), "max_position_embeddings", None),
    )


def _largest_stage(stats: ModelStats, stages: int) -> int:
    """Parameters of the largest stage: its layers, and the embedding or the output head."""
    if stages == 1:
        return stats.parameters
    of_layers = (stats.parameters - stats.embedding_elements) * _layers_share(stats, stages)
    return math.ceil(of_layers) + stats.vocabulary * stats.hidden


def _layers_share(stats: ModelStats, stages: int) -> Fraction:
    """Share of the layers in the stage with the most."""
    return Fraction(math.ceil(stats.layers / stages), stats.layers)


def cache_bytes(options: VLLMOptions, shape: EngineShape, memory: DeviceMemory | None, trainer: int | None) -> int:
    """Bytes for keys and values, in each process of an engine.

    Args:
        memory: of the GPU before the engine starts; None on a CPU.
        trainer: bytes that the roles of this process need on the GPU while the engine is awake; None if unknown.
    Raises:
        ConfigError: `rollout.kv_cache_gib` is null and nothing is left for a single row.
    """
    if options.kv_cache_gib is not None:
        return int(options.kv_cache_gib * GIB)
    if memory is None:
        return int(CACHE_ON_CPU_GIB * GIB)
    share = SHARE_BESIDE_UNKNOWN if trainer is None else SHARE
    taken = memory.own if trainer is None else max(trainer, memory.own)
    left = memory.free + memory.own - taken - shape.weights - shape.overhead
    num_bytes = min(int(share * left), shape.cache_of(options.max_num_seqs))
    if num_bytes < shape.cache_of(1):
        length = "" if shape.max_model_len is None else f" of {shape.max_model_len} tokens"
        raise ConfigError(
            f"rollout.kv_cache_gib is null: of {memory.total / GIB:.1f} GiB of the GPU {memory.free / GIB:.1f} are "
            f"free, the trainer needs {taken / GIB:.1f} while responses are drawn and the engine "
            f"{shape.weights / GIB:.1f} for weights and {shape.overhead / GIB:.1f} beside them, which leaves too "
            f"little for keys and values of one row{length} ({shape.cache_of(1) / GIB:.2f}). Set "
            "rollout.tensor_parallel_size, rollout.pipeline_parallel_size or trainer.n_gpus_per_node higher, "
            "sharding.cpu_offload=true, or rollout.max_num_seqs, rollout.max_num_batched_tokens or "
            "rollout.max_model_len lower."
        )
    return num_bytes


def utilization(shape: EngineShape, cache: int, memory: DeviceMemory) -> float:
    """`gpu_memory_utilization` for vLLM: the fraction of the device that this engine uses, rounded up to 0.001."""
    part = math.ceil((shape.weights + cache + shape.overhead) / memory.total * 1000) / 1000
    return min(1.0, max(0.001, part))
