"""One process alone: every sum is what it was."""

from __future__ import annotations

import pytest
import torch

from verl.description import BuildContext
from verl.engines.sharding import DDP, NoSharding
from verl.errors import ConfigError


def test_alone_sums_and_gradients_stay_as_they_are():
    parallel = NoSharding().build(BuildContext())
    assert (parallel.rank, parallel.world_size) == (0, 1)
    assert parallel.sums({"a": 1.5}) == {"a": 1.5}
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([1.0, 2.0])
    parallel.sum_gradients([weight])
    assert weight.grad.tolist() == [1.0, 2.0]
    parallel.close()


def test_a_place_says_whether_it_needs_processes():
    assert (NoSharding.needs_processes, DDP.needs_processes) == (False, True)


def test_a_time_out_is_positive():
    with pytest.raises(ConfigError, match="timeout_s is 0"):
        DDP(timeout_s=0)
