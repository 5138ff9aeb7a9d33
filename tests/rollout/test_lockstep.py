"""Turns of two processes that compute each forward pass together: one plays, both generate the same."""

import json
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from verl.rollout.base import TurnEngine, TurnRequest, TurnResult
from verl.rollout.lockstep import in_lockstep

TIMEOUT_S = 3.0  # of a collective operation


class MeetingTurns(TurnEngine):
    """Each token is a collective operation; an episode ends after as many as it has tokens."""

    def __init__(self, log, fails=False):
        self.log, self.fails, self.pending = log, fails, {}

    @property
    def num_pending(self):
        return len(self.pending)

    def add(self, turn):
        self.log.append(f"add {turn.episode}")
        self.pending[turn.episode] = turn.max_new_tokens

    def forget(self, episode):
        self.log.append(f"forget {episode}")

    def advance(self):
        if self.pending:
            dist.barrier()
            if self.fails:
                raise ValueError("the engine is broken")
        self.pending = {episode: left - 1 for episode, left in self.pending.items()}
        ended = [episode for episode, left in self.pending.items() if not left]
        self.log.append(f"ended {ended}")
        self.pending = {episode: left for episode, left in self.pending.items() if left}
        return [TurnResult(episode, [1], [0.0], True) for episode in ended]


def turn(episode, tokens):
    return TurnRequest(episode, [0], 0, 0, 0, tokens)


def play(turns):
    """Episode 1 comes while 0 is generated; the last one after a wait longer than any collective operation may take."""
    found = []
    turns.add(turn(0, 3))
    assert turns.num_pending == 1
    found += turns.advance()
    turns.add(turn(1, 1))
    while turns.num_pending:
        found += turns.advance()
    assert turns.advance() == []
    time.sleep(1.5 * TIMEOUT_S)
    turns.forget(0)
    turns.add(turn(2, 1))
    found += turns.advance()
    return [drawn.episode for drawn in found]


def refuse(turns):
    turns.add(turn(0, 2))
    turns.advance()
    raise ValueError("the environment is broken")


def rank_of(rank, directory, case):
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", store, timedelta(seconds=TIMEOUT_S), world_size=2, rank=rank)
    log = []
    turns = MeetingTurns(log, fails=case == "engine")
    try:
        result = in_lockstep(dist.group.WORLD, turns, refuse if case == "environment" else play)
    except ValueError as error:
        result = str(error)
    (directory / f"{rank}.json").write_text(json.dumps([result, log]))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("case", "expected"),
    [("sound", [1, 0, 2]), ("environment", "the environment is broken"), ("engine", "the engine is broken")],
)
def test_both_processes_make_the_same_calls_and_come_to_the_same_end(tmp_path, case, expected):
    mp.start_processes(rank_of, (tmp_path, case), nprocs=2, start_method="fork")
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    assert found[0][0] == expected
    if case == "sound":
        assert found[0][1][:4] == ["add 0", "ended []", "add 1", "ended [1]"]
        assert found[0][1][-3:] == ["forget 0", "add 2", "ended [2]"]
