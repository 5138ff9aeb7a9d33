"""Marks through the products of the device agree with those of the CPU: columns bit by bit, sums up to rounding."""

from __future__ import annotations

import pytest
import torch

from verl.sync.comparing import differing
from verl.sync.marks import Mark, as_array, mark_of
from verl.sync.vectors import Vectors, full_precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(7, 64), (1000, 896), (4096, 14336)], ids=str)
def test_a_layer_on_the_device_gives_the_marks_of_its_weight(dtype, shape):
    torch.set_float32_matmul_precision("high")
    weight = (torch.randn(shape) * 0.02).to(dtype)
    vectors = Vectors(11)
    expected = mark_of(weight, vectors)
    with full_precision():
        values = torch.nn.functional.linear(vectors.inputs(shape[1], dtype, "cuda"), weight.cuda())
    assert torch.get_float32_matmul_precision() == "high"
    torch.set_float32_matmul_precision("highest")
    assert differing(expected, Mark(as_array(values), shape[1], expected.dtype)) is None
    assert differing(expected, mark_of(weight.cuda(), vectors)) is None
