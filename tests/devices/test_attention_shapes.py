"""Blocks of packed attention on a GPU: few shapes, and the numbers of blocks that are as long as their rows."""

import functools

import pytest
import torch
from roles import experience, start_actor, weights

from verl.engines import engine as engine_module
from verl.engines.engine import BLOCK_MULTIPLE
from verl.model_paths.decode import KEY_MULTIPLE, key_multiple
from verl.model_paths.kv_cache import SlotLayer
from verl.model_paths.micro_batch import cut_into_micro_batches
from verl.models.tiny import TinyModel
from verl.ops.packing import pack
from verl.protocol import DataProto
from verl.rollout import hf
from verl.rollout.base import GenerationRequest, TurnLimits
from verl.rollout.hf import HFRollout
from verl.rollout.hf_rows import SlotRows
from verl.utils.memory import CUDNN_VARIABLE, make_current

LONGEST = 1024


def blocks_of(seed: int, multiple: int):
    """Of 32 prompts with 4 responses each, of many lengths."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, LONGEST, (32,), generator=generator).repeat_interleave(4)
    responses = torch.randint(1, LONGEST, (128,), generator=generator)
    mask = torch.arange(LONGEST) < responses[:, None]
    of = torch.arange(32).repeat_interleave(4)
    return pack(prompts, responses, of, mask, LONGEST, multiple=multiple).slots().blocks


@pytest.mark.exhaustive
def test_shapes_of_many_steps_are_few_and_multiples_of_64():
    made = [block for seed in range(8) for block in blocks_of(seed, BLOCK_MULTIPLE)]
    shapes = {(block.queries, block.keys) for block in made}
    as_they_come = {(block.queries, block.keys) for seed in range(8) for block in blocks_of(seed, 1)}
    assert all(queries % 64 == keys % 64 == 0 for queries, keys in shapes)
    lengths = LONGEST // 64
    assert len(shapes) <= lengths + lengths * lengths  # of prompts, and of responses behind them
    assert len(shapes) < 0.5 * len(as_they_come)
    assert len({block.queries for block in made}) <= lengths


@pytest.mark.exhaustive
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


@pytest.fixture
def key_shapes(monkeypatch):
    """Rows and keys of attention while a token is decoded, those of shared prompts apart."""
    found, update = set(), SlotLayer.update

    def updated(layer, keys, *others, **more):
        made = update(layer, keys, *others, **more)
        if keys.shape[2] == 1:
            found.add((len(keys), made[0].shape[2]))
        return made

    monkeypatch.setattr(SlotLayer, "update", updated)
    return found


def drawn(width, options, monkeypatch, multiple, before=lambda: None):
    """Responses of up to 150 tokens to prompts of many lengths, by a model of its own."""
    monkeypatch.setattr(hf, "key_multiple", lambda device: multiple)
    model = TinyModel(dtype="float64", hidden_size=32, intermediate_size=64)
    actor = start_actor(model, HFRollout(max_new_tokens=150, **options))
    actor.generator.engine.stop_ids = torch.arange(3)  # of few tokens: rows end one after another
    actor.generator.engine.rows(TurnLimits(width + 150, is_single=True))  # with its check
    before()
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(width // 2, width + 1, (4,), generator=generator)
    mask = torch.arange(width) >= width - lengths[:, None]
    asked = {"prompts": torch.randint(4, 60, mask.shape, generator=generator) * mask, "prompt_mask": mask}
    asked |= {"prompt_ids": torch.arange(4), "group_ids": torch.arange(4)}
    return actor, actor.generate(DataProto.from_dict(asked), GenerationRequest(0, 3))


ALL_ROWS = {"share_prefix": False, "drop_finished": False}
OTHERS = [pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((20, {}), (90, ALL_ROWS))]


@pytest.mark.parametrize(("width", "options"), [(90, {}), *OTHERS])
def test_decoding_meets_one_length_of_keys_per_64_tokens_and_draws_the_same(width, options, monkeypatch, key_shapes):
    found = {}
    for multiple in (1, KEY_MULTIPLE):
        actor, rows = drawn(width, options, monkeypatch, multiple, key_shapes.clear)
        assert actor.generator.engine.key_multiple == multiple
        found[multiple] = rows, set(key_shapes)
    (plain, as_they_come), (padded, few) = found[1], found[KEY_MULTIPLE]
    assert torch.equal(plain["responses"], padded["responses"])
    torch.testing.assert_close(plain["rollout_log_probs"], padded["rollout_log_probs"], rtol=0, atol=1e-11)
    assert all(keys % KEY_MULTIPLE == 0 for _, keys in few)
    lengths, batches = -(-(width + 150) // KEY_MULTIPLE), len({rows for rows, _ in few})
    assert len(few) <= lengths + batches  # each time that rows leave
    assert len(few) < 0.2 * len(as_they_come)


def test_lengths_that_change_numbers_are_not_used(monkeypatch, caplog):
    forward = SlotRows._forward

    def forward_without_mask(rows, call, slots, ids, positions, mask, images=None):  # zeros are attended to
        mask = None if rows.key_multiple > 1 and ids.shape[1] == 1 else mask
        return forward(rows, call, slots, ids, positions, mask, images)

    monkeypatch.setattr(SlotRows, "_forward", forward_without_mask)
    actor, rows = drawn(20, {}, monkeypatch, KEY_MULTIPLE)
    assert actor.generator.engine.key_multiple == 1
    assert "Each new token uses its exact length of keys, without padding: log-probs differ by" in caplog.text
    monkeypatch.setattr(SlotRows, "_forward", forward)
    _, plain = drawn(20, {}, monkeypatch, 1)
    assert torch.equal(plain["responses"], rows["responses"])


def test_a_cpu_takes_lengths_as_they_come_and_other_devices_multiples():
    assert key_multiple(torch.device("cpu")) == 1
    assert key_multiple(torch.device("cuda:0")) == KEY_MULTIPLE == 64


def _cut(multiple, batch, budget, paths, context, _, images):
    return cut_into_micro_batches(batch, budget, paths, context, multiple, images)


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
