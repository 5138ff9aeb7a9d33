"""The cost of switching from training to generating and back, compared with reloading the weights."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal, get_args

from verl.component import hint, nearest
from verl.errors import ConfigError
from verl.hybrid.actor import HybridActor
from verl.models.pretrained import Pretrained
from verl.utils.directories import TemporaryDirectory
from verl.utils.memory import settle, used_bytes

Mode = Literal["eval", "train", "round_trip", "reload"]
MIB = 2**20


def measure_switch_overhead(actor: HybridActor, mode: Mode = "eval", repeats: int = 20) -> dict[str, Any]:
    """Measure the time and memory of a switch.

    Args:
        actor: the actor.
        mode: `eval`: from training, with gradients, until the engine is ready to sample; `train`: back; `round_trip`:
            both. `reload`, for comparison: save the weights and load them as a second model.
        repeats: number of measurements, after one warm-up.
    Returns:
        Medians `latency_ms` and `mem_increase_mb`, with `latency_ms_quartiles`, `mode` and `repeats`. Memory is the
        increase of tensors on a GPU, or of the process on a CPU, after the switch.
    Raises:
        ConfigError: there is no such mode, or nothing to repeat.
    """
    if mode not in (known := get_args(Mode)):
        raise ConfigError(f"mode is {mode!r}: must be one of {', '.join(known)}.{hint(nearest(str(mode), known))}")
    if repeats < 1:
        raise ConfigError(f"repeats is {repeats}: must be at least 1.")
    if mode == "reload" and actor.process_group is not None:
        raise ConfigError("mode is 'reload': it loads the model into one process. Use an unsharded actor.")
    was_training = [module for module in actor.model.modules() if module.training]
    try:
        costs = [_reload(actor) if mode == "reload" else _switch(actor, mode) for _ in range(repeats + 1)][1:]
    finally:
        actor.eval()
        for module in was_training:
            module.training = True
    times = [1e3 * seconds for seconds, _ in costs]
    low, _, high = statistics.quantiles(times * 2 if repeats == 1 else times, n=4, method="inclusive")
    return {
        "latency_ms": statistics.median(times),
        "mem_increase_mb": max(0.0, statistics.median(added / MIB for _, added in costs)),
        "latency_ms_quartiles": [low, high],
        "mode": mode,
        "repeats": repeats,
    }


def _switch(actor: HybridActor, mode: str) -> tuple[float, int]:
    """A switch in place: mode of the modules, and synchronisation of the engine."""
    sampling = ExitStack()

    def to_generate() -> None:
        sampling.enter_context(actor.sampling())
        actor.sync()

    actor.train()
    costs = {"eval": _cost(actor, to_generate), "train": _cost(actor, sampling.close)}
    seconds, added = zip(*costs.values(), strict=True)
    return costs.get(mode, (sum(seconds), sum(added)))


def _reload(actor: HybridActor) -> tuple[float, int]:
    """Saving the weights and loading them as a second model."""
    dtype: Any = str(next(actor.parameters()).dtype).removeprefix("torch.")
    with TemporaryDirectory("verl-reload-") as directory:

        def reload() -> Any:
            actor.save_pretrained(directory)
            return Pretrained(path=directory, dtype=dtype).load_causal_lm(str(actor.device))

        return _cost(actor, reload)


def _cost(actor: HybridActor, action: Callable[[], Any]) -> tuple[float, int]:
    """Seconds of an action, and the bytes that it adds on the device, or in this process."""
    settle(actor.device)
    before, began = used_bytes(actor.device), time.perf_counter()
    result = action()
    settle(actor.device)
    cost = time.perf_counter() - began, used_bytes(actor.device) - before
    del result
    gc.collect()
    return cost
