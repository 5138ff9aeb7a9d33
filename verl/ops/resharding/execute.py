"""Executes a resharding plan: slices are sent from rank to rank, tensor by tensor, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.ops.resharding.layout import intersection, within
from verl.ops.resharding.plan import Plan
from verl.ops.resharding.rounds import Move
from verl.utils.progress import report

LIMIT_BYTES = 64 * 2**20


Held = Mapping[str, Tensor] | Callable[[str], Tensor]  # this rank's slices under the source of a plan, by name


def reshard(plan: Plan, held: Held, rank: int, **options: Any) -> Iterator[tuple[str, Tensor]]:
    """This rank's slices under the plan's target, one tensor after the other. All ranks take part, to the end.

    Args:
        plan: from `verl.ops.resharding.plan.reshard_plan`, the same on every rank.
        held: this rank's slices under the plan's source, by name, or a function that gives them.
        rank: of this process in the plan's meshes and in `group`.
        options: of `reshard_plans`.
    Yields:
        (name, slice) in the order of the plan's target, tensors that this rank holds there only.
    """
    return reshard_plans([(plan, held)], rank, **options)


def reshard_plans(
    plans: Iterable[tuple[Plan, Held]],
    rank: int,
    *,
    dtypes: Mapping[str, torch.dtype],
    device: torch.device | str = "cpu",
    limit_bytes: int = LIMIT_BYTES,
    group: Any = None,
    lend: bool = False,
    received: Callable[[int], object] = lambda num_bytes: None,
) -> Iterator[tuple[str, Tensor]]:
    """`reshard` for a plan in consecutive parts (`Plan.restricted`), each with what this rank holds of it.

    While the caller uses the tensors of a round, the next round is being sent, of the next part too. Beside what the
    caller keeps of the yielded tensors, a rank needs memory for the tensors of one window and for what it sends and
    receives in two rounds, each at most `limit_bytes`. Stages of a pipeline send at the same time, so tensors of
    several stages wait here for those before them: to bound that, carry out the plan in parts.

    Args:
        dtypes: of all tensors, by name.
        device: where slices are put together and received.
        group: of torch.distributed; None for all processes.
        lend: return slices that this rank already holds as views, without a copy.
        received: called with the bytes of each part that has arrived from another rank.
    """
    pending: _Round | None = None
    for plan, held in plans:
        own = held if callable(held) else held.__getitem__
        building = _Building(plan, own, rank, dtypes, torch.device(device), lend)
        for window in plan.windows(limit_bytes):
            rounds = list(window.rounds(rank))
            for number, moves in enumerate(rounds, start=1):
                begun = _Round(moves, building, group, window.names if number == len(rounds) else ())
                if pending is not None:
                    yield from pending.finish(received)
                pending = begun
    if pending is not None:
        yield from pending.finish(received)


class _Round:
    """Sends and receives of this rank that were started together.

    Args:
        names: tensors that are complete after this round.
    """

    def __init__(self, moves: list[Move], building: _Building, group: Any, names: Sequence[str]):
        import torch.distributed as dist

        self._building, self._names = building, names
        self._arriving: list[tuple[Move, Tensor]] = []
        ops = []
        for move in moves:
            if move.source == building.rank:
                ops.append(dist.P2POp(dist.isend, building.part(move), group=group, group_peer=move.target))
            elif move.target == building.rank:
                buffer = building.receive_buffer(move)
                self._arriving.append((move, buffer))
                ops.append(dist.P2POp(dist.irecv, buffer, group=group, group_peer=move.source))
        self._ops = ops  # keeps what is sent until it was
        self._works = dist.batch_isend_irecv(ops) if ops else []

    def finish(self, received: Callable[[int], object]) -> Iterator[tuple[str, Tensor]]:
        """Wait for the round, and yield the tensors that are complete now and next in order."""
        for work in self._works:
            work.wait()
        self._ops.clear()
        report()
        for move, part in self._arriving:
            received(part.nbytes)
            self._building.put(move, part)
        yield from self._building.complete(self._names)


class _Building:
    """The slices of one rank during assembly, in the order of the target."""

    def __init__(
        self,
        plan: Plan,
        own: Callable[[str], Tensor],
        rank: int,
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
        lend: bool,
    ):
        self.plan, self.own, self.rank, self.dtypes, self.device = plan, own, rank, dtypes, device
        self._lend = lend
        self._waiting = deque(name for name in plan.target.tensors if plan.target.holds(rank, name) is not None)
        self._complete: set[str] = set()
        self._begun: dict[str, Tensor] = {}

    def complete(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Mark tensors as complete, and return those that are next in order."""
        self._complete.update(names)
        while self._waiting and self._waiting[0] in self._complete:
            done = self._waiting.popleft()
            yield done, self._tensor(done)
            self._begun.pop(done, None)

    def put(self, move: Move, part: Tensor) -> None:
        """Copy a received part into its tensor."""
        box = self.plan.target.holds(self.rank, move.name)
        assert box is not None
        self._tensor(move.name)[within(move.box, box)] = part

    def part(self, move: Move) -> Tensor:
        """Contiguous data that this rank sends."""
        box = self.plan.source.holds(self.rank, move.name)
        assert box is not None
        return self.own(move.name)[within(move.box, box)].detach().contiguous()

    def receive_buffer(self, move: Move) -> Tensor:
        """Buffer in which a part is received."""
        shape = [stop - start for start, stop in move.box]
        return torch.empty(shape, dtype=self.dtypes[move.name], device=self.device)

    def _tensor(self, name: str) -> Tensor:
        """The slice as far as it is known: what this rank held already is laid in at the beginning."""
        if name not in self._begun:
            box, before = (side.holds(self.rank, name) for side in (self.plan.target, self.plan.source))
            assert box is not None
            if self._lend and before is not None and intersection(box, before) == box:
                return self.own(name)[within(box, before)].detach()
            shape = [stop - start for start, stop in box]
            self._begun[name] = torch.empty(shape, dtype=self.dtypes[name], device=self.device)
            if before is not None and (shared := intersection(box, before)) is not None:
                self._begun[name][within(shared, box)] = self.own(name)[within(shared, before)].detach()
        return self._begun[name]
