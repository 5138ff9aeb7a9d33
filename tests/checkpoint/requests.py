"""Requests to save, and reading back what became of them."""

from collections.abc import Mapping

import torch

from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.manager import CheckpointManager
from verl.checkpoint.save.save_request import SaveRequest
from verl.checkpoint.save.snapshot import SavedComponent


def request(step: int, tensors: Mapping[str, torch.Tensor], **more) -> SaveRequest:
    """Weights as a model, and a moment for each."""
    actor = SavedComponent(tensors=tensors, files={"config.json": b'{"step": %d}' % step})
    moments = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    optimizer = SavedComponent(tensors=moments, file="optimizer.safetensors")
    return SaveRequest(step=step, components={"actor": actor, "optimizer": optimizer}, state={"step": step}, **more)


def tensors_of(checkpoint: Checkpoint, component: str) -> dict[str, torch.Tensor]:
    """What a checkpoint holds, every byte hashed."""
    return dict(CheckpointManager(checkpoint.directory).load(component, mmap=False))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
