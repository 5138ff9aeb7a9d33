"""vLLM engines with a fault that the rollout worker injects."""

from typing import Any

from verl.component import component
from verl.rollout.vllm.config import VLLMRollout
from verl.rollout.weight_sync.stream import StreamWriter

WRONG = "model.layers.0.mlp.down_proj.weight"


@component
class WrongVLLM(VLLMRollout):
    """The third weights that the engine gets are wrong in one tensor."""

    def attach(self, *args: Any) -> Any:
        fill, loads = StreamWriter.fill, []

        def planted(writer: StreamWriter, chunks: Any, tensors: Any, *more: Any) -> Any:
            loads.append(1)
            changed = ((name, x + 1 if name == WRONG else x) for name, x in tensors)
            return fill(writer, chunks, changed if len(loads) == 3 else tensors, *more)

        StreamWriter.fill = planted
        return super().attach(*args)
