"""One option of a group as the description that it is, without the rest of a run."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from verl.compose.check import check
from verl.compose.composition import compose_root


def option(root: str, group: str, name: str) -> Any:
    """The description behind `conf/<group>/<name>.yaml`, as the default run of a root would have it.

    Raises:
        ConfigError: it needs a value that nothing gives.
    """
    node: Any = OmegaConf.to_container(compose_root(root, [f"{group}={name}"])[group], resolve=True)
    return check(node)
