"""Norms by the fused kernel compute what the modules of transformers do, forward and backward, and others stay."""

import copy

import pytest
import torch
from random_models import save_random_model
from transformers import AutoModelForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated

from verl.model_paths.check import finding_for
from verl.models.fused_norms import fuse_rms_norms

WIDTH = 576


def drawn(*shape, scale=1.0):
    """Numbers that bfloat16 holds exactly."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) * scale).bfloat16().float()


def results(norm, weight, x, gradient):
    """Output, and gradients of the input and of the weight."""
    x.requires_grad_()
    out = norm(x)
    out.backward(gradient)
    return [out.detach(), x.grad, weight.grad]


def by_formula(x, weight, gradient):
    weight, x = weight.detach().double().requires_grad_(), x.double()
    return results(
        lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight, weight, x, gradient.double()
    )


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm, Olmo2RMSNorm])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)], ids=str)
def test_a_norm_by_the_kernel_is_that_of_the_module_to_rounding(kind, dtype, bound):
    x, gradient = drawn(3, 40, WIDTH, scale=4.0), drawn(3, 40, WIDTH)
    plain = kind(WIDTH, eps=1e-5).to(dtype)
    with torch.no_grad():
        plain.weight.copy_(1 + drawn(WIDTH, scale=0.3))
    fused = copy.deepcopy(plain)
    assert {made.__name__ for made in fuse_rms_norms(fused)} == {kind.__name__}
    found = [results(norm, norm.weight, x.clone().to(dtype), gradient.to(dtype)) for norm in (plain, fused)]
    for one, other, exact in zip(*found, by_formula(x, plain.weight, gradient), strict=True):
        assert one.dtype == other.dtype == dtype
        size = float(exact.abs().mean())
        torch.testing.assert_close(other.double(), exact, rtol=bound, atol=bound * size)
        errors = [float((x.double() - exact).abs().mean()) for x in (one, other)]
        assert errors[1] <= 1.1 * errors[0] + 1e-7 * size


@pytest.mark.parametrize("kind", [GemmaRMSNorm, Qwen3NextRMSNorm, Qwen3NextRMSNormGated])
def test_a_norm_by_another_formula_stays(kind):
    module = kind(WIDTH)
    assert not fuse_rms_norms(module)
    assert type(module) is kind


def test_a_model_gives_the_same_logits_and_copies_of_it_are_like_it(tmp_path):
    plain = AutoModelForCausalLM.from_pretrained(save_random_model(tmp_path, "qwen3", torch.float32))
    fused = copy.deepcopy(plain)
    assert fuse_rms_norms(fused) == fuse_rms_norms(copy.deepcopy(plain))  # a class for both models
    assert finding_for(fused) == finding_for(plain)
    assert all(isinstance(layer.self_attn.q_norm, Qwen3RMSNorm) for layer in fused.model.layers)
    wanted = plain(input_ids=(ids := torch.arange(4, 24)[None])).logits
    for model in (fused, copy.deepcopy(fused)):
        torch.testing.assert_close(model(input_ids=ids).logits, wanted, rtol=1e-4, atol=1e-5)
    assert fused.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(fused.double()(input_ids=ids).logits, plain.double()(input_ids=ids).logits)  # as the modules
