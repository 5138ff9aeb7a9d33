"""Scores of tokens are those of the whole logits, however few logits are made at a time."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import short_where
from random_models import save_random_model
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.engines import chunked_logprobs
from verl.engines.chunked_logprobs import token_log_probs
from verl.engines.fsdp import shard_fully
from verl.model_paths.micro_batch import cut_into_micro_batches
from verl.models.heads import LMHead
from verl.models.parallel_info import computing_in
from verl.models.pretrained import Pretrained
from verl.ops.logprobs import entropy_of, log_probs_of, response_positions
from verl.protocol import DataProto


@pytest.fixture(scope="module")
def loaded(dir64):
    return Pretrained(path=str(dir64), dtype="float64").load_causal_lm("cpu")


class LargestTensor(TorchDispatchMode):
    """Remembers the numbers in the largest tensor that any operation gives."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.numbers = max(self.numbers, x.numel())
        return out


def micro_batch(vocabulary, rows=6, prompt=5, response=7):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, response + 1, (rows, 1), generator=generator)
    mask = torch.arange(response) < lengths
    attention = torch.cat([torch.ones(rows, prompt, dtype=torch.bool), mask], dim=1).long()
    ids = torch.randint(3, vocabulary, attention.shape, generator=generator) * attention
    rows = {"input_ids": ids, "attention_mask": attention, "responses": ids[:, prompt:].contiguous()}
    rows |= {"position_ids": (attention.cumsum(dim=1) - 1).clamp_min(0), "response_mask": mask}
    return next(iter(cut_into_micro_batches(DataProto.from_dict(rows), 10_000)))


def plain_scores(model, micro, temperature):
    x = micro.tensors
    names = ("input_ids", "attention_mask", "position_ids")
    logits = response_positions(model(**{name: x[name] for name in names}).logits, micro.response_width)
    mask = x["response_mask"]
    log_probs = log_probs_of(logits, x["responses"], temperature).masked_fill(~mask, 0)
    entropies = entropy_of(logits, temperature).masked_fill(~mask, 0)
    return log_probs, entropies, (logits.argmax(dim=-1) == x["responses"]) & mask


@pytest.mark.parametrize("at_a_time", [1, 3 * 102, 2**24])
def test_scores_and_gradients_are_those_of_the_whole_logits(loaded, at_a_time, monkeypatch):
    monkeypatch.setattr(chunked_logprobs, "LOGITS_AT_A_TIME", at_a_time)
    micro = micro_batch(100)
    found = token_log_probs(loaded, LMHead(loaded), micro, 0.7, entropy="grad", rank=True)
    log_probs, entropies, likeliest = plain_scores(loaded, micro, 0.7)
    torch.testing.assert_close(found.log_probs, log_probs, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.entropies, entropies, rtol=0, atol=1e-12)
    assert torch.equal(found.is_likeliest, likeliest)
    parameters = [p for p in loaded.parameters() if p.requires_grad]
    weight = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours = torch.autograd.grad((weight * (found.log_probs + found.entropies)).sum(), parameters)
    theirs = torch.autograd.grad((weight * (log_probs + entropies)).sum(), parameters)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("at_a_time", [3 * 102, 2**24])
