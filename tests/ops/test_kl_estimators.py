"""What the KL estimators and their gradients are on average, exactly, over all tokens of a small vocabulary."""

import pytest
import torch

from verl.ops.logprobs import ESTIMATORS, k2, k3


def distributions(spread=1.0):
    generator = torch.Generator().manual_seed(0)
    pi, ref = (torch.randn(6, dtype=torch.float64, generator=generator) * spread for _ in range(2))
    return torch.log_softmax(pi, -1), torch.log_softmax(ref, -1)


def kl(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum()


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_average_to_the_kl(name):
    log_pi, log_ref = distributions()
    mean = (log_pi.exp() * ESTIMATORS[name](log_pi, log_ref)).sum()
    assert mean.item() == pytest.approx(kl(log_pi, log_ref).item(), rel=1e-12)


def test_k2_averages_to_the_kl_for_close_policies_only():
    def relative_error(spread):
        log_pi, log_ref = distributions(spread)
        return ((log_pi.exp() * k2(log_pi, log_ref)).sum() / kl(log_pi, log_ref) - 1).abs().item()

    assert relative_error(0.01) < 0.01
    assert relative_error(1.0) > 0.03


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_k2_and_k3_are_never_negative_and_zero_for_equal_policies(name):
    log_pi, log_ref = distributions(3.0)
    assert (ESTIMATORS[name](log_pi, log_ref) > 0).all()
    assert ESTIMATORS[name](log_pi, log_pi).count_nonzero() == 0


def test_k3_keeps_its_digits_for_nearly_equal_policies():
    difference = torch.tensor(1e-3)
    assert k3(torch.zeros(()), difference).item() == pytest.approx(1e-6 / 2 + 1e-9 / 6, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "function"), [("k1", lambda p, q: torch.zeros(()) * p.sum()), ("k2", kl), ("k3", lambda p, q: kl(q, p))]
)
def test_the_mean_gradient_is_the_one_the_docstring_states(name, function):
    logits = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    _, log_ref = distributions()
    log_pi = torch.log_softmax(logits, -1)
    (mean,) = torch.autograd.grad((log_pi.detach().exp() * ESTIMATORS[name](log_pi, log_ref)).sum(), logits)
    (expected,) = torch.autograd.grad(function(torch.log_softmax(logits, -1), log_ref), logits)
    assert torch.allclose(mean, expected, atol=1e-14)
