"""`rollout=vllm`: its options are in `options.py`."""

from __future__ import annotations

from typing import Any

from verl.component import BuildContext, component
from verl.models.parallel_info import Autocast
from verl.rollout.base import ALONE, RolloutEngine
from verl.rollout.vllm.options import VLLMOptions


@component
class VLLMRollout(VLLMOptions):
    """Generate with vLLM; see `VLLMOptions`."""

    def attach(
        self, model: Any, tokenizer: Any, seed: int, autocast: Autocast = None, context: BuildContext = ALONE
    ) -> RolloutEngine:
        from verl.rollout.vllm.engine import VLLMEngine  # brings the process and its memory

        return VLLMEngine(self, model, tokenizer, seed, autocast, context)
