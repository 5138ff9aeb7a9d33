"""The actors of a group: hired in Ray, introduced to each other, listened to, and ended."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.cluster.base import Deadline, HostDescription
from verl.cluster.crew import BUILD_TIMEOUT_S, END_TIMEOUT_S, START_TIMEOUT_S
from verl.cluster.parcel import Parcel, unwrap
from verl.cluster.ray_actor import RoleActor, Told
from verl.cluster.ray_session import Session
from verl.cluster.versions import refuse_mixed
from verl.component import BuildContext
from verl.errors import WorkerDied, WorkerError, WorkerHung
from verl.utils.child_process import excerpt
from verl.utils.progress import Progress, ProgressWatch, report, state_of

GRACE_S = 0.5  # an error waits so long to be told: a sibling's death, where that is the cause, is told first
STACK_TIMEOUT_S = 5.0
LOOK_EVERY_S = 5.0
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
        call_timeout_s: without progress of any worker, after which a call under way names who is silent.
    """

    name: str
    size: int
    num_cpus: float
    num_gpus: float
    num_threads: int
    strategy: str
    call_timeout_s: float


class RayCrew:
    """Actors numbered by rank, in a placement group of their own.

    Attributes:
        pids: process ids by rank, each on its own machine, once `start` has returned.
        shares_store: all actors share the driver's memory: they are on its machine.
    """

    shares_store = False

    def __init__(self, session: Session, group: Group, logs: Path | None):
        self._group, self._logs = group, logs
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
        self._actors: list[Any] = []
        self._counts: dict[int, int] = {}  # of each worker's progress, when it was asked last
        self.pids: list[int] = []
        self._room = session.reserve([self._bundle()] * group.size, group.strategy)

    def start(self, host: HostDescription, context: BuildContext) -> None:
        """Hire the actors and build the roles in each.

        Raises:
            WorkerError: a worker could not build its roles.
            WorkerDied: a worker ended while it was starting; WorkerHung: it did not come to an end with that.
            ConfigError: the machines have different versions of what must be the same.
        """
        size = self._group.size
        self._actors = [self._hire(rank) for rank in range(size)]
        here = self._gather("start", [actor.versions.remote() for actor in self._actors], START_TIMEOUT_S)
        refuse_mixed(here, "trainer.placement.address")
        places = self._gather("start", [actor.place.remote() for actor in self._actors], START_TIMEOUT_S)
        nodes, self.pids = [place.address for place in places], [place.pid for place in places]
        self.shares_store = {place.node for place in places} == {ray.get_runtime_context().get_node_id()}
        is_one_machine = len(set(nodes)) == 1
        meeting = "127.0.0.1" if is_one_machine else nodes[0]
        (address,) = self._gather("start", [self._actors[0].free_address.remote(meeting)], START_TIMEOUT_S)
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

    def call(
        self, role: str, method: str, shares: Sequence[Parcel], rows: Sequence[Any], heard: Sequence[int]
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
        told: list[Told] = self._gather(name, refs, timeout_s, step, lambda one: one[1] is not None)
        return [unwrap(parcel) for parcel, _ in told]

    def _gather(
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
                        self._look_for_the_stopped(ranks, rank, name, step, found[rank][1])
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

    def _look_for_the_stopped(self, ranks: list[int], failed: int, name: str, step: int | None, error: str) -> None:
        """An error may be that of a worker that has waited for one that does nothing."""
        silent = sorted(set(ranks) - self._told_progress(ranks).keys()) if ranks else []
        if silent:
            rank = silent[0]
            state = self._state(rank) or ": it does not react at all"
            raise WorkerHung(
                rank, name, step, f"the process does nothing{state}. Rank {failed} failed for it:\n{error}"
            )

    def _state(self, rank: int) -> str:
        """What the system says of a worker on this machine."""
        found = state_of(self.pids[rank]) if self.shares_store and self.pids else ""
        return f": {found}" if found else ""

    def _silence(self, ranks: list[int], name: str, step: int | None, timeout_s: float) -> WorkerHung:
        """Who does not answer: first a process that does not even say where it stands."""
        asked = {rank: self._actors[rank].stack.options(concurrency_group="watch").remote() for rank in ranks}
        stacks, end = {}, Deadline(STACK_TIMEOUT_S)
        for rank, ref in asked.items():
            try:
                stacks[rank] = ray.get(ref, timeout=end.left_s)
            except (RayError, GetTimeoutError):
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


class _Place(NamedTuple):
    address: str
    pid: int
    node: str


class _Node(RoleActor):
    """An actor that knows its machine."""

    def place(self) -> _Place:
        return _Place(ray.util.get_node_ip_address(), os.getpid(), ray.get_runtime_context().get_node_id())


def _ending(error: RayActorError) -> str:
    text = " ".join(str(error).split())
    if "node" in text and "died" in text and "worker process has died" not in text:
        return "its machine left the Ray cluster"
    return "the process ended (killed, out of memory, or a crash)"
