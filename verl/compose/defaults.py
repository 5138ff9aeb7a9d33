"""Defaults of components: what neither a file of options nor an override names is as the class of the component has it.

    files of options, merged -> defaults of their classes -> overrides -> defaults of components in overrides

Files name only what differs from the classes. The whole configuration is what `--cfg job` prints, references resolve in
it, and overrides of the command line find every field there.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf, open_dict

from verl.component import Description, as_plain, field_types
from verl.compose.component_import import TARGET, import_component


class WholeConfigLoader(ConfigLoaderImpl):
    """Hydra's loader, with the defaults of components: `register` puts it in the place of Hydra's own."""

    def _compose_config_from_defaults_list(self, *args: Any, **kwargs: Any) -> DictConfig:
        config = super()._compose_config_from_defaults_list(*args, **kwargs)
        fill_defaults(config)
        return config

    def load_configuration(self, *args: Any, **kwargs: Any) -> DictConfig:
        config = super().load_configuration(*args, **kwargs)
        fill_defaults(config)
        return config


def fill_defaults(config: DictConfig) -> None:
    """Set the fields that a composed root does not name to the defaults of their classes, in place.

    A field without a default becomes `???`. A mapping without `_target_` changes keys of the component that is the
    default of its field, or that alone is possible there: `actor.lora.rank=8` is enough. Nodes that are references, and
    components that cannot be imported, stay as they are.
    """
    with open_dict(config):
        for key in config:
            if key != "hydra":
                _fill(config, key)


def _fill(parent: Any, key: Any) -> None:
    if OmegaConf.is_interpolation(parent, key) or OmegaConf.is_missing(parent, key):
        return
    node = parent[key]
    if isinstance(node, DictConfig):
        _fill_fields(node)
    for item in node if isinstance(node, DictConfig) else range(len(node)) if isinstance(node, ListConfig) else ():
        _fill(node, item)


def _fill_fields(node: DictConfig) -> None:
    target: Any = node._get_node(TARGET)
    kind = import_component(target._value()) if target is not None and isinstance(target._value(), str) else None
    if not isinstance(kind, type):  # it has none, or one that cannot be imported, which `validate` reports
        return
    for key, default in _defaults_of(kind).items():
        changes = node._get_node(key)
        if changes is None:
            OmegaConf.update(node, key, default, merge=False)
        elif _changes_default(changes):
            component = default if isinstance(default, dict) else _only_component(kind, key)
            if TARGET in component:
                OmegaConf.update(node, key, OmegaConf.merge(component, changes), merge=False)


def _changes_default(node: Any) -> bool:
    """Whether a node is a mapping that does not name a component."""
    is_mapping = isinstance(node, DictConfig) and not node._is_interpolation() and not node._is_none()
    return is_mapping and TARGET not in node


def _only_component(kind: type[Description], key: str) -> Mapping[str, Any]:
    """The one component that an optional field can hold, if there is but one."""
    declared = typing.get_args(field_types(kind)[key])
    match [x for x in declared if isinstance(x, type) and issubclass(x, Description)]:
        case [only] if not only.__subclasses__():
            return {TARGET: f"{only.__module__}.{only.__qualname__}", **_defaults_of(only)}
    return {}


@functools.cache
def _defaults_of(kind: type[Description]) -> Mapping[str, Any]:
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.name != kind.other_keys:
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            defaults[field.name] = MISSING if default is dataclasses.MISSING else as_plain(default)
    return defaults
