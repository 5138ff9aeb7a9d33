"""Log-probs of a few fixed rows on both sides of a sync, the proof of all that fingerprints of tensors do not cover:
rotary positions, scales, connections of layers, experts in kernels that cannot be read, an adapter that requests do not
use."""

from __future__ import annotations

import torch

from verl.ops.sampling import uniform

ROWS, LENGTH = 1, 16  # one forward pass over few tokens: its cost is that of reading the weights once
_ROW_SEED = 0x9A7E
# Mean distance that rounding may make: about 100 times the type's rounding error, which a model of many layers adds up,
# but at least 1e-3. docs/rollout.md has the derivation.
ALLOWED_NATS = {"float32": 1e-3, "tf32": 5e-2, "float16": 5e-2, "bfloat16": 3e-1}


def allowed_nats(*types: str) -> float:
    """The limit for two compute types, as named by `compute_type`: that of the coarser one."""
    return max(ALLOWED_NATS.get(name, ALLOWED_NATS["float32"]) for name in types)


def probe_rows(vocab_size: int, context: int = 4096) -> tuple[tuple[int, ...], ...]:
    """Rows of tokens that are the same on every machine, of length `LENGTH` or less in a shorter context."""
    length = max(2, min(LENGTH, context - 1))
    noise = uniform(_ROW_SEED, 0, torch.arange(ROWS)[:, None], torch.tensor(0), torch.arange(length))
    return tuple(tuple(row) for row in (noise * vocab_size).long().tolist())
