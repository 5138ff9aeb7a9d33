"""Off-policy reuse: how much rows drawn by an earlier policy count in the update of the present one.

    w_t = min(pi_old(y_t) / pi_rollout(y_t), cap)     rows of the buffer
    w_t = 1                                           rows of this step, unless `algorithm.correction` weighs them too

pi_rollout drew the row, at whatever version; pi_old is the policy before this step's update, which the clipped ratio of
the loss starts from.   B responses, T response length.

Source: Hilton et al. 2021, arXiv:2110.00641 (a proximal policy apart from the behaviour policy); Espeholt et al. 2018,
arXiv:1802.01561 (truncated weights).
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.correction import TruncatedIS
from verl.protocol import DataProto


@torch.no_grad()
def reuse_weights(batch: DataProto, correction: TruncatedIS | None) -> tuple[Tensor | None, dict[str, float]]:
    """The weights of a batch, and what they tell of its old rows.

    Args:
        batch: rollout_log_probs, old_log_probs, response_mask, [B, T]; with rows of the buffer also `is_replayed`, [B].
        correction: for all rows; None is `TruncatedIS()` for the rows of the buffer alone.
    Returns:
        [B, T], or None where every weight is 1; and metrics.
    """
    is_old = batch.batch.get("is_replayed")
    if is_old is None or not bool(is_old.any()):
        return correction(batch) if correction is not None else (None, {})
    weights, metrics = (correction or TruncatedIS())(batch)
    if correction is None:
        weights = torch.where(is_old[:, None], weights, batch["response_mask"].to(weights.dtype))
        metrics = {}
    old = weights[is_old][batch["response_mask"][is_old]].double()
    if not old.numel():
        return weights, metrics
    return weights, metrics | {
        "replay/weight_mean": float(old.mean()),
        "replay/weight_max": float(old.max()),
        "replay/effective_share": float(old.sum() ** 2 / (len(old) * (old**2).sum()).clamp_min(1e-300)),
    }
