"""What tests of rollout engines share: models that vLLM's kernels take, prompts of many lengths, comparisons by row."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from random_models import save_random_model
from torch import Tensor
from transformers import DynamicCache

from verl.models.pretrained import Pretrained
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest
from verl.rollout.responses import ResponseGenerator

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "llama": ("llama", {}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 32, "hidden_size": 128, "moe_intermediate_size": 64}),
}


def save_family(directory: Path, name: str) -> Pretrained:
    """A random float32 model whose heads have 32 numbers: vLLM's kernels for the CPU take no smaller ones."""
    family, options = FAMILIES[name]
    shape = {"hidden_size": 128, "max_position_embeddings": 256, **options}
    return Pretrained(path=str(save_random_model(directory, family, torch.float32, **shape)))


def random_prompts(count: int = 12, longest: int = 100) -> DataProto:
    """Prompts of 3 to `longest` tokens, padded on the left."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, longest + 1, (count,), generator=generator)
    mask = torch.arange(longest) >= longest - lengths[:, None]
    return DataProto.from_dict(
        {
            "prompts": torch.randint(3, 90, (count, longest), generator=generator).masked_fill(~mask, 0),
            "prompt_mask": mask,
            "prompt_ids": torch.arange(count),
            "group_ids": torch.arange(count),
        }
    )


def plain_log_probs(
    model: Any, set_weights: Callable[[Any], None], tokens: list[int], width: int, versions: list[Any], *, keeps: bool
) -> Tensor:
    """Log-probs of the tokens behind the first `width`, each by the weights of its version, with the cache of
    transformers: keys of former weights are kept in it, or all of them are computed anew."""
    ids, cache, log_probs, read = torch.tensor([tokens]), DynamicCache(), [], 0
    for version, group in itertools.groupby(versions):
        set_weights(version)
        if not keeps:
            cache, read = DynamicCache(), 0
        count = len(list(group))
        end = width + len(log_probs) + count - 1  # the last token of a version is read by the next one
        with torch.no_grad():
            logits = model(input_ids=ids[:, read:end], past_key_values=cache).logits[0, -count:]
        following = ids[0, end + 1 - count : end + 1, None]
        log_probs += logits.log_softmax(-1).gather(-1, following)[:, 0].tolist()
        read = end
    return torch.tensor(log_probs)


def generate(engine: Any, prompts: DataProto, request: GenerationRequest) -> DataProto:
    """Rows of responses by an engine."""
    return ResponseGenerator(engine, engine.options, 0).generate(prompts, request)


def by_row(rows: DataProto) -> dict[tuple[int, int], tuple[list[int], Tensor]]:
    """(prompt, sample) -> tokens and log-probs."""
    fields = ("prompt_ids", "sample_ids", "responses", "response_mask", "rollout_log_probs")
    return {
        (int(p), int(s)): (tokens[mask].tolist(), log_probs[mask])
        for p, s, tokens, mask, log_probs in zip(*(rows[name] for name in fields), strict=True)
    }


def agreement(left: DataProto, right: DataProto) -> tuple[float, float]:
    """The share of rows with the same tokens, and the largest difference of their log-probs."""
    ours, theirs = by_row(left), by_row(right)
    assert ours.keys() == theirs.keys()
    same = [key for key in ours if ours[key][0] == theirs[key][0]]
    gaps = [float((ours[key][1] - theirs[key][1]).abs().max()) for key in same]
    return len(same) / len(ours), max(gaps, default=float("inf"))


@torch.no_grad()
def shake(model: torch.nn.Module, scale: float = 0.02, seed: int = 1) -> None:
    """Change every weight that trains."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
