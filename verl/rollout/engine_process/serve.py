"""The main program of an engine's process: `python -m verl.rollout.engine_process.serve`.

It creates the engine and serves calls, one at a time, until the trainer closes the connection or exits. If the engine
has several processes, its workers are forks of this one, or import this module if they are spawned.

An engine is a class that is made with one argument and has the methods that the trainer calls:

describe, lost_worker                              `EngineInfo`; the worker process that ended, or None
wants, connect, load, adopt, prove                 weights: see `verl.rollout.weight_sync.engine_weights`
begin_turns, advance_turns, open_turns, end_turns  responses: see `verl.rollout.engine_process.turns`
sleep, wake                                        GPU memory given back, and taken again
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import secrets
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing import shared_memory
from typing import Any

from verl.rollout.engine_process.messages import EngineReply
from verl.rollout.engine_process.process import CORES_VARIABLE, NAME_VARIABLE
from verl.utils.child_process.channel import Channel, ChannelClosed
from verl.utils.child_process.interpreter import rare_garbage_collection
from verl.utils.child_process.process import is_parent_alive, run_child
from verl.utils.progress import Progress, report, report_to

PROGRESS_PATH_VARIABLE = "VERL_ENGINE_PROGRESS_PATH"  # for workers that are spawned
WORK = {"import", "compile", "exec", "open", "subprocess.Popen"}  # audit events of a process that starts or compiles


def serve(channel: Channel, engine: tuple[str, Any], progress: Progress) -> None:
    """Create the engine, `module:Class` and its argument, and serve calls until the trainer closes the connection."""
    faulthandler.enable()
    name_shared_memory()
    report_work(progress)
    if cores := os.environ.pop(CORES_VARIABLE, ""):  # before any library starts its threads
        os.sched_setaffinity(0, map(int, cores.split(",")))
    with contextlib.suppress(ChannelClosed):
        _serve(channel, *engine)
    if not is_parent_alive():
        os.killpg(0, signal.SIGKILL)  # workers too; the clean-up process of the trainer removes the files
    os._exit(0)  # immediately: nothing is left to do


def _serve(channel: Channel, server: str, setting: Any) -> None:
    engine: Any = None
    try:
        report("starting: importing the engine")
        module, _, name = server.partition(":")
        with rare_garbage_collection():
            make = getattr(importlib.import_module(module), name)
        gc.freeze()  # an engine may collect garbage several times as it starts: not among all that was imported

        report("starting: making the engine")
        engine = make(setting)
        info = engine.describe()
    except BaseException as error:  # noqa: BLE001 - the trainer's to handle; engines exit on some faults
        channel.send(_failure(error, engine))
        return
    answer = EngineReply(info)
    while True:
        report("idle")
        channel.send(answer)
        method, arguments = channel.receive()
        report(method)
        answer = _carry_out(engine, method, arguments)


def _carry_out(engine: Any, method: str, arguments: Sequence[Any]) -> EngineReply:
    try:
        return EngineReply(getattr(engine, method)(*arguments))
    except BaseException as error:  # noqa: BLE001 - the trainer's to handle
        return _failure(error, engine)


def _failure(error: BaseException, engine: Any) -> EngineReply:
    lost = None if engine is None else engine.lost_worker()
    return EngineReply(error=f"{type(error).__name__}: {error}", trace=traceback.format_exc(), lost=lost)


def name_shared_memory() -> None:
    """Give shared memory of this process and its forks names with the engine's prefix, so that it can be removed."""
    name = os.environ[NAME_VARIABLE]
    shared_memory._make_filename = lambda: f"/{name}_{secrets.token_hex(4)}"  # type: ignore[attr-defined]
    multiprocessing.current_process()._config["semprefix"] = f"/{name}_"  # type: ignore[attr-defined]


def report_work(progress: Progress) -> None:
    """Make this process and its forks report progress, including imports in their main threads."""
    report_to(progress)
    os.environ[PROGRESS_PATH_VARIABLE] = progress.path
    os.register_at_fork(after_in_child=lambda: report_to(progress, _worker_slot(progress)))
    _report_imports()


def _report_imports() -> None:
    """During start-up and compilation an engine imports modules and opens files for minutes without an engine step."""
    working = threading.get_ident()

    def on_event(event: str, _: Any) -> None:
        if event in WORK and threading.get_ident() == working:
            report()

    sys.addaudithook(on_event)


def _worker_slot(progress: Progress) -> int:
    return 1 + os.getpid() % (progress.num_slots - 1)


if __name__ == "__main__":
    run_child("verl.rollout.engine_process.serve")
elif __name__ == "__mp_main__":  # a worker that the engine has spawned
    faulthandler.enable()
    name_shared_memory()
    of_all = Progress.open(os.environ[PROGRESS_PATH_VARIABLE])
    report_to(of_all, _worker_slot(of_all))
    _report_imports()
