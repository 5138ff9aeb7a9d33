"""Options of engines in processes of their own."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt

from verl.component import component
from verl.rollout.base import Rollout


@component
class ProcessOptions(Rollout):
    """Generate by an engine in a process of its own.

    Args:
        sleep: free the engine's GPU memory during training. `auto`: only where trainer and engine do not fit into it
            together by the plan, or there is none. No effect on a CPU.
        chunk_mib: weights travel in two chunks of at most this size; a larger tensor travels in several, by its rows.
        call_timeout_s: largest time without progress (a step, tensor or layer); then the engine is killed and
            restarted, as after a crash. The total time of a call has no limit.
        start_timeout_s: largest time until the engine is ready, even if it makes progress; null: no limit.
    """

    location: ClassVar[Literal["trainer", "process", "server"]] = "process"

    sleep: bool | Literal["auto"] = "auto"
    chunk_mib: PositiveInt = 64
    call_timeout_s: PositiveFloat = 300.0  # type: ignore[misc]
    start_timeout_s: PositiveFloat | None = None

    @property
    def num_workers(self) -> int:
        """Processes of one engine, and on GPUs the number of those."""
        return 1
