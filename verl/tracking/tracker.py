"""What every tracker can do: the interface that a new place for metrics fills in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.component import Description


@dataclass(frozen=True, kw_only=True)
class TrackerDescription(Description):
    """Base of what a place under `tracker` may be: builds a `Tracker`."""


class Tracker:
    """One place that a run's numbers and texts go to.

    Every method does nothing unless overridden, so a tracker names only what it cares for. All text it receives is
    already free of secrets, and every metric is a plain int or float, perhaps not finite.

    Attributes:
        num_lost: for a tracker that tries again after a failure, the records that it could not write after all, known
            once it is closed; None for others, which lose a record with each call that fails.
    """

    num_lost: int | None = None

    def resume(self, identity: Mapping[str, Any]) -> None:
        """The run goes on from a checkpoint of one that went by this `identity`; called before `start`."""

    def identity(self) -> dict[str, Any]:
        """What a later run needs to go on where this one is recorded; empty for a place that has no such thing."""
        return {}

    def start(self, run_name: str, config: dict[str, Any], run_dir: Path, total_steps: int | None) -> None:
        """Open everything that can fail, so that a fault shows before training. `run_dir` exists."""

    def stage(self, name: str, seconds: float, note: str) -> None:
        """One stage of a step has ended, such as `gen` after 1.24 seconds, with what was done."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """The metrics of a finished training step."""

    def evaluation(self, metrics: dict[str, float], step: int) -> None:
        """The metrics of an evaluation of the weights after `step` steps; 0 is before training."""

    def samples(self, rows: list[dict[str, Any]], step: int, name: str) -> None:
        """A table of responses with what is known of each; `name` says which table, such as `eval`."""

    def message(self, text: str) -> None:
        """A sentence for the person who watches the run."""

    def close(self, status: str) -> None:
        """Release everything. Called once, with `finished`, `stopped`, `interrupted` or `failed`."""


def stage_line(name: str, seconds: float, note: str = "") -> str:
    """`[gen] 1.24s  384 responses, 1536 tokens`"""
    return f"[{name}] {seconds:.2f}s" + (f"  {note}" if note else "")


def short(value: float) -> str:
    """A number in at most four significant digits; whole numbers whole."""
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e6):
        return str(int(value))
    return f"{value:.4g}"


def metrics_line(metrics: dict[str, float]) -> str:
    """`reward/mean 0.8125  rollout/response_length_tokens 4`"""
    return "  ".join(f"{key} {short(value)}" for key, value in metrics.items())
