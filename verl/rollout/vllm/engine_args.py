"""Arguments of the vLLM engine, its environment and a model directory without weights; start-up errors as
ConfigError.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl.component import BuildContext
from verl.errors import ConfigError, RolloutError
from verl.models.images import is_image_text
from verl.models.own_module import OwnModule
from verl.models.parallel_info import Autocast, compute_device
from verl.models.structure import expert_layers, unwrapped
from verl.rollout.engine_process.process import CORES_VARIABLE, EngineDied, EngineError
from verl.rollout.process_engine import gpu_name
from verl.rollout.vllm.gpu_memory import GIB, cache_bytes, engine_shape, utilization
from verl.rollout.vllm.options import HIGHEST_RANK, LORA_RANKS, VLLMOptions
from verl.rollout.weight_sync.state_dict import dtype_of
from verl.utils.directories import cache_directory
from verl.utils.env_check import num_cores
from verl.utils.memory import device_memory

log = logging.getLogger(__name__)

IMAGE_FAMILIES = ("idefics3", "smolvlm", "qwen2_5_vl", "qwen3_vl")
UNREAD_FAMILIES = {
    "gemma3": "vLLM names the tensors of its vision tower otherwise than transformers does",
    "qwen3_5": "its layers of linear attention cannot be read back from vLLM, which a sync has to prove",
}
NO_LIMIT_S = str(30 * 24 * 3600)
HEAD_SIZES_ON_CPU = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class EngineArgs:
    """First message to the vLLM process.

    Attributes:
        directory: holds the model's configuration.
        dtype: data type of the engine's computation.
        num_threads: threads of the engine, on a CPU.
        lora_rank: rank of an adapter that is sent unmerged; None if there is none.
        name: prefix of the names of files that the engine's processes share.
        cache_bytes: size of the key-value cache in each of its processes.
        utilization: fraction of the GPU that the engine uses; None on a CPU.
    """

    options: VLLMOptions
    directory: str
    dtype: torch.dtype
    num_threads: int
    is_on_gpu: bool
    lora_rank: int | None = None
    name: str = ""
    cache_bytes: int = GIB
    utilization: float | None = None

    def engine_arguments(self) -> dict[str, Any]:
        """Arguments of `vllm.LLM`."""
        options = self.options
        arguments: dict[str, Any] = {
            "dtype": DTYPES[self.dtype],
            "kv_cache_memory_bytes": self.cache_bytes,
            "max_model_len": options.max_model_len,
            "max_num_seqs": options.max_num_seqs,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "enable_prefix_caching": options.prefix_caching,
            "enforce_eager": options.runs_eager(self.is_on_gpu),
            "tensor_parallel_size": options.tensor_parallel_size,
            "pipeline_parallel_size": options.pipeline_parallel_size,
            "enable_sleep_mode": self.is_on_gpu and bool(options.sleep),
        }
        if arguments["enable_sleep_mode"]:  # frees CUDA graphs and NCCL buffers too
            arguments |= {"sleep_mode_offload_cudagraph": True, "enable_nccl_comm_suspend": True}
        if self.utilization is not None:
            arguments["gpu_memory_utilization"] = self.utilization
        if self.lora_rank is not None:
            room = next(rank for rank in LORA_RANKS if rank >= self.lora_rank)
            arguments |= {"enable_lora": True, "max_lora_rank": room, "max_loras": 1}
        return arguments


def engine_args(
    options: VLLMOptions,
    model: Any,
    autocast: Autocast,
    directory: Path,
    name: str = "",
    trainer_bytes: int | None = None,
) -> EngineArgs:
    """The arguments for the engine of a model.

    Args:
        trainer_bytes: bytes of the GPU that the roles of this process need while the engine is awake, if known.
    Raises:
        ConfigError: vLLM is not installed, or does not support the options.
    """
    device = compute_device(model)
    is_on_gpu = device.type == "cuda"
    options.check_here(device.type)
    if (fault := unfit(model, autocast)) is not None:
        raise ConfigError(f"{fault} Set rollout=hf.")
    if (fault := indivisible(options, unwrapped(model).config.get_text_config())) is not None:
        raise ConfigError(fault)
    threads, dtype = options.num_threads or torch.get_num_threads(), dtype_of(model, autocast)
    shape = engine_shape(options, unwrapped(model).config, dtype, is_on_gpu)
    memory = device_memory(device) if is_on_gpu else None
    cache = cache_bytes(options, shape, memory, trainer_bytes)
    part = None if memory is None else utilization(shape, cache, memory)
    rank = unmerged_rank(options, model, dtype)
    return EngineArgs(options, str(directory), dtype, threads, is_on_gpu, rank, name, cache, part)


def unmerged_rank(options: VLLMOptions, model: Any, dtype: torch.dtype) -> int | None:
    """The rank of an adapter that the engine gets beside the base weights; None for none, or one that is merged.

    Raises:
        ConfigError: `lora` is adapter, and vLLM cannot take it so.
    """
    if options.lora == "merged" or not hasattr(model, "peft_config"):
        return None
    rank, reason = model.peft_config[model.active_adapter].r, None
    ends = (unwrapped(model).get_input_embeddings(), unwrapped(model).get_output_embeddings())
    if rank > LORA_RANKS[-1]:
        reason = f"actor.lora.rank is {rank}: {HIGHEST_RANK}"
    elif any(hasattr(layer, "base_layer") for layer in ends):
        reason = "lora.target_modules has the embedding or the head: set rollout.lora=merged for vLLM."
    elif expert_layers(unwrapped(model)):
        reason = "rollout.lora is adapter, and the model has experts, beside which vLLM takes none. Set it to merged."
    if options.lora == "auto":
        if dtype == torch.float32:
            return None
        if reason is None and not is_image_text(unwrapped(model).config):
            return rank
        log.warning("vLLM takes this adapter merged alone: in %s that rounds small updates away.", DTYPES[dtype])
        return None
    if reason is not None:
        raise ConfigError(reason)
    return rank


def unfit(model: Any, autocast: Autocast) -> str | None:
    """Why vLLM cannot run a model of a supported architecture; None if it can."""
    if isinstance(model, OwnModule):
        return f"actor.model is a {type(model.module).__name__}, which no other engine can compute."
    dtype, config = dtype_of(model, autocast), model.config.get_text_config()
    if (kind := model.config.model_type) not in IMAGE_FAMILIES and is_image_text(model.config):
        why = UNREAD_FAMILIES.get(kind, "it was not tried with vLLM")
        return f"actor.model is a {type(unwrapped(model)).__name__}, which reads images: {why}."
    if dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        return f"actor.model.dtype is {name}: vLLM computes in {', '.join(DTYPES.values())}."
    heads = getattr(config, "num_attention_heads", None)
    size = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else None)
    if compute_device(model).type == "cpu" and size is not None and size not in HEAD_SIZES_ON_CPU:
        sizes = ", ".join(map(str, HEAD_SIZES_ON_CPU))
        return f"actor.model has attention heads of {size} numbers: vLLM on a CPU takes {sizes}."
    return None


def indivisible(options: VLLMOptions, config: Any) -> str | None:
    """Why a model with this configuration cannot be divided over the processes of an engine; None if it can."""
    heads, layers = getattr(config, "num_attention_heads", None), getattr(config, "num_hidden_layers", None)
    if heads and heads % (size := options.tensor_parallel_size):
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        return (
            f"rollout.tensor_parallel_size is {size}: actor.model has {heads} attention heads. Set it to one of "
            f"{fitting}."
        )
    if layers and layers < (size := options.pipeline_parallel_size):
        return (
            f"rollout.pipeline_parallel_size is {size}: actor.model has {layers} layers, and each stage needs at least "
            f"one. Set it to at most {layers}."
        )
    return None


EXACT_FLOAT32 = {  # else Triton and cuBLAS compute float32 products in tf32, with 10 bits
    "TRITON_F32_DEFAULT": "ieee",
    "NVIDIA_TF32_OVERRIDE": "0",
}


def environment(
    options: VLLMOptions,
    context: BuildContext,
    num_threads: int,
    dtype: torch.dtype = torch.float32,
    gpus: Sequence[str] | None = None,
) -> dict[str, str]:
    """Environment of the vLLM process: one process, little logging, no network access, its share of the cores.

    Args:
        gpus: names of the GPUs that the engine uses; None: this process's GPU.
    """
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # it does not support logits processors
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(num_threads),
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",  # in TMPDIR, per engine: seconds at each start
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": NO_LIMIT_S,  # of a step's total time; ours is on progress
        "VLLM_ENGINE_READY_TIMEOUT_S": NO_LIMIT_S,
    }
    if context.device.startswith("cuda"):
        if dtype == torch.float32:
            variables |= EXACT_FLOAT32
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus or engine_gpus(context, options))
        return variables
    # Weights are packed into new memory with every sync, which is slow to get in small pages
    variables["GLIBC_TUNABLES"] = ":".join(filter(None, [os.environ.get("GLIBC_TUNABLES"), "glibc.malloc.hugetlb=1"]))
    if cores := engine_cores(context, num_threads):
        variables[CORES_VARIABLE] = ",".join(map(str, cores))
    return variables


def write_model_directory(model: Any, scratch: Path) -> Path:
    """A directory with the configuration of the running model, without weights, named by its content: the path is part
    of the key of vLLM's compilation cache, so a random path would cause a new compilation for each engine.

    Args:
        scratch: used if the cache of verl is not writable.
    """
    base, written = unwrapped(model), scratch / "model"
    base.config.save_pretrained(written)
    file = written / "config.json"
    config = json.loads(file.read_text())
    classes = (kind.__name__ for kind in type(base).__mro__ if not kind.__module__.startswith("torch."))
    config["architectures"] = [next(classes)]  # FSDP inserts its class before the model's
    file.write_text(json.dumps(config, sort_keys=True))
    if (cache := cache_directory("engine_models")) is None:
        return written
    digest = hashlib.sha256()
    for path in sorted(path for path in written.rglob("*") if path.is_file()):
        digest.update(repr((str(path.relative_to(written)), path.read_bytes())).encode())
    target = cache / digest.hexdigest()[:32]
    if not target.exists():
        temporary = Path(tempfile.mkdtemp(prefix="new_", dir=cache))
        shutil.copytree(written, temporary, dirs_exist_ok=True)
        try:
            temporary.rename(target)
        except OSError:  # another process was first
            shutil.rmtree(temporary, ignore_errors=True)
    return target


def engine_cores(context: BuildContext, num_threads: int) -> list[int]:
    """The cores for this process's engine; empty (the system chooses) if the engines do not fill the machine."""
    if not hasattr(os, "sched_getaffinity") or context.world_size * num_threads < num_cores():
        return []
    cores = sorted(os.sched_getaffinity(0))
    return [cores[(context.rank * num_threads + i) % len(cores)] for i in range(min(num_threads, len(cores)))]