def test_candidates_and_likeliest_tokens_are_those_of_the_whole_logits(loaded, at_a_time, monkeypatch):
    monkeypatch.setattr(chunked_logprobs, "LOGITS_AT_A_TIME", at_a_time)
    micro = micro_batch(100)
    x, mask = micro.tensors, micro.tensors["response_mask"]
    names = ("input_ids", "attention_mask", "position_ids")
    logits = response_positions(loaded(**{name: x[name] for name in names}).logits, micro.response_width) / 0.7
    log_probs = logits.log_softmax(dim=-1)
    best = token_log_probs(loaded, LMHead(loaded), micro, 0.7, top_k=5, num_tokens=60)
    expected = log_probs[..., :60].topk(5)
    assert torch.equal(best.candidates[mask], expected.indices[mask])
    assert not best.candidates[~mask].any()
    torch.testing.assert_close(best.candidate_log_probs[mask], expected.values[mask], rtol=0, atol=1e-12)
    x["ref_candidates"] = best.candidates.flip(-1)
    given = token_log_probs(loaded, LMHead(loaded), micro, 0.7, candidates="ref_candidates").candidate_log_probs
    torch.testing.assert_close(given[mask], expected.values.flip(-1)[mask], rtol=0, atol=1e-12)
    parameters = [p for p in loaded.parameters() if p.requires_grad]
    weight = torch.randn(given.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours = torch.autograd.grad((weight * given).sum(), parameters)
    plain = log_probs.gather(-1, x["ref_candidates"]) * mask[..., None]
    for own, other in zip(ours, torch.autograd.grad((weight * plain).sum(), parameters), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy", [None, "value"])
@pytest.mark.parametrize("at_a_time", [3 * 102, 2**24])
def test_scores_of_a_gpu_are_those_of_a_cpu_forward_and_backward(at_a_time, entropy, temperature, loaded, monkeypatch):
    monkeypatch.setattr(chunked_logprobs, "LOGITS_AT_A_TIME", at_a_time)
    micro, parameters, found = micro_batch(100), [p for p in loaded.parameters() if p.requires_grad], []
    weight = torch.randn(micro.tensors["response_mask"].shape, dtype=torch.float64)
    for is_used in (False, True):
        monkeypatch.setattr(chunked_logprobs, "uses_kernels", lambda logits, is_used=is_used: is_used)
        scores = token_log_probs(loaded, LMHead(loaded), micro, temperature, entropy=entropy)
        gradients = torch.autograd.grad((weight * scores.log_probs).sum(), parameters)
        found.append([scores.log_probs, *([scores.entropies] if entropy else []), *gradients])
    for plain, kernels in zip(*found, strict=True):
        torch.testing.assert_close(kernels, plain, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2**-24), (torch.bfloat16, 2**-9)], ids=str)
def test_scores_of_a_gpu_are_as_exact_in_narrow_types(dtype, rounding, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    logits = (torch.randn(200, 500, generator=draw) * 4).to(dtype)
    logits[:20, 7], tokens = 30.0, torch.randint(500, (200,), generator=draw)
    logits[:, 3] = -torch.inf  # a forbidden token
    tokens[tokens == 3], tokens[:20] = 4, 7  # almost certain
    weight, scoring, found = torch.randn(200, generator=draw), chunked_logprobs._Scoring(entropy="value"), []
    for is_used, x in ((False, logits.double()), (False, logits), (True, logits)):
        monkeypatch.setattr(chunked_logprobs, "uses_kernels", lambda logits, is_used=is_used: is_used)
        x = x.clone().requires_grad_()
        log_probs, entropies = scoring(x, tokens)
        (weight * log_probs).sum().backward()
        assert x.grad.dtype == x.dtype
        found.append([y.detach().double() for y in (log_probs, entropies, x.grad)])
    for exact, plain, kernels, one in zip(*found, (2**-24, 2**-24, rounding), strict=True):
        torch.testing.assert_close(kernels, exact, rtol=4 * one, atol=1e-5)
        assert (kernels - exact).abs().mean() <= 1.6 * (plain - exact).abs().mean() + 1e-7


def small(vocabulary, **options):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    options = {"num_hidden_layers": 1, "tie_word_embeddings": False, **options}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=vocabulary, **sizes, **options))


def test_no_more_than_a_part_of_the_logits_ever_exists_forward_or_backward(monkeypatch):
    model = small(20_000)
    micro = micro_batch(100, rows=40)
    tokens, weight = int(micro.tensors["response_mask"].sum()), 20_000 * 16
    monkeypatch.setattr(chunked_logprobs, "LOGITS_AT_A_TIME", 4 * 20_000)
    head = LMHead(model)
    with LargestTensor() as seen:
        token_log_probs(model, head, micro, entropy="grad").log_probs.sum().backward()
    assert seen.numbers <= weight  # a part of the logits, 80 000 numbers, is smaller
    assert tokens * 20_000 > 8 * weight
    with LargestTensor() as plain:
        plain_scores(model, micro, 1.0)
    assert plain.numbers >= tokens * 20_000


