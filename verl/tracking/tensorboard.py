"""Metrics as TensorBoard event files in the run directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from pydantic import PositiveInt

from verl.component import BuildContext, component
from verl.tracking.base import ContinuedTracker, TrackerDescription


@component
class TensorBoard(TrackerDescription):
    """Writes event files to `run_dir/tensorboard`; view them with `tensorboard --logdir RUN_DIR`.

    Args:
        flush_s: interval between writes, in seconds.
    """

    package: ClassVar[str] = "tensorboard"

    flush_s: PositiveInt = 30

    def build(self, context: BuildContext) -> TensorBoardTracker:
        return TensorBoardTracker(self)


class TensorBoardTracker(ContinuedTracker):
    """Scalars by metric key, the configuration and the samples as text."""

    def __init__(self, settings: TensorBoard):
        self._settings = settings
        self._writer: Any = None

    def start(self, run_name: str, config: dict[str, Any], run_dir: Path, total_steps: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(run_dir / "tensorboard"), flush_secs=self._settings.flush_s)
        self._writer.add_text("config", _as_code(config), 0)

    def log(self, metrics: dict[str, float], step: int) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)

    def samples(self, rows: list[dict[str, Any]], step: int, name: str) -> None:
        self._writer.add_text(f"samples/{name}", "\n\n".join(_as_code(row) for row in rows[:20]), step)

    def close(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()


def _as_code(value: Any) -> str:
    """JSON as an indented block, which TensorBoard's Markdown shows verbatim."""
    lines = json.dumps(value, indent=2, default=str, ensure_ascii=True).splitlines()
    return "\n".join(f"    {line}" for line in lines)
