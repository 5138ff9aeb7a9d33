"""What attention of a packed line takes on a GPU, from its layout.

Of one layer of Llama 8B in bfloat16, forward: scores, bytes of copied keys and values, bytes of masks.
"""

from dataclasses import dataclass

import torch

from verl.model_paths.packed_attention import make_block_mask
from verl.ops.attention import varlen_layout
from verl.ops.packing import PackedRows, pack

HEADS, KINDS, WIDTH, BYTES = 32, 8, 128, 2
PROMPT, SAMPLES = 512, 8
META = torch.device("meta")


@dataclass(frozen=True)
class AttentionCost:
    """Scores of one head; bytes of copies of keys and values, and of masks."""

    scores: int
    key_bytes: int = 0
    mask_bytes: int = 0


def group_of(longest: int, multiple: int = 64) -> PackedRows:
    """A prompt with responses from a quarter of `longest` tokens to all of them."""
    lengths = torch.linspace(longest // 4, longest, SAMPLES).long()
    mask = torch.arange(longest) < lengths[:, None]
    prompts = torch.full((SAMPLES,), PROMPT)
    return pack(prompts, lengths, torch.zeros(SAMPLES).long(), mask, PROMPT, multiple=multiple)


def needed(packing: PackedRows) -> int:
    """Scores of the keys that queries see."""
    return int((packing.positions + 1).sum())


def under_masks(packing: PackedRows, window: int | None = None) -> AttentionCost:
    """By blocks: a mask makes the kernel compute all scores, and need a copy of the keys for each head of queries."""
    scores = key_bytes = mask_bytes = 0
    for block in packing.slots().blocks:
        mask = make_block_mask(block, window, META)
        slots = block.count * block.queries
        scores += slots * (block.queries + 1) // 2 if mask is None else slots * block.keys
        heads = KINDS if mask is None else KINDS + HEADS  # gathered, then repeated
        key_bytes += 2 * block.count * block.keys * heads * WIDTH * BYTES
        mask_bytes += 0 if mask is None else mask.numel()
    return AttentionCost(scores, key_bytes, mask_bytes)


def by_kernel(packing: PackedRows, window: int | None = None) -> AttentionCost:
    """By the variable-length kernel, which leaves out what a causal segment hides."""
    layout = varlen_layout(packing.segments, [(0, len(packing.tokens))], window)
    scores = 0
    for part in layout.parts:
        for queries, keys in zip(part.query_ends.diff().tolist(), part.key_ends.diff().tolist(), strict=True):
            first = keys - queries + 1 if part.is_causal else keys
            seen = torch.arange(first, keys + 1) if part.is_causal else torch.full((queries,), keys)
            scores += int(seen.clamp(max=layout.window).sum() if layout.window else seen.sum())
    copied = 0 if layout.gathered is None else len(layout.gathered.index)
    return AttentionCost(scores, 2 * copied * KINDS * WIDTH * BYTES)
