"""What vLLM says when it cannot start, in terms of our configuration."""

from __future__ import annotations

import re
from typing import Any

from verl.errors import ConfigError, RolloutError
from verl.rollout.vllm.process import EngineError
from verl.rollout.vllm.setting import Setting


def as_config_error(error: EngineError, setting: Setting, model: Any) -> Exception:
    """The fault in the configuration behind an engine's refusal; the refusal itself where none is known."""
    text, options = f"{error.reason}\n{error.trace}", setting.options
    if "KV cache" in error.reason and (needed := re.search(r"([\d.]+) GiB KV cache is needed", text)):
        fits = re.search(r"maximum model length is (\d+)", text)
        shorter = f", or rollout.max_model_len={fits[1]}, which fits" if fits else ""
        return ConfigError(
            f"rollout.kv_cache_gib is {options.kv_cache_gib}: keys and values of one sequence of the longest length "
            f"alone take {needed[1]} GiB. Set it to at least {needed[1]}{shorter}."
        )
    if "are not supported for now" in text or ("not supported by" in text and "architecture" in text.lower()):
        return ConfigError(
            f"actor.model is a {type(_base(model)).__name__}: vLLM does not have this architecture. Set rollout=hf."
        )
    if "max_model_len" in error.reason and options.max_model_len is not None:
        return ConfigError(f"rollout.max_model_len is {options.max_model_len}: {_last_line(error.reason)}")
    return RolloutError(f"vLLM could not be started: {error}")


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "peft_config") else model


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1]
