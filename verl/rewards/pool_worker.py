"""The main program of a pool process: `python -m verl.rewards.pool_worker`, started by `process_pool.py` only.

It imports the user's function by its path, never the driver's main script, and torch only if the function does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import importlib
import math
import os
import pickle
import random
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl.errors import RewardError, end_cut, error_text
from verl.protocol.provenance import source_of
from verl.protocol.user_function import load_function, own_line, signature_of, source_file
from verl.rewards.deadline import awaited
from verl.rewards.signatures import with_own_arguments
from verl.utils.child_process.channel import Channel, ChannelClosed
from verl.utils.child_process.process import run_child
from verl.utils.progress import Progress


@dataclass(frozen=True)
class PoolSettings:
    """Settings of a worker, the same for all samples.

    Attributes:
        preloaded: modules to import before the first sample.
        digest: of the file of the function when the pool was made.
        trace: open file that a worker writes its stack trace to when the driver asks for it (SIGUSR2).
    """

    path: str
    kwargs: Mapping[str, Any]
    preloaded: tuple[str, ...]
    whole_batch: bool
    digest: str
    trace: int


def serve(channel: Channel, setting: PoolSettings, progress: Progress) -> None:
    """Import the function, then score samples until the driver closes the connection."""
    with contextlib.suppress(ChannelClosed):
        _serve(channel, setting, progress)
    os._exit(0)  # does not wait for threads of user code


def _serve(channel: Channel, setting: PoolSettings, progress: Progress) -> None:
    try:
        if file_digest(setting.path) != setting.digest:
            raise RewardError(
                "its file was changed during the run. Restore it, or resume the run to score by the new one"
            )
        function = with_own_arguments(load_function(setting.path), dict(setting.kwargs), not setting.whole_batch)
        for name in setting.preloaded:
            importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001 - reported to the driver
        reason = str(error).removeprefix(f"path is {setting.path!r}: ") if isinstance(error, RewardError) else None
        channel.send(("error", reason.rstrip(".") if reason else error_text(error)))
        return
    kwargs = dict(setting.kwargs)
    channel.send(("ready", (source_of(function), signature_of(function, kwargs))))
    faulthandler.register(signal.SIGUSR2, file=setting.trace)
    while True:
        message: bytes = channel.receive()
        progress.advance("scoring a sample")
        answer = _score(function, message, kwargs, setting.whole_batch)
        progress.advance("waiting for a sample")
        channel.send(answer)


def file_digest(path: str) -> str:
    """Digest of the file of a function by its path; empty if the file is unknown."""
    file, _ = source_file(path.rpartition(":")[0])
    return "" if file is None or not file.is_file() else hashlib.blake2b(file.read_bytes()).hexdigest()


def _score(
    function: Callable, message: bytes, kwargs: dict[str, Any], whole_batch: bool
) -> tuple[str, float | dict[str, Any] | bytes | str | None]:
    """(`score`, the number or the pickled result for a whole batch), or (`error`, a description)."""
    try:
        sample = pickle.loads(message)
        seed_by_content(sample)
        result = awaited(function(**{**sample, **kwargs}) if isinstance(sample, dict) else function(sample, **kwargs))
        number = 0.0 if whole_batch else plain_score(result)
    except BaseException as error:  # noqa: BLE001 - user code may raise anything, sys.exit() included
        return "error", f"{error_text(error)}{own_line(error, function)}"
    if not whole_batch:
        return "error" if isinstance(number, str) else "score", number
    try:
        return "score", pickle.dumps(result)
    except Exception:  # noqa: BLE001 - pickling runs user code
        return "error", with_type(result)


def seed_by_content(given: Any) -> None:
    """Seed the global random generators of this process by a hash of the arguments of the function.

    A function that uses them then returns the same result for the same rows, regardless of earlier calls, so that a
    resumed run equals an uninterrupted one.

    Args:
        given: keyword arguments, or a DataProto.
    """
    digest = hashlib.blake2b(digest_size=8)
    if isinstance(given, dict):
        digest.update(repr(given).encode("utf-8", "backslashreplace"))
    else:
        digest.update(repr([array.tolist() for array in given.non_tensor_batch.values()]).encode("utf-8", "replace"))
        for tensor in given.batch.values():
            digest.update(tensor.detach().to("cpu").contiguous().view(-1).numpy(force=True).tobytes())
    seed = int.from_bytes(digest.digest()) % 2**32
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def plain_score(result: Any) -> float | dict[str, Any] | str | None:
    """`plain_number`, None for no reward, or a mapping with a `score` and further numbers or texts."""
    if isinstance(result, list) and len(result) == 1:
        return plain_score(result[0])
    if not isinstance(result, Mapping) or "score" not in result:
        return None if result is None else plain_number(result)
    score = plain_score(result["score"])
    others = {str(k): x if x is None or isinstance(x, str) else plain_number(x) for k, x in result.items()}
    return score if isinstance(score, str) else {**others, "score": score}


def plain_number(result: Any) -> float | str:
    """A number as a float, also from a list, array or tensor of one element; else a description of the value."""
    number = result
    if isinstance(result, (list, tuple)) or getattr(result, "ndim", 0):
        is_list = isinstance(result, (list, tuple))
        if (count := len(result) if is_list else math.prod(result.shape)) != 1:
            return f"a {type(result).__name__} of {count} items"
        number = result[0] if is_list else result.reshape(-1)[0]
    if not isinstance(number, (bool, int, float)) and getattr(number, "ndim", None) == 0 and hasattr(number, "item"):
        number = number.item()
    if isinstance(number, (bool, int, float)):
        return float(number)
    return with_type(result)


def with_type(result: Any) -> str:
    return f"{end_cut(repr(result), 120)} of type {type(result).__name__}"


if __name__ == "__main__":
    # including processes started by the user's function
    run_child("verl.rewards.pool_worker")
