"""An answer that its processes put together themselves is the one that the driver would have joined."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cluster.toy_roles import ToyHost

from verl.cluster.batch_partition import BatchPartition, OutputShapes, SharedOutput, WrittenOutput, write_output
from verl.cluster.local_worker_group import LocalWorkerGroup
from verl.cluster.rpc import PendingCall, RowAssignment, role_handles
from verl.cluster.shm_channel import ShmBlockPool
from verl.component import BuildContext
from verl.dispatch import Dispatch
from verl.protocol import DataProto

pytestmark = pytest.mark.xdist_group("cluster")

EMPTY = ShmBlockPool(shared=False).empty


def batch(rows: int, prompt: int = 300, response: int = 200) -> DataProto:
    lengths = torch.randint(1, prompt + response, (rows, 1), generator=torch.Generator().manual_seed(rows))
    mask = (torch.arange(prompt + response) < lengths).long()
    responses = torch.arange(rows * response).view(rows, response)
    return DataProto.from_dict({"attention_mask": mask, "responses": responses}, {"text": list(range(rows))})


def scored(rows: DataProto, each: int = 1, cut: int = 0) -> DataProto:
    """What a role answers: `each` rows to one, and `cut` tokens fewer."""
    sample = torch.arange(each).repeat(len(rows))[:, None]
    values = rows["responses"].double().repeat_interleave(each, 0)[:, cut:] / 7 + sample
    tensors = {"values": values, "own": torch.arange(each * len(rows) * 3).view(-1, 3).to(torch.bfloat16)}
    return DataProto.from_dict(
        tensors, {"said": [str(n) for n in rows["text"] for _ in range(each)]}, {"temperature": 1}
    )


def assert_alike(found: DataProto, expected: DataProto) -> None:
    assert list(found.batch) == list(expected.batch)
    for name, x in expected.batch.items():
        assert found[name].dtype == x.dtype
        assert torch.equal(found[name], x), name
        assert found.producer(name) == expected.producer(name)
    assert found["said"].tolist() == expected["said"].tolist()
    assert (found.meta_info, len(found)) == (expected.meta_info, len(expected))


def expectations(given: DataProto, answer: DataProto) -> OutputShapes:
    seen = OutputShapes()
    seen.note("toy.score", given, answer)
    return seen


@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize(("rows", "parts"), [(50, 2), (51, 4), (100, 1)])
def test_rows_that_are_written_into_their_places_are_joined(rows, parts, each):
    first, given = batch(40, 310, 190), batch(rows)
    layout = expectations(first, scored(first, each)).layout("toy.score", given)
    memory = np.full(layout.size, 255, np.uint8)
    division = BatchPartition(given, parts)
    answers = [scored(part, each) for part in division.split_rows(given)]
    placed = [write_output(answer, own, layout, memory) for answer, own in zip(answers, division.rows, strict=True)]
    assert all(type(answer) is WrittenOutput for answer in placed)
    room = SharedOutput(layout, lambda: memory)
    whole = room.join(placed, division, EMPTY)
    assert room.was_used
    assert_alike(whole, division.join(answers))
    assert whole["values"].data_ptr() == memory.ctypes.data  # and not copied


def test_answers_that_are_not_what_was_expected_are_joined_by_the_driver():
    given = batch(60)
    layout = expectations(given, scored(given)).layout("toy.score", given)
    memory, division = np.zeros(layout.size, np.uint8), BatchPartition(given, 3)
    cuts = [0, 5, 0]  # the second one is shorter
    answers = [scored(part, cut=cut) for part, cut in zip(division.split_rows(given), cuts, strict=True)]
    placed = [write_output(answer, own, layout, memory) for answer, own in zip(answers, division.rows, strict=True)]
    assert [type(answer) is WrittenOutput for answer in placed] == [True, False, True]
    room = SharedOutput(layout, lambda: memory)
    assert_alike(room.join(placed, division, EMPTY), division.join(answers))
    assert not room.was_used


def test_only_what_follows_from_the_batch_is_expected():
    given = batch(60)
    known = expectations(given, scored(given))
    assert known.layout("toy.score", batch(90, 20, 150)).columns[0] == ("values", torch.float64, (90, 150))
    assert known.layout("toy.other", given) is None
    assert known.layout("toy.score", batch(2, 4, 4)) is None  # too little to matter
    known.note("toy.score", given, scored(given, cut=3))  # something else than before
    assert known.layout("toy.score", given) is None
    own_length = expectations(given, scored(given, cut=3))
    assert own_length.layout("toy.score", given) is None


def test_those_whose_answers_do_not_matter_are_not_heard():
    pairs = RowAssignment((0, 0, 1, 1))  # two processes work on each share
    heard = {
        kind: PendingCall("toy.x", 1, Dispatch(*kind), (batch(8),), pairs).heard
        for kind in [(True, True), (True, False), (False, False), (False, False, True)]
    }
    assert heard == {
        (True, True): [0, 2],
        (True, False): [0],
        (False, False): [0],
        (False, False, True): [0, 1, 2, 3],
    }


def wide(rows: int, number: float) -> DataProto:
    return DataProto.from_dict({"wide": torch.arange(rows * 256.0).view(rows, 256) + number})


def test_processes_write_their_answers_into_the_drivers_memory_which_is_theirs_until_they_are_dropped():
    host = ToyHost()
    cluster = LocalWorkerGroup(host, BuildContext(), 2, num_threads=1)
    try:
        toy = role_handles(cluster, host)["toy"]
        toy.back(wide(200, 0.0)).result(timeout=60)  # what an answer looks like is known from here on
        kept = [toy.back(wide(rows, float(rows))).result(timeout=60)["wide"] for rows in (200, 333, 70, 1, 200)]
        lent = [block for block in cluster._post.blocks._all.values() if block.holders]
        inside = [any(_begin(b) <= x.data_ptr() < _begin(b) + b.size for b in lent) for x in kept]
        assert inside == [True, True, True, False, True]  # a row is too little
        for rows, x in zip((200, 333, 70, 1, 200), kept, strict=True):
            assert torch.equal(x, wide(rows, float(rows))["wide"])
        del kept, x
        toy.where().result(timeout=60)  # the workers say that they have done
        assert not any(block.holders for block in cluster._post.blocks._all.values())
    finally:
        cluster.close()


def _begin(block) -> int:
    return np.frombuffer(block.memory, np.uint8).ctypes.data
