"""Whether a model gives a text the same numbers when it is padded on the left, tried before anything is trained.

A model that ignores its attention mask or its positions trains and samples without an error, on wrong numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.errors import ConfigError

SHORT, LONG = 5, 9  # tokens
# Mean difference over the spread of the numbers. Rounding stays far below; a model that sees padding is near 1.
TOLERANCES = {torch.float64: 1e-4, torch.float32: 5e-3, torch.float16: 0.1, torch.bfloat16: 0.1}


@torch.no_grad()
def refuse_padding_blind(model: Any, path: str) -> None:
    """Compare a short text alone with the same text padded on the left beside a longer one.

    Args:
        model: a Hugging Face causal language model or backbone, in evaluation mode.
        path: where the configuration describes it, for the message.
    Raises:
        ConfigError: the numbers differ by more than rounding.
    """
    config, parameter = model.config.get_text_config(), next(model.parameters())
    if (getattr(config, "max_position_embeddings", None) or LONG) < LONG:
        return
    device = parameter.device
    long = torch.arange(1, LONG + 1, device=device) % config.vocab_size
    short = torch.flip(long, dims=(0,))[:SHORT]
    padded = torch.cat([torch.zeros(LONG - SHORT, dtype=torch.long, device=device), short])
    mask = torch.ones(2, LONG, dtype=torch.long, device=device)
    mask[1, : LONG - SHORT] = 0
    alone = _numbers(model, short[None], torch.ones_like(short[None]))[0]
    beside = _numbers(model, torch.stack([long, padded]), mask)[1, -SHORT:]
    if not torch.isfinite(alone).all():
        return  # weights that are not finite: the first step tells of those
    difference = float((alone - beside).abs().mean() / alone.std().clamp(min=1e-12))
    if not difference <= TOLERANCES.get(parameter.dtype, 0.1):
        raise ConfigError(
            f"{path} is a {type(model).__name__}: it gives a text other numbers once the text is padded on the left "
            f"beside a longer one ({difference:.0%} off), as prompts are here. It ignores attention_mask or "
            "position_ids. Choose a model that heeds both, or another attention implementation of it."
        )


def _numbers(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    """Logits, or the hidden states of a backbone, [b s n] float64."""
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    found = model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False)
    return (found.logits if hasattr(found, "logits") else found.last_hidden_state).double()
