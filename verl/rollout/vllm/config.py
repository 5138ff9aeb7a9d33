"""`rollout=vllm`: its options are in `options.py`."""

from __future__ import annotations

from typing import Any

import torch

from verl.component import BuildContext, component
from verl.errors import ConfigError
from verl.models.parallel_info import Autocast
from verl.rollout.base import ALONE, RolloutEngine
from verl.rollout.vllm.gpu_memory import cache_bytes, engine_shape
from verl.rollout.vllm.options import VLLMOptions
from verl.utils.memory import DeviceMemory


@component
class VLLMRollout(VLLMOptions):
    """Generate with vLLM; see `VLLMOptions`."""

    def attach(
        self, model: Any, tokenizer: Any, seed: int, autocast: Autocast = None, context: BuildContext = ALONE
    ) -> RolloutEngine:
        from verl.rollout.vllm.engine import VLLMEngine  # brings the process and its memory

        return VLLMEngine(self, model, tokenizer, seed, autocast, context)

    def engine_memory(
        self, config: Any, dtype: torch.dtype, memory: DeviceMemory | None, trainer_bytes: int | None
    ) -> dict[str, int]:
        shape = engine_shape(self, config, dtype, memory is not None)
        try:
            cache = cache_bytes(self, shape, memory, trainer_bytes)
        except ConfigError:  # it does not fit: the plan shows by how much
            cache = shape.cache_of(1)
        return {"weights": shape.weights, "cache": cache, "overhead": shape.overhead, "asleep": shape.asleep}