@pytest.mark.parametrize(
    ("family", "separable"), [("qwen2", True), ("gpt_neox", True), ("cohere", True), ("gemma2", False)]
)
def test_a_model_that_does_more_than_multiply_by_its_head_is_found_out(family, separable, tmp_path):
    options = {"logit_scale": 0.5} if family == "cohere" else {}
    path = save_random_model(tmp_path, family, torch.float32, **options)
    source = Pretrained(path=str(path), attention="eager" if family == "gemma2" else "sdpa")
    model = source.load_causal_lm("cpu")
    head = LMHead(model)
    assert head.is_separable is separable
    micro = micro_batch(100)
    found = token_log_probs(model, head, micro, entropy="grad")
    log_probs, entropies, _ = plain_scores(model, micro, 1.0)
    torch.testing.assert_close(found.log_probs, log_probs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.entropies, entropies, rtol=1e-4, atol=1e-5)


def test_the_model_is_whole_again_after_its_head_was_left_out(loaded):
    micro = micro_batch(100)
    names = ("input_ids", "attention_mask", "position_ids")
    before = loaded(**{name: micro.tensors[name] for name in names}).logits
    token_log_probs(loaded, LMHead(loaded), micro)
    assert torch.equal(loaded(**{name: micro.tensors[name] for name in names}).logits, before)


def head_gradient(dtype, at_a_time, monkeypatch, *, autocast=None, tied=False, is_sharded=False):
    """Of the output head of one small model, from 400 tokens with advantages that mostly agree."""
    torch.manual_seed(0)
    model = small(64, tie_word_embeddings=tied).double().to(dtype)
    if is_sharded:
        mesh = init_device_mesh("cpu", (1,))
        shard_fully(model, mesh, reshard=True, compute_dtype=autocast, offload=False, pin=False)
        autocast = None
    monkeypatch.setattr(chunked_logprobs, "LOGITS_AT_A_TIME", 64 * at_a_time)
    micro = micro_batch(64, rows=100)
    head = LMHead(model)
    with computing_in(None if autocast is None else "bfloat16", model):
        found = token_log_probs(model, head, micro, entropy="grad")
        (found.log_probs.sum() + 0.1 * found.entropies.sum()).backward()
    gradient = model.lm_head.weight.grad
    return (gradient.full_tensor() if is_sharded else gradient).double()


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


CASES = {
    "weights in bfloat16": {"dtype": torch.bfloat16},
    "tied": {"dtype": torch.bfloat16, "tied": True},
    "autocast": {"dtype": torch.float32, "autocast": torch.bfloat16},
    "fsdp": {"dtype": torch.float32, "autocast": torch.bfloat16, "is_sharded": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", short_where(CASES, lambda case: case != "autocast"))
def test_parts_add_up_the_gradient_of_a_head_in_bfloat16_as_well_as_one_pass_does(case, monkeypatch, one_process):
    exact = head_gradient(torch.float64, 10_000, monkeypatch, tied=CASES[case].get("tied", False))
    whole, parts = (head_gradient(at_a_time=n, monkeypatch=monkeypatch, **CASES[case]) for n in (10_000, 1))
    errors = [float((found - exact).norm() / exact.norm()) for found in (whole, parts)]
    assert errors[1] < 1.2 * errors[0] + 1e-4


@pytest.mark.parametrize(("device", "numbers"), [("cpu", 2**24), ("cuda", 2**27)])
def test_a_chunk_of_the_logits_is_as_large_as_the_documents_say(device, numbers):
    assert chunked_logprobs.logits_at_a_time(device) == numbers
    document = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
    assert device == "cpu" or "chunks of 2^27 elements" in document