def engine_gpus(context: BuildContext, options: VLLMOptions) -> list[str]:
    """The GPUs of an engine that belongs to one training process; the process's own GPU comes first.

    Raises:
        ConfigError: it spans several GPUs, and they belong to other processes of the run or are not visible here.
    """
    visible, count = os.environ.get("CUDA_VISIBLE_DEVICES"), options.num_workers
    seen = len(visible.split(",")) if visible else torch.cuda.device_count()
    if count > 1 and context.world_size > 1:
        raise ConfigError(
            f"{options.worker_keys}: with sharding=ddp, or as the role rollout, each of {context.world_size} processes "
            "has its own engine on its own GPU. Set them to 1, or sharding=fsdp, where processes share an engine, or "
            "give each rollout worker one device."
        )
    if count > seen:
        raise ConfigError(
            f"{options.worker_keys}, and this process sees {seen} GPU{'s' if seen > 1 else ''}: an engine of {count} "
            f"processes needs as many. Set their product to at most {seen}."
        )
    first = torch.device(context.device).index or 0
    return [gpu_name(f"cuda:{(first + i) % seen}") for i in range(count)]


TOO_FULL = "less than desired GPU memory utilization"
NO_ROOM = ("GiB KV cache is needed", "No available memory for the cache blocks")

