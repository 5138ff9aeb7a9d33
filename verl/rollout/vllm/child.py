"""The engine's process: `python -m verl.rollout.vllm.child`, started by `process.py` alone.

It makes its engine and carries out one call after another until the trainer hangs up or is gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from verl.rollout.vllm.ending import sweep
from verl.rollout.vllm.process import (
    CONNECTION_VARIABLE,
    CORES_VARIABLE,
    DIRECTORY_VARIABLE,
    PARENT_VARIABLE,
    SHARED_VARIABLE,
    Answer,
    Call,
    Start,
    receive,
    send,
)

LOOK_EVERY_S = 0.5


def serve(connection: Connection) -> None:
    """Make the engine and answer calls until the trainer hangs up."""
    start: Start = receive(connection)
    sys.path[:] = [*start.sys_path, *(path for path in sys.path if path not in start.sys_path)]
    try:
        from verl.rollout.vllm.hosted import HostedEngine

        engine = HostedEngine(start.setting)
    except Exception as error:  # noqa: BLE001 - the trainer's to handle
        send(connection, _failure(error))
        return
    send(connection, Answer(engine.describe()))
    try:
        while True:
            send(connection, _carry_out(engine, receive(connection)))
    finally:
        engine.close()


def _carry_out(engine: Any, call: Call) -> Answer:
    try:
        return Answer(getattr(engine, call.method)(*call.args))
    except Exception as error:  # noqa: BLE001 - the trainer's to handle
        return _failure(error)


def _failure(error: Exception) -> Answer:
    return Answer(error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())


def _end_with(parent: int) -> None:
    """End this process soon after the trainer, even in the middle of a computation.

    What vLLM started (workers of a tensor-parallel engine, the keeper of their shared memory) sees that and ends too.
    """
    while os.getppid() == parent:
        time.sleep(LOOK_EVERY_S)
    shutil.rmtree(os.environ[DIRECTORY_VARIABLE], ignore_errors=True)
    sweep(os.environ.get(SHARED_VARIABLE, ""))
    os._exit(1)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to all processes of a job: the trainer decides
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN, nothing that vLLM's workers inherit
    if cores := os.environ.pop(CORES_VARIABLE, ""):  # before any library starts its threads
        os.sched_setaffinity(0, map(int, cores.split(",")))
    parent = int(os.environ.pop(PARENT_VARIABLE))
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    connection = Connection(int(os.environ.pop(CONNECTION_VARIABLE)))
    with contextlib.suppress(EOFError, ConnectionError):
        serve(connection)
    sweep(os.environ.get(SHARED_VARIABLE, ""))
    os._exit(0)  # at once: nothing is left to do


if __name__ == "__main__":
    from verl.rollout.vllm.child import main as imported_main  # so that messages are of the importable module's classes

    imported_main()
