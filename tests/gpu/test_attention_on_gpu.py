"""Tier 1, torch on one GPU: the variable-length kernel on packed lines, and compiled layers."""

import pytest
import torch
from devices.attention_cost import group_of, needed
from gpu.needs import gpus
from roles import start_actor, with_experience
from trial_rows import TrialRow, as_batch

from verl.model_paths.packed_attention import attend_line
from verl.models.tiny import TinyModel
from verl.ops import attention
from verl.ops.attention import mask_reason
from verl.ops.packing import pack

pytestmark = gpus()

HEADS = 8
MODEL = TinyModel(hidden_size=256, intermediate_size=512, num_heads=4, context_length=512)


def group(share, longest=700):
    lengths = torch.tensor([longest, 1, 300, 2, 5, 64, 650])
    mask = torch.arange(longest) < lengths[:, None]
    of = torch.tensor([0, 3, 0, 1, 1, 2, 2])
    return pack(torch.tensor([400, 17, 400, 33, 33, 1, 1]), lengths, of, mask, 400, share, 64).to("cuda")


def heads_of(packing, kinds, width):
    draw = torch.Generator(device="cuda").manual_seed(0)
    sizes = [(len(packing.tokens), heads, width) for heads in (HEADS, kinds, kinds, HEADS)]
    *heads, above = (torch.randn(size, generator=draw, device="cuda", dtype=torch.bfloat16) for size in sizes)
    return [x.requires_grad_() for x in heads], above


def computed(heads, above, packing, window, dtype=None):
    given = [x.detach().to(dtype or x.dtype).requires_grad_() for x in heads]
    out = attend_line(*given, packing, window, None)
    return [x.double() for x in (out, *torch.autograd.grad(out, given, above.to(out.dtype)))]


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("kinds", [8, 2])
@pytest.mark.parametrize("share", [True, False])
def test_the_kernel_is_as_near_to_float64_as_attention_under_masks(share, kinds, window, width, monkeypatch):
    packing = group(share)
    heads, above = heads_of(packing, kinds, width)
    assert mask_reason(heads[0], heads[2]) is None
    exact = computed(heads, above, packing, window, torch.float64)
    kernel = computed(heads, above, packing, window)
    monkeypatch.setattr(attention, "mask_reason", lambda query, value: "as a comparison")
    masks = computed(heads, above, packing, window)
    for x, y, z in zip(kernel, masks, exact, strict=True):
        assert x.isfinite().all()
        assert (x - z).norm() <= 1.5 * (y - z).norm() + 1e-3 * z.norm()


def test_sums_of_the_kernel_have_heads_first():
    packing = group(share=False)
    heads, _ = heads_of(packing, HEADS, 64)
    layout = attention.varlen_layout(packing.segments, [(0, len(packing.tokens))], None).to("cuda")
    with torch.no_grad():
        _, sums = attention.forward_parts(*heads, layout, None)
    assert sums.shape == (HEADS, len(packing.tokens))
    first = (heads[0][0].float() * heads[1][0].float()).sum(dim=-1) * 64**-0.5  # a query that sees its own key alone
    torch.testing.assert_close(sums[:, 0], first, rtol=0, atol=0.05)


def test_time_and_memory_of_a_group_with_and_without_masks(record_property, monkeypatch):
    packing = group_of(8192).to("cuda")
    heads, above = heads_of(packing, 2, 128)
    found = {}
    for name in ("kernel", "masks"):
        if name == "masks":
            monkeypatch.setattr(attention, "mask_reason", lambda query, value: "as a comparison")
        computed(heads, above, packing, None)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        computed(heads, above, packing, None)
        end.record()
        torch.cuda.synchronize()
        found[name] = {"ms": start.elapsed_time(end), "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
    record_property("attention", {"scores": needed(packing), **found})
    assert found["kernel"]["peak_gib"] < found["masks"]["peak_gib"]


@pytest.mark.parametrize("model", [MODEL, TinyModel(**{**vars(MODEL), "compile": True})], ids=["as it is", "compiled"])
def test_an_update_of_packed_rows_in_bfloat16_is_near_that_in_float32(model):
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(4, 60, (90,), generator=draw)
    batch = as_batch([TrialRow(prompt, torch.randint(4, 60, (n,), generator=draw)) for n in (200, 3, 77, 1)])
    wide = start_actor(MODEL, device="cuda:0")
    narrow = start_actor(model, device="cuda:0", autocast="bfloat16")
    batch = with_experience(batch, wide)
    scores = [actor.compute_log_probs(batch)["old_log_probs"] for actor in (wide, narrow)]
    assert (scores[0] - scores[1]).abs().max() < 0.1
    norms = [actor.update(batch)["grad_norm"] for actor in (wide, narrow)]
    assert norms[1] == pytest.approx(norms[0], rel=0.1)
