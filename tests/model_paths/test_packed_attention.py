"""Packed lines give what padded rows give, forward and backward, for every family that can run them."""

import pytest
import refusals
import torch
from devices.flash_kernel import flash_on_cpu
from random_models import save_random_model
from refusals import refusal, refused
from transformers import masking_utils
from transformers.models.llama import modeling_llama

from verl.model_paths import packed_attention
from verl.model_paths.packed_attention import MaskShape, call_packed, describe_mask, gather_rows
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
        found = gather_rows(line[0], packing.predictors)
    (found * weight).sum().backward()
    return found.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


WINDOWS = {"sliding_window": 5, "head_dim": 8}
OPTIONS = {"mistral": WINDOWS, "gemma3_text": {**WINDOWS, "num_key_value_heads": 1}}
FAMILIES = ["qwen2", "qwen3", "llama", "mistral", "phi3", "gpt_neox", "olmo2", "gpt2"]
KERNELS = [pytest.param(family, "blocks", marks=pytest.mark.slow) for family in FAMILIES]
KERNELS += [(family, "flash") for family in ("qwen3", "mistral", "gemma3_text")]


@pytest.mark.first_rows(3)
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(("family", "kernel"), KERNELS)
def test_packed_and_padded_rows_agree(family, kernel, share, tmp_path, monkeypatch):
    """By blocks, as on a CPU, and by the kernel of a GPU, which is called again going backward."""
    save_random_model(tmp_path, family, torch.float64, **OPTIONS.get(family, {}))
    model, rows = Pretrained(path=str(tmp_path), dtype="float64").load_causal_lm("cpu").train(), padded_rows()
    weight = torch.randn(model.config.vocab_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected, gradients = run(model, rows, weight)
    assert packed_attention.enable(model) is None
    assert torch.equal(run(model, rows, weight)[0], expected)  # rows as before
    if kernel == "flash":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with flash_on_cpu(monkeypatch, kernel == "flash") as calls:
        found, packed_gradients = run(model, rows, weight, share)
    if kernel == "flash":
        layers = model.config.num_hidden_layers
        assert 2 * layers <= calls.forward <= (4 if share else 2) * layers
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # norms pass through float32
    for name, gradient in gradients.items():
        torch.testing.assert_close(packed_gradients[name], gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_mask_is_made_once_for_all_layers_and_for_their_recomputation(recomputed, tmp_path, monkeypatch):
    save_random_model(tmp_path, "llama", torch.float64, num_hidden_layers=3)
    model, rows = Pretrained(path=str(tmp_path), dtype="float64").load_causal_lm("cpu").train(), padded_rows()
    assert packed_attention.enable(model) is None
    if recomputed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    made, make = [], packed_attention.make_block_mask
    monkeypatch.setattr(packed_attention, "make_block_mask", lambda *given: made.append(given) or make(*given))
    run(model, rows, torch.ones(model.config.vocab_size, dtype=torch.float64), share=True)
    blocks = pack(PROMPTS, RESPONSES, PROMPT_OF, rows["mask"], P, True).slots().blocks
    assert len(made) == len(blocks)


def test_gradients_repeat_bit_for_bit(tmp_path):
    save_random_model(tmp_path, "qwen2", torch.float32)
    model, rows = Pretrained(path=str(tmp_path)).load_causal_lm("cpu").train(), padded_rows()
    assert packed_attention.enable(model) is None
    weight = torch.randn(model.config.vocab_size, generator=torch.Generator().manual_seed(1))
    first, again = (run(model, rows, weight, share=True)[1] for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("family", ["gemma2", "bloom"])
def test_a_model_that_cannot_be_packed_says_why_and_stays_as_it_was(family, tmp_path):
    save_random_model(tmp_path, family, torch.float32)
    model = Pretrained(path=str(tmp_path), attention="eager").load_causal_lm("cpu")
    assert "sdpa" in (packed_attention.enable(model) or "")
    assert model.config._attn_implementation == "eager"


def test_a_saved_model_knows_nothing_of_it(tmp_path):
    save_random_model(tmp_path / "a", "llama", torch.float32)
    model = Pretrained(path=str(tmp_path / "a")).load_causal_lm("cpu")
    assert packed_attention.enable(model) is None
    model.save_pretrained(tmp_path / "b")
    assert packed_attention.NAME not in (tmp_path / "b/config.json").read_text()


def blocks(length: int) -> torch.Tensor:
    """[1 S] a block of 20 tokens in the middle that see each other, as those of an image do."""
    ids = torch.full((1, length), -1)
    ids[0, 20:40] = 3
    return ids


CAUSAL = masking_utils.causal_mask_function
TEXTS = masking_utils.packed_sequence_mask_function((torch.arange(151) // 50)[None])
MASKS = {
    "causal": (CAUSAL, MaskShape()),
    "sliding": (masking_utils.sliding_window_causal_mask_function(7), MaskShape(7)),
    "wide": (masking_utils.sliding_window_causal_mask_function(151), MaskShape()),
    "chunked": (masking_utils.chunked_causal_mask_function(64, torch.zeros(1, dtype=torch.long)), None),
    "chunks of 10": (masking_utils.chunked_causal_mask_function(10, torch.zeros(1, dtype=torch.long)), None),
    "blockwise": (masking_utils.or_masks(CAUSAL, masking_utils.blockwise_overlay(blocks(151))), None),
    "bidirectional": (masking_utils.bidirectional_mask_function, None),
    "around": (masking_utils.sliding_window_bidirectional_mask_function(7), None),
    "packed": (masking_utils.and_masks(CAUSAL, TEXTS), None),
    "strided": (lambda batch, head, query, key: (key <= query) & ((query - key) % 2 == 0), None),
    "scalar": (lambda batch, head, query, key: bool(query >= key), None),  # cannot be asked of many at a time
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_known_by_what_it_shows(name):
    mask_function, shape = MASKS[name]
    assert describe_mask(mask_function, 151) == shape


def attended(attention_mask: torch.Tensor | None = None, layer: torch.nn.Module | None = None, **keywords):
    packing = pack(PROMPTS, RESPONSES, PROMPT_OF, padded_rows()["mask"], P, True)
    states = torch.randn(1, 2, len(packing.tokens), 4, generator=torch.Generator().manual_seed(0))
    layer = layer or torch.nn.Module()
    return packed_attention.attend(layer, states, states, states, attention_mask, packing=packing, **keywords)[0]


def test_a_keyword_that_is_not_known_is_refused_if_it_has_a_value():
    expected = attended()
    for name in ("softcap", "s_aux", "position_bias", "anything_new"):
        assert torch.equal(attended(**{name: None}), expected)
        with refusal(name, kind=NotImplementedError):
            attended(**{name: torch.ones(2) if name == "s_aux" else 0.5})
    with refusal("is_causal", kind=NotImplementedError):
        attended(is_causal=False)
    assert torch.equal(attended(is_causal=True, use_cache=False), expected)


class NotCausal(torch.nn.Module):
    is_causal = False


test_a_mask_that_nobody_has_described_is_refused = refused(
    ("mask of a layer", refusals.ANY, lambda: attended(torch.ones([1, 1, *[attended().shape[1]] * 2]).tril().bool())),
    ("mask of a layer", refusals.ANY, lambda: attended(sliding_window=4)),  # and no mask that says so
    ("mask of a layer", refusals.ANY, lambda: attended(layer=NotCausal())),
    kind=NotImplementedError,
)


@pytest.mark.parametrize("made", ["create_chunked_causal_mask", "create_bidirectional_mask"])
def test_a_model_that_asks_for_another_mask_on_a_packed_line_is_refused(made, tmp_path, monkeypatch):
    save_random_model(tmp_path, "llama", torch.float32)
    model, rows = Pretrained(path=str(tmp_path)).load_causal_lm("cpu"), padded_rows()
    model.config.attention_chunk_size = 4
    assert packed_attention.enable(model) is None
    weight = torch.ones(model.config.vocab_size)
    run(model, rows, weight, share=True)
    create = getattr(masking_utils, made)

    def other(past_key_values=None, position_ids=None, **given):
        return create(**given) if "bidirectional" in made else create(past_key_values=None, **given)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", other)
    with refusal("mask", kind=NotImplementedError):
        run(model, rows, weight, share=True)
