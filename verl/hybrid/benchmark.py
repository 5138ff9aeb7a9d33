"""The cost of switching from training to generating and back, compared with reloading the weights."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
    times = [1e3 * timer.seconds for timer in costs]
    low, _, high = statistics.quantiles(times * 2 if repeats == 1 else times, n=4, method="inclusive")
    return {
        "latency_ms": statistics.median(times),
        "mem_increase_mb": max(0.0, statistics.median(timer.bytes / MIB for timer in costs)),
        "latency_ms_quartiles": [low, high],
        "mode": mode,
        "repeats": repeats,
    }


def _switch(actor: HybridActor, mode: str) -> _Timer:
    """A switch in place: mode of the modules, and synchronisation of the engine."""
    timer, sampling = _Timer(actor), ExitStack()
    actor.train()
    with timer.running(mode != "generate_to_train"):
        sampling.enter_context(actor.sampling())
        actor.sync()
    with timer.running(mode != "train_to_generate"):
        sampling.close()
    return timer


def _reload(actor: HybridActor) -> _Timer:
    """Saving the weights and loading them as a second model."""
    timer, dtype = _Timer(actor), str(next(actor.parameters()).dtype).removeprefix("torch.")
    with TemporaryDirectory("verl-reload-") as directory:
        with timer.running(True):
            actor.save_pretrained(directory)
            second = Pretrained(path=directory, dtype=dtype).load_causal_lm(str(actor.device))  # type: ignore[arg-type]
        del second
        gc.collect()
    return timer


class _Timer:
    """Measures seconds and additional bytes of blocks of code."""

    def __init__(self, actor: HybridActor):
        self.device, self.seconds, self.bytes = actor.device, 0.0, 0

    @contextmanager
    def running(self, is_counted: bool) -> Iterator[None]:
        settle(self.device)
        before, began = used_bytes(self.device), time.perf_counter()
        yield
        settle(self.device)
        if is_counted:
            self.seconds += time.perf_counter() - began
            self.bytes += used_bytes(self.device) - before
