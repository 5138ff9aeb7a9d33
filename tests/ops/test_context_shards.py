"""The tokens of a packed line divided over ranks: each query sees the keys of its own row, however it is cut."""

import pytest
import torch
from cases import each_value_once

from verl.ops import context_shards
from verl.ops.context_shards import shard_line
from verl.ops.packing import pack

PROMPTS, RESPONSES = torch.tensor([5, 5, 5, 2, 1, 9]), torch.tensor([14, 3, 1, 7, 2, 30])


def line(share):
    mask = torch.arange(30) < RESPONSES[:, None]
    mask[:, 2::4] = False
    return pack(PROMPTS, RESPONSES, torch.tensor([0, 0, 0, 1, 2, 3]), mask, 9, share)


def seen_by(packing, query):
    """The entries of the line that a token of it sees, by the blocks of the whole line."""
    slots = packing.slots()
    slot, first, key = int(slots.out.index[query]), 0, 0
    for block in slots.blocks:
        if slot < first + block.count * block.queries:
            row, place = divmod(slot - first, block.queries)
            keys = slots.keys.index[key + row * block.keys : key + (row + 1) * block.keys]
            prefix = int(block.prefix_lengths[row]) if block.prefix else 0
            return [*keys[:prefix].tolist(), *keys[block.prefix : block.prefix + place + 1].tolist()]
        first, key = first + block.count * block.queries, key + block.count * block.keys
    raise AssertionError(query)


@pytest.mark.parametrize(("share", "piece", "size"), each_value_once([True, False], [1024, 4], [1, 2, 3, 64]))
def test_each_token_is_one_ranks_and_sees_its_row(share, piece, size, monkeypatch):
    monkeypatch.setattr(context_shards, "PIECE", piece)
    packing = line(share)
    shards = [shard_line(packing, size, rank) for rank in range(size)]
    most = max(shards[0].sizes)
    for shard in shards:
        seen = {}
        for block in shard.blocks:
            keys = block.entries[block.keys.index].view(block.count, block.width)
            for place in block.is_query.nonzero().tolist():
                visible = block.mask(None)[place[0], 0, place[1]]
                seen[int(block.queries[tuple(place)])] = keys[place[0]][visible].tolist()
        assert seen == {place: seen_by(packing, int(entry)) for place, entry in enumerate(shard.own)}
        assert torch.equal(packing.predictors.index[shard.predicted], shard.own[shard.predictors.index])
    places = torch.cat([torch.cat([s.own, torch.full((most - len(s.own),), -1)]) for s in shards])
    assert torch.equal(places[shards[0].padded], torch.arange(len(packing.tokens)))
    assert sum(shards[0].counts) == len(packing.predictors.index)


def test_ranks_come_to_equal_work_on_a_long_row():
    packing = pack(torch.tensor([1]), torch.tensor([4001]), torch.tensor([0]), torch.ones(1, 4001).bool(), 1, False)
    work = [sum(int(block.mask(None).sum()) for block in shard_line(packing, 4, rank).blocks) for rank in range(4)]
    assert max(work) < 1.01 * min(work)


def test_a_window_hides_what_is_behind_it():
    (block,) = (block for block in shard_line(line(False), 1, 0).blocks if block.count == 1 and block.width > 30)
    assert block.mask(7).sum(dim=-1).max() == 7
    assert torch.equal(block.mask(7).sum(dim=-1).flatten(), (block.positions.flatten() + 1).clamp(max=7))
