"""Marks through the products of the device agree with those of the CPU: columns bit by bit, sums up to rounding."""

import pytest
import torch
from gpu.needs import gpus

from verl.rollout.proof.fingerprints import ProbeVectors, WeightFingerprint, as_array, fingerprint, full_precision
from verl.rollout.proof.verifier import differing

pytestmark = gpus()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(7, 64), (1000, 896), (4096, 14336)], ids=str)
def test_a_layer_on_the_device_gives_the_marks_of_its_weight(dtype, shape):
    torch.set_float32_matmul_precision("high")
    weight = (torch.randn(shape) * 0.02).to(dtype)
    vectors = ProbeVectors(11)
    expected = fingerprint(weight, vectors)
    with full_precision():
        values = torch.nn.functional.linear(vectors.inputs(shape[1], dtype, "cuda"), weight.cuda())
    assert torch.get_float32_matmul_precision() == "high"
    torch.set_float32_matmul_precision("highest")
    assert differing(expected, WeightFingerprint(as_array(values), shape[1], expected.dtype)) is None
    assert differing(expected, fingerprint(weight.cuda(), vectors)) is None
