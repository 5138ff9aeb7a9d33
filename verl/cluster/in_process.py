"""Roles in the driver's own process: a call is a call."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from verl.cluster.base import HostDescription
from verl.component import BuildContext
from verl.dispatch import dispatch_of


class InProcess:
    """Every role in this process. Calls are carried out at once; an error is raised where the result is asked for."""

    world_size = 1
    shares_memory = True

    def __init__(self, host: HostDescription, context: BuildContext):
        self.step: int | None = None
        self._types = host.worker_types()
        self._host = host.build(context)

    def submit(self, role: str, method: str, args: tuple[Any, ...]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            result = self._host.call(role, method, args)
            future.set_result([result] if dispatch_of(self._types[role], method).gathers else result)
        except Exception as error:  # noqa: BLE001 - the caller's, who waits for the future
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Let go of the models."""
        self._host.close()
