"""The connection to Ray: to a cluster by its address, or to one that is started on this machine.

A cluster that is started here is also ended here; an existing one keeps running.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import ray
import ray._private.worker
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from verl.errors import ConfigError, VerlError
from verl.utils.directories import TemporaryDirectory
from verl.utils.orphan_cleanup import CLEANUP

LONGEST_SOCKET_PATH = 103  # bytes; Linux allows 107
RAYS_OWN = 62  # maximum bytes that Ray appends to the path of its directory
KNOCK_TIMEOUT_S = 5.0
SESSION_VARIABLE = "VERL_RAY_SESSION"
SYSTEM_CONFIG = {
    # By default Ray frees memory after a hundred objects, or once a second. Until then batches go to pages that were
    # never accessed, which takes several times as long as copying to used ones.
    "free_objects_batch_size": 1,
    # Ray prestarts a process for each core, which stays unused: roles have their own runtime environment.
    "prestart_worker_first_driver": False,
}


@dataclass(frozen=True)
class RaySettings:
    """Resource requests and settings for Ray.

    Attributes:
        address: address of a cluster; None starts one on this machine.
        num_cpus, num_gpus: total of all groups.
        object_store_mib: shared memory of a cluster started here; None uses Ray's default.
        start_timeout_s: timeout for an answer of the cluster, and then for free resources.
    """

    address: str | None
    num_cpus: float
    num_gpus: float
    object_store_mib: int | None
    start_timeout_s: float


class RaySession:
    """This process's connection to Ray, shared by all its users; closed by the last `close`.

    Raises:
        ConfigError: no cluster answers at the address.
    """

    _users: ClassVar[int] = 0
    _opened: ClassVar[bool] = False
    _mark: ClassVar[int] = -1
    _words: ClassVar[int] = -1
    _held: ClassVar[TemporaryDirectory | None] = None

    def __init__(self, settings: RaySettings):
        self.settings = settings
        if not ray.is_initialized():
            with _sigterm_as_it_was():
                self._open(settings)
            RaySession._opened = True
        RaySession._users += 1
        self._is_open = True

    def reserve(self, bundles: list[dict[str, float]], strategy: str) -> PlacementGroup:
        """Reserve a placement group for a group of workers, one bundle each.

        Raises:
            VerlError: the cluster does not have, or does not free, the resources in time.
        """
        there, limit_s = ray.cluster_resources(), self.settings.start_timeout_s
        if any(there.get(name, 0.0) < count * len(bundles) for name, count in bundles[0].items()):
            limit_s = 0.0  # waiting would not help
        group = placement_group(bundles, strategy=strategy)
        try:
            ray.get(group.ready(), timeout=limit_s)
        except GetTimeoutError as error:
            remove_placement_group(group)
            raise VerlError(
                f"Ray has no room for {len(bundles)} workers of {_said(bundles[0])} ({strategy}) after {limit_s:g} s: "
                f"the cluster has {_said(there)}, of which {_said(ray.available_resources())} are free. Set "
                "trainer.nnodes, trainer.n_gpus_per_node or trainer.placement.num_cpus lower, or add machines."
            ) from error
        return group

    def close(self) -> None:
        """Release this user's share of the connection. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        RaySession._users -= 1
        if RaySession._users == 0 and RaySession._opened:
            RaySession._opened = False
            RaySession._end()

    @classmethod
    def _end(cls) -> None:
        ray.shutdown()
        held, cls._held = cls._held, None
        if held is not None:
            held.cleanup()
            CLEANUP.withdraw(cls._mark)
            CLEANUP.withdraw(cls._words)

    def _open(self, settings: RaySettings) -> None:
        quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "logging_level": logging.ERROR}
        if settings.address is not None:
            has_token = _show_token()
            try:
                _check_cluster(settings.address, settings.start_timeout_s)
                ray.init(address=settings.address, **quiet)
            except (OSError, RuntimeError, ValueError, RayError) as error:
                raise ConfigError(
                    f"trainer.placement.address is {settings.address!r}: a Ray cluster could not be joined there "
                    f"({str(error).splitlines()[0]}; {_token_message(has_token)}). Start one with "
                    "`ray start --head`, or set it to null."
                ) from error
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {}
        if settings.object_store_mib is not None:
            options["object_store_memory"] = settings.object_store_mib * 2**20
        # Ray starts workers through a shell and does not quote
        if (quoted := shlex.quote(sys.executable)) != sys.executable:
            options["runtime_env"] = {"py_executable": quoted}
        RaySession._held = _short_directory()
        RaySession._mark = CLEANUP.register(environment=[f"{SESSION_VARIABLE}={RaySession._held.name}"])
        atexit.register(RaySession._end)  # for a driver that exits without `close`
        os.environ[SESSION_VARIABLE] = RaySession._held.name  # inherited by all processes that Ray starts
        try:
            ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, int(settings.num_cpus + 0.999)),
                include_dashboard=False,
                _system_config=SYSTEM_CONFIG,
                _temp_dir=RaySession._held.name,
                **options,
                **quiet,
            )
        except BaseException:
            RaySession._end()
            raise
        finally:
            del os.environ[SESSION_VARIABLE]
        RaySession._words = CLEANUP.register(last_words=_last_words(ray._private.worker._global_node))


