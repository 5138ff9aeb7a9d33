"""Former `_target_`s: each names a component that is there today, and a saved value is rewritten wherever it stands."""

from __future__ import annotations

import importlib

import pytest

from verl.component import Description
from verl.utils.saved_targets import RENAMED, current_targets


@pytest.mark.parametrize(("old", "new"), sorted(RENAMED.items()))
def test_a_former_name_leads_to_a_component_of_today(old, new):
    module, _, name = new.replace(":", ".").rpartition(".")
    found = getattr(importlib.import_module(module), name)
    assert ":" in new or issubclass(found, Description)
    assert new not in RENAMED, "a name of today is a former name of something else"


def test_names_are_replaced_at_any_depth_and_nothing_else_is():
    old, new = next(iter(RENAMED.items()))
    saved = {"algorithm._target_": old, "parts": [{"_target_": old, "note": f"not {old}"}], "n": 3, "none": None}
    expected = {"algorithm._target_": new, "parts": [{"_target_": new, "note": f"not {old}"}], "n": 3, "none": None}
    assert current_targets(saved) == expected


@pytest.mark.parametrize("before", [1, 4])
def test_a_saved_number_of_workers_that_had_no_effect_is_left_out_and_one_that_had_is_kept(before):
    function = {"_target_": "verl.rewards.function.RewardFunction", "path": "rule.py:score", "num_workers": before}
    saved = {"config": {"reward": {"parts": {"rule": function}}}}
    assert current_targets(saved)["config"]["reward"]["parts"]["rule"]["num_workers"] is None
    for kept in ({**function, "per_sample": True}, {**function, "num_workers": 8}, {**function, "_target_": "mine.R"}):
        assert current_targets(kept) == kept
