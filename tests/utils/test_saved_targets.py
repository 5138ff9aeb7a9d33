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
