"""Validation of a composed configuration: builds the components of a run, or reports every fault at once.

    composed nodes -> classes named by `_target_` -> components, innermost first -> faults across components

It imports no large library and loads no weights.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.component import (
    INVALID,
    BuildContext,
    Description,
    components_in,
    field_types,
    hint,
    join,
    set_fields,
)
from verl.compose.component_import import TARGET, import_component
from verl.compose.overrides import meant
from verl.compose.schema import LISTS, group_options
from verl.errors import ConfigError

_DEPTH = 40  # deeper than any real configuration; detects a node that refers to its own parent


@dataclass
class PlainConfig:
    """A configuration as nested dicts and lists.

    Attributes:
        tree: the resolved values; `INVALID` for a value that could not be resolved.
        borrowed: target path of each node that is a reference.
        faults: one sentence for each value that could not be resolved.
    """

    tree: Any = None
    borrowed: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def origin(self, path: str) -> str:
        """The path at which the value of `path` is set; below a reference, the path in its target."""
        for _ in range(_DEPTH):
            for start, target in self.borrowed.items():
                if path == start or path.startswith(f"{start}."):
                    path = target + path[len(start) :]
                    break
            else:
                return path
        return path


def read_plain(config: DictConfig) -> PlainConfig:
    """Resolve a configuration as far as possible, and collect faults."""
    plain = PlainConfig()
    plain.tree = _read(config, "", plain)
    plain.faults = list(dict.fromkeys(plain.faults))
    return plain


def _read(node: Any, path: str, plain: PlainConfig) -> Any:
    if path.count(".") > _DEPTH:
        plain.faults.append(f"{path[:60]}...: this reference contains itself.")
        return INVALID
    if isinstance(node, DictConfig):
        return dict(_items(node, list(node.keys()), path, plain))
    if isinstance(node, ListConfig):
        return [value for _, value in _items(node, range(len(node)), path, plain)]
    return node


def _items(node: Any, keys: Any, path: str, plain: PlainConfig) -> Iterator[tuple[Any, Any]]:
    for key in keys:
        below = join(path, key)
        if OmegaConf.is_missing(node, key):
            plain.faults.append(_unset(node, key, plain.origin(below)))
            yield key, INVALID
            continue
        raw = node._get_node(key)
        try:
            value = node[key]
        except (OmegaConfBaseException, RecursionError) as error:
            reason = str(error).partition("\n")[0] or "it refers to itself"
            reason = reason.partition("raised while resolving interpolation: ")[2].strip('"') or reason
            plain.faults.append(f"{plain.origin(below)} is {_raw(raw)}: {reason}.")
            yield key, INVALID
            continue
        if OmegaConf.is_interpolation(node, key) and OmegaConf.is_config(value) and value._get_full_key(None):
            plain.borrowed[below] = value._get_full_key(None)
        yield key, _read(value, below, plain)


def _unset(node: Any, key: Any, path: str) -> str:
    """The fault of a required value, with the example that its component has for it."""
    target = _raw(node._get_node(TARGET)) if isinstance(node, DictConfig) and TARGET in node else None
    kind = import_component(target) if isinstance(target, str) else None
    example = kind.example_values.get(str(key)) if isinstance(kind, type) else None
    return f"{path} is not set: it has no default, so give {path}=..." + (f", such as {example}." if example else "")


def _raw(node: Any) -> Any:
    return node._value() if hasattr(node, "_value") else node


def validate(config: DictConfig | dict[str, Any], faults: Sequence[str] = ()) -> Any:
    """Build the components of a configuration.

    Args:
        config: a composed root; its `_target_` is the class of the run.
        faults: found earlier, on the command line; reported together with all others.
    Returns:
        The description of the run.
    Raises:
        ConfigError: with every fault, each beginning with its configuration path: unknown keys with the nearest known
            one, missing values, wrong types, wrong `_target_`s, dangling references, and faults that the components
            report, alone and in combination.
    """
    plain = read_plain(config if isinstance(config, DictConfig) else OmegaConf.create(config))
    checking = _Validation(plain)
    run = checking.value(plain.tree, "")
    all_faults = list(dict.fromkeys([*faults, *plain.faults, *checking.faults]))
    if not all_faults and not isinstance(run, Description):
        all_faults = [f"the root of the configuration has no {TARGET}."]
    if all_faults:
        raise ConfigError(all_faults)
    return run


def refuse_here(run: Description, context: BuildContext | None = None) -> None:
    """Check what a run needs of this machine, of servers, storage, clusters and its directories, before training and
    before the run directory exists.

    Raises:
        ConfigError: with everything that is missing, by configuration path.
    """
    faults = [join(path, fault) for path, part in components_in(run) for fault in part.machine_faults()]
    if not faults:
        context, here = context or BuildContext(), components_in(run, fields=lambda part: part.preflight_fields())
        faults = [join(path, fault) for path, part in here for fault in part.preflight(context)]
    if faults:
        raise ConfigError(list(dict.fromkeys(faults)))


class _Validation:
    """Traverses a configuration, from the leaves up."""

    def __init__(self, plain: PlainConfig):
        self.plain = plain
        self.faults: list[str] = []

    def value(self, node: Any, path: str) -> Any:
        """The component or plain value of a node; `INVALID` if it has a fault."""
        if _is_component(node):
            return self._component(node, path)
        if isinstance(node, dict):
            read = {key: self.value(item, join(path, key)) for key, item in node.items()}
            return INVALID if any(item is INVALID for item in read.values()) else read
        if isinstance(node, list):
            items = [self.value(item, join(path, i)) for i, item in enumerate(node)]
            return INVALID if any(item is INVALID for item in items) else items
        return node

    def _component(self, node: dict[str, Any], path: str) -> Any:
        kind = self._locate(node[TARGET], path)
        items = {key: item for key, item in node.items() if key != TARGET}
        if kind is not None and kind.other_keys is not None:
            items = self._with_other_keys(kind, kind.other_keys, items, path)
        if kind is None:
            for key, item in items.items():
                self.value(item, join(path, key))
            return INVALID
        known, before = field_types(kind), len(self.faults)
        items = {key: _of_function(known[key], item) if key in known else item for key, item in items.items()}
        values = {key: self.value(item, join(path, key)) for key, item in items.items() if key in known}
        self._unknown_keys(kind, [key for key in items if key not in known], path)
        component = object.__new__(kind)
        for fault in set_fields(component, values):
            self.faults.append(join(self.plain.origin(path), fault))
        sound = len(self.faults) == before and all(value is not INVALID for value in values.values())
        return component if sound else INVALID

    def _with_other_keys(self, kind: type[Description], into: str, items: dict[str, Any], path: str) -> dict[str, Any]:
        """Move components under keys that are not fields into the field that collects them; null removes one."""
        collected, others = items.get(into) or {}, [key for key in items if key not in field_types(kind)]
        moved = {key: items[key] for key in others if items[key] is None or _is_component(items[key])}
        if not moved or not isinstance(collected, dict):
            return items
        below = {key: item for key, item in moved.items() if item is not None}
        self.plain.borrowed |= {join(path, f"{into}.{key}"): join(path, key) for key in below}
        return {**{key: item for key, item in items.items() if key not in moved}, into: {**collected, **below}}

    def _locate(self, target: Any, path: str) -> type[Description] | None:
        where = join(path, TARGET)
        if target is INVALID:
            return None
        kind = import_component(target) if isinstance(target, str) else "expected the dotted path of a component class"
        if isinstance(kind, str):
            self.faults.append(f"{self.plain.origin(where)} is {target!r}: {kind}.")
            return None
        return kind

    def _unknown_keys(self, kind: type[Description], keys: Sequence[str], path: str) -> None:
        for key in keys:
            here = self.plain.origin(join(path, key))
            below = [join(self.plain.origin(path), name) for name in field_types(kind)]
            if path in LISTS and key in group_options().get(path, []):
                self.faults.append(f"{here} is not among the trackers: add it to the list, {path}=[default,{key}].")
                continue
            known = dict.fromkeys(self.plain.origin(path) for path in _paths(self.plain.tree, ""))
            near = meant(key, self.plain.tree) or nearest_path(here, [*below, *known])
            self.faults.append(f"{here} is not a known key: {kind.__name__} has no such field.{hint(near)}")


def _of_function(annotation: Any, node: Any) -> Any:
    """A node with `path` in place of a component that can be a function: that component, without the fields of the one
    that it was merged into.
    """
    form = getattr(annotation, "function_form", None)
    if form is None or not isinstance(node, dict) or "path" not in node:
        return node
    before = field_types(kind) if isinstance(kind := import_component(str(node.get(TARGET))), type) else {}
    known = field_types(import_component(form))  # type: ignore[arg-type]
    merged = {TARGET} | (before.keys() - known.keys())
    return node if "path" in before else {TARGET: form, **{k: x for k, x in node.items() if k not in merged}}


def _is_component(node: Any) -> bool:
    return isinstance(node, dict) and TARGET in node


def _paths(node: Any, path: str) -> Iterator[str]:
    if isinstance(node, list):
        return
    if isinstance(node, dict):
        kind = import_component(node[TARGET]) if isinstance(node.get(TARGET), str) else None
        names = field_types(kind) if isinstance(kind, type) else {}
        yield from (join(path, name) for name in names)
        for key, item in node.items():
            yield from _paths(item, join(path, key))


def nearest_path(path: str, known: Iterable[str]) -> str | None:
    """The known configuration path closest to `path`, mainly by its last key: `trainer.lr` gives
    `actor.optimizer.lr`. The case of letters does not matter.
    """
    scored = ((_likeness(path.lower(), candidate.lower()), candidate) for candidate in known)
    score, best = max(scored, key=lambda pair: (pair[0], -len(pair[1])), default=(0.0, ""))
    return best if score >= 0.6 else None


def _likeness(path: str, candidate: str) -> float:
    whole = difflib.SequenceMatcher(None, path, candidate).ratio()
    last = difflib.SequenceMatcher(None, path.rsplit(".", 1)[-1], candidate.rsplit(".", 1)[-1]).ratio()
    same_parent = path.rpartition(".")[0] == candidate.rpartition(".")[0]
    return 0.65 * last + 0.25 * whole + 0.1 * same_parent
