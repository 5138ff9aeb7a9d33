"""Roles in Ray actors, on this machine or on a cluster: the same calls, futures and errors as with sibling processes.

    driver ──batch──> object store ──> actor 0, actor 1, ...     each reads its rows from the batch
           <─────replies───────── object store <──                           rows joined in order
                                                   actor 0 <──gloo/nccl──> actor 1

If an actor is on another machine than the driver, each actor is sent only its share, so that no row goes to two
machines. `RayTransport` creates the actors in a placement group and sends the calls; `RemoteWorkerGroup` does the rest.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, ObjectStoreFullError, RayActorError, RayError
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.cluster.ray.ray_init import RaySession
from verl.cluster.ray.ray_worker import (
    RayReply,
    RoleWorker,
    free_address,
    interface_of,
    own_gpu,
)
from verl.cluster.rpc import END_TIMEOUT_S, STACK_TIMEOUT_S, ColocatedRoles, Deadline, PendingCall, RemoteWorkerGroup
from verl.cluster.shm_channel import deserialize, serialize
from verl.cluster.worker import refuse_mixed_versions
from verl.component import BuildContext
from verl.errors import VerlError, WorkerDied
from verl.utils.child_process.process import PACKAGE_ROOT, excerpt
from verl.utils.progress import Progress, state_of

START_TIMEOUT_S = 300.0  # limit for an actor to start
POLL_INTERVAL_S = 5.0


@dataclass(frozen=True)
class RayRoleGroup:
    """Workers that hold the same roles.

    Attributes:
        name: name of the pool, for logs.
        size: number of workers.
        num_cpus, num_gpus: resources of each worker.
        num_threads: torch threads of each worker.
        strategy: strategy of Ray's placement group.
        call_timeout_s: see `RemoteWorkerGroup`.
    """

    name: str
    size: int
    num_cpus: float
    num_gpus: float
    num_threads: int
    strategy: str
    call_timeout_s: float


class RayWorkerGroup(RemoteWorkerGroup):
    """All roles of a host in each of the actors of a group.

    Args:
        session: session that is closed with the group.
    """

    def __init__(self, session: RaySession, group: RayRoleGroup, host: ColocatedRoles, context: BuildContext):
        logs = None if context.run_dir is None else context.run_dir.absolute() / "workers"
        transport = RayTransport(session, group, logs)
        super().__init__(transport, host, context, group.size, group.call_timeout_s)


class RayTransport:
    """Actors numbered by rank, in a placement group; see `Transport`."""

    poll_takes_s = 2 * STACK_TIMEOUT_S

    def __init__(self, session: RaySession, group: RayRoleGroup, logs: Path | None):
        self._session, self._setting, self._logs = session, group, logs
        self.progress = Progress(num_slots=group.size)
        self.pids: Sequence[int] = []
        self._actors: list[Any] = []
        self._counts: dict[int, int] = {}  # last known progress counter of each worker
        self._is_here = False  # all actors are on the driver's machine
        self._placement_group: Any = None
        self._hosts: list[str] = []
        self._inbox: SimpleQueue[tuple[int, list[Any]] | None] = SimpleQueue()
        self._collector: threading.Thread | None = None

    def start(self, group: RemoteWorkerGroup, host: ColocatedRoles, context: BuildContext) -> None:
        if self._logs is not None:
            self._logs.mkdir(parents=True, exist_ok=True)
        size = self._setting.size
        resources = {"CPU": self._setting.num_cpus, "GPU": self._setting.num_gpus}
        bundle = {name: count for name, count in resources.items() if count} or {"CPU": 0.001}
        self._placement_group = self._session.reserve([bundle] * size, self._setting.strategy)
        self._actors = [self._create_actor(rank) for rank in range(size)]
        self._collector = threading.Thread(target=self._collect, args=(group,), daemon=True)
        self._collector.start()

        def on_all(method: str, *args: Any) -> list[Any]:
            sent = [getattr(actor, method).remote(*args) for actor in self._actors]
            return group.begin_start(lambda number, _: self._inbox.put((number, sent)), START_TIMEOUT_S).result()

        refuse_mixed_versions(on_all("versions"), "trainer.placement.address")
        locations = on_all("location")
        self.pids = [location.pid for location in locations]
        self._hosts = [f"{location.host} ({location.address})" for location in locations]
        here = ray.get_runtime_context().get_node_id()
        self._is_here = {location.node for location in locations} == {here}
        search_path, starts = tuple(map(os.path.abspath, sys.path)), []
        is_on_gpu = context.device.startswith("cuda")
        for rank, (actor, location) in enumerate(zip(self._actors, locations, strict=True)):
            device = f"cuda:{location.gpu}" if is_on_gpu else context.device
            worker_context = replace(context, rank=rank, world_size=size, device=device, tokenizer=None)
            env = {"VERL_RENDEZVOUS": locations[0].rendezvous, "RANK": str(rank), "WORLD_SIZE": str(size)}
            if location.network:  # no need to resolve the machine's name, which may give only its loopback address
                env["GLOO_SOCKET_IFNAME"] = location.network
            payload = pickle.dumps((host, worker_context))
            starts.append(actor.start.remote(payload, search_path, env, self._setting.num_threads))
        group.begin_start(lambda number, _: self._inbox.put((number, starts))).result()

    def _create_actor(self, rank: int) -> Any:
        log = None if self._logs is None else str(self._log(rank))
        env = {
            "PYTHONPATH": os.pathsep.join(filter(None, [PACKAGE_ROOT, os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": str(self._setting.num_threads),
        }
        for name in ("VERL_STRICT_DATA_CHECK", "CUBLAS_WORKSPACE_CONFIG"):
            if name in os.environ:
                env[name] = os.environ[name]
        remote = ray.remote(  # pyright: ignore[reportCallIssue] - its overloads leave out concurrency_groups
            concurrency_groups={"watch": 1}
        )
        actor = remote(_RayWorker).options(
            num_cpus=self._setting.num_cpus,
            num_gpus=self._setting.num_gpus,
            runtime_env={"env_vars": env},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._placement_group, placement_group_bundle_index=rank
            ),
        )
        return actor.remote(log)

    def send(self, number: int, pending: PendingCall) -> None:
        role, _, method = pending.name.partition(".")
        try:
            shares = pending.by_rank(lambda args: ray.put(tuple(serialize(args))))
            calls = [
                actor.call.remote(role, method, share, rank in pending.result_ranks)
                for rank, (actor, share) in enumerate(zip(self._actors, shares, strict=True))
            ]
        except (RayError, OSError, ValueError) as error:
            raise _refusal(error, pending.name, pending.step) from error
        self._inbox.put((number, calls))

    def _collect(self, group: RemoteWorkerGroup) -> None:
        """Receive replies until the group is closed."""
        tracked: dict[Any, tuple[int, int]] = {}  # call and rank
        while True:
            while not tracked or not self._inbox.empty():
                if (received := self._inbox.get()) is None:
                    return
                number, refs = received
                tracked |= {ref: (number, rank) for rank, ref in enumerate(refs)}
            try:
                ready, _ = ray.wait(list(tracked), num_returns=len(tracked), timeout=0)
                ready = ready or ray.wait(list(tracked), timeout=POLL_INTERVAL_S)[0]
                for ref in ready:
                    self._take(group, ref, *tracked.pop(ref))
            except Exception as error:  # noqa: BLE001 - raised in the caller
                broken = f"the connection to Ray broke ({type(error).__name__}: {error})"
                group.on_end(0, partial(str, broken))
                return

    def _take(self, group: RemoteWorkerGroup, ref: Any, number: int, rank: int) -> None:
        try:
            answer = ray.get(ref)
        except RayActorError as error:
            ended = _ending(error, self._hosts[rank] if rank < len(self._hosts) else "")
            return group.on_end(rank, lambda: f"{ended}\n{self.tail(rank)}")
        except RayError as error:
            return group.on_error(number, rank, str(error))
        self.progress.advance(slot=rank)
        if isinstance(answer, RayReply):
            if answer.serialized is None:
                return group.on_error(number, rank, answer.error or "")
            answer = deserialize(answer.serialized)
        return group.on_reply(number, rank, answer)

    def poll_progress(self, ranks: Sequence[int]) -> None:
        for rank, progress in self._progress_of(ranks).items():
            if progress is not None and progress[0] != self._counts.get(rank):
                self._counts[rank] = progress[0]
                self.progress.advance(slot=rank)

    def _progress_of(self, ranks: Sequence[int]) -> dict[int, tuple[int, str] | None]:
        """Progress of the workers that answer, by rank; None for one that has ended."""
        progress: dict[int, tuple[int, str] | None] = {}
        with contextlib.suppress(RayError):
            refs = [self._actors[rank].progress.options(concurrency_group="watch").remote() for rank in ranks]
            answered, _ = ray.wait(refs, num_returns=len(refs), timeout=STACK_TIMEOUT_S) if refs else ([], [])
            for rank, ref in zip(ranks, refs, strict=True):
                if ref in answered:
                    progress[rank] = None
                    with contextlib.suppress(RayError):  # raised in the caller
                        progress[rank] = ray.get(ref)
        return progress

    def unresponsive(self, ranks: Sequence[int]) -> Sequence[int]:
        return sorted(set(ranks) - self._progress_of(ranks).keys())

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        stacks, end = dict.fromkeys(ranks, ""), Deadline(STACK_TIMEOUT_S)
        with contextlib.suppress(RayError):
            refs = {rank: self._actors[rank].stack.options(concurrency_group="watch").remote() for rank in ranks}
            for rank, ref in refs.items():
                with contextlib.suppress(RayError, GetTimeoutError):
                    stacks[rank] = ray.get(ref, timeout=end.left_s)
        return stacks

    def state(self, rank: int) -> str:
        return state_of(self.pids[rank]) if self._is_here and self.pids else ""

    def tail(self, rank: int) -> str:
        if self._logs is None or not self._log(rank).is_file():
            return ""
        return "\n".join(excerpt(self._log(rank)).lines)

    def kill(self) -> None:
        if not ray.is_initialized():
            return
        for actor in self._actors:
            with contextlib.suppress(RayError):
                ray.kill(actor)
        if self._placement_group is not None:
            group, self._placement_group = self._placement_group, None
            with contextlib.suppress(Exception):
                remove_placement_group(group)

    def close(self, is_idle: bool) -> None:
        if is_idle and self._actors and ray.is_initialized():
            with contextlib.suppress(RayError):
                refs = [actor.end.remote() for actor in self._actors]
                ray.wait(refs, num_returns=len(refs), timeout=END_TIMEOUT_S)
        self.kill()
        self._inbox.put(None)
        if self._collector is not None and self._collector.is_alive():
            self._collector.join(timeout=END_TIMEOUT_S)
        self._session.close()

    def _log(self, rank: int) -> Path:
        assert self._logs is not None
        name = "" if self._setting.name == "main" else f"{self._setting.name}_"
        return self._logs / f"{name}rank_{rank}.log"


class _WorkerLocation(NamedTuple):
    """Location of a worker.

    Attributes:
        address, host: address of its machine in the cluster, and the machine's name.
        rendezvous: address for a process group.
        network: its network interface; empty if unknown or set by the user.
        gpu: index of its GPU among those that the process sees.
    """

    address: str
    pid: int
    node: str
    rendezvous: str
    network: str
    gpu: int
    host: str = ""


class _RayWorker(RoleWorker):
    """The Ray actor: a `RoleWorker` that reports its location."""

    def location(self) -> _WorkerLocation:
        address, node = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        network = "" if "GLOO_SOCKET_IFNAME" in os.environ else interface_of(address)
        gpu = own_gpu([str(number) for number in ray.get_gpu_ids()], os.environ.get("CUDA_VISIBLE_DEVICES"))
        return _WorkerLocation(
            address,
            os.getpid(),
            node,
            free_address(address),
            network,
            gpu,
            socket.gethostname(),
        )


def _ending(error: RayActorError, host: str) -> str:
    """Description of how a worker ended on `host`, a name and an address."""
    text = " ".join(str(error).split())
    if "node" in text and "died" in text and "worker process has died" not in text:
        return f"its machine left the Ray cluster: {host}"
    return f"the process ended (killed, out of memory, a crash, or its machine went down) on {host}"


def _refusal(error: Exception, name: str, step: int | None) -> VerlError:
    """Why Ray refuses a call."""
    if isinstance(error, ObjectStoreFullError):
        return VerlError(
            f"{name}: Ray's object store has no room for the batch. Set trainer.placement.object_store_mib higher "
            "(of a cluster that was there before: `ray start --object-store-memory`), or a smaller batch."
        )
    return WorkerDied(0, name, step, f"Ray does not take the call ({type(error).__name__}: {error})")
