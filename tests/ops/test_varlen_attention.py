"""Variable-length attention of a packed line against its attention under masks, in float64, by a stand-in of the
kernel."""

import pytest
import torch
from cases import each_value_once
from devices.attention_cost import BYTES, KINDS, AttentionCost, by_kernel, group_of, needed, under_masks
from devices.attention_cost import WIDTH as HEAD_SIZE
from devices.flash_kernel import flash_on_cpu
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from verl.model_paths import context_attention
from verl.model_paths.context_attention import ContextGroup
from verl.model_paths.packed_attention import attend_line
from verl.ops import attention
from verl.ops.packing import pack

PROMPTS, RESPONSES = torch.tensor([5, 4, 5, 5, 2, 1, 9]), torch.tensor([14, 1, 3, 1, 7, 2, 30])
PROMPT_OF = torch.tensor([0, 4, 0, 0, 1, 2, 3])  # the prompt of row 1 has a response of one token, which is left out
HEADS, WIDTH = 4, 8
BYTES_OF_KEYS = 2 * KINDS * HEAD_SIZE * BYTES  # and of values, of a token


def line(share):
    return pack(PROMPTS, RESPONSES, PROMPT_OF, torch.arange(30) < RESPONSES[:, None], 9, share)


def heads_of(packing, kinds, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    size = len(packing.tokens)
    shapes = [(size, HEADS, WIDTH), (size, kinds, WIDTH), (size, kinds, WIDTH), (size, HEADS, WIDTH)]
    *heads, above = (torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes)
    return [x.requires_grad_() for x in heads], above


def with_gradients(out, heads, above):
    return [out.detach(), *torch.autograd.grad(out, heads, above)]


@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("window", [None, 1, 4, 6, 12, 1000])
@pytest.mark.parametrize("kinds", [4, 2, 1])
@pytest.mark.parametrize("share", [True, False])
def test_outputs_and_gradients_are_those_under_masks(share, kinds, window, scaling, monkeypatch):
    packing = line(share)
    heads, above = heads_of(packing, kinds)
    wanted = with_gradients(attend_line(*heads, packing, window, scaling), heads, above)
    with flash_on_cpu(monkeypatch) as calls:
        found = with_gradients(attend_line(*heads, packing, window, scaling), heads, above)
    assert calls.forward == calls.backward == (2 if share and window in (None, 1000) else 1)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("share", "size", "window"), each_value_once([True, False], [1, 2, 3, 64], [12, 1, 4, None]))
def test_ranks_that_share_the_tokens_of_a_line_come_to_its_outputs_and_gradients(share, size, window, monkeypatch):
    packing = line(share)
    heads, above = heads_of(packing, 2)
    wanted = with_gradients(attend_line(*heads, packing, window, None), heads, above)
    query, *keys = (x.detach() for x in heads)
    found = [torch.zeros_like(x) for x in wanted]
    sums = []
    monkeypatch.setattr(context_attention, "_gather_line", lambda key, value, line: keys)  # what the exchange gives
    monkeypatch.setattr(context_attention, "_scatter_line", lambda *given: (sums.append(given[:2]), (empty, empty))[1])
    with flash_on_cpu(monkeypatch) as calls:
        for rank in range(size):
            own = ContextGroup(None, size, rank).shard(packing)
            q = query[own.shard.own].requires_grad_()
            empty = torch.zeros(0, *keys[0].shape[1:], dtype=torch.float64)
            out = own.attend(q, empty.requires_grad_(), empty.clone().requires_grad_(), window, None, attend_line)
            is_own = own.shard.padded[own.shard.own] // max(own.shard.sizes) == rank  # one without tokens has the first
            place = own.shard.own[is_own]
            (of_query,) = torch.autograd.grad(out, q, above[own.shard.own] * is_own[:, None, None])
            found[0][place], found[1][place] = out.detach()[is_own], of_query[is_own]
    assert calls.forward
    found[2:] = [sum(parts) for parts in zip(*sums, strict=True)]
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("share", [True, False])
def test_the_kernel_computes_the_scores_that_queries_need_and_no_others(share, monkeypatch):
    packing = line(share)
    with flash_on_cpu(monkeypatch) as calls:
        attend_line(*heads_of(packing, 2)[0], packing, None, None)
    assert calls.scores == needed(packing)


@pytest.mark.parametrize("longest", [1024, 8192, 32768])
def test_scores_and_bytes_of_a_group_of_long_responses(longest):
    """One layer of Llama 8B."""
    packing = group_of(longest)
    masks, kernel = under_masks(packing), by_kernel(packing)
    assert kernel == AttentionCost(scores=needed(packing), key_bytes=0, mask_bytes=0)
    assert masks.scores > 1.6 * kernel.scores
    keys = by_kernel(packing, window=4096).key_bytes
    assert keys <= 1.2 * len(packing.tokens) * BYTES_OF_KEYS
    assert masks.key_bytes > 5 * len(packing.tokens) * BYTES_OF_KEYS


