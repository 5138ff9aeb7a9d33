"""Advantage estimators: GAE and GRPO; credit of a response's reward to its tokens.

    token_level_rewards, response_mask (, values | group_ids)  ->  estimator  ->  advantages, returns

B responses, T response length. An estimator runs on the whole batch of a step, before it is split.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import PositiveFloat
from torch import Tensor

from verl.component import Description, UnitInterval, component
from verl.ops.masking import centred_in_groups, group_sums, masked_sum, masked_whiten
from verl.protocol import DataProto


@component
class AdvantageEstimator(Description):
    """Base class of advantage estimators; a subclass declares its inputs and computes `advantages` and `returns`.

    Attributes:
        function_form: the component that calls a function, for a node with `path` in place of an estimator.
        needs_values: uses `values`, so that the run needs a critic.
        needs_groups: compares the responses to one prompt by `group_ids`, so that a prompt needs several.
        needs_greedy_baseline: uses `greedy_scores` [B], the score of the greedy response to the same prompt.
    """

    function_form: ClassVar[str] = "verl.algorithms.functions.AdvantageFunction"
    needs_values: ClassVar[bool] = False
    needs_groups: ClassVar[bool] = False
    needs_greedy_baseline: ClassVar[bool] = False

    def __call__(self, batch: DataProto) -> DataProto:
        """Compute advantages and returns of a batch.

        Args:
            batch: token_level_rewards [B, T], response_mask [B, T] and the declared inputs.
        Returns:
            A new DataProto of `advantages` and `returns`, [B, T], 0 off the mask; `batch` is unchanged.
        """
        raise NotImplementedError


@component
class GAE(AdvantageEstimator):
    """Generalised advantage estimation.

        delta_t  = r_t + gamma * V_{t+1} - V_t
        A_t      = delta_t + gamma * lam * A_{t+1}
        return_t = A_t + V_t

    Source: Schulman et al. 2015, arXiv:1506.02438, eq. 11-16.
    Differs: t+1 is the next token on the mask; masked tokens (tool output) are skipped, not treated as zero-reward
    steps. A response truncated at its length limit ends like any other, with a next value of 0. Whitening is over all
    tokens of the batch and changes advantages only; returns use the advantages before it.
    Degenerate: a row with an empty mask gives zeros; with one token A = r - V; whitening a single token gives 0.

    Args:
        gamma: discount per token, in [0, 1].
        lam: in [0, 1]; 1 is Monte Carlo, 0 is TD(0).
        whiten: normalise the advantages to mean 0 and variance 1.
        discount: whether gamma and lam apply from token to token, or from turn to turn of an episode. With the latter
            tokens within a turn are not discounted, so that the length of a turn has no effect.
    Raises:
        ConfigError: gamma or lam outside [0, 1].
    """

    gamma: UnitInterval = 1.0
    lam: UnitInterval = 1.0
    whiten: bool = True
    discount: Literal["token", "turn"] = "token"

    needs_values: ClassVar[bool] = True

    @torch.no_grad()
    def __call__(self, batch: DataProto) -> DataProto:
        mask, rewards, values = batch["response_mask"], batch["token_level_rewards"], batch["values"]
        gamma: float | Tensor = self.gamma
        decay: float | Tensor = self.gamma * self.lam
        if self.discount == "turn":
            acts = _ends_turn(batch, mask)
            gamma, decay = (torch.where(acts, values.new_tensor(x), values.new_ones(())) for x in (gamma, decay))
        delta = rewards + gamma * _next_on_mask(values, mask) - values
        advantages = discounted_sums(delta, mask, decay)
        returns = torch.where(mask, advantages + values, 0.0)
        if self.whiten:
            advantages = masked_whiten(advantages, mask)
        return DataProto.from_dict({"advantages": advantages, "returns": returns})


@component
class GRPO(AdvantageEstimator):
    """The advantage of GRPO with outcome rewards: relative to the group of responses to the same prompt.

        R_i    = sum of the rewards of response i
        A_it   = (R_i - mean of the group) / (std of the group + epsilon), the same for each token t
        return = R_i at each token

    Source: Shao et al. 2024, arXiv:2402.03300, sec. 4.1.2.
    Differs: the paper does not define the std; this is the sample std (divided by n - 1, as torch.std) plus epsilon.
    Without the std it is the advantage of Dr. GRPO (Liu et al. 2025, arXiv:2503.20783).
    Degenerate: a group of one, or of equal rewards, gives exact zeros. A row with an empty mask gives zeros and does
    not count as a member of its group.

    Args:
        normalize_std: divide by the std of the group; false gives R_i less the mean.
        epsilon: added to the std, above 0.
    Raises:
        ConfigError: epsilon not above 0.
    """

    normalize_std: bool = True
    epsilon: PositiveFloat = 1e-6

    needs_groups: ClassVar[bool] = True

    @torch.no_grad()
    def __call__(self, batch: DataProto) -> DataProto:
        mask, rewards = batch["response_mask"], batch["token_level_rewards"]
        scores = masked_sum(rewards, mask, dim=-1)
        is_member = mask.any(dim=-1).to(scores.dtype)
        advantages = centred_in_groups(scores, batch["group_ids"], is_member)
        if self.normalize_std:
            size = group_sums(is_member, batch["group_ids"])
            squares = group_sums(advantages.double().square(), batch["group_ids"])  # large ones overflow float32
            variance = squares / (size - 1).clamp(min=1)
            advantages = (advantages / (variance.sqrt() + self.epsilon)).to(scores.dtype)
        return per_response(advantages, scores, mask)


def per_response(advantages: Tensor, scores: Tensor, mask: Tensor) -> DataProto:
    """One advantage and one return for each response [B], given to each token of the mask [B, T]."""
    return DataProto.from_dict(
        {
            "advantages": torch.where(mask, advantages.unsqueeze(-1), 0.0),
            "returns": torch.where(mask, scores.unsqueeze(-1), 0.0),
        }
    )


def _next_on_mask(values: Tensor, mask: Tensor) -> Tensor:
    """[B, T]: the value at the next token on the mask, 0 where there is none."""
    rows, length = values.shape
    padded = torch.cat([values, values.new_zeros(rows, 1)], dim=-1)
    positions = torch.arange(length, device=mask.device)
    own_or_later = torch.where(mask, positions, length).flip(-1).cummin(dim=-1).values.flip(-1)
    later = torch.cat([own_or_later[:, 1:], own_or_later.new_full((rows, min(length, 1)), length)], dim=-1)
    return padded.gather(-1, later)


def _ends_turn(batch: DataProto, mask: Tensor) -> Tensor:
    """[B, T]: True where the next token on the mask is of another turn; in a row without turns nowhere."""
    if "turn_ids" not in batch:
        return torch.zeros_like(mask)
    turns = batch["turn_ids"].double()
    return _next_on_mask(turns + 1, mask) != turns + 1


def discounted_sums(delta: Tensor, mask: Tensor, decay: float | Tensor) -> Tensor:
    """[B, T]: x_t = delta_t + decay_t * x_{t+1} along the tokens on the mask, 0 off it."""
    # Off the mask x_t = 0 + 1 * x_{t+1} carries the running sum over.
    steps = torch.where(mask, delta, 0.0).t().contiguous()
    decays = torch.where(mask, torch.as_tensor(decay, dtype=delta.dtype, device=delta.device), 1.0).t().contiguous()
    sums = torch.empty_like(steps)
    running = delta.new_zeros(delta.shape[0])
    for t in reversed(range(delta.shape[1])):
        running = torch.addcmul(steps[t], decays[t], running, out=sums[t])
    return torch.where(mask, sums.t(), 0.0)
