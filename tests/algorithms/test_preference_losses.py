"""Losses of preferences against their formulas, written out per pair, and their coefficients against autograd."""

import math

import pytest
import torch

from verl.algorithms.preference_losses import DPO, IPO, KTO, ORPO, BradleyTerry, PreferenceRows, SimPO, evaluated

PAIRS = 5


def drawn(seed: int = 0) -> PreferenceRows:
    draw = torch.Generator().manual_seed(seed)
    return PreferenceRows(
        scores=-5 * torch.rand(2 * PAIRS, generator=draw, dtype=torch.float64) - 0.5,
        num_tokens=torch.randint(1, 6, (2 * PAIRS,), generator=draw).double(),
        is_chosen=torch.arange(2 * PAIRS) < PAIRS,
        reference=-5 * torch.rand(2 * PAIRS, generator=draw, dtype=torch.float64) - 0.5,
        margins=torch.rand(PAIRS, generator=draw, dtype=torch.float64).repeat(2),
    )


def pairs(rows: PreferenceRows, scores: torch.Tensor):
    """(score, tokens, reference) of the chosen response, and of the rejected one, by pair."""
    columns = list(zip(scores, rows.num_tokens, rows.reference, strict=True))
    return list(zip(columns[:PAIRS], columns[PAIRS:], strict=True))


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def dpo(rows, scores, beta=0.3, e=0.1):
    gaps = [beta * ((c - rc) - (r - rr)) for (c, _, rc), (r, _, rr) in pairs(rows, scores)]
    return sum(-(1 - e) * torch.log(sigmoid(h)) - e * torch.log(sigmoid(-h)) for h in gaps) / PAIRS


def ipo(rows, scores, beta=0.2):
    gaps = [(c - rc) / tc - (r - rr) / tr for (c, tc, rc), (r, tr, rr) in pairs(rows, scores)]
    return sum((gap - 1 / (2 * beta)) ** 2 for gap in gaps) / PAIRS


def kto(rows, scores, beta=0.4, desirable=1.2, undesirable=0.9):
    ratios = scores - rows.reference
    z = max(0.0, float(ratios[PAIRS:].mean()))
    losses = [
        desirable * (1 - sigmoid(beta * (ratio - z))) if good else undesirable * (1 - sigmoid(beta * (z - ratio)))
        for ratio, good in zip(ratios[:PAIRS], rows.is_chosen, strict=False)
    ]
    return sum(losses) / PAIRS


def orpo(rows, scores, beta=0.3):
    def log_odds(score, tokens):
        p = torch.exp(score / tokens)
        return torch.log(p / (1 - p))

    odds = [torch.log(sigmoid(log_odds(c, tc) - log_odds(r, tr))) for (c, tc, _), (r, tr, _) in pairs(rows, scores)]
    return -scores[:PAIRS].sum() / rows.num_tokens[:PAIRS].sum() - beta * sum(odds) / PAIRS


def simpo(rows, scores, beta=2.0, gamma=0.5, e=0.1):
    gaps = [beta * (c / tc - r / tr) - gamma for (c, tc, _), (r, tr, _) in pairs(rows, scores)]
    return sum(-(1 - e) * torch.log(sigmoid(h)) - e * torch.log(sigmoid(-h)) for h in gaps) / PAIRS


def bradley_terry(rows, scores, centre=0.05):
    terms = [
        -torch.log(sigmoid(c - r - margin)) + centre * (c + r) ** 2
        for ((c, *_), (r, *_)), margin in zip(pairs(rows, scores), rows.margins, strict=False)
    ]
    return sum(terms) / PAIRS


CASES = {
    "dpo": (DPO(beta=0.3, label_smoothing=0.1), dpo),
    "ipo": (IPO(beta=0.2), ipo),
    "kto": (KTO(beta=0.4, desirable_weight=1.2, undesirable_weight=0.9), kto),
    "orpo": (ORPO(beta=0.3), orpo),
    "simpo": (SimPO(label_smoothing=0.1), simpo),
    "bradley-terry": (BradleyTerry(centre_coef=0.05), bradley_terry),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_coefficients_are_those_of_the_formula(name, seed):
    loss, formula = CASES[name]
    rows = drawn(seed)
    if not loss.is_paired:
        labels = torch.tensor([True, False, True, True, False])
        rows = PreferenceRows(rows.scores, rows.num_tokens, labels.repeat(2), rows.reference)
    scores = rows.scores.clone().requires_grad_()
    expected = formula(rows, scores)
    (gradient,) = torch.autograd.grad(expected, scores)
    coefs, metrics = evaluated(loss, rows)
    assert metrics["loss"] == pytest.approx(float(expected.detach()), abs=1e-12)
    torch.testing.assert_close(coefs, gradient, rtol=0, atol=1e-12)
    assert loss.is_paired or not coefs[PAIRS:].any()  # mismatched rows only estimate a KL divergence


def test_metrics_tell_of_the_implicit_rewards_of_pairs():
    rows = PreferenceRows(
        scores=torch.tensor([-1.0, -4.0, -3.0, -2.0]),
        num_tokens=torch.ones(4),
        is_chosen=torch.tensor([True, True, False, False]),
        reference=torch.tensor([-2.0, -2.0, -2.0, -2.0]),
    )
    metrics = evaluated(DPO(beta=0.5), rows)[1]
    assert metrics.pop("loss") > 0
    assert metrics == {
        "rewards/chosen": -0.25,
        "rewards/rejected": -0.25,
        "logps/chosen": -2.5,
        "logps/rejected": -2.5,
        "rewards/margins": 0.0,
        "rewards/accuracies": 0.5,
    }


@pytest.mark.parametrize("loss", [DPO(), SimPO(), ORPO(), KTO(), BradleyTerry()], ids=lambda x: type(x).__name__)
def test_extreme_scores_give_finite_losses_and_coefficients(loss):
    scores = torch.tensor([-2000.0, -1e-9, -1e-9, -2000.0])
    chosen = torch.tensor([True, True, False, False])
    reference = torch.full((4,), -100.0)
    coefs, metrics = evaluated(loss, PreferenceRows(scores, torch.ones(4), chosen, reference))
    assert torch.isfinite(coefs).all()
    assert math.isfinite(metrics["loss"])
