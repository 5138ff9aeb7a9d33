"""Log-probabilities and entropies of response tokens, and estimates of the KL divergence from them.

B responses, P prompt length, T response length, S = P + T. The one-token shift of a language model is
`response_positions`. Where responses are not in the same columns, the index of the predicting state is computed
instead: for packed rows in `verl/ops/packing.py`, for rows moved to the left in `verl/model_paths/micro_batch.py`.

Estimates per token of KL(pi || ref), in nats, from tokens that pi sampled (Schulman 2020, "Approximating KL
Divergence", http://joschu.net/blog/kl-approx.html):

    estimator   value                         mean over pi          never below 0
    k1          log pi - log ref              the KL                no
    k2          (log pi - log ref)^2 / 2      near the KL           yes
    k3          ref/pi - 1 - log(ref/pi)      the KL                yes

As a loss, on tokens of the current policy: the mean gradient of k1 is zero, that of k2 is the KL's own, and that of
k3 is the gradient of KL(ref || pi).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

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
        tokens: [B, T] int64, or [B, T, K] for several tokens at each place.
        temperature: the temperature that the tokens were sampled at, above 0.
    Returns:
        The shape of `tokens`.
    Raises:
        ValueError: temperature not above 0.
    """
    log_probs = _log_softmax(logits, temperature)
    if tokens.dim() == logits.dim():
        return log_probs.gather(-1, tokens)
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


Estimator = Literal["k1", "k2", "k3"]


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """log pi - log ref, [B, T] from two of [B, T]: unbiased, of either sign, of high variance."""
    return log_probs - ref_log_probs


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """(log pi - log ref)^2 / 2, [B, T] from two of [B, T]: biased, low variance, right to second order."""
    return 0.5 * (log_probs - ref_log_probs).square()


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """ref/pi - 1 - log(ref/pi), [B, T] from two of [B, T]: unbiased and never negative.

    Unbiased where pi gives mass to all that ref does. Grows as exp where ref likes a token far more than pi does.
    """
    difference = ref_log_probs - log_probs
    return torch.expm1(difference) - difference


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


SUMS = ("on_policy", "on_policy_tokens", "off_policy", "off_policy_tokens")
LARGEST = "largest"


class LogProbGap:
    """Accumulates differences between rollout and trainer log-probs; sums stay on the device until `sums` is called."""

    def __init__(self):
        self._pieces: list[Tensor] = []

    def add(
        self, rollout_log_probs: Tensor, log_probs: Tensor, mask: Tensor, is_on_policy: Tensor | None = None
    ) -> None:
        """Add rows.

        Args:
            rollout_log_probs, log_probs: [B, T] nats, by the engine and by the trainer; used on the mask only.
            mask: [B, T] bool.
            is_on_policy: [B] bool, whether the row was sampled with the weights of `log_probs`; None if all were.
        """
        gap = torch.where(mask, (rollout_log_probs - log_probs).abs(), 0.0).double()
        on_policy = mask if is_on_policy is None else mask & is_on_policy[:, None]
        other = mask & ~on_policy
        sums = [part for kind in (on_policy, other) for part in (gap.where(kind, 0.0).sum(), kind.sum().double())]
        largest = gap.where(on_policy, 0.0).amax() if gap.numel() else gap.new_zeros(())
        self._pieces.append(torch.stack([*sums, largest]))

    def sums(self) -> dict[str, float]:
        """The sums as plain numbers, for `metrics` in this or another process."""
        if not self._pieces:
            return dict.fromkeys((*SUMS, LARGEST), 0.0)
        pieces = torch.stack(self._pieces)
        found = torch.cat([pieces[:, :-1].sum(dim=0), pieces[:, -1:].amax(dim=0)])
        return dict(zip((*SUMS, LARGEST), found.tolist(), strict=True))

    @staticmethod
    def metrics(*shares: Mapping[str, float]) -> dict[str, float]:
        """Means and maxima over the rows of all processes; kinds of rows without tokens are left out.

        Args:
            shares: `sums` of each process.
        """
        total = {name: sum(share[name] for share in shares) for name in SUMS}
        metrics = {}
        if total["on_policy_tokens"]:
            metrics["rollout/log_prob_gap_nats"] = total["on_policy"] / total["on_policy_tokens"]
            metrics["rollout/log_prob_gap_max_nats"] = max(share[LARGEST] for share in shares)
        if total["off_policy_tokens"]:
            metrics["rollout/off_policy_gap_nats"] = total["off_policy"] / total["off_policy_tokens"]
        return metrics
