"""Experts that the routers chose for the tokens that predict a response, for router replay.

vLLM returns recorded experts only with its second model runner, which does not support logits processors. This uses the
same hooks of its routers, and reads them when `CounterNoiseProcessor` samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer


class ExpertRecorder:
    """The choices of the last forward pass. Works for eager models only, since graphs call no hooks.

    Args:
        runner: vLLM's model runner.
    Raises:
        ValueError: a layer's kernel chooses experts without reporting them.
    """

    def __init__(self, runner: Any):
        self._runner = runner
        self._chosen: dict[int, Tensor] = {}
        bind_routed_experts_capturer(runner.get_model(), self)  # type: ignore[arg-type]

    def capture(self, layer_id: int, topk_ids: Tensor) -> None:
        """Called by the router of a layer with the experts [tokens k] of a forward pass."""
        self._chosen[layer_id] = topk_ids

    def of_last_tokens(self, rows: int) -> Tensor:
        """Experts of the last token of each of the batch's first rows, [rows layers k] int16 in main memory."""
        last = torch.from_numpy(np.asarray(self._runner.query_start_loc.np[1 : rows + 1]) - 1)
        chosen = [ids[last.to(ids.device)] for _, ids in sorted(self._chosen.items())]
        self._chosen.clear()
        return torch.stack(chosen, dim=1).to("cpu", torch.int16)
