"""Validation of a composed configuration: builds the components of a run, or reports every fault at once.

    composed nodes -> classes named by `_target_` -> components, innermost first -> faults across components

No large library is imported and no weight is loaded.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.component import BuildContext, Description, _as_declared, field_types, non_finite, type_fault
from verl.compose.schema import LISTS, conf_dir, group_options
from verl.compose.suggestions import hint, nearest_path
from verl.errors import ConfigError
from verl.utils.component_exits import as_component_exit, raised_by_code

_DEPTH = 40  # deeper than any real configuration: a node that refers to its own parent has no end


class UnresolvedValue:
    """Stands for a value that already has a fault; whoever looks at it stops there."""

    def __repr__(self) -> str:
        return "<unknown>"


UNRESOLVED = UnresolvedValue()


@dataclass
class PlainConfig:
    """A configuration as nested dicts and lists.

    Attributes:
        tree: the resolved values; `UNRESOLVED` where one could not be read.
        borrowed: path of each node that refers to another one, with the path of that other.
        faults: one sentence for each value that could not be read.
    """

    tree: Any = None
    borrowed: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def origin(self, path: str) -> str:
        """Where the value at `path` is written: below a reference, the path in the node referred to."""
        for _ in range(_DEPTH):
            for start, target in self.borrowed.items():
                if path == start or path.startswith(f"{start}."):
                    path = target + path[len(start) :]
                    break
            else:
                return path
        return path


def read_plain(config: DictConfig) -> PlainConfig:
    """Resolve a configuration; faults are collected and the rest is read all the same."""
    plain = PlainConfig()
    plain.tree = _read(config, "", plain)
    plain.faults = list(dict.fromkeys(plain.faults))
    return plain


def join(path: str, key: object) -> str:
    """The path of `key` below `path`."""
    return f"{path}.{key}" if path else str(key)


def _read(node: Any, path: str, plain: PlainConfig) -> Any:
    if path.count(".") > _DEPTH:
        plain.faults.append(f"{path[:60]}...: this reference contains itself.")
        return UNRESOLVED
    if isinstance(node, DictConfig):
        return dict(_items(node, list(node.keys()), path, plain))
    if isinstance(node, ListConfig):
        return [value for _, value in _items(node, range(len(node)), path, plain)]
    return node


def _items(node: Any, keys: Any, path: str, plain: PlainConfig) -> Iterator[tuple[Any, Any]]:
    for key in keys:
        below = join(path, key)
        if OmegaConf.is_missing(node, key):
            plain.faults.append(
                f"{plain.origin(below)} is not set: it has no default, so give {plain.origin(below)}=..."
            )
            yield key, UNRESOLVED
            continue
        raw = node._get_node(key)
        try:
            value = node[key]
        except (OmegaConfBaseException, RecursionError) as error:
            reason = str(error).partition("\n")[0] or "it refers to itself"
            reason = reason.partition("raised while resolving interpolation: ")[2].strip('"') or reason
            plain.faults.append(f"{plain.origin(below)} is {_raw(raw)}: {reason}.")
            yield key, UNRESOLVED
            continue
        if OmegaConf.is_interpolation(node, key) and OmegaConf.is_config(value) and value._get_full_key(None):
            plain.borrowed[below] = value._get_full_key(None)
        yield key, _read(value, below, plain)


def _raw(node: Any) -> Any:
    return node._value() if hasattr(node, "_value") else node


TARGET = "_target_"


def validate(config: DictConfig | dict[str, Any], faults: Sequence[str] = ()) -> Any:
    """The description that a configuration gives.

    Args:
        config: a composed root; its own `_target_` names the description of the run.
        faults: found earlier, on the command line; they are reported together with all others.
    Raises:
        ConfigError: with every fault, each opening with its config path: unknown keys with the nearest known one,
            missing and mistyped values, wrong `_target_`s, references that lead nowhere, and what the descriptions
            themselves find wrong, alone and together.
    """
    plain = read_plain(config if isinstance(config, DictConfig) else OmegaConf.create(config))
    checking = _Validation(plain)
    run = checking.value(plain.tree, "")
    found = list(dict.fromkeys([*faults, *plain.faults, *checking.faults]))
    if not found and not isinstance(run, Description):
        found = [f"the root of the configuration has no {TARGET}."]
    if found:
        raise ConfigError(found)
    return run


def refuse_here(run: Description, context: BuildContext | None = None) -> None:
    """Look for what a run lacks, on this machine first, then of servers, stores, clusters and the directories that it
    writes: before anything is trained, and before the run has a directory.

    Raises:
        ConfigError: with everything that is missing, by config path.
    """
    found = list(dict.fromkeys(_faults_here(run, ""))) or list(
        dict.fromkeys(_preflight(run, "", context or BuildContext()))
    )
    if found:
        raise ConfigError(found)


def _preflight(value: Any, path: str, context: BuildContext) -> Iterator[str]:
    if isinstance(value, Description):
        for fault in value.preflight(context):
            yield join(path, fault)
        for name in value.parts_here():
            yield from _preflight(getattr(value, name), join(path, name), context)
    elif isinstance(value, (list, tuple, dict)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _preflight(item, join(path, key), context)


def _faults_here(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Description):
        for fault in value.faults_here():
            yield join(path, fault)
        for f in dataclasses.fields(value):
            yield from _faults_here(getattr(value, f.name), join(path, f.name))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _faults_here(item, join(path, i))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _faults_here(item, join(path, key))


class _Validation:
    """One walk over a configuration, from the leaves up."""

    def __init__(self, plain: PlainConfig):
        self.plain = plain
        self.faults: list[str] = []

    def value(self, node: Any, path: str) -> Any:
        """What stands at a node: a description, a plain value, or UNKNOWN where a fault was found in it."""
        if _is_component(node):
            return self._component(node, path)
        if isinstance(node, dict):
            read = {key: self.value(item, join(path, key)) for key, item in node.items()}
            return UNRESOLVED if any(item is UNRESOLVED for item in read.values()) else read
        if isinstance(node, list):
            items = [self.value(item, join(path, i)) for i, item in enumerate(node)]
            return UNRESOLVED if any(item is UNRESOLVED for item in items) else items
        return node

    def _component(self, node: dict[str, Any], path: str) -> Any:
        kind = self._locate(node[TARGET], path)
        given = {key: item for key, item in node.items() if key != TARGET}
        if kind is not None and kind.other_keys is not None:
            given = self._with_other_keys(kind, kind.other_keys, given, path)
        if kind is None:
            for key, item in given.items():
                self.value(item, join(path, key))
            return UNRESOLVED
        types, before = field_types(kind), len(self.faults)
        values = {key: self.value(item, join(path, key)) for key, item in given.items() if key in types}
        self._unknown_keys(kind, [key for key in given if key not in types], path)
        for name in _required(kind):
            if name not in values:
                self._fault(path, f"{name} is missing: {kind.__name__} needs it.")
                values[name] = UNRESOLVED
        for name, value in values.items():
            if value is UNRESOLVED:
                continue
            values[name] = _as_declared(value, types[name])
            if (expected := type_fault(values[name], types[name])) is not None:
                numbers = [f"{below} is {x}: must be finite." for below, x in non_finite(name, values[name])]
                wrong = f"{name} is {_shown(value)}: expected {expected}.{_untargeted(value, path, name)}"
                self._report(numbers or [wrong], path)
                values[name] = UNRESOLVED
        return self._made(kind, values, path, sound=len(self.faults) == before)

    def _with_other_keys(self, kind: type[Description], into: str, given: dict[str, Any], path: str) -> dict[str, Any]:
        """Components under keys that are no fields moved into the field that takes them; null leaves one out."""
        own, others = given.get(into) or {}, [key for key in given if key not in field_types(kind)]
        taken = {key: given[key] for key in others if given[key] is None or _is_component(given[key])}
        if not taken or not isinstance(own, dict):
            return given
        below = {key: item for key, item in taken.items() if item is not None}
        self.plain.borrowed |= {join(path, f"{into}.{key}"): join(path, key) for key in below}
        return {**{key: item for key, item in given.items() if key not in taken}, into: {**own, **below}}

    def _made(self, kind: type[Description], values: dict[str, Any], path: str, *, sound: bool) -> Any:
        if any(value is UNRESOLVED for value in values.values()):
            self._report(_faults_of_the_rest(kind, values), path)
            return UNRESOLVED
        try:
            made = kind(**values)
        except ConfigError as error:
            self._report(error.faults, path)
            return UNRESOLVED
        return made if sound else UNRESOLVED

    def _locate(self, target: Any, path: str) -> type[Description] | None:
        where = join(path, TARGET)
        if target is UNRESOLVED:
            return None
        found = _import(target) if isinstance(target, str) else "expected the dotted path of a description's class"
        if isinstance(found, str):
            self.faults.append(f"{self.plain.origin(where)} is {target!r}: {found}.")
            return None
        return found

    def _unknown_keys(self, kind: type[Description], keys: Sequence[str], path: str) -> None:
        for key in keys:
            here = self.plain.origin(join(path, key))
            below = [join(self.plain.origin(path), name) for name in field_types(kind)]
            if path in LISTS and key in group_options(conf_dir()).get(path, []):
                self.faults.append(f"{here} is not among the trackers: add it to the list, {path}=[default,{key}].")
                continue
            near = nearest_path(here, [*below, *self._known_paths()])
            self.faults.append(f"{here} is not a known key: {kind.__name__} has no such field.{hint(near)}")

    def _known_paths(self) -> Iterable[str]:
        """Every path that the components of this configuration know."""
        return dict.fromkeys(self.plain.origin(path) for path in _paths(self.plain.tree, ""))

    def _report(self, faults: Iterable[str], path: str) -> None:
        for fault in faults:
            self._fault(path, fault)

    def _fault(self, path: str, fault: str) -> None:
        self.faults.append(join(self.plain.origin(path), fault))


def _import(target: str) -> type[Description] | str:
    """The description's class, or what is wrong with its name."""
    module_name, _, name = target.rpartition(".")
    if not module_name:
        return "expected the dotted path of a description's class"
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except ModuleNotFoundError as error:
        return f"there is no module {error.name}"
    except ImportError as error:
        return f"it cannot be imported ({error})"
    except BaseException as error:  # the user's module runs here and may raise anything
        if not raised_by_code(error):
            raise
        found = error if isinstance(error, Exception) else as_component_exit(error)
        return f"importing it raised {type(found).__name__}: {found}"
    if found is None:
        return f"{module_name} has no {name}"
    if not (isinstance(found, type) and issubclass(found, Description)):
        return "it is no description; give a frozen dataclass that inherits verl.component.Description"
    return found


