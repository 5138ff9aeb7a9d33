"""Copies from the device: what is saved is what the compute stream had been asked for at the call."""

import torch
from checkpoint.requests import request, same_bits, tensors_of
from gpu.needs import gpus

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.save.async_writer import CheckpointWriter

pytestmark = gpus()


def test_tensors_on_the_device_are_saved_as_the_compute_stream_left_them(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    tensors = {
        "weight": torch.zeros(4000, 4000, device="cuda"),
        "transposed": torch.randn(30, 20, device="cuda").T,
        "half": torch.randn(1001, device="cuda").bfloat16(),
        "host": torch.randn(10),
    }
    with CheckpointWriter(store) as writer:
        for step in range(1, 4):
            for _ in range(50):
                tensors["weight"].add_(1)  # still queued when `save` is called
            expected = {name: tensor.clone().cpu() for name, tensor in tensors.items()}
            writer.save(request(step, tensors))
            writer.wait_copied()
            tensors["weight"].add_(1000)
            writer.drain()
            found = tensors_of(store.newest(), "actor")
            assert [name for name in tensors if not same_bits(found[name], expected[name])] == []
            tensors["weight"].sub_(1000)
