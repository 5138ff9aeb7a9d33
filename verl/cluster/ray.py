"""Roles in Ray actors, on this machine or on a cluster: the same calls, futures and errors as with sibling processes.

    driver ──share of the rows──> object store ──> actor 0, actor 1, ...     each reads its share where it lies
           <─────answers───────── object store <──                           rows joined in their order
                                                   actor 0 <──gloo/nccl──> actor 1

An error in one worker, its death, or its silence fails the call under way with the rank, the call and the step, and
ends the whole group: its siblings may be waiting for it in a collective operation for ever.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectStoreFullError, RayActorError, RayError
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.cluster.base import Deadline, HostDescription
from verl.cluster.crew import END_TIMEOUT_S, LOG_TAIL_LINES, START_TIMEOUT_S
from verl.cluster.dividing import Division
from verl.cluster.parcel import unwrap, wrap
from verl.cluster.ray_actor import RoleActor, Told
from verl.cluster.ray_session import Session
from verl.description import BuildContext
from verl.dispatch import Dispatch, dispatch_of
from verl.errors import ConfigError, VerlError, WorkerDied, WorkerError, WorkerHung

GRACE_S = 0.5  # an error waits so long to be told: a sibling's death, where that is the cause, is told first
STACK_TIMEOUT_S = 5.0
PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class Group:
    """Workers that hold the same roles.

    Attributes:
        name: of the pool, for logs.
        size: workers.
        num_cpus, num_gpus: of each.
        num_threads: that torch may use in each.
        strategy: of Ray's placement group.
        call_timeout_s: after which a call that is not answered names who is silent.
        parts: of each worker, which share of the rows it works on; those of one share answer alike.
    """

    name: str
    size: int
    num_cpus: float
    num_gpus: float
    num_threads: int
    strategy: str
    call_timeout_s: float
    parts: tuple[int, ...]


@dataclass
class _Pending:
    """A call under way, and the answers to come, by rank."""

    name: str
    step: int | None
    future: Future[Any]
    division: Division | None
    dispatch: Dispatch
    refs: list[Any]

    def result(self, answers: list[Any], speakers: Sequence[int]) -> Any:
        """The answers of all ranks as the one that the caller waits for; `speakers` answer for the shares of rows."""
        if self.dispatch.gathers:
            return answers
        answers = [answers[rank] for rank in speakers]
        return self.division.join(answers) if self.dispatch.joins and self.division else answers[0]


class RayActors:
    """Every role of a host in each of the actors of a group.

    Attributes:
        pids: process ids by rank, each on its own machine.
    Raises:
        WorkerError: a worker could not build its roles.
        WorkerDied: a worker ended while it was starting.
        ConfigError: the machines have different versions of what must be the same.
    """

    shares_memory = False

    def __init__(self, session: Session, group: Group, host: HostDescription, context: BuildContext):
        self.world_size, self.step = group.size, None
        self._speakers = [group.parts.index(part) for part in range(max(group.parts) + 1)]
        self._session, self._group, self._types = session, group, host.worker_types()
        self._lock = threading.Lock()
        self._failure: VerlError | None = None
        self._pending: list[_Pending] = []
        self._inbox: SimpleQueue[_Pending | None] = SimpleQueue()
        self._logs = None if context.run_dir is None else context.run_dir.absolute() / "workers"
        if self._logs is not None:
            self._logs.mkdir(parents=True, exist_ok=True)
        self._actors: list[Any] = []
        self._room = session.reserve([self._bundle()] * group.size, group.strategy)
        self._collector = threading.Thread(target=self._collect, daemon=True)
        try:
            self._start(host, context)
        except BaseException:
            self._kill()
            self.close()
            raise
        self._collector.start()

    def submit(self, role: str, method: str, args: tuple[Any, ...]) -> Future[Any]:
        """Send a call to every actor. Its future fails with a WorkerError; after `close`, with a VerlError."""
        dispatch = dispatch_of(self._types[role], method)
        divides = dispatch.divides and len(self._speakers) > 1
        division = Division(args[0], len(self._speakers)) if divides else None
        name, future = f"{role}.{method}", Future()
        with self._lock:
            if self._failure is not None:
                future.set_exception(self._failure)
                return future
            try:
                refs = self._send(role, method, args, division)
            except (RayError, OSError, ValueError) as error:
                future.set_exception(_refusal(error, name, self.step))
                return future
            pending = _Pending(name, self.step, future, division, dispatch, refs)
            self._pending.append(pending)
            self._inbox.put(pending)
        return future

    def _send(self, role: str, method: str, args: tuple[Any, ...], division: Division | None) -> list[Any]:
        """Put each share, or what all are to have, into the object store once, and call every actor with it."""
        if division is None:
            sent = [ray.put(tuple(wrap(args)))] * self.world_size
        else:
            shares = [ray.put(tuple(wrap((part, *args[1:])))) for part in division.divide(args[0])]
            sent = [shares[part] for part in self._group.parts]
        return [actor.call.remote(role, method, share) for actor, share in zip(self._actors, sent, strict=True)]

    def close(self) -> None:
        """End the actors, asked first unless they are at work. Leaves nothing running; may be called again."""
        ended = VerlError("The workers of this run were ended: close() was called.")
        is_idle, withdrawn = not self._pending, self._withdraw(ended)
        for pending in withdrawn or []:
            pending.future.set_exception(ended)
        if is_idle and withdrawn is not None and ray.is_initialized():
            with contextlib.suppress(RayError):
                ray.wait(
                    [actor.end.remote() for actor in self._actors],
                    num_returns=len(self._actors) or 1,
                    timeout=END_TIMEOUT_S,
                )
        self._kill()
        self._inbox.put(None)
        if self._collector.is_alive():
            self._collector.join(timeout=END_TIMEOUT_S)
        self._session.close()

    # Starting

    def _start(self, host: HostDescription, context: BuildContext) -> None:
        self._actors = [self._hire(rank) for rank in range(self.world_size)]
        here = self._gather("start", [actor.versions.remote() for actor in self._actors], START_TIMEOUT_S)
        _refuse_mixed(here)
        places = self._gather("start", [actor.place.remote() for actor in self._actors], START_TIMEOUT_S)
        nodes, self.pids = [node for node, _ in places], [pid for _, pid in places]
        is_one_machine = len(set(nodes)) == 1
        meeting = "127.0.0.1" if is_one_machine else nodes[0]
        (address,) = self._gather("start", [self._actors[0].free_address.remote(meeting)], START_TIMEOUT_S)
        search_path, refs = tuple(map(os.path.abspath, sys.path)), []
        device = "cuda:0" if context.device.startswith("cuda") else context.device  # Ray shows each the GPU it gives it
        for rank, actor in enumerate(self._actors):
            own = replace(context, rank=rank, world_size=self.world_size, device=device, tokenizer=None)
            env = {"VERL_RENDEZVOUS": address, "RANK": str(rank), "WORLD_SIZE": str(self.world_size)}
            if is_one_machine and sys.platform == "linux":
                env["GLOO_SOCKET_IFNAME"] = "lo"  # no need to resolve the machine's name
            refs.append(actor.start.remote(pickle.dumps((host, own)), search_path, env, self._group.num_threads))
        self._answers("start", None, refs, None)  # however long the weights take: a worker's end would be noticed

    def _hire(self, rank: int) -> Any:
        log = None if self._logs is None else str(self._log(rank))
        env = {
            "PYTHONPATH": os.pathsep.join(filter(None, [PACKAGE_ROOT, os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": str(self._group.num_threads),
        }
        for name in ("VERL_STRICT_DATA_CHECK", "CUBLAS_WORKSPACE_CONFIG"):
            if name in os.environ:
                env[name] = os.environ[name]
        actor = ray.remote(concurrency_groups={"watch": 1})(_Node).options(
            num_cpus=self._group.num_cpus,
            num_gpus=self._group.num_gpus,
            runtime_env={"env_vars": env},
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._room, placement_group_bundle_index=rank),
        )
        return actor.remote(log)

    def _bundle(self) -> dict[str, float]:
        wanted = {"CPU": self._group.num_cpus, "GPU": self._group.num_gpus}
        return {name: count for name, count in wanted.items() if count} or {"CPU": 0.001}

    # Answers

    def _collect(self) -> None:
        """Take in the answers, call by call."""
        while (pending := self._inbox.get()) is not None:
            try:
                answers = self._answers(pending.name, pending.step, pending.refs, self._group.call_timeout_s)
                result = pending.result(answers, self._speakers)
            except WorkerError as failure:
                self._fail(failure)
            except Exception as error:  # noqa: BLE001 - the caller's, who waits for the future
                if self._taken(pending):
                    pending.future.set_exception(error)
            else:
                if self._taken(pending):
                    pending.future.set_result(result)

    def _answers(self, name: str, step: int | None, refs: Sequence[Any], timeout_s: float | None) -> list[Any]:
        """What the workers answered, by rank.

        Raises:
            WorkerError: one of them raised; WorkerDied where one has ended, WorkerHung where one is silent.
        """
        told: list[Told] = self._gather(name, refs, timeout_s, step, lambda one: one[1] is not None)
        return [unwrap(parcel) for parcel, _ in told]

    def _gather(
        self, name: str, refs: Sequence[Any], timeout_s: float | None, step: int | None = None, failed: Any = None
    ) -> list[Any]:
        deadline, waiting, found = Deadline(timeout_s if timeout_s is not None else float("inf")), list(refs), {}
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=min(deadline.left_s, 3600.0))
            if not ready and not deadline.left_s:
                raise self._silence([refs.index(ref) for ref in waiting], name, step, timeout_s)
            for ref in ready:
                rank = refs.index(ref)
                found[rank] = self._get(ref, rank, name, step)
                if failed is not None and failed(found[rank]):
                    self._look_for_the_dead(refs, waiting, name, step)
                    raise WorkerError(rank, name, step, found[rank][1])
        return [found[rank] for rank in range(len(refs))]

    def _get(self, ref: Any, rank: int, name: str, step: int | None) -> Any:
        try:
            return ray.get(ref)
        except RayActorError as error:
            raise WorkerDied(rank, name, step, f"{_ending(error)}\n{self._tail(rank)}") from error
        except RayError as error:
            raise WorkerError(rank, name, step, str(error)) from error

    def _look_for_the_dead(self, refs: Sequence[Any], waiting: list[Any], name: str, step: int | None) -> None:
        """An error may be the echo of a sibling's end, of which Ray tells a little later."""
        end = Deadline(GRACE_S)
        while waiting and end.left_s:
            ready, waiting = ray.wait(waiting, timeout=end.left_s)
            for ref in ready:
                with contextlib.suppress(RayError):
                    ray.get(ref)
                    continue
                self._get(ref, refs.index(ref), name, step)

    def _silence(self, ranks: list[int], name: str, step: int | None, timeout_s: float | None) -> WorkerHung:
        """Who does not answer: first a process that does not even say where it stands."""
        asked = {rank: self._actors[rank].stack.options(concurrency_group="watch").remote() for rank in ranks}
        stacks, end = {}, Deadline(STACK_TIMEOUT_S)
        for rank, ref in asked.items():
            try:
                stacks[rank] = ray.get(ref, timeout=end.left_s)
            except (RayError, GetTimeoutError):
                detail = f"no answer within {timeout_s:g} s, and the process does not react at all\n{self._tail(rank)}"
                return WorkerHung(rank, name, step, detail)
        where = "\n".join(f"rank {rank} stands at:\n{stack}" for rank, stack in stacks.items())
        return WorkerHung(ranks[0], name, step, f"no answer within {timeout_s:g} s\n{where}")

    def _taken(self, pending: _Pending) -> bool:
        """Whether the call was still under way; it is not any more."""
        with self._lock:
            is_open = pending in self._pending
            if is_open:
                self._pending.remove(pending)
            return is_open

    # Ending

    def _fail(self, failure: WorkerError) -> None:
        """End the actors, and fail every call under way and all that come."""
        failed = self._withdraw(failure)
        self._kill()
        for pending in failed or []:
            pending.future.set_exception(failure)

    def _withdraw(self, failure: VerlError) -> list[_Pending] | None:
        """Let no call through from here on. Returns those under way; None if something had failed before."""
        with self._lock:
            if self._failure is not None:
                return None
            self._failure = failure
            failed, self._pending = self._pending, []
            return failed

    def _kill(self) -> None:
        if not ray.is_initialized():
            return
        for actor in self._actors:
            with contextlib.suppress(RayError):
                ray.kill(actor)
        with contextlib.suppress(Exception):
            remove_placement_group(self._room)

    def _log(self, rank: int) -> Path:
        assert self._logs is not None
        name = "" if self._group.name == "main" else f"{self._group.name}_"
        return self._logs / f"{name}rank_{rank}.log"

    def _tail(self, rank: int) -> str:
        if self._logs is None or not self._log(rank).is_file():
            return ""
        return "\n".join(self._log(rank).read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])


class _Node(RoleActor):
    """An actor that knows its machine."""

    def place(self) -> tuple[str, int]:
        return ray.util.get_node_ip_address(), os.getpid()


def _refuse_mixed(versions: list[dict[str, str]]) -> None:
    for rank, found in enumerate(versions):
        for name, version in found.items():
            if version != versions[0][name]:
                raise ConfigError(
                    f"trainer.placement.address: rank {rank} runs on a machine with {name} {version}, rank 0 on one "
                    f"with {versions[0][name]}. Install the same set everywhere."
                )


def _refusal(error: Exception, name: str, step: int | None) -> VerlError:
    """Why Ray does not take a call."""
    if isinstance(error, ObjectStoreFullError):
        return VerlError(
            f"{name}: Ray's object store has no room for the batch. Set trainer.placement.object_store_mib higher "
            "(of a cluster that was there before: `ray start --object-store-memory`), or a smaller batch."
        )
    return WorkerDied(0, name, step, f"Ray does not take the call ({type(error).__name__}: {error})")


def _ending(error: RayActorError) -> str:
    text = " ".join(str(error).split())
    if "node" in text and "died" in text and "worker process has died" not in text:
        return "its machine left the Ray cluster"
    return "the process ended (killed, out of memory, or a crash)"
