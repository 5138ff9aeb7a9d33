"""Packed lines give what padded rows give, forward and backward, for every family that can run them."""

from __future__ import annotations

import pytest
import torch
from random_models import save_random_model

from verl.model_paths import packed_attention
from verl.model_paths.packed_attention import call_packed, take
from verl.models.pretrained import Pretrained
from verl.ops.packing import pack

PROMPTS, RESPONSES = torch.tensor([5, 5, 7, 7, 2, 5]), torch.tensor([6, 1, 4, 3, 0, 6])
PROMPT_OF = torch.tensor([8, 8, 1, 1, 4, 8])
P, T = 7, 6


def padded_rows() -> dict[str, torch.Tensor]:
    """Left-padded prompts, right-padded responses, and a hole in one response's mask."""
    ids, attention = torch.zeros(6, P + T, dtype=torch.int64), torch.zeros(6, P + T, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    for row, (p, t) in enumerate(zip(PROMPTS.tolist(), RESPONSES.tolist(), strict=True)):
        own = torch.Generator().manual_seed(int(PROMPT_OF[row]))
        ids[row, P - p : P] = torch.randint(3, 30, (p,), generator=own)
        ids[row, P : P + t] = torch.randint(3, 30, (t,), generator=generator)
        attention[row, P - p : P + t] = 1
    mask = torch.arange(T) < RESPONSES[:, None]
    mask[2, 1] = False
    positions = (attention.cumsum(1) - 1).clamp_min(0)
    return {"input_ids": ids, "attention_mask": attention, "position_ids": positions, "mask": mask}


def run(model, rows, weight, share=None):
    """The logits that predict the tokens on the mask, and the gradients of a weighted sum of them."""
    model.zero_grad()
    mask = rows["mask"]
    if share is None:
        found = model(**{k: v for k, v in rows.items() if k != "mask"}, use_cache=False).logits[:, P - 1 : -1][mask]
    else:
        packing = pack(PROMPTS, RESPONSES, PROMPT_OF, mask, P, share)
        line = call_packed(model, rows["input_ids"], packing, use_cache=False).logits
        found = take(line[0], packing.predictors)
    (found * weight).sum().backward()
    return found.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral", "phi3", "gpt_neox", "olmo2", "gpt2"])
def test_packed_and_padded_rows_agree(family, share, tmp_path):
    window = {"sliding_window": 5} if family == "mistral" else {}
    save_random_model(tmp_path, family, torch.float64, **window)
    model, rows = Pretrained(path=str(tmp_path), dtype="float64").load_causal_lm("cpu").train(), padded_rows()
    weight = torch.randn(model.config.vocab_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected, gradients = run(model, rows, weight)
    assert packed_attention.enable(model) is None
    assert torch.equal(run(model, rows, weight)[0], expected)  # rows as before
    found, packed_gradients = run(model, rows, weight, share)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(packed_gradients[name], gradient, rtol=1e-4, atol=1e-4)


def test_gradients_repeat_bit_for_bit(tmp_path):
    save_random_model(tmp_path, "qwen2", torch.float32)
    model, rows = Pretrained(path=str(tmp_path)).load_causal_lm("cpu").train(), padded_rows()
    assert packed_attention.enable(model) is None
    weight = torch.randn(model.config.vocab_size, generator=torch.Generator().manual_seed(1))
    first, again = (run(model, rows, weight, share=True)[1] for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize(("family", "attention", "why"), [("gemma2", "eager", "sdpa"), ("bloom", "eager", "sdpa")])
def test_a_model_that_cannot_be_packed_says_why_and_stays_as_it_was(family, attention, why, tmp_path):
    save_random_model(tmp_path, family, torch.float32)
    model = Pretrained(path=str(tmp_path), attention=attention).load_causal_lm("cpu")
    assert why in (packed_attention.enable(model) or "")
    assert model.config._attn_implementation == attention


def test_a_saved_model_knows_nothing_of_it(tmp_path):
    save_random_model(tmp_path / "a", "llama", torch.float32)
    model = Pretrained(path=str(tmp_path / "a")).load_causal_lm("cpu")
    assert packed_attention.enable(model) is None
    model.save_pretrained(tmp_path / "b")
    assert packed_attention.NAME not in (tmp_path / "b/config.json").read_text()
