"""What marks tell of a tensor: everything that a sync can get wrong, and nothing that rounding does."""

import math
from typing import Any

import pytest
import torch
from rollout.proof.planted import marks_of, some_weights, verifier_of
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from verl.models.pretrained import Pretrained
from verl.rollout.proof import fingerprints
from verl.rollout.proof.fingerprints import COLUMNS, HostCopies, ProbeVectors, fingerprint, tied_names, transposed_names
from verl.rollout.proof.verifier import differing

TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_signs_and_columns_are_exact_in_every_type(dtype):
    inputs = ProbeVectors(3).inputs(301, dtype)
    assert inputs.shape == (1 + COLUMNS, 301)
    assert (inputs[0].abs() == 1).all()
    assert (inputs[1:].sum(dim=1) == 1).all()
    assert torch.equal(inputs[0].float(), ProbeVectors(8).signs(301))
    assert 0.4 < float((inputs[0] > 0).float().mean()) < 0.6


@pytest.mark.parametrize("width", [1, 3, 4, 17, 64])
def test_in_time_every_column_is_read(width):
    syncs = math.ceil(width / min(COLUMNS, width))
    assert {column for version in range(syncs) for column in ProbeVectors(version).columns(width)} == set(range(width))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("width", [64, 896, 4096])
def test_another_order_of_summation_is_not_seen(dtype, width):
    rows = (torch.randn(700, width) * 0.02 * torch.rand(700, 1)).to(dtype)  # some rows much smaller than others
    expected = fingerprint(rows, ProbeVectors(5))
    inputs = ProbeVectors(5).inputs(width, dtype)
    other = torch.nn.functional.linear(inputs.flip(1), rows.flip(1)).float().numpy()
    found = type(expected)(other, width, expected.dtype)
    assert (found.values[0] != expected.values[0]).any()  # sums differ, columns do not
    assert differing(expected, found) is None


@pytest.mark.parametrize("place", [0, 333, 895])
def test_a_single_entry_that_changes_shows_in_float32(place):
    rows = torch.randn(700, 896) * 0.02
    changed = rows.clone()
    changed[123, place] += 0.002
    assert differing(fingerprint(rows, ProbeVectors()), fingerprint(changed, ProbeVectors())) is not None


def after_one_update(weights, lr):
    """AdamW from a random gradient, as `torch.optim` makes it."""
    parameters = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in weights.items()}
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    torch.optim.AdamW(parameters.values(), lr=lr, weight_decay=0.0).step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.parametrize(
    ("lr", "dtype"), [(1e-5, torch.float32), (1e-6, torch.float32), (1e-5, torch.bfloat16)], ids=str
)
def test_every_tensor_shows_one_update(lr, dtype):
    weights = some_weights(width=256)
    updated = after_one_update(weights, lr)
    before, after = marks_of(weights, dtype=dtype), marks_of(updated, dtype=dtype)
    matrices = [name for name in before if before[name].width is not None]
    # In bfloat16 a vector of 256 may happen to keep all of its entries.
    names = list(before) if dtype == torch.float32 else matrices
    assert all(differing(after[name], before[name]) is not None for name in names)


def test_a_matrix_that_is_kept_sideways_is_marked_as_engines_have_it():
    weight, verifier = torch.randn(20, 30), verifier_of()
    verifier.transposed = {"w"}
    verifier.add_fingerprint("w", weight)
    assert differing(verifier.fingerprints["w"], fingerprint(weight.T.contiguous(), ProbeVectors())) is None
    model = torch.nn.ModuleDict({"a": Conv1D(20, 30), "b": torch.nn.Linear(30, 20)})
    assert transposed_names(model) == {"a.weight"}


def test_tied_tensors_are_found_by_identity(tmp_path):
    from random_models import save_random_model

    for is_tied in (True, False):
        path = save_random_model(tmp_path / str(is_tied), "qwen2", torch.float32, tie_word_embeddings=is_tied)
        model = Pretrained(path=str(path)).load_causal_lm("cpu")
        assert tied_names(model) == ({"lm_head.weight": "model.embed_tokens.weight"} if is_tied else {})


class Launches(TorchDispatchMode):
    """Counts operations that compute, not those that look at a tensor in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or func.overloadpacket.__name__ in ("empty", "_unsafe_view"))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("shape", "most"), [((576, 1536), 7), ((1536, 8960), 7), ((151936, 1536), 49), ((1536,), 2)])
def test_a_fingerprint_on_a_device_takes_few_kernels_and_sends_nothing_there_again(shape, most):
    weight, vectors = torch.empty(shape, device="meta"), ProbeVectors(1)
    counts = []
    for _ in range(2):
        with Launches() as launches, HostCopies():
            fingerprint(weight, vectors, torch.bfloat16)
        counts.append(launches.count)
    assert counts[1] <= most


def test_parts_that_are_computed_together_on_a_device_have_the_fingerprints_of_each(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    shapes = {"a": (6, 16), "b": (10, 16), "c": (4, 8), "norm": (16,), "bias": (3,), "half": (8, 16), "columns": (5, 8)}
    whole = {name: (tuple((0, n) for n in shape), shape) for name, shape in shapes.items()}
    parts = {name: (torch.randn(shape, generator=draw), box, shape) for name, (box, shape) in whole.items()}
    parts["half"] = (parts["half"][0][4:], ((4, 8), (0, 16)), shapes["half"])
    parts["columns"] = (parts["columns"][0][:, 2:6].contiguous(), ((0, 5), (2, 6)), shapes["columns"])
    vectors = ProbeVectors(3)
    alone = {name: fingerprints.own_part(*part, vectors, torch.bfloat16) for name, part in parts.items()}
    assert fingerprints.own_parts(parts, vectors, torch.bfloat16).keys() == parts.keys()
    monkeypatch.setattr(fingerprints, "is_in_main_memory", lambda x: False)
    copies, calls = HostCopies(), []
    monkeypatch.setattr(fingerprints, "fingerprint", lambda *given: calls.append(given) or fingerprint(*given))
    with copies:
        together = fingerprints.own_parts(parts, vectors, torch.bfloat16)
    copies.finish()
    assert len(calls) == 3  # matrices 16 and 8 wide, and vectors
    for name, mark in alone.items():
        found = together[name]
        for field in ("rows", "offset", "width", "is_term"):
            assert getattr(found, field) == getattr(mark, field)
        assert differing(mark, found) is None
    wrong = {name: (part.roll(1, 0), *where) for name, (part, *where) in parts.items()}
    with copies:
        together = fingerprints.own_parts(wrong, vectors, torch.bfloat16)
    copies.finish()
    assert all(differing(mark, together[name]) is not None for name, mark in alone.items())
