"""A trainer and an engine without an engine: marks of the same tensors, with room for a fault on one side."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.rollout.proof.fingerprints import Fingerprints
from verl.rollout.proof.verifier import SyncVerifier, VerifyReply

Weights = dict[str, Tensor]
LOG_PROBS = np.zeros((4, 11), dtype=np.float32)


def some_weights(width: int = 128, layers: int = 3, seed: int = 0) -> Weights:
    """Tensors of a small decoder, with equal shapes among them."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.02

    weights = {"model.embed_tokens.weight": drawn(500, width), "model.norm.weight": 1 + drawn(width)}
    for layer in range(layers):
        name = f"model.layers.{layer}"
        for part in "qkvo":
            weights[f"{name}.self_attn.{part}_proj.weight"] = drawn(width, width)
            weights[f"{name}.self_attn.{part}_proj.bias"] = drawn(width)
        weights[f"{name}.mlp.down_proj.weight"] = drawn(width, 3 * width)
    return weights


def marks_of(
    weights: Weights, version: int = 0, dtype: torch.dtype = torch.float32, tied: Mapping | None = None
) -> Fingerprints:
    """As either side takes them."""
    verifier = verifier_of(dtype, tied, version)
    for name, tensor in weights.items():
        verifier.add_fingerprint(name, tensor)
    return verifier.fingerprints


def verifier_of(
    dtype: torch.dtype = torch.float32, tied: Mapping | None = None, version: int = 0, **probe: Any
) -> SyncVerifier:
    """The trainer's side without a model, in the sync of a version."""
    verifier = SyncVerifier(torch.nn.Module(), dtype, **probe)
    verifier.tied, verifier.version = dict(tied or {}), version
    verifier.question()
    return verifier


def proven(
    trained: Weights,
    loaded: Weights | None = None,
    *,
    fault: Callable[[Weights], object] | None = None,
    before: Weights | None = None,
    dtype: torch.dtype = torch.float32,
    loaded_as: torch.dtype | None = None,
    tied: Mapping[str, str] | None = None,
    gap_nats: float = 0.0,
) -> dict[str, float]:
    """The proof of a sync of `trained`, of which the engine made `loaded`, by default the same with a `fault`."""
    held = {name: tensor.to(dtype).clone() for name, tensor in trained.items()} if loaded is None else dict(loaded)
    held |= {alias: held[source].clone() for alias, source in (tied or {}).items()}
    if fault is not None:
        fault(held)
    verifier = verifier_of(dtype, tied, rows=((1, 2),), log_probs=lambda rows: LOG_PROBS)
    if before:
        verifier.adopt(marks := marks_of(before, 0, dtype, tied))
        verifier.verify(VerifyReply(marks, LOG_PROBS))
        verifier.question()
    verifier.adopt(marks_of(trained, 1, dtype, tied))
    return verifier.verify(VerifyReply(marks_of(held, 1, loaded_as or dtype), LOG_PROBS + gap_nats))


def compared(trained: Fingerprints, held: Fingerprints) -> dict[str, float]:
    """The proof of a sync with these fingerprints of both sides."""
    verifier = verifier_of()
    verifier.adopt(trained)
    return verifier.verify(VerifyReply(held, np.zeros(0)))
