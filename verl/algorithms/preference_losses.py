"""Losses of preferences: functions of one number per row, so that their gradient is one coefficient per row.

    first pass   row_scores s [R]: log-prob of a response, or score of a reward model, without gradient
    loss L(s)    coefficients c = dL/ds [R], by autograd on R numbers
    second pass  the gradient of sum_r c_r * s_r is that of L, however the rows are packed and divided

A batch of B pairs has R = 2B rows: the chosen responses, then the rejected ones in the same order. A batch of B
labelled responses has B examples, then B mismatched rows. s is log pi(y|x) in nats, summed over the response, and r its
reference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from verl.component import Description, component

Smoothing = Annotated[float, Field(ge=0, lt=0.5)]


@dataclass(frozen=True)
class PreferenceRows:
    """The numbers of the R rows of a batch.

    Attributes:
        scores: [R], see above.
        num_tokens: [R] tokens of the response, EOS included.
        is_chosen: [R] bool, on chosen and desirable responses.
        reference: [R] nats, log-prob by the reference; None for losses without one.
        margins: [R], by how much the chosen response is better; None without.
    """

    scores: Tensor
    num_tokens: Tensor
    is_chosen: Tensor
    reference: Tensor | None = None
    margins: Tensor | None = None

    @property
    def log_ratios(self) -> Tensor:
        """log pi(y|x) - log ref(y|x) [R]."""
        assert self.reference is not None
        return self.scores - self.reference


@component
class PreferenceLoss(Description):
    """Base class of losses of preferences.

    Attributes:
        needs_reference: reads log-probs of the reference.
        is_paired: compares the two responses of a pair; else it rates labelled responses.
        rates_scores: of a reward model, whose scores it compares; else of a policy.
    """

    needs_reference: ClassVar[bool] = True
    is_paired: ClassVar[bool] = True
    rates_scores: ClassVar[bool] = False

    def __call__(self, rows: PreferenceRows) -> tuple[Tensor, Tensor]:
        """The loss, a scalar, and the implicit reward of each row [R]."""
        raise NotImplementedError


@component
class DPO(PreferenceLoss):
    """Direct preference optimisation, with label smoothing.

        h = beta * ((s - r)_chosen - (s - r)_rejected)
        L = -(1 - e) log sigmoid(h) - e log sigmoid(-h)         mean over pairs

    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7; smoothing: Mitchell 2023, "A note on DPO with noisy
    preferences", eq. 3.
    Degenerate: label_smoothing 0 is DPO.

    Args:
        beta: strength of the tie to the reference.
        label_smoothing: e, the share of pairs whose preference is taken to be the wrong way round, in [0, 0.5).
    """

    beta: PositiveFloat = 0.1
    label_smoothing: Smoothing = 0.0

    def __call__(self, rows: PreferenceRows) -> tuple[Tensor, Tensor]:
        rewards = self.beta * rows.log_ratios
        return _smoothed(_gap(rewards), self.label_smoothing), rewards


@component
class IPO(PreferenceLoss):
    """Identity preference optimisation: the gap of log-ratios is regressed on a constant.

        L = ((s - r)_chosen / T_chosen - (s - r)_rejected / T_rejected - 1 / (2 beta))^2         mean over pairs

    Source: Azar et al. 2023, arXiv:2310.12036, eq. 17, with beta for their tau.
    Differs: log-ratios are means over the T tokens of a response, as in TRL, so that long ones do not dominate.

    Args:
        beta: the larger, the smaller the gap that is aimed at.
    """

    beta: PositiveFloat = 0.1

    def __call__(self, rows: PreferenceRows) -> tuple[Tensor, Tensor]:
        gap = _gap(rows.log_ratios / rows.num_tokens)
        return (gap - 1 / (2 * self.beta)).square().mean(), self.beta * rows.log_ratios


@component
class KTO(PreferenceLoss):
    """Kahneman-Tversky optimisation of labelled responses; pairs are taken apart.

        z = max(0, mean of s - r over mismatched rows)         no gradient
        L = w_d (1 - sigmoid(beta (s - r - z)))                desirable
            w_u (1 - sigmoid(beta (z - s + r)))                undesirable;   mean over examples

    Source: Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8. A mismatched row is the prompt of an example with the
    response of the one before it in the batch (of the first: the last), so that z estimates a KL divergence.

    Args:
        beta: strength of the tie to the reference.
        desirable_weight, undesirable_weight: w_d and w_u; for unequal counts n_d and n_u choose w_d n_d / (w_u n_u)
            between 1 and 4/3.
    """

    is_paired: ClassVar[bool] = False

    beta: PositiveFloat = 0.1
    desirable_weight: NonNegativeFloat = 1.0
    undesirable_weight: NonNegativeFloat = 1.0

    def __call__(self, rows: PreferenceRows) -> tuple[Tensor, Tensor]:
        ratios, mismatched = rows.log_ratios.chunk(2)
        distance = self.beta * (ratios - mismatched.mean().clamp(min=0).detach())
        desirable = rows.is_chosen.chunk(2)[0]
        losses = torch.where(
            desirable,
            self.desirable_weight * torch.sigmoid(-distance),
            self.undesirable_weight * torch.sigmoid(distance),
        )
        return losses.mean(), self.beta * rows.log_ratios


@component
class ORPO(PreferenceLoss):
    """Odds-ratio preference optimisation: likelihood of the chosen response, and its odds against the rejected one.

        p = exp(s / T),  odds = p / (1 - p)
        L = -sum(s_chosen) / sum(T_chosen) - beta * mean over pairs of log sigmoid(log(odds_chosen / odds_rejected))

    Source: Hong et al. 2024, arXiv:2403.07691, eq. 4, 6 and 7, with beta for their lambda.
    Differs: the likelihood is that of the response; TRL adds the tokens of the prompt.

    Args:
        beta: weight of the odds.
    """

    needs_reference: ClassVar[bool] = False

    beta: NonNegativeFloat = 0.1

    def __call__(self, rows: PreferenceRows) -> tuple[Tensor, Tensor]:
        mean = rows.scores / rows.num_tokens
        odds = mean - torch.log(-torch.expm1(mean.clamp(max=-1e-12)))
        chosen, tokens = rows.scores.chunk(2)[0], rows.num_tokens.chunk(2)[0]
        return -chosen.sum() / tokens.sum() - self.beta * logsigmoid(_gap(odds)).mean(), self.beta * mean


@component
class SimPO(PreferenceLoss):
    """Simple preference optimisation: mean log-probs in place of log-ratios, and a margin.

        h = beta * (s_chosen / T_chosen - s_rejected / T_rejected) - gamma
        L = -(1 - e) log sigmoid(h) - e log sigmoid(-h)         mean over pairs

    Source: Meng et al. 2024, arXiv:2405.14734, eq. 6.

    Args:
        beta: scale of the mean log-prob.
        gamma: the margin.
        label_smoothing: as in `DPO`.
    """

    needs_reference: ClassVar[bool] = False

    beta: PositiveFloat = 2.0
    gamma: NonNegativeFloat = 0.5
    label_smoothing: Smoothing = 0.0

    def __call__(self, rows: PreferenceRows) -> tuple[Tensor, Tensor]:
        rewards = self.beta * rows.scores / rows.num_tokens
        return _smoothed(_gap(rewards) - self.gamma, self.label_smoothing), rewards


@component
class BradleyTerry(PreferenceLoss):
    """The loss of a reward model: the chosen response wins by the difference of the scores.

        L = -log sigmoid(s_chosen - s_rejected - margin) + c (s_chosen + s_rejected)^2         mean over pairs

    Source: Bradley & Terry 1952; margin: Touvron et al. 2023, arXiv:2307.09288, eq. 2; centring: Eisenstein et al.
    2023, arXiv:2312.09244, eq. 2.

    Args:
        centre_coef: c, which keeps scores around zero: the other term fixes differences only.
    """

    needs_reference: ClassVar[bool] = False
    rates_scores: ClassVar[bool] = True

    centre_coef: NonNegativeFloat = 0.0

    def __call__(self, rows: PreferenceRows) -> tuple[Tensor, Tensor]:
        gap = _gap(rows.scores)
        if rows.margins is not None:
            gap = gap - rows.margins.chunk(2)[0]
        chosen, rejected = rows.scores.chunk(2)
        return -logsigmoid(gap).mean() + self.centre_coef * (chosen + rejected).square().mean(), rows.scores


def evaluated(loss: PreferenceLoss, rows: PreferenceRows) -> tuple[Tensor, dict[str, float]]:
    """Coefficients [R] float64 of the rows, and metrics with TRL's names, `loss` among them.

    For pairs: `rewards/chosen`, `rewards/rejected`, `rewards/margins`, and `rewards/accuracies`, the share of pairs
    whose chosen response has the larger reward. For labelled responses the first three over the examples, if there are
    both kinds. For policies also `logps/chosen` and `logps/rejected`, in nats.
    """
    scores = rows.scores.double().requires_grad_()
    value, rewards = loss(replace(rows, scores=scores))
    (coefs,) = torch.autograd.grad(value, scores)
    metrics = {"loss": float(value.detach())}
    examples = len(scores) if loss.is_paired else len(scores) // 2
    groups = {"chosen": rows.is_chosen[:examples], "rejected": ~rows.is_chosen[:examples]}
    named = {"rewards": rewards.detach()} | ({} if loss.rates_scores else {"logps": scores.detach()})
    for name, x in named.items():
        metrics |= {f"{name}/{group}": float(x[:examples][mask].mean()) for group, mask in groups.items() if mask.any()}
    if "rewards/chosen" in metrics and "rewards/rejected" in metrics:
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    if loss.is_paired:
        metrics["rewards/accuracies"] = float((_gap(rewards.detach()) > 0).double().mean())
    return coefs, metrics


def _gap(x: Tensor) -> Tensor:
    """Chosen less rejected, [B] of [2B]."""
    chosen, rejected = x.chunk(2)
    return chosen - rejected


def _smoothed(gap: Tensor, smoothing: float) -> Tensor:
    return ((1 - smoothing) * softplus(-gap) + smoothing * softplus(gap)).mean()