def joined_by_autograd(query, key, value, packing):
    """The join of two parts by `varlen_attn` and autograd, whose sums have no gradient."""
    prompts = [segment for segment in packing.segments if segment.prompt is None]
    behind = [segment for segment in packing.segments if segment.prompt is not None]
    (prompt,) = prompts
    ends, of_prompt, of_behind = (
        torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for lengths in (
            [segment.length for segment in packing.segments],
            [prompt.length],
            [sum(segment.length for segment in behind)],
        )
    )
    start, aux = prompt.length, AuxRequest(lse=True)
    longest = int(ends.diff().max())
    own, sums = varlen_attn(
        query, key, value, ends, ends, longest, longest, return_aux=aux, window_size=(-1, 0), enable_gqa=True
    )
    before, others = varlen_attn(
        query[start:],
        key[:start],
        value[:start],
        of_behind,
        of_prompt,
        int(of_behind[-1]),
        start,
        return_aux=aux,
        enable_gqa=True,
    )
    share = torch.sigmoid(others - sums[:, start:]).t()[:, :, None]
    return torch.cat([own[:start], own[start:] * (1 - share) + before * share])


def test_a_join_by_autograd_gives_the_output_and_wrong_gradients_and_ours_right_ones(monkeypatch):
    """As on a GPU: the stand-in is behind torch's own `varlen_attn`, whose backward pass ignores gradients of sums."""
    packing = pack(torch.tensor([9, 9]), torch.tensor([14, 7]), torch.zeros(2).long(), torch.ones(2, 14).bool(), 9)
    heads, above = heads_of(packing, 2)
    wanted = with_gradients(attend_line(*heads, packing, None, None), heads, above)
    with flash_on_cpu(monkeypatch):
        naive = with_gradients(joined_by_autograd(*heads, packing), heads, above)
        ours = with_gradients(attend_line(*heads, packing, None, None), heads, above)
    torch.testing.assert_close(naive[0], wanted[0], rtol=0, atol=1e-12)
    far = [float((x - y).norm() / y.norm()) for x, y in zip(naive, wanted, strict=True)]
    assert far[1] > 0.1, far  # of queries
    assert far[2] > 0.1, far  # of keys
    assert all(float((x - y).norm() / y.norm()) < 1e-12 for x, y in zip(ours, wanted, strict=True))


def test_bfloat16_is_as_near_to_float64_as_attention_under_masks(monkeypatch):
    packing = line(True)
    heads, above = heads_of(packing, 2)
    exact = with_gradients(attend_line(*heads, packing, None, None), heads, above)
    narrow = [x.detach().bfloat16().requires_grad_() for x in heads]
    masked = with_gradients(attend_line(*narrow, packing, None, None), narrow, above.bfloat16())
    with flash_on_cpu(monkeypatch):
        found = with_gradients(attend_line(*narrow, packing, None, None), narrow, above.bfloat16())
    for x, y, z in zip(found, masked, exact, strict=True):
        assert x.dtype == torch.bfloat16
        assert (x - z).norm() <= 1.3 * (y - z).norm()


KEPT = {
    "the device is no CUDA device": ("cpu", torch.bfloat16, 8, 8),
    "float32": ("cuda", torch.float32, 64, 64),
    "float64": ("cuda", torch.float64, 64, 64),
    "192 for queries and 128 for values": ("cuda", torch.bfloat16, 192, 128),
    "multiples of 8": ("cuda", torch.bfloat16, 20, 20),
    "up to 256": ("cuda", torch.bfloat16, 264, 264),
    "compute capability 8.0, the device has 7.5": ("cuda", torch.float16, 64, 64, (7, 5)),
    "on this device the kernel takes up to 192": ("cuda", torch.bfloat16, 256, 256, (8, 9)),
    "turned off": ("cuda", torch.bfloat16, 64, 64, (9, 0), False),
}
TAKEN = [(64, torch.bfloat16, (9, 0)), (128, torch.float16, (8, 6)), (256, torch.bfloat16, (9, 0))]


class Heads:
    """What is asked of a tensor on a device that is not there."""

    def __init__(self, device, dtype, width):
        self.device, self.dtype, self.shape = torch.device(device), dtype, (7, 4, width)


@pytest.fixture
def gpu(monkeypatch):
    def of(capability=(9, 0), is_on=True):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: is_on)

    return of


@pytest.mark.parametrize("why", KEPT)
def test_what_the_kernel_does_not_compute_keeps_its_masks_and_is_named_once(why, gpu, caplog):
    device, dtype, of_query, of_value, *machine = KEPT[why]
    gpu(*machine)
    attention._warn_once.cache_clear()
    for _ in range(3):
        assert not attention.takes_varlen(Heads(device, dtype, of_query), Heads(device, dtype, of_value))
    assert why in attention.mask_reason(Heads(device, dtype, of_query), Heads(device, dtype, of_value))
    assert len(caplog.records) == (device != "cpu")
    assert all(why in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(("width", "dtype", "capability"), TAKEN)
def test_heads_that_the_kernel_computes_need_no_masks(width, dtype, capability, gpu):
    gpu(capability)
    assert attention.takes_varlen(Heads("cuda:1", dtype, width), Heads("cuda:1", dtype, width))
