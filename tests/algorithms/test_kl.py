"""KL in the reward, in the loss, or nowhere."""

import math

import pytest
import torch
from refusals import refusal

from verl.algorithms.kl import AdaptiveKLInReward, KLInLoss, KLInReward, NoKL
from verl.component import BuildContext
from verl.protocol import DataProto

LN2 = math.log(2)


def scored():
    """Three tokens of the first row and one of the second; policy log-probs are ln 2 above the reference's."""
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    zeros = torch.zeros(3, 3, dtype=torch.float64)
    scores = zeros.clone()
    scores[0, 2], scores[1, 0] = 1.0, 2.0
    return DataProto.from_dict(
        {
            "response_mask": mask,
            "token_level_scores": scores,
            "old_log_probs": (zeros - 1.0) * mask,
            "ref_log_probs": (zeros - 1.0 - LN2) * mask,
        }
    )


@pytest.mark.parametrize(("estimator", "kl"), [("k1", LN2), ("k2", LN2**2 / 2), ("k3", 0.5 - 1 + LN2)])
def test_kl_in_the_reward_is_paid_per_token_out_of_the_score(estimator, kl):
    control, batch = KLInReward(coef=0.1, estimator=estimator), scored()
    rewards, metrics = control.shape_rewards(batch)
    expected = [[-0.1 * kl, -0.1 * kl, 1 - 0.1 * kl], [2 - 0.1 * kl, 0, 0], [0, 0, 0]]
    assert rewards.tolist() == [pytest.approx(row, abs=1e-14) for row in expected]
    # Four tokens; two responses with tokens, paying for three and for one.
    assert metrics["kl/reference_nats"] == pytest.approx(kl)
    assert metrics["kl/penalty_mean"] == pytest.approx(0.1 * kl * (3 + 1) / 2)
    assert control.needs_reference
    assert control.loss(batch["old_log_probs"], batch.batch) is None


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    # In log pi: k1 has slope 1, k2 the log ratio, k3 1 - ref/pi.
    [("k1", LN2, 1.0), ("k2", LN2**2 / 2, LN2), ("k3", 0.5 - 1 + LN2, 0.5)],
)
def test_kl_in_the_loss_pulls_by_its_coefficient(estimator, value, gradient):
    control, batch = KLInLoss(coef=0.3, estimator=estimator), scored()
    mask = batch["response_mask"]
    log_probs = batch["old_log_probs"].clone().requires_grad_()
    per_token = control.loss(log_probs, batch.batch)
    per_token.sum().backward()
    assert torch.allclose(per_token, 0.3 * value * mask.double(), atol=1e-14)
    assert torch.allclose(log_probs.grad, 0.3 * gradient * mask.double(), atol=1e-14)


def test_kl_in_the_loss_leaves_the_scores_and_reports_the_distance():
    control, batch = KLInLoss(coef=0.3), scored()
    rewards, metrics = control.shape_rewards(batch)
    assert torch.equal(rewards, batch["token_level_scores"])
    assert metrics == {"kl/reference_nats": pytest.approx(0.5 - 1 + LN2)}
    assert control.needs_reference


@pytest.mark.parametrize("control", [NoKL(), KLInReward(coef=0), KLInLoss(coef=0)])
def test_no_kl_and_a_coefficient_of_zero_leave_the_scores_and_need_no_reference(control):
    batch = scored().select(batch_keys=["response_mask", "token_level_scores", "old_log_probs"])
    rewards, metrics = control.shape_rewards(batch)
    assert torch.equal(rewards, batch["token_level_scores"])
    assert (metrics, control.needs_reference, control.loss(batch["old_log_probs"], batch.batch)) == ({}, False, None)


def test_what_stands_off_the_mask_changes_nothing():
    batch = scored()
    mask = batch["response_mask"]
    dirty = {name: torch.where(mask, x, torch.nan) for name, x in batch.batch.items() if name != "response_mask"}
    dirty = DataProto.from_dict({"response_mask": mask, **dirty})
    for control in (NoKL(), KLInReward(coef=0.1), KLInLoss(coef=0.1)):
        clean_rewards, clean_metrics = control.shape_rewards(batch)
        rewards, metrics = control.shape_rewards(dirty)
        assert torch.equal(rewards, clean_rewards)
        assert metrics == clean_metrics
    log_probs = dirty["old_log_probs"].clone().requires_grad_()
    per_token = KLInLoss(coef=0.1).loss(log_probs, dirty.batch)
    per_token.sum().backward()
    assert per_token[~mask].count_nonzero() == 0
    assert log_probs.grad[~mask].count_nonzero() == 0


