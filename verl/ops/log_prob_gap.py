"""Distance between the log-probs of the engine that sampled and those of the trainer, over the pieces of a batch.

    gap_t = |log pi_engine(y_t) - log pi_trainer(y_t)|, in nats

It is rounding where both computed with the same weights, and has no such bound where a row was drawn by earlier ones.
The two kinds of rows are therefore counted apart.   B responses, T response length.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SUMS = ("on_policy", "on_policy_tokens", "off_policy", "off_policy_tokens")
LARGEST = "largest"


class LogProbGap:
    """Sums over pieces of a batch; they stay on the device until `sums` is called."""

    def __init__(self):
        self._pieces: list[Tensor] = []

    def add(
        self, rollout_log_probs: Tensor, log_probs: Tensor, mask: Tensor, is_on_policy: Tensor | None = None
    ) -> None:
        """Count some rows.

        Args:
            rollout_log_probs, log_probs: [B, T] nats, by the engine and by the trainer; read on the mask alone.
            mask: [B, T] bool.
            is_on_policy: [B] bool, whether the weights that gave `log_probs` drew the row; None for all of them.
        """
        gap = torch.where(mask, (rollout_log_probs - log_probs).abs(), 0.0).double()
        own = mask if is_on_policy is None else mask & is_on_policy[:, None]
        other = mask & ~own
        sums = [part for kind in (own, other) for part in (gap.where(kind, 0.0).sum(), kind.sum().double())]
        largest = gap.where(own, 0.0).amax() if gap.numel() else gap.new_zeros(())
        self._pieces.append(torch.stack([*sums, largest]))

    def sums(self) -> dict[str, float]:
        """Plain numbers, for `metrics` here or in a sibling process."""
        if not self._pieces:
            return dict.fromkeys((*SUMS, LARGEST), 0.0)
        pieces = torch.stack(self._pieces)
        return dict(zip((*SUMS, LARGEST), [*pieces[:, :-1].sum(dim=0).tolist(), float(pieces[:, -1].amax())]))

    @staticmethod
    def metrics(*shares: Mapping[str, float]) -> dict[str, float]:
        """Means and largest over the rows of all processes; none of a kind of rows that has no token.

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
