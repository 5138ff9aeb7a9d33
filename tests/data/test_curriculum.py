"""A curriculum draws what is near the target, by the seed and the recorded pass rates alone."""

import json
from collections import Counter

import pytest
import torch
from refusals import refusal

from verl.compose.compose import compose_root
from verl.compose.overrides import command_line
from verl.compose.validate import validate
from verl.data.curriculum import PassRate, PassRateSampler
from verl.data.files import PromptFiles
from verl.data.sampler import DataSampler

IDS = [10 * row for row in range(40)]  # other rows were dropped


def sampler(batch_size: int = 8, seed: int = 3, **options) -> PassRateSampler:
    return PassRate(**options).sampler(IDS, batch_size, seed=seed)


def record(order: PassRateSampler, rates: dict[int, float], responses: int = 10) -> None:
    """Responses to some rows, of which these shares pass."""
    ids = torch.tensor([IDS[row] for row in rates]).repeat_interleave(responses)
    passed = [index < rate * responses for rate in rates.values() for index in range(responses)]
    order.record(ids, torch.tensor(passed))


def test_the_warm_up_is_the_order_without_a_curriculum():
    plain, warm = DataSampler(40, 8, seed=3), sampler(warmup_epochs=2)
    record(warm, {0: 1.0, 1: 0.0})
    assert all(torch.equal(plain.next_batch(), warm.next_batch()) for _ in range(10))
    assert not torch.equal(plain.next_batch(), warm.next_batch())


def test_prompts_are_drawn_in_the_proportion_of_their_bands():
    order = sampler(batch_size=1, warmup_epochs=0, bands=5, target=0.5, falloff=0.5)
    bands = {row: row % 5 for row in range(40)}  # 8 rows in each
    record(order, {row: (band + 0.5) / 5 for row, band in bands.items()})
    drawn = Counter(bands[int(order.next_batch())] for _ in range(20000))
    expected = [0.25, 0.5, 1.0, 0.5, 0.25]  # of 2.5
    for band, weight in enumerate(expected):
        assert drawn[band] / 20000 == pytest.approx(weight / 2.5, abs=0.012), band


def test_a_batch_has_different_prompts_and_unseen_ones_count_as_the_target():
    order = sampler(warmup_epochs=0, falloff=0.001)
    record(order, dict.fromkeys(range(20), 1.0))
    for _ in range(50):
        rows = order.next_batch().tolist()
        assert len(set(rows)) == 8
        assert all(row >= 20 for row in rows)  # the others are 1000 and more times rarer; the seed draws none


def test_the_pass_rate_is_remembered_in_part():
    order = sampler(memory=0.25)
    for share in (0.0, 1.0, 0.5):
        record(order, {2: share})
    assert order.rates == {20: 0.25 * 0.75 + 0.75 * 0.5}
    assert order.metrics == {
        "curriculum/seen_share": 1 / 40,
        "curriculum/pass_rate": 0.5625,
        "curriculum/target_share": 1,
    }
    assert [PassRate().band(rate) for rate in (0.0, 0.19, 0.2, 0.5, 0.99, 1.0)] == [0, 0, 1, 2, 4, 4]


def test_what_was_drawn_ahead_stays_and_a_saved_state_goes_on_exactly():
    order = sampler(warmup_epochs=0)
    record(order, {row: row / 39 for row in range(40)})
    ahead = [order.peek(k) for k in range(3)]
    record(order, {row: 1 - row / 39 for row in range(40)})
    restored = sampler(warmup_epochs=0, seed=99)
    restored.load_state_dict(json.loads(json.dumps(order.state_dict())))
    for batch in ahead:
        assert torch.equal(order.next_batch(), batch)
        assert torch.equal(restored.next_batch(), batch)
    for _ in range(12):  # over two ends of an epoch
        one, other = order.next_batch(), restored.next_batch()
        assert torch.equal(one, other)
        for each in (order, restored):
            record(each, {int(row): int(row) % 3 / 2 for row in one})
    assert order.state_dict() == restored.state_dict()
    assert (order.epoch, order.position) == (3, 0)


def test_pass_rates_and_the_seed_change_what_is_drawn():
    batches = []
    for seed, rates in ((3, {}), (3, dict.fromkeys(range(20), 0.0)), (4, {})):
        order = sampler(seed=seed, warmup_epochs=0)
        record(order, rates) if rates else None
        batches.append(torch.stack([order.next_batch() for _ in range(5)]))
    assert not torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])


def test_the_command_line_takes_the_option_and_its_settings():
    arguments, assigned = command_line("ppo", ["data.curriculum=pass_rate", "data.curriculum.target=0.7"])
    assert validate(compose_root("ppo", arguments), assigned.faults).data.curriculum == PassRate(target=0.7)
    (fault,) = command_line("ppo", ["data.curriculum=pass_rat"])[1].faults
    assert fault.startswith("data.curriculum=pass_rat")


def test_weights_of_files_do_not_go_with_a_curriculum(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1+1="}\n')
    with refusal("weights"):
        PromptFiles(train_files=(str(file),), weights=(1.0,), curriculum=PassRate())