def test_no_rows_give_no_rewards_and_zero_metrics():
    rewards, metrics = KLInReward(coef=0.1).shape_rewards(scored()[:0])
    assert rewards.shape == (0, 3)
    assert metrics == {"kl/reference_nats": 0.0, "kl/penalty_mean": 0.0}


def controller(**fields):
    return AdaptiveKLInReward(**{"coef": 0.1, "target": 1.0, "horizon": 20.0} | fields).build(BuildContext())


# Two responses with tokens, of 3 ln 2 and ln 2 nats: 2 ln 2 a response.
@pytest.mark.parametrize(("target", "error"), [(4.0, -0.2), (1.5, 2 * LN2 / 1.5 - 1), (0.5, 0.2)])
def test_the_coefficient_moves_by_the_clipped_error_and_the_batch_pays_by_the_one_before(target, error):
    running = controller(target=target)
    rewards, metrics = running.shape_rewards(scored())
    assert torch.equal(rewards, KLInReward(coef=0.1).shape_rewards(scored())[0])
    assert metrics["kl/coef"] == 0.1
    assert metrics["kl/response_nats"] == pytest.approx(2 * LN2)
    assert running.coef == pytest.approx(0.1 * (1 + error * 2 / 20))


def test_a_batch_beyond_the_horizon_moves_the_coefficient_by_a_fifth_at_most_and_one_without_responses_not_at_all():
    running = controller(target=0.5, horizon=0.01)
    for batch in (scored()[:0], scored()[2:]):  # no row, and a row whose mask is empty
        running.shape_rewards(batch)
        assert running.coef == 0.1
    running.shape_rewards(scored())
    assert running.coef == pytest.approx(0.12)


def test_the_coefficient_goes_on_from_a_saved_state():
    running, other = controller(), controller()
    running.shape_rewards(scored())
    other.load_state_dict(running.state_dict())
    assert other.state_dict() == running.state_dict() == {"coef": running.coef}
    for state in ({}, {"coef": 0.0}, {"coef": 0.1, "step": 3}):
        with refusal("state"):
            other.load_state_dict(state)


def test_the_description_stays_as_it_was_and_needs_a_reference():
    described = AdaptiveKLInReward(coef=0.1, target=1.0)
    described.build(BuildContext()).shape_rewards(scored())
    assert (described.coef, described.needs_reference) == (0.1, True)
    with refusal("coef"):
        AdaptiveKLInReward(coef=0.0, target=1.0)


def test_a_coefficient_that_the_target_drives_down_stays_where_it_can_rise_from():
    batch = scored()
    running = controller(target=1e9, horizon=0.01)
    for _ in range(500):
        running.shape_rewards(batch)
    low = running.coef
    assert low == torch.finfo(torch.float32).tiny
    assert running.shape_rewards(batch)[1]["kl/response_nats"] == pytest.approx(2 * LN2)
    running.options = AdaptiveKLInReward(coef=0.1, target=0.1, horizon=0.01)
    running.shape_rewards(batch)
    assert running.coef == pytest.approx(1.2 * low)
    other = controller()
    other.load_state_dict(running.state_dict())
    assert other.coef == running.coef


@pytest.mark.parametrize("coef", [0.3, 1e-50, 5e-324])
def test_what_the_loss_weighs_is_measured_without_its_coefficient(coef):
    control, batch = KLInLoss(coef=coef), scored()
    mask = batch["response_mask"]
    assert torch.allclose(control.measure(batch["old_log_probs"], batch.batch), (0.5 - 1 + LN2) * mask.double())
    assert KLInLoss(coef=0).measure(batch["old_log_probs"], batch.batch) is None
    assert KLInReward(coef=coef).measure(batch["old_log_probs"], batch.batch) is None
