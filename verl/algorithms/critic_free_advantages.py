"""Critic-free advantage estimators: RLOO, OPO, REINFORCE++ and ReMax, a return less a baseline without a model.

B responses, T response length. R_i is the sum of the rewards of response i, l_i its number of tokens.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from verl.algorithms.advantages import AdvantageEstimator, discounted_sums, per_response
from verl.component import UnitInterval, component
from verl.ops.masking import centred_in_groups, group_sums, masked_sum, masked_whiten
from verl.protocol import DataProto


@component
class RLOO(AdvantageEstimator):
    """The advantage of RLOO: relative to the mean of the other responses of the group (leave-one-out).

        A_i = R_i - sum over j != i of R_j / (n - 1) = n / (n - 1) * (R_i - mean of the group)

    Source: Ahmadian et al. 2024, arXiv:2402.14740, after Kool et al. 2019. The baseline does not depend
    on response i, so the gradient is unbiased, and nothing is divided by a std.
    Degenerate: a group of one, or of equal rewards, gives exact zeros. A row with an empty mask gives zeros and does
    not count as a member of its group.
    """

    needs_groups: ClassVar[bool] = True

    @torch.no_grad()
    def __call__(self, batch: DataProto) -> DataProto:
        mask = batch["response_mask"]
        scores = masked_sum(batch["token_level_rewards"], mask, dim=-1)
        is_member = mask.any(dim=-1).to(scores.dtype)
        size = group_sums(is_member, batch["group_ids"])
        centred = centred_in_groups(scores, batch["group_ids"], is_member)
        return per_response(centred * size / (size - 1).clamp(min=1), scores, mask)


@component
class OPO(AdvantageEstimator):
    """The advantage of OPO: relative to the length-weighted mean of the group.

        A_i = R_i - sum_j l_j R_j / sum_j l_j

    Source: Hao et al. 2025, arXiv:2505.23585: the baseline of minimal variance weights each reward by the squared
    norm of the gradient of its log-probability, which is assumed to be proportional to the length. The paper uses it
    exactly on policy: one update per batch, no KL, no entropy bonus.
    Degenerate: a group of one, or of equal rewards, gives exact zeros; equal lengths give GRPO without the std. A row
    with an empty mask has weight 0 and gives zeros.
    """

    needs_groups: ClassVar[bool] = True

    @torch.no_grad()
    def __call__(self, batch: DataProto) -> DataProto:
        mask = batch["response_mask"]
        scores = masked_sum(batch["token_level_rewards"], mask, dim=-1)
        return per_response(centred_in_groups(scores, batch["group_ids"], mask.sum(dim=-1)), scores, mask)


@component
class ReinforcePlusPlus(AdvantageEstimator):
    """The advantage of REINFORCE++: the return from each token on, whitened over the batch.

        G_t = r_t + gamma * G_{t+1}
        A_t = (G_t - mean of the batch) / std of the batch

    Source: Hu et al. 2025, arXiv:2501.03262, REINFORCE++: the token-level KL penalty is in r_t (use KLInReward with
    k1), and normalisation runs over all tokens of the batch, so neither critic nor group is needed.
    Degenerate: a batch in which every token has the same return gives zeros; a row with an empty mask gives zeros.

    Args:
        gamma: discount per token, in [0, 1].
    Raises:
        ConfigError: gamma outside [0, 1].
    """

    gamma: UnitInterval = 1.0

    @torch.no_grad()
    def __call__(self, batch: DataProto) -> DataProto:
        mask = batch["response_mask"]
        returns = discounted_sums(batch["token_level_rewards"], mask, self.gamma)
        return DataProto.from_dict({"advantages": masked_whiten(returns, mask), "returns": returns})


@component
class ReinforcePlusPlusBaseline(AdvantageEstimator):
    """The advantage of REINFORCE++ with a baseline: less the mean of the group, over the std of the batch.

        a_i  = R_i - mean of the group, the same for each token
        A_it = (a_i - mean of the batch) / std of the batch, both over tokens

    Source: Hu et al. 2025, arXiv:2501.03262, REINFORCE++-baseline (KLInLoss with k2 goes with it). Unlike the std of
    the group, the std of the batch does not amplify a group with nearly equal rewards.
    Degenerate: if every group has equal rewards all advantages are exact zeros. A group of equal rewards among mixed
    ones is not exactly zero, since lengths move the mean of the batch. A row with an empty mask gives zeros and does
    not count.
    """

    needs_groups: ClassVar[bool] = True

    @torch.no_grad()
    def __call__(self, batch: DataProto) -> DataProto:
        mask = batch["response_mask"]
        scores = masked_sum(batch["token_level_rewards"], mask, dim=-1)
        centred = centred_in_groups(scores, batch["group_ids"], mask.any(dim=-1))
        whitened = masked_whiten(_on_tokens(centred, mask), mask)
        return DataProto.from_dict({"advantages": whitened, "returns": _on_tokens(scores, mask)})


@component
class ReMax(AdvantageEstimator):
    """The advantage of ReMax: the return from each token on, less the score of the greedy response to the prompt.

        A_t = sum over s >= t of gamma^(s - t) r_s - R(greedy response)

    Source: Li et al. 2023, arXiv:2310.10505. A penalty in r_s, such as a KL, applies to the
    sampled response only.
    Degenerate: a response with the greedy response's score and no penalty gives exact zeros if gamma is 1. A row with
    an empty mask gives zeros.

    Args:
        gamma: discount per token, in [0, 1].
    Raises:
        ConfigError: gamma outside [0, 1].
    """

    gamma: UnitInterval = 1.0

    needs_greedy_baseline: ClassVar[bool] = True

    @torch.no_grad()
    def __call__(self, batch: DataProto) -> DataProto:
        mask = batch["response_mask"]
        returns = discounted_sums(batch["token_level_rewards"], mask, self.gamma)
        baseline = _on_tokens(batch["greedy_scores"].to(returns.dtype), mask)
        return DataProto.from_dict({"advantages": returns - baseline, "returns": returns})


def _on_tokens(x: Tensor, mask: Tensor) -> Tensor:
    """A number per response [B] at each token of the mask [B, T], 0 off it."""
    return torch.where(mask, x.unsqueeze(-1), 0.0)
