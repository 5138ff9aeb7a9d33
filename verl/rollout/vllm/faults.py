"""What vLLM says when it cannot start, in terms of our configuration."""

from __future__ import annotations

import math
import re
from typing import Any

from verl.errors import ConfigError, RolloutError
from verl.rollout.vllm.process import EngineDied, EngineError
from verl.rollout.vllm.setting import GIB, Setting

BLOCK_TOKENS = 128  # of the cache, at most
NO_ROOM = ("GiB KV cache is needed", "No available memory for the cache blocks")

LOST_WORKER = "WorkerProc initialization failed"  # said of workers that raised, and of those that are gone


def as_death(error: EngineError) -> EngineDied | None:
    """A worker process that was lost while the engine started; None where it is something else that failed."""
    if LOST_WORKER not in error.reason or (error.found is not None and error.found.cause is not None):
        return None
    return EngineDied("The vLLM engine lost a worker process while it started.", error.found)


def as_config_error(error: EngineError, setting: Setting, model: Any) -> Exception:
    """The fault in the configuration behind an engine's refusal; the refusal itself where none is known."""
    text, options = f"{error.reason}\n{error.trace}", setting.options
    if any(words in text for words in NO_ROOM):
        length = options.max_model_len or getattr(_base(model).config.get_text_config(), "max_position_embeddings", 0)
        needed = _cache_gib(_base(model).config.get_text_config(), length, setting)
        fits = re.search(r"maximum model length is (\d+)", text)
        shorter = f", or rollout.max_model_len to {fits[1]}" if fits else ", or rollout.max_model_len lower"
        return ConfigError(
            f"rollout.kv_cache_gib is {options.kv_cache_gib}: keys and values of one sequence of {length} tokens alone "
            f"take {needed} GiB. Set it to at least that{shorter}."
        )
    if "are not supported for now" in text or ("not supported by" in text and "architecture" in text.lower()):
        return ConfigError(
            f"actor.model is a {type(_base(model)).__name__}: vLLM does not have this architecture. Set rollout=hf."
        )
    if "max_model_len" in error.reason and options.max_model_len is not None:
        return ConfigError(f"rollout.max_model_len is {options.max_model_len}: {_last_line(error.reason)}")
    details = str(error).rpartition("\n")[0]
    return RolloutError(f"{details}\nvLLM could not be started: {error.summary}".lstrip())


def _cache_gib(config: Any, length: int, setting: Setting) -> float:
    """What keys and values of one sequence take, rounded up."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    blocks = math.ceil(length / BLOCK_TOKENS) + 1  # vLLM keeps one for itself
    numbers = 2 * config.num_hidden_layers * heads * size * blocks * BLOCK_TOKENS
    gib = numbers * setting.dtype.itemsize / setting.options.tensor_parallel_size / GIB
    return math.ceil(gib * 1e4) / 1e4


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "peft_config") else model


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1]
