"""`trainer.num_threads=auto`: what is measured, what is chosen, and what a resumed run takes."""

from collections.abc import Iterator

import pytest
import torch

from verl.utils import threads as threads_module
from verl.utils.threads import TRIALS, best, choose_threads, counts


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Four threads, whatever the variable of this process says."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield 4
    torch.set_num_threads(before)


def test_all_threads_are_taken_unless_fewer_are_clearly_faster() -> None:
    assert best({8: 1.0, 4: 0.9, 1: 3.0}) == 8
    assert best({8: 1.0, 4: 0.7, 1: 3.0}) == 4
    assert best({2: 1.0, 1: 0.3}) == 1
    assert counts(2) == [2, 1]
    assert counts(16) == [16, 8, 1]


def test_a_resumed_run_has_the_threads_of_its_checkpoint_and_a_variable_counts_as_a_choice(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_threads(64, None, 3)
    assert torch.get_num_threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert choose_threads(64, None, None) == ""
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("busy", [1, TRIALS - 1, TRIALS])
def test_a_process_that_comes_and_goes_costs_a_run_no_threads(
    threads: int, monkeypatch: pytest.MonkeyPatch, busy: int
) -> None:
    found = [{4: 3.0, 1: 1.0}] * busy + [{4: 1.0, 1: 3.0}] * (TRIALS - busy)
    monkeypatch.setattr(threads_module, "measured", lambda width, autocast: found.pop(0))
    monkeypatch.setattr(threads_module, "PAUSE_S", 0.0)
    choose_threads(64, None, None)
    assert torch.get_num_threads() == (1 if busy == TRIALS else threads)
