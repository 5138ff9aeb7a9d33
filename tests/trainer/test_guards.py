"""Guards surround the stages of a step, and no stage knows them."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

from verl.trainer.guards import STAGES, stage
from verl.trainer.ppo import PPOTrainer
from verl.trainer.sampling import Sampling


class Guarded:
    """One stage, of which the guards note what they see."""

    def __init__(self):
        self.seen = []
        self.guards = SimpleNamespace(of_stage={"score": [self.inner, self.outer]})

    @stage
    def score(self, rows):
        self.seen.append(rows)
        if rows == "bad":
            raise ValueError(rows)
        return f"scores of {rows}"

    def inner(self, rows):
        result = yield
        self.seen.append(("inner", rows, result))

    def outer(self, rows):
        try:
            result = yield rows.replace("all", "some")
        except ValueError as error:
            raise KeyError("told by a guard") from error
        self.seen.append(("outer", rows, result))


def test_guards_run_around_a_stage_the_first_one_innermost_and_may_replace_what_it_gets():
    guarded = Guarded()
    assert guarded.score("all rows") == "scores of some rows"
    result = "scores of some rows"
    assert guarded.seen == ["some rows", ("inner", "some rows", result), ("outer", "all rows", result)]


def test_a_guard_may_turn_the_error_of_a_stage_into_another():
    with pytest.raises(KeyError, match="told by a guard") as caught:
        Guarded().score("bad")
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_stage_has_a_name_of_the_list_and_the_step_names_no_guard():
    with pytest.raises(AssertionError, match="another_stage"):

        @stage
        def another_stage(self):
            pass

    assert all(hasattr(PPOTrainer, name) or hasattr(Sampling, name) for name in STAGES)
    source = inspect.getsource(PPOTrainer.step).lower()
    assert not any(word in source for word in ("guard", "monitor", "plant", "queue", "inspect"))
