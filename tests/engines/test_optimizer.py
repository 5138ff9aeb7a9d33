"""The optimizer: its schedule against values worked out by hand, and what weight decay acts on."""

import pytest
import torch

from verl.engines.optimizer import AdamW, lr_for_size


def rates(total, **options):
    optimizer_config = AdamW(lr=2.0, **options)
    return [optimizer_config.learning_rate(update, total) for update in range(total)]


HALF = 2**0.5 / 2


@pytest.mark.parametrize(
    ("schedule", "final_fraction", "expected"),
    [
        ("constant", 0.0, [2.0] * 4),
        ("linear", 0.0, [2.0, 1.5, 1.0, 0.5]),
        ("linear", 0.5, [2.0, 1.75, 1.5, 1.25]),
        ("cosine", 0.0, [2.0, 1.0 + HALF, 1.0, 1.0 - HALF]),
        ("cosine", 0.1, [2.0, 1.1]),
    ],
)
def test_rates_fall_by_their_schedule(schedule, final_fraction, expected):
    found = rates(len(expected), schedule=schedule, final_fraction=final_fraction)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_warm_up_rises_to_the_peak_and_the_schedule_starts_there(schedule):
    rising = rates(8, schedule=schedule, warmup_updates=4)
    assert rising[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rising[4:] == pytest.approx(rates(4, schedule=schedule))


def test_past_the_end_the_rate_stays_at_its_last_value():
    assert AdamW(lr=2.0, schedule="linear", final_fraction=0.1).learning_rate(99, 10) == pytest.approx(0.2)
    assert AdamW(lr=2.0, schedule="cosine").learning_rate(10, 0) == pytest.approx(0.0)


def test_weight_decay_acts_on_matrices_only():
    matrix, vector = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(3))
    frozen = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
    optimizer = AdamW(lr=0.1, weight_decay=0.5).attach([matrix, vector, frozen])
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2
    matrix.grad, vector.grad = torch.zeros_like(matrix), torch.zeros_like(vector)
    optimizer.step()
    torch.testing.assert_close(matrix.detach(), torch.full((2, 3), 1 - 0.1 * 0.5))
    assert torch.equal(vector.detach(), torch.ones(3))


@pytest.mark.parametrize(
    ("parameters", "lr"),
    [(8_000_000_000, 1e-6), (494_000_000, 1e-6), (300_000_000, 1e-6), (3_000_000, 4e-5), (100, 1e-3)],
)
def test_a_learning_rate_suits_the_size_of_the_model(parameters, lr):
    assert lr_for_size(parameters) == pytest.approx(lr, rel=0.02)


def test_a_rate_that_is_not_given_is_chosen_for_the_model_and_the_role(model32, caplog):
    model = model32.load_causal_lm("cpu")
    chosen = AdamW().for_model(model)
    assert chosen.lr == pytest.approx(lr_for_size(sum(p.numel() for p in model.parameters())), rel=0.05)
    assert AdamW().for_model(model, 10.0).lr == pytest.approx(10 * chosen.lr, rel=0.05)
    assert AdamW(lr=0.5).for_model(model, 10.0).lr == 0.5
    caplog.set_level("INFO")
    AdamW().for_model(model, path="critic.")
    assert "critic.optimizer.lr is null" in caplog.text
    large = torch.nn.Linear(30_000, 10_000, bias=False, device="meta")
    assert (AdamW().for_model(large).lr, AdamW().for_model(large, 10.0).lr) == (1e-6, 1e-5)
