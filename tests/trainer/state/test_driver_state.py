"""What the driver holds is saved by being a part: a state of one's own goes on where it was, with no edit elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
from same_training import course, newest
from trainer.runs import fit

from verl.checkpoint.resolve import resolve
from verl.errors import CheckpointCorrupt
from verl.trainer.state.driver_state import load_parts, place_of


class Kept:
    """A part that keeps whatever it is given."""

    def __init__(self) -> None:
        self.state: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_each_part_is_loaded_with_its_component_alone_and_a_part_that_was_not_saved_is_given_nothing(model32, tmp_path):
    fit(course(model32, tmp_path, stop_after=1), tmp_path)
    point = resolve(str(newest(tmp_path).directory), tmp_path)
    assert point is not None
    names = ["sampler", "kl", "reward", "lengths", "safety", "drawn_ahead", "replay_buffer", "rng", "unheard_of"]
    assert {place_of(name).loaded_with for name in names} == {"dataloader", "scheduler", "replay_buffer", "rng"}
    for component in ("dataloader", "scheduler", "replay_buffer", "rng", None):
        parts = {name: Kept() for name in names}
        load_parts(point, parts, None if component is None else [component])
        told = {name for name, part in parts.items() if part.state is not None}
        assert told == {name for name in names if component in (None, place_of(name).loaded_with)}
    found = {name: part.state for name, part in parts.items()}
    assert found["sampler"] == {"seed": found["sampler"]["seed"], "epoch": 0, "position": 3, "fills": True}
    assert found["reward"] == {"reward": {}}
    assert not found["drawn_ahead"]
    assert not found["replay_buffer"]
    assert found["unheard_of"] == {}
    assert found["rng"]["ranks"] == []


def test_what_a_part_cannot_read_is_told_of_its_file(model32, tmp_path):
    class Unable(Kept):
        def load_state_dict(self, state: Any) -> None:
            raise KeyError("coef")

    fit(course(model32, tmp_path, stop_after=1), tmp_path)
    point = resolve(str(newest(tmp_path).directory), tmp_path)
    assert point is not None
    for name in ("sampler", "kl", "rng"):
        with pytest.raises(CheckpointCorrupt, match=place_of(name).path):
            load_parts(point, {name: Unable()})
