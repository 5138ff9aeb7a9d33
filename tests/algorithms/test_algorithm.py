"""An algorithm says what a run needs and refuses numbers that make no sense."""

from __future__ import annotations

import pytest
from refusals import refusal

from verl.algorithms.advantages import GAE, GRPO
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.kl import KLInLoss, KLInReward, NoKL
from verl.algorithms.losses import ClippedValueLoss, PPOClip
from verl.errors import ConfigError
from verl.ops.loss_aggregation import AGGREGATIONS


@pytest.mark.parametrize(
    ("advantage", "kl", "needs"),
    [
        (GAE(), NoKL(), (True, False, False)),
        (GAE(), KLInReward(coef=0.01), (True, False, True)),
        (GRPO(), KLInLoss(coef=0.01), (False, True, True)),
        (GRPO(), KLInLoss(coef=0.0), (False, True, False)),
    ],
)
def test_what_a_run_needs_follows_from_the_parts(advantage, kl, needs):
    algorithm = Algorithm(advantage=advantage, policy_loss=PPOClip(), kl=kl)
    assert (algorithm.needs_values, algorithm.needs_groups, algorithm.needs_reference) == needs


def test_the_defaults_are_one_pass_with_neither_kl_nor_entropy():
    algorithm = Algorithm(advantage=GAE(), policy_loss=PPOClip())
    assert (algorithm.value_loss, algorithm.kl) == (ClippedValueLoss(), NoKL())
    assert (algorithm.epochs, algorithm.mini_batches, algorithm.entropy_coef) == (1, 1, 0.0)


def test_the_entropy_bonus_changes_linearly_from_the_first_update_to_the_last():
    falling = Algorithm(advantage=GAE(), policy_loss=PPOClip(), entropy_coef=0.04, final_entropy_coef=0.0)
    assert [falling.entropy_coef_at(update, 5) for update in range(5)] == pytest.approx([0.04, 0.03, 0.02, 0.01, 0.0])
    assert falling.entropy_coef_at(9, 5) == 0.0  # a run that goes on longer than was planned
    constant = Algorithm(advantage=GAE(), policy_loss=PPOClip(), entropy_coef=0.04)
    assert {constant.entropy_coef_at(update, 5) for update in range(5)} == {0.04}


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_every_aggregation_can_be_chosen(mode):
    length = 5 if mode.endswith("-norm") else None
    algorithm = Algorithm(advantage=GAE(), policy_loss=PPOClip(), aggregation=mode, norm_length=length)
    assert algorithm.aggregation == mode


@pytest.mark.parametrize(("mode", "length"), [("token-mean", 5), (AGGREGATIONS[-1], None)])
def test_a_length_is_given_with_the_aggregation_that_reads_it_and_no_other(mode, length):
    with pytest.raises(ConfigError, match=f"norm_length is {length}: .*aggregation=seq-mean-token-sum-norm"):
        Algorithm(advantage=GAE(), policy_loss=PPOClip(), aggregation=mode, norm_length=length)
    with refusal("norm_length"):
        Algorithm(advantage=GAE(), policy_loss=PPOClip(), aggregation=mode, norm_length=0)


def test_all_faults_are_told_at_once():
    with pytest.raises(ConfigError) as error:
        Algorithm(advantage=GAE(), policy_loss=PPOClip(), entropy_coef=-0.5, epochs=0, mini_batches=-2)
    assert [fault.split(":")[0] for fault in error.value.faults] == [
        "entropy_coef is -0.5",
        "epochs is 0",
        "mini_batches is -2",
    ]


def test_parts_of_the_wrong_kind_are_refused():
    with refusal("advantage"):
        Algorithm(advantage=PPOClip(), policy_loss=PPOClip())
    with refusal("aggregation"):
        Algorithm(advantage=GAE(), policy_loss=PPOClip(), aggregation="mean")
