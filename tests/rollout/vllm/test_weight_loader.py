"""Where the tensors of a stream land in the layers of an engine, whole or cut over ranks, packed or not."""

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout.proof.rank_models import Unquantized, full_weights, rank_model
from torch import nn

from verl.rollout.vllm.server.weight_loader import (
    InPlaceLoader,
    UnsupportedLayer,
    concatenate_views,
    give_back_free_memory,
)
from verl.rollout.weight_sync.stream import ChunkEntry


class UnquantizedLinearMethod(Unquantized):
    """Packs as vLLM does on a CPU: the weight itself is gone after it."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed = layer.weight.detach().clone()
        layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


class UnquantizedEmbeddingMethod(Unquantized):
    """Packs a copy, and keeps the weight."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed = layer.weight.detach().clone()


def engine(rank: int, size: int, *, packs: bool) -> nn.Module:
    """One rank's model with weights of its own, which are to be replaced."""
    model = rank_model({name: torch.full_like(tensor, 9.0) for name, tensor in full_weights().items()}, rank, size)
    for module in model.modules():
        if hasattr(module, "quant_method"):
            is_embedding = hasattr(module, "shard_indices")
            module.quant_method = (UnquantizedEmbeddingMethod if is_embedding else UnquantizedLinearMethod)()
            if packs:
                module.cpu_linear = "packed"
                module.quant_method.process_weights_after_loading(module)
    return model


def land(model: nn.Module, weights: dict[str, torch.Tensor], *, per_chunk: int = 100, rows: int = 0) -> None:
    """In chunks of so many tensors, whose memory is used again; or of so many rows of one tensor."""
    landing = InPlaceLoader(model, {name: tuple(tensor.shape) for name, tensor in weights.items()})
    names = list(weights)
    for name, tensor in weights.items() if rows else ():
        for begin in range(0, len(tensor), rows):
            part = tensor[begin : begin + rows].clone()
            landing.take(ChunkEntry(name, tuple(part.shape), 0, begin, tuple(tensor.shape)), part)
            landing.keep()
            part.fill_(-1.0)
    if rows:
        return
    for start in range(0, len(names), per_chunk):
        chunk = {name: weights[name].clone() for name in names[start : start + per_chunk]}
        for name, tensor in chunk.items():
            landing.take(ChunkEntry(name, tuple(tensor.shape), 0), tensor)
        landing.keep()
        for tensor in chunk.values():
            tensor.fill_(-1.0)


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    """What each layer computes with."""
    found = {name: p.detach() for name, p in model.named_parameters() if p.numel()}
    layers = ((path, m) for path, m in model.named_modules() if hasattr(m, "packed") and m.weight.numel() == 0)
    return found | {f"{path}.weight": layer.packed for path, layer in layers}


def wanted(rank: int, size: int) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in rank_model(full_weights(), rank, size).named_parameters()}


@pytest.mark.parametrize("per_chunk", [1, 3, 100])
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_holds_its_part_of_every_tensor(size, packs, per_chunk):
    for rank in range(size):
        model = engine(rank, size, packs=packs)
        land(model, full_weights(), per_chunk=per_chunk)
        expected, found = wanted(rank, size), held(model)
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_a_tensor_that_comes_by_its_rows_lands_like_a_whole_one(size, packs, rows):
    for rank in range(size):
        model = engine(rank, size, packs=packs)
        land(model, full_weights(), rows=rows)
        expected, found = wanted(rank, size), held(model)
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


def test_a_packed_layer_gives_its_memory_back_before_it_takes_new():
    model = engine(0, 1, packs=True)
    seen = []
    process = UnquantizedLinearMethod.process_weights_after_loading

    class Watched(UnquantizedLinearMethod):
        def process_weights_after_loading(self, layer):
            seen.append(layer.cpu_linear)
            process(self, layer)

    Watched.__name__ = "UnquantizedLinearMethod"
    model.attn.o_proj.quant_method = Watched()
    land(model, full_weights())
    assert seen == [None]


