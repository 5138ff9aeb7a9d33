"""Roles in Ray actors, on this machine or on a cluster: the same calls, futures and errors as with sibling processes.

    driver ──batch──> object store ──> actor 0, actor 1, ...     each takes its rows from where the batch lies
           <─────replies───────── object store <──                           rows joined in their order
                                                   actor 0 <──gloo/nccl──> actor 1

Where actors are on other machines than the driver, each is sent its share, so that no row goes to two machines.
An error in one worker, its death, or its silence fails the call under way with the rank, the call and the step, and
ends the whole group. `RayLauncher` creates the actors in a placement group, connects them and ends them.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, ObjectStoreFullError, RayActorError, RayError
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.cluster.launcher import BUILD_TIMEOUT_S, END_TIMEOUT_S, START_TIMEOUT_S, refuse_mixed_versions
from verl.cluster.ray.ray_init import RaySession
from verl.cluster.ray.ray_worker import RayReply, RoleWorker
from verl.cluster.rpc import (
    ColocatedRoles,
    Deadline,
    PendingCall,
    gave_up_on_sibling,
    missed_exchange,
    row_assignment,
)
from verl.cluster.serialization import Serialized, deserialize, serialize
from verl.cluster.shm_channel import ShmBlockPool
from verl.component import BuildContext
from verl.dispatch import dispatch_of
from verl.errors import VerlError, WorkerDied, WorkerError, WorkerHung
from verl.utils.child_process.exit_report import excerpt
from verl.utils.progress import Progress, ProgressWatch, report, state_of

GRACE_S = 0.5  # delay before an error is reported, so that a sibling's death that caused it is reported first
STACK_TIMEOUT_S = 5.0
LOOK_EVERY_S = 5.0
PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])


@dataclass(frozen=True)
class RayRoleGroup:
    """Workers that hold the same roles.

    Attributes:
        name: of the pool, for logs.
        size: workers.
        num_cpus, num_gpus: of each.
        num_threads: that torch may use in each.
        strategy: of Ray's placement group.
        call_timeout_s: without progress of any worker, after which a call under way names who is silent.
    """

    name: str
    size: int
    num_cpus: float
    num_gpus: float
    num_threads: int
    strategy: str
    call_timeout_s: float


class RayLauncher:
    """Actors numbered by rank, in a placement group of their own.

    Attributes:
        pids: process ids by rank, each on its own machine, once `start` has returned.
        shares_store: all actors share the driver's memory: they are on its machine.
    """

    shares_store = False

    def __init__(self, session: RaySession, group: RayRoleGroup, logs: Path | None):
        self._group, self._logs = group, logs
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
        self._actors: list[Any] = []
        self._counts: dict[int, int] = {}  # of each worker's progress, when it was asked last
        self.pids: list[int] = []
        self._room = session.reserve([self._bundle()] * group.size, group.strategy)

    def start(self, host: ColocatedRoles, context: BuildContext) -> None:
        """Hire the actors and build the roles in each.

        Raises:
            WorkerError: a worker could not build its roles.
            WorkerDied: a worker ended while it was starting; WorkerHung: it did not come to an end with that.
            ConfigError: the machines have different versions of what must be the same.
        """
        size = self._group.size
        self._actors = [self._hire(rank) for rank in range(size)]
        here = self._await_replies("start", [actor.versions.remote() for actor in self._actors], START_TIMEOUT_S)
        refuse_mixed_versions(here, "trainer.placement.address")
        places = self._await_replies("start", [actor.place.remote() for actor in self._actors], START_TIMEOUT_S)
        nodes, self.pids = [place.address for place in places], [place.pid for place in places]
        self.shares_store = {place.node for place in places} == {ray.get_runtime_context().get_node_id()}
        is_one_machine = len(set(nodes)) == 1
        meeting = "127.0.0.1" if is_one_machine else nodes[0]
        (address,) = self._await_replies("start", [self._actors[0].free_address.remote(meeting)], START_TIMEOUT_S)
        search_path, refs = tuple(map(os.path.abspath, sys.path)), []
        device = "cuda:0" if context.device.startswith("cuda") else context.device  # Ray shows each the GPU it gives it
        for rank, actor in enumerate(self._actors):
            own = replace(context, rank=rank, world_size=size, device=device, tokenizer=None)
            env = {"VERL_RENDEZVOUS": address, "RANK": str(rank), "WORLD_SIZE": str(size)}
            if is_one_machine and sys.platform == "linux":
                env["GLOO_SOCKET_IFNAME"] = "lo"  # no need to resolve the machine's name
            refs.append(actor.start.remote(pickle.dumps((host, own)), search_path, env, self._group.num_threads))
        self.answers("start", None, refs, max(self._group.call_timeout_s, BUILD_TIMEOUT_S))

    def _hire(self, rank: int) -> Any:
        log = None if self._logs is None else str(self._log(rank))
        env = {
            "PYTHONPATH": os.pathsep.join(filter(None, [PACKAGE_ROOT, os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": str(self._group.num_threads),
        }
        for name in ("VERL_STRICT_DATA_CHECK", "CUBLAS_WORKSPACE_CONFIG"):
            if name in os.environ:
                env[name] = os.environ[name]
        actor = ray.remote(concurrency_groups={"watch": 1})(_RayWorker).options(
            num_cpus=self._group.num_cpus,
            num_gpus=self._group.num_gpus,
            runtime_env={"env_vars": env},
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._room, placement_group_bundle_index=rank),
        )
        return actor.remote(log)

    def _bundle(self) -> dict[str, float]:
        wanted = {"CPU": self._group.num_cpus, "GPU": self._group.num_gpus}
        return {name: count for name, count in wanted.items() if count} or {"CPU": 0.001}

    def call(
        self, role: str, method: str, shares: Sequence[Serialized], rows: Sequence[Any], heard: Sequence[int]
    ) -> list[Any]:
        """Call every actor.

        Args:
            shares: what each is sent; one object may be the share of all.
            rows: of the batch that each is sent, those that are for it; None for all.
            heard: the ranks that are to send their results.
        Returns:
            References to the answers.
        """
        stored = {id(share): ray.put(tuple(share)) for share in {id(share): share for share in shares}.values()}
        sent = [stored[id(share)] for share in shares]
        return [
            actor.call.remote(role, method, share, None if own is None else own.numpy(), rank in heard)
            for rank, (actor, share, own) in enumerate(zip(self._actors, sent, rows, strict=True))
        ]

    def answers(self, name: str, step: int | None, refs: Sequence[Any], timeout_s: float) -> list[Any]:
        """What the workers answered, by rank.

        Raises:
            WorkerError: one of them raised; WorkerDied where one has ended, WorkerHung where one is silent.
        """
        told: list[RayReply] = self._await_replies(name, refs, timeout_s, step, lambda one: one[1] is not None)
        return [deserialize(parcel) for parcel, _ in told]

    def _await_replies(
        self,
        name: str,
        refs: Sequence[Any],
        timeout_s: float,
        step: int | None = None,
        failed: Callable | None = None,
    ) -> list[Any]:
        waiting, found, look_every_s = list(refs), {}, min(LOOK_EVERY_S, timeout_s / 5)
        with contextlib.closing(Progress(num_slots=len(refs))) as seen:
            watch = ProgressWatch(seen, timeout_s, look_every_s=look_every_s + 2 * STACK_TIMEOUT_S)
            while waiting:
                ready, waiting = ray.wait(waiting, timeout=look_every_s)
                ranks = [refs.index(ref) for ref in waiting]
                if not ready and watch.idle_s >= timeout_s / 2:  # workers are asked only where it matters
                    self._note_progress(ranks, seen)
                if not ready and watch.is_overdue:
                    raise self._silence(ranks, name, step, timeout_s)
                for ref in ready:
                    rank = refs.index(ref)
                    seen.advance(slot=rank)
                    found[rank] = self._get(ref, rank, name, step)
                    if failed is not None and failed(found[rank]):
                        self._look_for_the_dead(refs, waiting, name, step)
                        self._look_for_the_hung(refs, waiting, rank, name, step, found[rank][1])
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

    def _note_progress(self, ranks: Sequence[int], seen: Progress) -> None:
        """Advance the slot of each worker that has done something since it was asked before."""
        for rank, (count, _) in self._told_progress(ranks).items():
            if count != self._counts.get(rank):
                self._counts[rank] = count
                seen.advance(slot=rank)
                report()  # to whoever waits for this process

    def _told_progress(self, ranks: Sequence[int]) -> dict[int, tuple[int, str]]:
        """By rank, of those that answer: what they say of their progress."""
        asked = [self._actors[rank].progress.options(concurrency_group="watch").remote() for rank in ranks]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=STACK_TIMEOUT_S)
        told = {}
        for rank, ref in zip(ranks, asked, strict=True):
            if ref in answered:
                with contextlib.suppress(RayError):  # it has ended: whoever waits for its answer is told
                    told[rank] = ray.get(ref)
        return told

    def _look_for_the_hung(
        self, refs: Sequence[Any], waiting: Sequence[Any], failed: int, name: str, step: int | None, error: str
    ) -> None:
        """An error may be that of a worker that has waited for one which does nothing, or hangs elsewhere."""
        _, unanswered = ray.wait(list(waiting), num_returns=len(waiting), timeout=0) if waiting else ([], [])
        ranks = [refs.index(ref) for ref in unanswered]
        silent = sorted(set(ranks) - self._told_progress(ranks).keys()) if ranks else []
        if silent:
            rank = silent[0]
            state = self._state(rank) or ": it does not react at all"
            raise WorkerHung(
                rank, name, step, f"the process does nothing{state}. Rank {failed} failed for it:\n{error}"
            )
        if gave_up_on_sibling(error):
            blamed, detail = missed_exchange(failed, error, self._stacks(ranks))
            raise WorkerHung(blamed, name, step, detail)

    def _stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Where workers stand, by rank; empty of one that does not react."""
        asked = {rank: self._actors[rank].stack.options(concurrency_group="watch").remote() for rank in ranks}
        stacks, end = dict.fromkeys(ranks, ""), Deadline(STACK_TIMEOUT_S)
        for rank, ref in asked.items():
            with contextlib.suppress(RayError, GetTimeoutError):
                stacks[rank] = ray.get(ref, timeout=end.left_s)
        return stacks

    def _state(self, rank: int) -> str:
        """What the system says of a worker on this machine."""
        found = state_of(self.pids[rank]) if self.shares_store and self.pids else ""
        return f": {found}" if found else ""

    def _silence(self, ranks: list[int], name: str, step: int | None, timeout_s: float) -> WorkerHung:
        """Who does not answer: first a process that does not even say where it stands."""
        stacks = self._stacks(ranks)
        for rank in ranks:
            if not stacks[rank]:
                at_all = f"no answer within {timeout_s:g} s, and the process does not react at all{self._state(rank)}"
                return WorkerHung(rank, name, step, f"{at_all}\n{self._tail(rank)}")
        where = "\n".join(f"rank {rank} stands at:\n{stack}" for rank, stack in stacks.items())
        return WorkerHung(ranks[0], name, step, f"no answer within {timeout_s:g} s, and no progress meanwhile\n{where}")

    def end(self) -> None:
        """Ask the actors to let go of what they hold, if they do so soon."""
        if self._actors and ray.is_initialized():
            with contextlib.suppress(RayError):
                asked = [actor.end.remote() for actor in self._actors]
                ray.wait(asked, num_returns=len(asked), timeout=END_TIMEOUT_S)

    def kill(self) -> None:
        """End every actor at once, and give the room back; may be called again."""
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
        return "\n".join(excerpt(self._log(rank)).lines)


