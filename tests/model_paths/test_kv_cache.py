"""The cache that is written in place holds what transformers' own cache holds."""

from __future__ import annotations

import torch
from transformers import DynamicCache, MistralConfig, Qwen2Config

from verl.model_paths.kv_cache import PreallocatedLayer, preallocated_cache


def states(rows, length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 2, length, 4, generator=generator), torch.randn(rows, 2, length, 4, generator=generator)


def test_it_holds_what_a_dynamic_cache_holds_through_growth_repeats_and_leaving_rows():
    config = Qwen2Config(num_hidden_layers=1, num_attention_heads=2, hidden_size=8)
    caches = DynamicCache(config=config), preallocated_cache(config, max_length=200)
    seen = [cache.update(*states(2, 3, 0), 0) for cache in caches]
    for cache in caches:
        cache.batch_repeat_interleave(3)
    rows = 6
    for step in range(1, 150):
        seen = [cache.update(*states(rows, 1, step), 0) for cache in caches]
        assert torch.equal(seen[0][0], seen[1][0])
        assert torch.equal(seen[0][1], seen[1][1])
        if step in (1, 40, 41):
            keep = torch.tensor([i for i in range(rows) if i != 1])
            for cache in caches:
                cache.batch_select_indices(keep)
            rows -= 1
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == 152
    assert seen[1][0].shape[2] == 152


def test_a_new_token_moves_nothing_while_there_is_room():
    layer = PreallocatedLayer(max_length=40)
    layer.update(*states(1, 3, 0))
    places = {layer.update(*states(1, 1, step))[0].data_ptr() for step in range(1, 38)}
    assert len(places) <= 2


def test_layers_that_forget_stay_as_transformers_makes_them():
    config = MistralConfig(num_hidden_layers=2, sliding_window=8)
    assert not any(isinstance(layer, PreallocatedLayer) for layer in preallocated_cache(config, 40).layers)
