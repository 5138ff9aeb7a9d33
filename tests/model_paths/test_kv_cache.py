"""Slots hold what transformers' own cache holds of each row, wherever it lies."""

import pytest
import torch
from transformers import DynamicCache, MistralConfig, Qwen2Config

from verl.model_paths.kv_cache import CacheCall, SlotCache, keeps_all_tokens

CONFIG = Qwen2Config(num_hidden_layers=1, num_attention_heads=2, hidden_size=8)


def states(rows, length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 2, length, 4, generator=generator), torch.randn(rows, 2, length, 4, generator=generator)


def written(cache, call, new):
    cache.prepare(call)
    return cache.update(*new, 0)


@pytest.mark.parametrize("columns", ["one of all", "of each row"])
def test_they_hold_what_a_dynamic_cache_holds_through_growth_and_moves(columns):
    own, slots, rows = DynamicCache(config=CONFIG), SlotCache(CONFIG, 4, 200), 4
    prompt = states(rows, 3, 0)
    own.update(*prompt, 0)
    written(slots, CacheCall(0, torch.arange(3).expand(rows, 3), rows, 3), prompt)
    for step in range(3, 150):
        new = states(rows, 1, step)
        column = slice(step, step + 1) if columns == "one of all" else torch.full((rows, 1), step)
        found = written(slots, CacheCall(0, column, 4, step + 1, step + 1), new)
        for mine, theirs in zip(found, own.update(*new, 0), strict=True):
            assert torch.equal(mine, theirs)
        if step in (4, 40, 41):  # the last row moves to the place of the first
            own.batch_select_indices(torch.tensor([rows - 1, *range(1, rows - 1)]))
            slots.copy([rows - 1], [0], step + 1)
            rows -= 1


def test_a_new_token_moves_nothing_while_there_is_memory():
    cache = SlotCache(CONFIG, 1, 40)
    places = {
        written(cache, CacheCall(0, slice(i, i + 1), 1, i + 1, i + 1), states(1, 1, i))[0].data_ptr() for i in range(40)
    }
    assert len(places) == 1


def test_slots_that_change_places_keep_what_they_hold_also_where_no_memory_was_before():
    cache = SlotCache(CONFIG, 9, 40)
    keys, values = written(cache, CacheCall(0, torch.arange(5).expand(2, 5), 2, 5, 5), states(2, 5, 0))
    before = keys.clone(), values.clone()
    cache.copy([0, 1], [1, 0], 5)
    for mine, theirs in zip((keys, values), before, strict=True):
        assert torch.equal(mine, theirs.flip(0))
    before = keys.clone()
    cache.copy([0], [7], 5)
    keys, _ = written(cache, CacheCall(0, slice(5, 6), 8, 6, 6), states(8, 1, 1))
    assert torch.equal(keys[7, :, :5], before[0])
    assert torch.equal(keys[1, :, :5], before[1])


def test_rows_that_are_few_give_the_memory_of_the_others_back_when_it_grows():
    cache = SlotCache(CONFIG, 8, 200)
    written(cache, CacheCall(0, slice(0, 64), 8, 64, 64), states(8, 64, 0))
    keys, _ = written(cache, CacheCall(0, slice(64, 65), 3, 65, 65), states(3, 1, 1))
    assert torch.equal(keys[:, :, :64], states(8, 64, 0)[0][:3])
    assert len(cache.layers[0].slots.tensors[0]) == 3


def test_layers_that_forget_have_no_slots():
    assert keeps_all_tokens(CONFIG)
    assert not keeps_all_tokens(MistralConfig(num_hidden_layers=2, sliding_window=8))
