"""The cost of switching from training to generating and back, compared with reloading the weights."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

from verl.component import hint, nearest
from verl.errors import ConfigError
from verl.hybrid.actor import HybridActor
from verl.models.pretrained import Pretrained
from verl.utils.directories import TemporaryDirectory
from verl.utils.memory import settle, used_bytes

Mode = Literal["train_to_generate", "generate_to_train", "round_trip", "reload"]
STATES: dict[str, Mode] = {"eval": "train_to_generate", "train": "generate_to_train"}  # by the state after the switch
MIB = 2**20


def measure_switch_overhead(
    actor: HybridActor, mode: Mode | Literal["train", "eval"] = "train_to_generate", repeats: int = 20
) -> dict[str, Any]:
    """Measure the time and memory of a switch.

    Args:
        actor: the actor.
        mode: `train_to_generate` (or `eval`): from training, with gradients, until the engine is ready to sample;
            `generate_to_train` (or `train`): back; `round_trip`: both. `reload`, for comparison: save the weights and
            load them as a second model.
        repeats: number of measurements, after one warm-up.
    Returns:
        Medians `latency_ms` and `mem_increase_mb`, with `latency_ms_quartiles`, `mode` and `repeats`. Memory is the
        increase of tensors on a GPU, or of the process on a CPU, after the switch.
    Raises:
        ConfigError: there is no such mode.
    """
    if mode not in (known := (*get_args(Mode), *STATES)):
        raise ConfigError(f"mode is {mode!r}: must be one of {', '.join(known)}.{hint(nearest(str(mode), known))}")
    if mode == "reload" and actor.process_group is not None:
        raise ConfigError("mode is 'reload': it loads the model into one process. Use an unsharded actor.")
    mode = STATES.get(mode, mode)  # type: ignore[assignment]
    was_training = [module for module in actor.model.modules() if module.training]
    try:
        costs = [_reload(actor) if mode == "reload" else _switch(actor, mode) for _ in range(repeats + 1)][1:]
    finally:
        actor.eval()
        for module in was_training:
            module.training = True
    times = [1e3 * cost.seconds for cost in costs]
    low, _, high = statistics.quantiles(times * 2 if repeats == 1 else times, n=4, method="inclusive")
    return {
        "latency_ms": statistics.median(times),
        "mem_increase_mb": max(0.0, statistics.median(cost.bytes / MIB for cost in costs)),
        "latency_ms_quartiles": [low, high],
        "mode": mode,
        "repeats": repeats,
    }


def _switch(actor: HybridActor, mode: str) -> _Cost:
    """A switch in place: mode of the modules, and synchronisation of the engine."""
    cost, sampling = _Cost(actor.device), ExitStack()
    actor.train()
    with nullcontext() if mode == "generate_to_train" else cost.added():
        sampling.enter_context(actor.sampling())
        actor.sync()
    with nullcontext() if mode == "train_to_generate" else cost.added():
        sampling.close()
    return cost


def _reload(actor: HybridActor) -> _Cost:
    """Saving the weights and loading them as a second model."""
    cost, dtype = _Cost(actor.device), str(next(actor.parameters()).dtype).removeprefix("torch.")
    with TemporaryDirectory("verl-reload-") as directory:
        with cost.added():
            actor.save_pretrained(directory)
            second = Pretrained(path=directory, dtype=dtype).load_causal_lm(str(actor.device))  # type: ignore[arg-type]
        del second
        gc.collect()
    return cost


@dataclass
class _Cost:
    """Seconds, and additional bytes on a device or in this process."""

    device: Any
    seconds: float = 0.0
    bytes: int = 0

    @contextmanager
    def added(self) -> Iterator[None]:
        """Add those of a block of code."""
        settle(self.device)
        before, began = used_bytes(self.device), time.perf_counter()
        yield
        settle(self.device)
        self.seconds += time.perf_counter() - began
        self.bytes += used_bytes(self.device) - before