def _last_words(node: Any) -> dict[int, str]:
    """Message printed if Ray kills this process because its raylet ended, which Ray does silently; by process id."""
    (raylet,) = node.all_processes["raylet"]
    text = (
        f"Ray's raylet (process {raylet.process.pid}) was killed or crashed, or ended with another of Ray's own "
        "processes, and Ray ended this process for it. Published checkpoints are whole: start the run again with "
        "resume=latest."
    )
    return {raylet.process.pid: text}


def _show_token() -> bool:
    """Make Ray send its authentication token, if this user has one, when joining a cluster.

    A cluster started by `ray start` requires the token if its user has one, and every local `ray.init` writes one.
    `ray.init(address=...)` sends it only with RAY_AUTH_MODE=token; a cluster that needs no token ignores it.

    Returns: Whether a token is sent.
    """
    if "RAY_AUTH_MODE" not in os.environ:
        with contextlib.suppress(ImportError):  # a version of Ray without tokens
            # a compiled module without a stub
            from ray._raylet import AuthenticationTokenLoader, Config  # pyright: ignore[reportAttributeAccessIssue]

            if AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
                os.environ["RAY_AUTH_MODE"] = "token"
                Config.initialize("")  # Ray read it at import
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def _token_message(has_token: bool) -> str:
    if has_token:
        return (
            "it was shown the token of this user, ~/.ray/auth_token or RAY_AUTH_TOKEN: the cluster's must be the same"
        )
    return "it was shown no token: if it asks for one, put that into RAY_AUTH_TOKEN and set RAY_AUTH_MODE=token"


def _short_directory() -> TemporaryDirectory:
    """A new directory whose path is short enough for a socket in it, independent of TMPDIR."""
    is_short = len(tempfile.gettempdir()) + RAYS_OWN + len("/verl_123456789012") < LONGEST_SOCKET_PATH
    return TemporaryDirectory("verl_", None if is_short else "/tmp")


_JOIN = """
import logging, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False, logging_level=logging.ERROR)
"""


def _check_cluster(address: str, timeout_s: float) -> None:
    """Check that a cluster can be joined, in another process, because Ray's attempt has no timeout and may exit.

    Raises:
        OSError: the cluster cannot be joined in time.
    """
    deadline = time.monotonic() + timeout_s
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=min(KNOCK_TIMEOUT_S, timeout_s)).close()
    command = [sys.executable, "-c", _JOIN, address]
    try:
        subprocess.run(command, capture_output=True, timeout=max(0.1, deadline - time.monotonic()), check=True)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"nothing within start_timeout_s={timeout_s:g} s") from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        raise ConnectionError(lines[-1] if lines else f"Ray ended with status {error.returncode}") from error


@contextmanager
def _sigterm_as_it_was():
    """Restore the handler of SIGTERM, which Ray replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _said(resources: Mapping[str, float]) -> str:
    named = {name: count for name, count in resources.items() if name in ("CPU", "GPU")}
    return ", ".join(f"{count:g} {name}" for name, count in named.items()) or "nothing"
