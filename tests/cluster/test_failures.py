"""What fails first in a group of processes is reported; each interleaving is forced."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from cluster.toy_roles import ToyHost

from verl.cluster import rpc
from verl.cluster.rpc import PendingCall, RemoteWorkerGroup
from verl.component import BuildContext
from verl.errors import WorkerDied
from verl.utils.progress import Progress


class Unheard:
    """A transport to two processes that never answer."""

    poll_takes_s, pids = 0.0, (0, 0)

    def __init__(self) -> None:
        self.progress = Progress(num_slots=2)

    def start(self, group: RemoteWorkerGroup, host: Any, context: BuildContext) -> None:
        """They are there."""

    def send(self, number: int, pending: PendingCall) -> None:
        """Nobody gets it."""

    def unresponsive(self, ranks: Sequence[int]) -> Sequence[int]:
        return ()

    def stacks(self, ranks: Sequence[int]) -> Mapping[int, str]:
        return dict.fromkeys(ranks, "")

    def state(self, rank: int) -> str:
        return ""

    tail = state

    def kill(self) -> None:
        """They are gone."""

    def close(self, is_idle: bool) -> None:
        self.progress.close()


@pytest.mark.parametrize("ends", ["before", "while it is looked who is to blame"])
def test_an_end_that_takes_long_to_describe_is_reported_and_not_the_error_of_a_sibling(ends, monkeypatch):
    monkeypatch.setattr(rpc, "GRACE_S", 0.0)
    is_described, is_blamed = threading.Event(), threading.Event()
    blame, failure_of = RemoteWorkerGroup._blame, RemoteWorkerGroup._failure_of

    def words() -> str:
        is_described.set()
        assert is_blamed.wait(60)
        return "the process ended"

    def blame_and_tell(group: RemoteWorkerGroup, *given: Any) -> None:
        blame(group, *given)
        is_blamed.set()

    def end(group: RemoteWorkerGroup) -> None:
        ending = threading.Thread(target=group.on_end, args=(1, words), daemon=True)
        ending.start()
        assert is_described.wait(60)

    def failure_of_one_that_ends(group: RemoteWorkerGroup, *given: Any) -> Any:
        end(group)
        return failure_of(group, *given)

    monkeypatch.setattr(RemoteWorkerGroup, "_blame", blame_and_tell)
    group = RemoteWorkerGroup(Unheard(), ToyHost(), BuildContext(), 2, 600.0)
    answer = group.submit("toy", "where", ())
    if ends == "before":
        end(group)
    else:
        monkeypatch.setattr(RemoteWorkerGroup, "_failure_of", failure_of_one_that_ends)
    group.on_error(0, 0, "ConnectionError: a sibling hung up")
    with pytest.raises(WorkerDied, match=r"rank 1 failed in toy\.where:\nthe process ended"):
        answer.result(timeout=60)
    group.close()