def _is_component(node: Any) -> bool:
    return isinstance(node, dict) and TARGET in node


def _required(kind: type[Description]) -> Iterator[str]:
    for f in dataclasses.fields(kind):
        if f.init and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            yield f.name


def _shown(value: Any) -> str:
    text = type(value).__name__ if isinstance(value, Description) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _untargeted(value: Any, path: str, name: str) -> str:
    if not isinstance(value, dict):
        return ""
    if path in LISTS and name in group_options(conf_dir()).get(path, []):
        return f" It has no {TARGET}: add {name} to the list, such as {path}=[default,{name}]."
    return f" It has no {TARGET}: choose an option of its group, or give the whole node."


class _StopValidation(Exception):
    """A description looked at a value that already has a fault."""


class _UnreadableValue(UnresolvedValue):
    """In place of UNKNOWN while a description looks for further faults: any use of it stops the search."""

    def _stop(self, *_: Any) -> Any:
        raise _StopValidation

    __getattr__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __len__ = __iter__ = _stop
    __contains__ = __getitem__ = __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __mod__ = _stop
    __rmod__ = __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __str__ = __repr__ = __format__ = _stop
    __hash__ = _stop  # type: ignore[assignment]


def _faults_of_the_rest(kind: type[Description], values: dict[str, Any]) -> Iterator[str]:
    """What a description finds wrong with the fields that could be read, up to the first that could not."""
    partial = object.__new__(kind)
    for f in dataclasses.fields(kind):
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        value = values.get(f.name, default)
        object.__setattr__(partial, f.name, _UnreadableValue() if value is UNRESOLVED else value)
    try:
        yield from partial.faults()
    except _StopValidation:
        return


def _paths(node: Any, path: str) -> Iterator[str]:
    if isinstance(node, list):
        return
    if isinstance(node, dict):
        kind = _import(node[TARGET]) if isinstance(node.get(TARGET), str) else None
        names = field_types(kind) if isinstance(kind, type) else {}
        yield from (join(path, name) for name in names)
        for key, item in node.items():
            yield from _paths(item, join(path, key))