LOST_WORKER = "WorkerProc initialization failed"  # in messages about workers that raised, and that died


def as_death(error: EngineError) -> EngineDied | None:
    """`EngineDied` if a worker process was lost while the engine started; None for other failures."""
    if LOST_WORKER not in error.reason or (error.found is not None and error.found.cause is not None):
        return None
    return EngineDied("The vLLM engine lost a worker process while it started.", error.found)


def as_config_error(error: EngineError, setting: EngineArgs, model: Any) -> Exception:
    """The configuration error that explains a start-up error of the engine; the error itself if none is known."""
    text, options, kind = f"{error.reason}\n{error.trace}", setting.options, type(unwrapped(model)).__name__
    if any(words in text for words in NO_ROOM):
        shape = engine_shape(options, unwrapped(model).config, setting.dtype, setting.is_on_gpu)
        length, needed = shape.max_model_len, math.ceil(shape.cache_of(1) / GIB * 1e4) / 1e4
        fits = re.search(r"maximum model length is (\d+)", text)
        setting_text = options.kv_cache_gib or f"null, which gives {setting.cache_bytes / GIB:.3g} here"
        shorter = f", or rollout.max_model_len to {fits[1]}" if fits else ", or rollout.max_model_len lower"
        return ConfigError(
            f"rollout.kv_cache_gib is {setting_text}: keys and values of one sequence of {length} tokens alone "
            f"take {needed} GiB. Set it to at least that{shorter}."
        )
    if TOO_FULL in text:
        free = re.search(r"\(([\d.]+)/([\d.]+) GiB\) on startup", text)
        there = f" and {free[1]} of {free[2]} GiB are free" if free else ""
        return ConfigError(
            f"rollout.kv_cache_gib is {options.kv_cache_gib}: with the engine's weights that takes "
            f"{setting.utilization} of the GPU{there}. Set it lower, or null for what is left beside the trainer."
        )
    if "are not supported for now" in text or ("not supported by" in text and "architecture" in text.lower()):
        return ConfigError(f"actor.model is a {kind}: vLLM does not have this architecture. Set rollout=hf.")
    if "does not support LoRA" in text:
        return ConfigError(f"rollout.lora is {options.lora}: vLLM takes no adapter of a {kind}. Set it to merged.")
    if "Pipeline parallelism is not supported" in text:
        return ConfigError(
            f"rollout.pipeline_parallel_size is {options.pipeline_parallel_size}: vLLM does not divide a "
            f"{kind} into stages. Set rollout.tensor_parallel_size in its place, or rollout=hf."
        )
    if reason := re.search(r"Routed-experts capture [^\n]*|No supported MoE router[^\n]*", text):
        return ConfigError(f"rollout.router_replay is true: {reason[0]} Set it to false, or rollout=hf.")
    if "max_model_len" in error.reason and options.max_model_len is not None:
        return ConfigError(f"rollout.max_model_len is {options.max_model_len}: {error.reason.strip().splitlines()[-1]}")
    details = str(error).rpartition("\n")[0]
    return RolloutError(f"{details}\nvLLM could not be started: {error.summary}".lstrip())
