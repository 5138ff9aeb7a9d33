"""Configuration of a script: a run from a short YAML file over the default, single options, and mappings of keys.

short file, overrides -> ComposedConfig       group, name of an option -> component       mapping -> component
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.component import Description, hint, nearest
from verl.compose.compose import apply_values, compose_root
from verl.compose.overrides import assign, flatten, parse_overrides
from verl.compose.schema import group_options
from verl.compose.validate import validate
from verl.errors import ConfigError, faults_below
from verl.rollout.base import Rollout
from verl.rollout.hf import HFRollout

Kind = TypeVar("Kind", bound=Description)


@dataclass
class ComposedConfig:
    """A composed root, with notes about aliases, and faults to be reported by the validation.

    Attributes:
        options: `group=option` choices besides the defaults.
    """

    config: DictConfig
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)


def compose_over_default(
    short: Mapping[str, Any],
    overrides: Sequence[str] = (),
    replacements: Mapping[str, Mapping[str, Any]] | None = None,
    preferences: Mapping[str, Any] | None = None,
) -> ComposedConfig:
    """Apply `replacements`, then `short`, then `overrides` to the default configuration of `ppo`.

    Args:
        short: nested mappings; a text under the name of a group selects its option.
        overrides: as on the command line, `group=option` or `path.to.key=value`.
        replacements: whole components by root key.
        preferences: defaults of the caller, by path; ignored if there is no such node, as with `tracker=none`.
    """
    pairs, faults = parse_overrides(overrides)
    assigned = assign("ppo", list({**dict(flatten(short)), **dict(pairs)}.items()))
    config = compose_root("ppo", assigned.options)
    preferred = [
        (path, value)
        for path, value in (preferences or {}).items()
        if OmegaConf.select(config, path.rpartition(".")[0]) is not None
    ]
    apply_values(config, [*preferred, *(replacements or {}).items(), *assigned.values])
    return ComposedConfig(config, assigned.notes, [*faults, *assigned.faults], assigned.options)


def read_short_file(path: str | Path) -> dict[str, Any]:
    """The nested mapping in a YAML file.

    Raises:
        ConfigError: there is no such file, or it is not a mapping.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"config_path is {str(path)!r}: no such file.")
    try:
        tree: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, OSError) as error:
        raise ConfigError(f"config_path is {str(path)!r}: not readable as YAML ({error}).") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"config_path is {str(path)!r}: expected keys with values, found a {type(tree).__name__}.")
    return tree


def load_option(group: str, name: str) -> Any:
    """The component of `conf/<group>/<name>.yaml`, as in the default run of `ppo`.

    Raises:
        ConfigError: the option has a required value without default.
    """
    node: Any = OmegaConf.to_container(compose_root("ppo", [f"{group}={name}"])[group], resolve=True)
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
    known = group_options()["rollout"]
    if rollout not in known:
        raise ConfigError(
            f"rollout is {rollout!r}: this version has {', '.join(known)}.{hint(nearest(str(rollout), known))} "
            "rollout='hf' generates with the training weights."
        )
    return load_option("rollout", rollout)


def described(kind: type[Kind], argument: str, values: Kind | Mapping[str, Any] | None) -> Kind:
    """Make a component from a mapping; a component is returned unchanged.

    Args:
        kind: class of the component.
        argument: name of the argument, for messages.
        values: the mapping or component; None for the defaults.
    Raises:
        ConfigError: unknown keys, with the nearest known one, and invalid values.
    """
    if isinstance(values, kind):
        return values
    if values is not None and not isinstance(values, Mapping):
        raise ConfigError(f"{argument} is {values!r}: expected a mapping of the keys of {kind.__name__}.")
    with faults_below(argument):
        return kind(**(values or {}))
