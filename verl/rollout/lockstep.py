"""Episodes under tensor parallelism: one process plays, all compute every forward pass together.

first process   environments ── add, forget, advance ──> LeadingTurns ── the same calls ──> turns of the engine
                                                              │ broadcast, in order
the others                                                `_follow`   ── the same calls ──> turns of the engine
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from verl.models.parallel_info import wait_for
from verl.rollout.base import TurnEngine, TurnRequest, TurnResult

T = TypeVar("T")


def in_lockstep(group: Any, turns: TurnEngine, play: Callable[[TurnEngine], T]) -> T:
    """The result of `play`, which only the first process of the group calls. Collective over the group.

    Args:
        group: processes that compute every forward pass together; None if this process computes alone.
        turns: of the engine of this process.
    Raises:
        Exception: the exception of `play`, in all processes.
    """
    if group is None:
        return play(turns)
    import torch.distributed as dist

    channel = _Channel(group)
    if dist.get_rank(group):
        return _follow(turns, channel)
    leading = LeadingTurns(turns, channel)
    try:
        result = play(leading)
    except Exception as error:
        leading.release(_End(error=error))
        raise
    leading.release(_End(result))
    return result


class LeadingTurns(TurnEngine):
    """Turns in the first process of a group; the others repeat each call."""

    def __init__(self, turns: TurnEngine, channel: _Channel):
        self.turns, self.channel, self.dtype, self.experts = turns, channel, turns.dtype, turns.experts
        self._calls: list[TurnRequest | int] = []  # turns to add and episodes to forget, since the last `advance`

    @property
    def num_pending(self) -> int:
        return self.turns.num_pending + sum(isinstance(call, TurnRequest) for call in self._calls)

    def add(self, turn: TurnRequest) -> None:
        self._calls.append(turn)

    def forget(self, episode: int) -> None:
        self._calls.append(episode)

    def advance(self) -> list[TurnResult]:
        calls, self._calls = self._calls, []
        if not calls and not self.turns.num_pending:
            return []
        self.channel.send(calls, is_idle=not self.turns.num_pending)
        return _advance(self.turns, calls)

    def close(self) -> None:
        self._calls.clear()

    def release(self, end: _End) -> None:
        """Let the other processes return."""
        self.channel.send(end, is_idle=not self.turns.num_pending)


@dataclass(frozen=True)
class _End:
    """The result of the first process, or its error."""

    result: Any = None
    error: Exception | None = None


class _Channel:
    """Broadcasts from the first process of a group.

    A collective operation has a time limit, and environments may take longer. So while no turn is being generated the
    other processes wait in the store of torch.distributed, where waiting has no limit.
    """

    def __init__(self, group: Any):
        import torch.distributed as dist

        self.group, self.ranks = group, dist.get_process_group_ranks(group)
        self.store, self.rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
        self.key, self.number = f"verl/lockstep/{self._broadcast(secrets.token_hex(8))}", 0

    def send(self, message: Any, *, is_idle: bool) -> None:
        if is_idle:
            self.number += 1
            for rank in self.ranks[1:]:
                self.store.set(f"{self.key}/{self.number}/{rank}", "go on")
        self._broadcast(message)

    def receive(self, *, is_idle: bool) -> Any:
        if is_idle:
            self.number += 1
            key = f"{self.key}/{self.number}/{self.rank}"
            wait_for(self.store, [key])
            self.store.delete_key(key)
        return self._broadcast(None)

    def _broadcast(self, message: Any) -> Any:
        import torch.distributed as dist

        box = [message]
        dist.broadcast_object_list(box, src=self.ranks[0], group=self.group)
        return box[0]


def _follow(turns: TurnEngine, channel: _Channel) -> Any:
    """Repeat the calls of the first process; returns its result."""
    error: Exception | None = None
    while True:
        message = channel.receive(is_idle=not turns.num_pending)
        if isinstance(message, _End):
            error = message.error or error
        if error is not None:
            raise error
        if isinstance(message, _End):
            return message.result
        try:
            _advance(turns, message)
        except Exception as raised:  # noqa: BLE001 - raised in the first process too
            error = raised


def _advance(turns: TurnEngine, calls: list[TurnRequest | int]) -> list[TurnResult]:
    for call in calls:
        if isinstance(call, TurnRequest):
            turns.add(call)
        else:
            turns.forget(call)
    return turns.advance()
