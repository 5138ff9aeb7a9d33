"""The value head: zero at the start, one number per position, and saved beside a backbone that anyone can open."""

from __future__ import annotations

import pytest
import torch
from roles import largest_difference, weights
from transformers import AutoModel

from verl.models.heads import ValueHeadModel
from verl.models.pretrained import VALUE_HEAD_FILE, Pretrained

TOKENS = torch.tensor([[0, 0, 8, 9, 10], [11, 12, 13, 14, 15]])
MASK = (TOKENS > 0).long()
POSITIONS = (MASK.cumsum(dim=1) - 1).clamp_min(0)


@pytest.fixture
def trained(model64):
    """A value model whose head is not zero."""
    model = ValueHeadModel(model64.load_backbone("cpu"))
    generator = torch.Generator().manual_seed(0)
    for weight in model.head.parameters():
        weight.data = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return model


def test_a_new_head_is_zero_and_reads_every_position(model64):
    model = ValueHeadModel(model64.load_backbone("cpu"))
    values = model(TOKENS, MASK, POSITIONS).values
    assert values.shape == TOKENS.shape
    assert not values.any()


def test_values_are_the_head_on_the_last_hidden_state(trained):
    hidden = trained.backbone(TOKENS, attention_mask=MASK, position_ids=POSITIONS).last_hidden_state
    expected = hidden @ trained.head.weight[0] + trained.head.bias
    torch.testing.assert_close(trained(TOKENS, MASK, POSITIONS).values, expected, rtol=0, atol=1e-12)


def test_a_value_does_not_see_what_comes_later(trained):
    other = TOKENS.clone()
    other[:, 3:] = 50
    early = trained(TOKENS, MASK, POSITIONS).values[:, 2]
    torch.testing.assert_close(trained(other, MASK, POSITIONS).values[:, 2], early, rtol=0, atol=1e-12)


def test_backbone_and_head_come_back_bit_by_bit(trained, tmp_path):
    trained.save_pretrained(tmp_path)
    source = Pretrained(path=str(tmp_path), dtype="float64")
    again = ValueHeadModel(source.load_backbone("cpu"))
    again.load_head(source.value_head())
    assert largest_difference(weights(again), weights(trained)) == 0
    assert torch.equal(again(TOKENS, MASK, POSITIONS).values, trained(TOKENS, MASK, POSITIONS).values)


def test_transformers_opens_the_directory_of_a_critic(trained, tmp_path):
    trained.save_pretrained(tmp_path)
    assert (tmp_path / VALUE_HEAD_FILE).is_file()
    opened = AutoModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert largest_difference(weights(opened), weights(trained.backbone)) == 0


def test_the_head_of_a_bfloat16_backbone_is_float32(dir32):
    model = ValueHeadModel(Pretrained(path=str(dir32), dtype="bfloat16").load_backbone("cpu"))
    assert model.head.weight.dtype == model(TOKENS, MASK, POSITIONS).values.dtype == torch.float32