@pytest.mark.parametrize("rows", [0, 5])
def test_a_head_is_packed_anew_after_the_embedding_that_it_is_tied_to(rows):
    model = engine(0, 1, packs=True)
    model.lm_head = model.embed_tokens
    land(model, full_weights(), rows=rows)
    assert torch.equal(model.lm_head.packed, model.embed_tokens.weight)
    assert torch.equal(model.lm_head.packed[:51], full_weights()["embed_tokens.weight"])


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_holes_between_tensors_in_use_go_back_to_the_system():
    tensors = [torch.ones(25_000) for _ in range(800)]  # 100 kB each: on the heap, not in a mapping of its own
    last = tensors.pop()
    tensors.clear()
    before = resident_mib()
    give_back_free_memory()
    assert resident_mib() < before - 40
    assert float(last.sum()) == 25_000


def test_matrices_side_by_side_are_one_without_a_copy():
    memory = torch.arange(60.0)
    parts = [memory[:24].view(4, 6), memory[24:36].view(2, 6), memory[36:60].view(4, 6)]
    whole = concatenate_views(parts)
    assert whole.data_ptr() == memory.data_ptr()
    assert torch.equal(whole, memory.view(10, 6))
    for others in ([parts[0], parts[2]], [parts[1], parts[0]], [memory[:24].view(4, 6)[:, :3], parts[1][:, :3]]):
        copied = concatenate_views(others)
        assert torch.equal(copied, torch.cat(others))
        assert copied.data_ptr() != memory.data_ptr()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model, weights: weights.pop("norm.weight"), "norm.weight does not come"),
        (lambda model, weights: weights.update(more=torch.ones(3)), "more has no place"),
        (lambda model, weights: weights.update({"attn.o_proj.weight": torch.ones(32, 24)}), "attn.o_proj.weight does"),
        (lambda model, weights: setattr(model.attn.o_proj, "quant_method", Unquantized()), "loaded by Unquantized"),
        (lambda model, weights: setattr(model, "experts", type("FusedMoE", (nn.Module,), {})()), "is a FusedMoE"),
        (lambda model, weights: setattr(model, "mla", type("MLAAttention", (nn.Module,), {})()), "is a MLAAttention"),
        (lambda model, weights: model.attn.o_proj.register_parameter("scale", nn.Parameter(torch.ones(1))), "scale"),
    ],
)
def test_what_is_not_plain_is_refused(change, said):
    model, weights = engine(0, 1, packs=True), full_weights()
    change(model, weights)
    with pytest.raises(UnsupportedLayer, match=said):
        land(model, weights)


PPMissingLayer = type("PPMissingLayer", (nn.Identity,), {})


@pytest.mark.parametrize("stage", [("embed_tokens", "attn"), ("mlp", "norm")])
def test_a_pipeline_stage_takes_its_own_layers_alone_of_a_whole_model(stage):
    model, weights = engine(0, 1, packs=False), full_weights()
    for name in {path for path, _ in model.named_children()} - {*stage}:
        setattr(model, name, PPMissingLayer())
    own = {name for name in weights if name.startswith(stage)}
    assert 0 < len(own) < len(weights)
    assert InPlaceLoader(model, {name: tuple(x.shape) for name, x in weights.items()}).wanted().keys() == own
    land(model, weights)
    whole, found = wanted(0, 1), held(model)
    assert found.keys() == {name for name in whole if name.startswith(stage)}
    for name, tensor in found.items():
        assert torch.equal(tensor, whole[name]), name


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_rank_that_is_given_what_it_wants_alone_holds_the_same(size, packs):
    weights = full_weights()
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    moved = 0
    for rank in range(size):
        model = engine(rank, size, packs=packs)
        boxes = InPlaceLoader(model, shapes).wanted()
        assert boxes.keys() == shapes.keys()
        landing = InPlaceLoader(model, shapes, {name: tuple(start for start, _ in box) for name, box in boxes.items()})
        for name, box in boxes.items():
            part = weights[name][tuple(slice(start, stop) for start, stop in box)].clone()
            moved += part.numel()
            landing.take(ChunkEntry(name, tuple(part.shape), 0), part)
        landing.keep()
        expected, found = wanted(rank, size), held(model)
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
    assert size == 1 or moved < 0.7 * size * sum(tensor.numel() for tensor in weights.values())
