"""The number of threads of a run on a CPU, measured: `trainer.num_threads=auto`.

Threads that share a product wait for each other at its end. Where another process holds one of the cores, all of them
wait until it lets go, at every product: two threads can take three times as long as one. `measured` finds this out
within half a second, in the dtype and the width of the run's model. On a busy machine it is asked again, for seconds.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping

import torch

ROWS, LAYERS = 64, 8  # of the products that are measured: a decoding step of as many rows
ROUNDS, BUDGET_S = 5, 0.5
WIDEST = 1024  # wider products take longer than the measurement may
GAIN = 1.25  # by which fewer threads must be faster than all of them, so that an idle machine always chooses the same
TRIALS, PAUSE_S = 4, 1.0  # fewer threads must win each of these: the choice holds for the whole run


def counts(most: int) -> list[int]:
    """Numbers of threads to compare, all of them first."""
    return [most, most // 2, 1] if most > 3 else [most, 1]


def best(seconds: Mapping[int, float]) -> int:
    """The number of threads that a run takes, of `seconds` by number, all threads first."""
    most = next(iter(seconds))
    fastest = min(seconds, key=seconds.__getitem__)
    return fastest if seconds[fastest] * GAIN < seconds[most] else most


def measured(width: int, autocast: str | None) -> dict[int, float]:
    """Seconds of the layers of a model of `width`, by the number of threads; leaves that number as it was."""
    most = torch.get_num_threads()
    found = dict.fromkeys(counts(most), 0.0)
    width = min(width, WIDEST)
    dtype = torch.bfloat16 if autocast == "bfloat16" else torch.float32
    up, down = torch.ones(3 * width, width, dtype=dtype), torch.ones(width, 3 * width, dtype=dtype)
    rows = torch.ones(ROWS, width, dtype=dtype)
    end = time.perf_counter() + BUDGET_S
    try:
        with torch.inference_mode():
            for turn in range(ROUNDS):
                for threads in found:
                    torch.set_num_threads(threads)
                    start = time.perf_counter()
                    for _ in range(LAYERS):
                        _ = torch.nn.functional.silu(rows @ up.T) @ down.T
                    found[threads] += (time.perf_counter() - start) * (turn > 0)  # the first one packs weights
                if turn > 0 and time.perf_counter() > end:
                    break
    finally:
        torch.set_num_threads(most)
    return found


def choose_threads(width: int, autocast: str | None, saved: int | None) -> str:
    """Set the threads of torch: those of the resumed run, of OMP_NUM_THREADS, or the measured ones; a line for the log.

    Args:
        width: hidden size of the model.
        autocast: type in which products are computed; None: float32.
        saved: threads of the run that is resumed, so that its sums are rounded as before.
    """
    if saved is not None:
        torch.set_num_threads(saved)
        return f"{saved} threads, as before the save"
    if "OMP_NUM_THREADS" in os.environ or torch.get_num_threads() == 1:
        return ""
    most, seconds = torch.get_num_threads(), measured(width, autocast)
    for _ in range(TRIALS - 1):
        if best(seconds) == most:
            break
        time.sleep(PAUSE_S)  # another process may have come and gone
        seconds = measured(width, autocast)
    torch.set_num_threads(best(seconds))
    times = ", ".join(f"{1000 * s:.0f} ms with {threads}" for threads, s in seconds.items())
    return f"{best(seconds)} threads (measured: {times}; trainer.num_threads=N chooses)"


@contextlib.contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Context in which torch uses this number of CPU threads."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    set_threads = torch._C.set_num_threads  # an engine may put a function that does nothing in the place of torch's
    set_threads(count)
    try:
        yield
    finally:
        set_threads(before)
