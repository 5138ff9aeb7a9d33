"""Blocks of packed attention on a GPU: few shapes, and the numbers of blocks that are as long as their rows."""

from __future__ import annotations

import functools

import pytest
import torch
from roles import experience, start_actor, weights

from verl.engines import engine as engine_module
from verl.engines.engine import BLOCK_MULTIPLE
from verl.model_paths.micro_batch import cut_into_micro_batches
from verl.models.tiny import TinyModel
from verl.ops.packing import pack
from verl.utils.memory import CUDNN_VARIABLE, make_current

LONGEST = 1024


def blocks_of(seed: int, multiple: int):
    """Of 32 prompts with 4 responses each, of many lengths."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, LONGEST, (32,), generator=generator).repeat_interleave(4)
    responses = torch.randint(1, LONGEST, (128,), generator=generator)
    mask = torch.arange(LONGEST) < responses[:, None]
    of = torch.arange(32).repeat_interleave(4)
    return pack(prompts, responses, of, mask, LONGEST, multiple=multiple).blocks


def test_shapes_of_many_steps_are_few_and_multiples_of_64():
    shapes = {(b.queries, b.keys) for seed in range(20) for b in blocks_of(seed, BLOCK_MULTIPLE)}
    as_they_come = {(b.queries, b.keys) for seed in range(20) for b in blocks_of(seed, 1)}
    assert all(queries % 64 == keys % 64 == 0 for queries, keys in shapes)
    lengths = LONGEST // 64
    assert len(shapes) <= lengths + lengths * lengths  # of prompts, and of responses behind them
    assert len(shapes) < 0.5 * len(as_they_come)
    assert len({b.queries for seed in range(20) for b in blocks_of(seed, BLOCK_MULTIPLE)}) <= lengths


def test_longer_blocks_change_no_number_but_by_rounding(prompts, monkeypatch):
    model = TinyModel(dtype="float64", hidden_size=32, intermediate_size=64)
    rows = experience(start_actor(model), prompts(), num_samples=6)
    found = []
    for multiple in (1, BLOCK_MULTIPLE):
        monkeypatch.setattr(engine_module, "cut_into_micro_batches", functools.partial(_cut, multiple))
        actor = start_actor(model)
        assert actor.engine.paths(rows).scoring == "packed"
        scores = actor.compute_log_probs(rows)["old_log_probs"]
        found.append((scores, actor.update(rows), weights(actor.model)))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-9)
    for name, value in found[0][1].items():
        assert found[1][1][name] == pytest.approx(value, rel=1e-7, abs=1e-9)
    for name, weight in found[0][2].items():
        torch.testing.assert_close(found[1][2][name], weight, rtol=0, atol=1e-4)  # Adam divides by small numbers


def _cut(multiple, batch, budget, paths, context, _):
    return cut_into_micro_batches(batch, budget, paths, context, multiple)


@pytest.mark.parametrize(("asked", "stays"), [(None, False), ("1", True)])
def test_cudnn_makes_no_plan_for_each_shape_unless_it_is_asked_for(monkeypatch, asked, stays):
    monkeypatch.delenv(CUDNN_VARIABLE, raising=False)
    if asked:
        monkeypatch.setenv(CUDNN_VARIABLE, asked)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        make_current("cuda:1")
        assert torch.backends.cuda.cudnn_sdp_enabled() is stays
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
