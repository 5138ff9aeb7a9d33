"""What one of four processes has of a model: the slices of its layout, and nothing read but them."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from devices.device_syncs import DeviceSyncs
from torch.testing._internal.distributed.fake_pg import FakeStore

from verl.component import BuildContext
from verl.engines.fsdp import units_of
from verl.engines.parallel_degrees import ParallelDegrees
from verl.engines.parallel_dims import ShardedParallelism
from verl.models.heads import LMHead, ValueHeadModel
from verl.models.lora import LoRA
from verl.models.model_files import SafetensorsReader
from verl.ops.resharding.dtensor import is_divided, local, own_part, tensor_layout

MESHES = {
    "fsdp": ParallelDegrees(dp_shard=4),
    "hsdp": ParallelDegrees(dp_replicate=2, dp_shard=2),
    "tp": ParallelDegrees(dp_replicate=2, tp=2),
    "tp_fsdp": ParallelDegrees(dp_shard=2, tp=2),
    "cp": ParallelDegrees(dp_shard=2, cp=2),
    "cp_tp": ParallelDegrees(cp=2, tp=2),
}


class CountingFiles(SafetensorsReader):
    """Files that know how many numbers were read from them."""

    num_read = 0

    def read(self, wanted, box=None):
        found = super().read(wanted, box)
        self.num_read += found.numel()
        return found


@pytest.fixture(params=MESHES)
def parallel(request):
    """The last of four processes; the others do not answer, and loading asks them nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    context = BuildContext(rank=3, world_size=4)
    yield ShardedParallelism(context, 60.0, MESHES[request.param], fully=request.param != "tp")
    dist.destroy_process_group()


@pytest.mark.first_rows(2)
def test_a_process_reads_its_slices_and_no_more(parallel, model64):
    whole, model = model64.load_causal_lm("cpu").state_dict(), model64.load_skeleton("causal_lm")
    model.weight_files = files = CountingFiles(Path(model64.path), "model")
    parallel.shard_model(model)
    held = 0
    for name, x in model.named_parameters():
        box = tensor_layout(x).box(parallel.mesh, parallel.rank)
        assert torch.equal(local(x), whole[name][tuple(slice(*side) for side in box)]), name
        held += local(x).numel()
    assert files.num_read == held
    total = sum(x.numel() for x in whole.values())
    assert held < {4: 0.3, 2: 0.6}[parallel.mesh.extent("shard") * parallel.mesh.extent("tensor")] * total


@pytest.mark.first_rows(2)
def test_the_trial_of_the_output_head_leaves_nothing_gathered(parallel, model64):
    model = model64.load_causal_lm("cpu")
    parallel.shard_model(model)
    LMHead(model)
    assert all(unit._get_fsdp_state()._fsdp_param_group.is_sharded for unit in units_of(model))
    assert all(is_divided(p) for p in model.parameters()) or not parallel.fully


@pytest.mark.first_rows(2)
def test_whole_or_in_slices_a_process_comes_to_the_same_part(parallel, model64):
    sliced, loaded = ValueHeadModel(model64.load_skeleton("backbone")), ValueHeadModel(model64.load_backbone("cpu"))
    parallel.shard_model(sliced)
    parallel.shard_model(loaded)
    other = dict(loaded.named_parameters())
    for name, x in sliced.named_parameters():
        assert torch.equal(local(x), local(other[name])), name
        assert tensor_layout(x) == tensor_layout(other[name])
    assert tensor_layout(sliced.head.weight).splits == ()  # small, and called apart from the backbone
    buffers = dict(loaded.named_buffers())
    assert all(torch.equal(x, buffers[name]) for name, x in sliced.named_buffers())


@pytest.mark.first_rows(2)
def test_the_factors_of_an_adapter_are_divided_as_the_layers_that_they_adapt(parallel, model64):
    model = LoRA(rank=2).apply(model64.load_causal_lm("cpu"), causal_lm=True)
    whole = {name: x.detach().clone() for name, x in model.named_parameters()}
    parallel.shard_model(model)
    named, tensors = dict(model.named_parameters()), dict[str, list[int]]()
    for name, x in named.items():
        tensors[name] = [axis for dim, axis in tensor_layout(x).splits if dim == "tensor"]
        assert x.requires_grad == ("lora_" in name)
        assert torch.equal(local(x), own_part(x, whole[name])), name
    if parallel.mesh.extent("tensor") > 1:
        columns, rows = (f"base_model.model.model.layers.0.self_attn.{layer}_proj" for layer in "qo")
        assert tensors[f"{columns}.base_layer.weight"] == tensors[f"{columns}.lora_B.default.weight"] == [0]
        assert tensors[f"{rows}.base_layer.weight"] == tensors[f"{rows}.lora_A.default.weight"] == [1]
        assert tensors[f"{columns}.lora_A.default.weight"] == tensors[f"{rows}.lora_B.default.weight"] == []


def test_clipping_waits_for_no_device_and_its_launches_do_not_grow_with_the_number_of_parameters(parallel):
    found = {}
    for count in (3, 60):
        draw = torch.Generator().manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(5, 4, generator=draw, dtype=torch.float64)) for _ in range(count)]
        for p in parameters:
            p.grad = torch.randn(5, 4, generator=draw, dtype=torch.float64)
        wanted = torch.stack([p.grad for p in parameters]).norm() / 2  # the same in four processes, of which one adds
        grads = [p.grad.clone() for p in parameters]
        syncs = DeviceSyncs()
        syncs.on_device([p.grad for p in parameters])
        with syncs:
            norm = parallel.clip(parameters, 0.1)
        torch.testing.assert_close(norm, wanted, rtol=1e-12, atol=0)
        for p, grad in zip(parameters, grads, strict=True):
            torch.testing.assert_close(p.grad, grad * 0.1 / (norm + 1e-6), rtol=1e-12, atol=0)
        assert not syncs.counts.keys() - {"to"}, syncs.counts  # the device that it is on already
        found[count] = syncs.launches
    assert found[3] == found[60] <= 15
