"""`_target_`s that configurations saved by earlier versions name, and what they are called now.

Whoever parses a saved configuration or state passes it through `current_targets`, before training identity, reward
identity, differences and lineage are computed from it. A class that moves gets a row here.
"""

from __future__ import annotations

from typing import Any

_BEFORE_0_3_0 = {  # below `verl.`
}
RENAMED = {f"verl.{old}": f"verl.{new}" for old, new in _BEFORE_0_3_0.items()}


def current_targets(saved: Any) -> Any:
    """A parsed JSON or YAML value with every string that is a former name replaced by the present one."""
    if isinstance(saved, dict):
        return {key: current_targets(value) for key, value in saved.items()}
    if isinstance(saved, list):
        return [current_targets(value) for value in saved]
    return RENAMED.get(saved, saved) if isinstance(saved, str) else saved
