"""`rollout=auto`: chooses the engine that was faster in measurements with models of this size."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, ClassVar, Literal

from verl.component import BuildContext, component
from verl.models.parallel_info import Autocast, compute_device
from verl.rollout.base import ALONE, Capability, Rollout, RolloutEngine
from verl.rollout.hf import HFRollout
from verl.rollout.vllm.config import VLLMRollout
from verl.rollout.vllm.engine_args import unfit
from verl.utils.env_check import vllm_fault

log = logging.getLogger(__name__)

# Number of parameters from which vLLM is chosen. On a CPU, in float32 with short prompts, our loop sampled 1.3 to 1.5
# times as many tokens per second at 4, 33 and 100 million parameters (benchmarks/vllm_rollout.py); nothing larger was
# measured.
FROM_ON = {"cpu": 1_000_000_000, "cuda": 0}
COMMON = ("temperature", "top_k", "top_p", "max_new_tokens", "min_new_tokens", "stop_token_ids", "sleep")


@component
class AutoRollout(Rollout):
    """Generate by `rollout=hf` or `rollout=vllm`, whichever is faster for the size of the model on this device.

    Both sample the same tokens up to rounding. The choice and its reason are logged. Engine-specific settings have
    their defaults; to change them, choose the engine by name.

    Args:
        max_model_len: as of `VLLMRollout`; `hf` needs no limit.
        sleep: as of either.
    """

    supports: ClassVar[frozenset[Capability]] = HFRollout.supports - {"router_replay", "rollout_worker"}
    can_offload: ClassVar[bool] = True

    max_model_len: int | None = None
    sleep: bool | Literal["auto"] = "auto"

    def with_room_for(self, prompt: int, response: int | None = None) -> AutoRollout:
        length = prompt + (self.max_new_tokens if response is None else response)
        return self if self.max_model_len is not None else replace(self, max_model_len=length)

    def attach(
        self, model: Any, tokenizer: Any, seed: int, autocast: Autocast = None, context: BuildContext = ALONE
    ) -> RolloutEngine:
        kind, reason = self.choice(model, autocast)
        log.info("rollout=auto takes rollout=%s: %s.", "vllm" if kind is VLLMRollout else "hf", reason)
        return self.as_kind(kind).attach(model, tokenizer, seed, autocast, context)

    def planned(self, is_gpu: bool) -> Rollout:
        return self.as_kind(VLLMRollout if is_gpu and vllm_fault(is_gpu) is None else HFRollout)

    def chosen_for(self, model: Any, autocast: Autocast = None) -> Rollout:
        """The rollout description that `attach` uses."""
        return self.as_kind(self.choice(model, autocast)[0])

    def choice(self, model: Any, autocast: Autocast = None) -> tuple[type[Rollout], str]:
        """The chosen rollout description and the reason for the choice."""
        device, size = compute_device(model).type, sum(p.numel() for p in model.parameters())
        if size < FROM_ON.get(device, 0):
            limit = f"{FROM_ON[device] / 1e6:.0f} million"
            return HFRollout, f"the model has {size / 1e6:.1f} million parameters, less than {limit} on {device}"
        if (fault := vllm_fault(device == "cuda") or unfit(model, autocast)) is not None:
            return HFRollout, f"vLLM would be faster, but {fault.rstrip('.')}"
        return VLLMRollout, f"the model has {size / 1e6:.1f} million parameters on {device}"

    def as_kind(self, kind: type[Rollout]) -> Rollout:
        """The same settings as those of an engine of this kind."""
        chosen = {name: getattr(self, name) for name in COMMON}
        return VLLMRollout(**chosen, max_model_len=self.max_model_len) if kind is VLLMRollout else kind(**chosen)