class _NodeBundle(NamedTuple):
    address: str
    pid: int
    node: str


class _RayWorker(RoleWorker):
    """An actor that knows its machine."""

    def place(self) -> _NodeBundle:
        return _NodeBundle(ray.util.get_node_ip_address(), os.getpid(), ray.get_runtime_context().get_node_id())


def _ending(error: RayActorError) -> str:
    text = " ".join(str(error).split())
    if "node" in text and "died" in text and "worker process has died" not in text:
        return "its machine left the Ray cluster"
    return "the process ended (killed, out of memory, or a crash)"


class RayWorkerGroup:
    """Every role of a host in each of the actors of a group.

    Args:
        session: closed with the group.
    Raises:
        WorkerError: a worker could not build its roles.
        WorkerDied: a worker ended while it was starting.
        ConfigError: the machines have different versions of what must be the same.
    """

    shares_memory = False

    def __init__(self, session: RaySession, group: RayRoleGroup, host: ColocatedRoles, context: BuildContext):
        self.world_size, self.step = group.size, None
        self._shares = row_assignment(host.shardings(), group.size)
        self._session, self._group, self._types = session, group, host.worker_types()
        self._lock = threading.Lock()
        self._failure: VerlError | None = None
        self._pending: list[PendingCall] = []
        self._inbox: SimpleQueue[tuple[PendingCall, list[Any]] | None] = SimpleQueue()
        self._joined = ShmBlockPool(shared=False)
        self._launcher: RayLauncher | None = None
        self._collector = threading.Thread(target=self._collect, daemon=True)
        logs = None if context.run_dir is None else context.run_dir.absolute() / "workers"
        try:
            self._launcher = RayLauncher(session, group, logs)
            self._launcher.start(host, context)
        except BaseException:
            self._kill()
            self.close()
            raise
        self._collector.start()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank, each on its own machine."""
        return [] if self._launcher is None else self._launcher.pids

    def submit(self, role: str, method: str, args: tuple[Any, ...]) -> Future[Any]:
        """Send a call to every actor. Its future fails with a WorkerError; after `close`, with a VerlError."""
        dispatch = dispatch_of(self._types[role], method)
        pending = PendingCall(f"{role}.{method}", self.step, dispatch, args, self._shares[role])
        with self._lock:
            if self._failure is not None:
                pending.future.set_exception(self._failure)
                return pending.future
            try:
                refs = self._launcher.call(role, method, *self._sent(pending), pending.heard)
            except (RayError, OSError, ValueError) as error:
                pending.future.set_exception(_refusal(error, pending.name, self.step))
                return pending.future
            self._pending.append(pending)
            self._inbox.put((pending, refs))
        return pending.future

    def _sent(self, pending: PendingCall) -> tuple[list[Serialized], list[Any]]:
        """What each rank is sent, one object to all who are sent the same; and which of its rows are for that rank."""
        args, division = pending.args, pending.division
        if division is None:
            return [serialize(args)] * self.world_size, [None] * self.world_size
        if self._launcher.shares_store:  # all may read all of it: they take their rows themselves, side by side
            return [serialize(args)] * self.world_size, [division.rows[part] for part in pending.shares.of_rank]
        shares = [serialize((part, *args[1:])) for part in division.split_rows(args[0])]
        return [shares[part] for part in pending.shares.of_rank], [None] * self.world_size

    def close(self) -> None:
        """End the actors, asked first unless they are at work. Leaves nothing running; may be called again."""
        ended = VerlError("The workers of this run were ended: close() was called.")
        is_idle, withdrawn = not self._pending, self._withdraw(ended)
        for pending in withdrawn or []:
            pending.future.set_exception(ended)
        if is_idle and withdrawn is not None and self._launcher is not None:
            self._launcher.end()
        self._kill()
        self._inbox.put(None)
        if self._collector.is_alive():
            self._collector.join(timeout=END_TIMEOUT_S)
        self._session.close()

    def _collect(self) -> None:
        """Take in the answers, call by call."""
        while (received := self._inbox.get()) is not None:
            pending, refs = received
            try:
                answers = self._launcher.answers(pending.name, pending.step, refs, self._group.call_timeout_s)
                result = pending.result(dict(enumerate(answers)), self._joined.empty)
            except WorkerError as failure:
                self._fail(failure)
            except (RayError, OSError) as error:
                broken = f"the connection to Ray broke ({type(error).__name__}: {error})"
                self._fail(WorkerDied(0, pending.name, pending.step, broken))
            except Exception as error:  # noqa: BLE001 - the caller's, who waits for the future
                if self._taken(pending):
                    pending.future.set_exception(error)
            else:
                if self._taken(pending):
                    pending.future.set_result(result)

    def _taken(self, pending: PendingCall) -> bool:
        """Whether the call was still under way; it is not any more."""
        with self._lock:
            is_open = pending in self._pending
            if is_open:
                self._pending.remove(pending)
            return is_open

    def _fail(self, failure: WorkerError) -> None:
        """End the actors, and fail every call under way and all that come."""
        failed = self._withdraw(failure)
        self._kill()
        for pending in failed or []:
            pending.future.set_exception(failure)

    def _withdraw(self, failure: VerlError) -> list[PendingCall] | None:
        """Let no call through from here on. Returns those under way; None if something had failed before."""
        with self._lock:
            if self._failure is not None:
                return None
            self._failure = failure
            failed, self._pending = self._pending, []
            return failed

    def _kill(self) -> None:
        if self._launcher is not None:
            self._launcher.kill()


def _refusal(error: Exception, name: str, step: int | None) -> VerlError:
    """Why Ray does not take a call."""
    if isinstance(error, ObjectStoreFullError):
        return VerlError(
            f"{name}: Ray's object store has no room for the batch. Set trainer.placement.object_store_mib higher "
            "(of a cluster that was there before: `ray start --object-store-memory`), or a smaller batch."
        )
    return WorkerDied(0, name, step, f"Ray does not take the call ({type(error).__name__}: {error})")
