"""The one-token shift, log-probabilities and entropies."""

import math

import pytest
import torch
from refusals import refused

from verl.ops.logprobs import entropy_of, log_probs_of, response_positions


def test_each_response_token_is_predicted_by_the_position_before_it():
    prompt_length, response_length = 3, 4
    positions = torch.arange(prompt_length + response_length).expand(2, -1)
    assert response_positions(positions, response_length)[0].tolist() == [2, 3, 4, 5]


def test_states_cut_to_the_last_positions_give_the_same():
    states = torch.randn(2, 9, 5, generator=torch.Generator().manual_seed(0))
    whole, cut = response_positions(states, 4), response_positions(states[:, -5:], 4)
    assert whole.shape == (2, 4, 5)
    assert torch.equal(whole, cut)


def test_an_empty_response_has_no_positions():
    assert response_positions(torch.zeros(2, 3, 5), 0).shape == (2, 0, 5)


def test_log_probs_are_those_of_the_tempered_softmax():
    logits = torch.tensor([[[1.0, 2.0, 3.0]]], dtype=torch.float64).log()  # probabilities 1/6, 2/6, 3/6
    assert log_probs_of(logits, torch.tensor([[1]])).exp().item() == pytest.approx(1 / 3, abs=1e-15)
    # At temperature 1/2 the odds are squared: 1/14, 4/14, 9/14.
    assert log_probs_of(logits, torch.tensor([[2]]), temperature=0.5).exp().item() == pytest.approx(9 / 14, abs=1e-15)


@pytest.mark.parametrize(
    ("given", "returned"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_log_probs_and_entropies_are_float32_at_least(given, returned):
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)).to(given)
    log_probs = log_probs_of(logits, torch.zeros(2, 3, dtype=torch.int64))
    assert log_probs.dtype is returned
    assert entropy_of(logits).dtype is returned
    assert torch.allclose(log_probs, torch.log_softmax(logits.to(returned), -1)[..., 0], atol=1e-6)


def test_log_probs_stay_finite_for_huge_logits():
    logits = torch.tensor([[[1e4, 0.0, -1e4]]])
    assert log_probs_of(logits, torch.tensor([[2]])).item() == -2e4


def test_the_gradient_of_a_log_prob_is_one_hot_less_softmax_over_temperature():
    logits = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    tokens = torch.tensor([[0, 1, 2], [3, 4, 0]])
    log_probs_of(logits, tokens, temperature=0.7).sum().backward()
    expected = (torch.nn.functional.one_hot(tokens, 5) - torch.softmax(logits.detach() / 0.7, -1)) / 0.7
    assert torch.allclose(logits.grad, expected, atol=1e-14)


def test_entropy_is_log_v_for_a_uniform_and_zero_for_a_certain_token():
    assert entropy_of(torch.zeros(1, 1, 8, dtype=torch.float64)).item() == pytest.approx(math.log(8), abs=1e-15)
    assert entropy_of(torch.tensor([[[0.0, 1e4]]])).item() == 0
    # Odds 1 : 3 squared by temperature 1/2 are 1 : 9.
    tempered = entropy_of(torch.tensor([[[0.0, math.log(3)]]], dtype=torch.float64), temperature=0.5)
    assert tempered.item() == pytest.approx(-0.1 * math.log(0.1) - 0.9 * math.log(0.9), abs=1e-14)


def test_a_forbidden_token_adds_no_entropy_and_gets_no_gradient():
    logits = torch.tensor([[[0.3, 0.1, -torch.inf]]], dtype=torch.float64, requires_grad=True)
    entropy = entropy_of(logits)
    entropy.sum().backward()
    assert torch.allclose(entropy, entropy_of(logits.detach()[..., :2]), atol=1e-15)
    assert logits.grad[0, 0, 2] == 0
    assert logits.grad.isfinite().all()


def test_the_gradient_of_entropy_agrees_with_finite_differences():
    logits = torch.randn(1, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: entropy_of(x, temperature=1.3), logits)


ONE = torch.zeros(1, 1, dtype=torch.int64)
BAD_TEMPERATURES = (0.0, -1.0, float("nan"))
test_a_temperature_not_above_zero_and_a_response_without_a_position_before_it_are_refused = refused(
    *(("temperature", t, lambda t=t: log_probs_of(torch.zeros(1, 1, 2), ONE, t)) for t in BAD_TEMPERATURES),
    *(("temperature", t, lambda t=t: entropy_of(torch.zeros(1, 1, 2), t)) for t in BAD_TEMPERATURES),
    ("response_length", 4, lambda: response_positions(torch.zeros(1, 4), 4)),
    kind=ValueError,
)
