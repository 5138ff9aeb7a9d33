"""Options of the vLLM engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt

from verl.component import component
from verl.errors import ConfigError
from verl.rollout.base import Capability
from verl.rollout.engine_process.options import ProcessOptions
from verl.utils.env_check import vllm_fault

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for
HIGHEST_RANK = f"vLLM takes adapters of at most rank {LORA_RANKS[-1]}. Set rollout.lora=merged."


@component
class VLLMOptions(ProcessOptions):
    """Generate by vLLM, in a separate process for each training process, or each group of tensor-parallel ones.

    It samples the same tokens as `rollout=hf` with the same weights, up to rounding. It computes in `actor.autocast`
    if that is set, otherwise in the model's data type.

    Args:
        kv_cache_gib: size of the key-value cache in each process of an engine; null: on a GPU 0.9 of the memory that
            the trainer and the engine's weights leave free, at most what max_num_seqs rows can fill; on a CPU 1.
        max_num_seqs: responses decoded concurrently; further ones wait.
        max_num_batched_tokens: tokens of one forward pass; longer prompts are read in pieces.
        max_model_len: maximum length of prompt and response together, in tokens; null: the maximum that the data of
            the run need, or the model's maximum if the data are not known.
        prefix_caching: samples of one prompt share its keys and values. Affects speed only.
        enforce_eager: run the model as written; false compiles it first and captures CUDA graphs, which takes a minute
            or more and pays off on GPUs; null: false on a GPU, true on a CPU and with router_replay.
        tensor_parallel_size: GPUs that share each layer of an engine.
        pipeline_parallel_size: stages of an engine, each with some of the layers on tensor_parallel_size GPUs. A
            response passes through them in turn, so use it where tensor parallelism cannot divide the model.
        lora: how an adapter is sent to the engine: `merged` into the model's weights, or as an `adapter` beside them.
            In bfloat16 merging rounds the first updates away (`benchmarks/merged_adapter.py`), so `auto` merges in
            float32, where that is exact and generation faster, and else only what vLLM takes no other way: models with
            images or experts, and adapters of the embedding, the head or a rank above 512.
        num_threads: threads of the engine, on a CPU; null: as many as the trainer has.
        sleep, chunk_mib, call_timeout_s, start_timeout_s: see `ProcessOptions`.
    """

    supports: ClassVar[frozenset[Capability]] = frozenset({"stages", "experts", "turns", "router_replay", "images"})
    can_offload: ClassVar[bool] = True
    may_change: ClassVar[bool] = True

    kv_cache_gib: PositiveFloat | None = None
    max_num_seqs: PositiveInt = 256
    max_num_batched_tokens: PositiveInt = 4096
    max_model_len: PositiveInt | None = None
    prefix_caching: bool = True
    enforce_eager: bool | None = None
    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    lora: Literal["auto", "merged", "adapter"] = "auto"
    num_threads: PositiveInt | None = None

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if self.router_replay and self.enforce_eager is False:
            yield "router_replay is true: a compiled model does not tell its experts. Set enforce_eager to null."
        if self.router_replay and self.pipeline_parallel_size > 1:
            yield (
                f"router_replay is true: it was not tried with pipeline_parallel_size {self.pipeline_parallel_size}, "
                "where no process sees all that routers choose. Set tensor_parallel_size in its place."
            )
        if self.weight_update == "in_flight" and self.kv_cache == "keep" and self.pipeline_parallel_size > 1:
            yield (
                f"kv_cache is keep: with pipeline_parallel_size {self.pipeline_parallel_size} several steps are under "
                "way at once, so that weights cannot be taken between two of them. Set kv_cache to recompute."
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            yield (
                f"max_num_batched_tokens is {self.max_num_batched_tokens}: a pass takes at least one token of each of "
                f"the max_num_seqs {self.max_num_seqs} responses."
            )
        if self.max_model_len is not None and self.max_model_len <= self.max_new_tokens:
            yield (
                f"max_model_len is {self.max_model_len}: it holds prompt and response, and max_new_tokens alone is "
                f"{self.max_new_tokens}."
            )

    def faults_with_actor(self, lora_rank: int | None) -> Iterator[str]:
        if self.lora == "adapter" and lora_rank is not None and lora_rank > LORA_RANKS[-1]:
            yield f"actor.lora.rank is {lora_rank}: {HIGHEST_RANK}"

    def faults_with_images(self) -> Iterator[str]:
        yield from super().faults_with_images()
        if self.num_workers > 1:
            yield f"{self.worker_keys}, and the prompts have images: vLLM reads them in one process. Set them to 1."
        if self.lora == "adapter":
            yield "rollout.lora is adapter, and the prompts have images: vLLM gets an adapter merged. Set it to merged."

    @property
    def num_workers(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def worker_keys(self) -> str:
        """The options that give `num_workers`, with their values, for messages."""
        sizes = {"tensor": self.tensor_parallel_size, "pipeline": self.pipeline_parallel_size}
        named = [f"rollout.{way}_parallel_size is {size}" for way, size in sizes.items() if size > 1]
        return " and ".join(named) or "rollout.tensor_parallel_size is 1"

    def check_here(self, device: str) -> None:
        if (fault := vllm_fault(device.startswith("cuda"))) is not None:
            raise ConfigError(f"rollout=vllm cannot run: {fault}")

    def runs_eager(self, is_on_gpu: bool) -> bool:
        """Whether the model runs as written, neither compiled nor captured."""
        return not is_on_gpu or self.router_replay if self.enforce_eager is None else self.enforce_eager

    def with_room_for(self, prompt: int, response: int | None = None) -> VLLMOptions:
        length = prompt + (self.max_new_tokens if response is None else response)
        return self if self.max_model_len is not None else replace(self, max_model_len=length)
