"""Log-probabilities and entropies of response tokens, and the only one-token shift of a language model.

B responses, P prompt length, T response length, S = P + T, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def response_positions(states: Tensor, response_length: int) -> Tensor:
    """The states that predict each response token: positions P-1 to S-2, since position s predicts token s+1.

    Args:
        states: [B, S, ...], anything with one entry per token (hidden states, logits); or [B, T+1, ...], if the
            sequence was already cut to its last T+1 positions.
        response_length: T.
    Returns:
        [B, T, ...], where [b, t] belongs to response token t. A view.
    Raises:
        ValueError: fewer than T+1 positions, so that nothing predicts the first response token.
    """
    positions = states.shape[1]
    if not 0 <= response_length < positions:
        raise ValueError(
            f"response_length is {response_length} and there are {positions} positions: "
            "the first response token is predicted by the position before it, so T + 1 are needed."
        )
    return states[:, positions - response_length - 1 : positions - 1]


def log_probs_of(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """log_softmax(logits / temperature) at `tokens`, in nats.

    Computed and returned in float32 at least; float64 stays float64.

    Args:
        logits: [B, T, V], untruncated. Any leading shape will do.
        tokens: [B, T] int64.
        temperature: the temperature that the tokens were sampled at, above 0.
    Returns:
        [B, T].
    Raises:
        ValueError: temperature not above 0.
    """
    log_probs = _log_softmax(logits, temperature)
    return log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def entropy_of(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy of softmax(logits / temperature), in nats: 0 where one token has all the mass, at most log V.

    A logit of -inf is a token of probability zero: it adds nothing, and gets no gradient.

    Args:
        logits: [B, T, V]. Any leading shape will do.
        temperature: above 0.
    Returns:
        [B, T], float32 at least.
    Raises:
        ValueError: temperature not above 0.
    """
    log_probs = _log_softmax(logits, temperature)
    # The floor is finite, so that 0 * log 0 is 0 forward and backward.
    return -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(-1)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}: log-probabilities need one above 0.")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)
