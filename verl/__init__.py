"""verl: reinforcement-learning post-training of language models, from a laptop to a cluster."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl import config
    from verl.cluster.placement import DeviceMesh, check_process_groups
    from verl.hybrid.actor import HybridActor
    from verl.hybrid.benchmark import measure_switch_overhead
    from verl.service.session import TrainingSession
    from verl.trainer.api.pipeline import DataPipeline, RLTrainer
    from verl.trainer.api.trainer import Trainer
    from verl.utils.env_check import check_env

# GNU OpenMP, which torch brings, reads this when it is loaded. Its threads wait for each other by spinning, by default
# longer than a process may keep a core: beside one busy process, two threads on two cores take 40 times as long
# (benchmarks/busy_machine.py).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")

__version__ = "0.3.0"
__distribution__ = "verl"  # name on a package index, and of its extras in messages; what is imported is `verl`
__all__ = [
    "DataPipeline",
    "DeviceMesh",
    "HybridActor",
    "RLTrainer",
    "Trainer",
    "TrainingSession",
    "__distribution__",
    "__version__",
    "check_env",
    "check_process_groups",
    "config",
    "measure_switch_overhead",
]

_HOMES = {
    "DataPipeline": "verl.trainer.api.pipeline",
    "DeviceMesh": "verl.cluster.placement",
    "HybridActor": "verl.hybrid.actor",
    "RLTrainer": "verl.trainer.api.pipeline",
    "Trainer": "verl.trainer.api.trainer",
    "TrainingSession": "verl.service.session",
    "check_env": "verl.utils.env_check",
    "check_process_groups": "verl.cluster.placement",
    "measure_switch_overhead": "verl.hybrid.benchmark",
}


def __getattr__(name: str) -> Any:
    """Import exported names lazily, so that `import verl` is fast."""
    if name == "config":
        return importlib.import_module("verl.config")
    if name not in _HOMES:
        raise AttributeError(f"module 'verl' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
