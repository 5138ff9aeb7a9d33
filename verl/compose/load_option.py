"""Loads one option of a configuration group as a component, without the rest of a run."""

from __future__ import annotations

from typing import Any

from hydra.utils import get_class
from omegaconf import OmegaConf

from verl.component import hint, nearest
from verl.compose.compose import compose_root
from verl.compose.schema import conf_dir, group_options
from verl.compose.validate import validate
from verl.errors import ConfigError
from verl.rollout.base import Rollout
from verl.rollout.hf import HFRollout


def load_option(root: str, group: str, name: str) -> Any:
    """The component of `conf/<group>/<name>.yaml`, as in the default run of a root.

    Args:
        root: `ppo` or `sft`.
        group, name: the option.
    Raises:
        ConfigError: the option has a required value without default.
    """
    node: Any = OmegaConf.to_container(compose_root(root, [f"{group}={name}"])[group], resolve=True)
    return validate(node)


def load_rollout(rollout: str | Rollout) -> Rollout:
    """The rollout component for an option name, with its defaults; a component is returned unchanged.

    Raises:
        ConfigError: there is no such option, or it has required values.
    """
    if isinstance(rollout, Rollout):
        return rollout
    if rollout == "hf":
        return HFRollout()
    _refuse_unknown(rollout)
    return load_option("ppo", "rollout", rollout)


def rollout_kind(name: str) -> type[Rollout]:
    """The class of an option of the group `rollout`, which may have required values.

    Raises:
        ConfigError: there is no such option.
    """
    _refuse_unknown(name)
    return get_class(compose_root("ppo", [f"rollout={name}"]).rollout["_target_"])


def _refuse_unknown(rollout: str) -> None:
    known = group_options(conf_dir())["rollout"]
    if rollout not in known:
        raise ConfigError(
            f"rollout is {rollout!r}: this version has {', '.join(known)}.{hint(nearest(str(rollout), known))} "
            "rollout='hf' generates with the training weights."
        )
