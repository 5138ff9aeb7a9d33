"""vLLM engines with a fault that the rollout worker injects."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from verl.component import component
from verl.rollout.engine_process.turns import ProcessTurns
from verl.rollout.vllm.config import VLLMRollout
from verl.rollout.weight_sync.stream import StreamWriter

WRONG = "model.layers.0.mlp.down_proj.weight"


@component
class DyingVLLM(VLLMRollout):
    """The process of the engine is killed before a step, in one run.

    Args:
        call: number of that step.
        killed: path; a file with this name and .done says that it was.
    """

    call: int = 1
    killed: str = ""

    def attach(self, *args: Any) -> Any:
        advance, calls = ProcessTurns.advance, []

        def advance_or_die(turns: ProcessTurns) -> Any:
            calls.append(1)
            if len(calls) == self.call and not (done := Path(f"{self.killed}.done")).exists():
                done.touch()
                assert turns.process.process_id is not None
                os.kill(turns.process.process_id, signal.SIGKILL)
            return advance(turns)

        ProcessTurns.advance = advance_or_die
        return super().attach(*args)


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
