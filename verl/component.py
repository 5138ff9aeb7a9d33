"""Components: what a part of a run is, checked when it is made, built in the process that owns the device.

A `_target_` in the configuration names a description. It is a frozen keyword-only dataclass, so a config key can be
checked against its fields, it travels to workers as it is, and its hash is the component's identity.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import json
import math
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from verl.errors import ConfigError, install_command

PREFLIGHT_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """What a description may need to know of the process it is built in.

    Attributes:
        device: torch device string of this process.
        seed: run seed; everything random derives from it.
        rank, world_size: place of this process among the data-parallel ones.
        tokenizer: the actor's tokenizer, once it is loaded.
        run_dir: where results are written, or None.
        row_tokens: of the longest row that the run can have, prompt and response; None where it is not known.
        job: of a sweep, or empty: what must not be shared by its jobs carries it in its name.
        swept: configuration paths whose values tell the jobs of the sweep apart.
    """

    device: str = "cpu"
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    tokenizer: Any = None
    run_dir: Path | None = None
    row_tokens: int | None = None
    job: str = ""
    swept: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Description:
    """Base of every description.

    Subclasses add fields, yield what is wrong with them in `faults`, and make the running thing in `build`. A pure
    component, such as a loss, is its own running thing and inherits `build`.

    Attributes:
        other_keys: the field, a mapping, that takes components under keys which are no fields; None refuses such keys.
    Raises:
        ConfigError: on construction, with every fault of type or value, each opening with its field's name.
    """

    other_keys: ClassVar[str | None] = None

    def __post_init__(self):
        faults = []
        for name, annotation in field_types(type(self)).items():
            value = _as_declared(getattr(self, name), annotation)
            object.__setattr__(self, name, value)
            if (expected := type_fault(value, annotation)) is not None:
                numbers = [f"{path} is {x}: must be finite." for path, x in non_finite(name, value)]
                faults += numbers or [f"{name} is {value!r}: expected {expected}."]
        faults = faults or list(self.faults())
        if faults:
            raise ConfigError(faults)

    def faults(self) -> Iterator[str]:
        """Yield one sentence per fault, opening with the field: `lam is 1.5: must lie in [0, 1].`"""
        yield from ()

    def faults_here(self) -> Iterator[str]:
        """Yield what it needs and this machine lacks (a package, a device, a directory), each opening with the field.
        Asked before anything is trained or written; `faults` must hold on any machine."""
        yield from ()

    def preflight(self, context: BuildContext) -> Iterator[str]:
        """Yield what it needs of other machines, and of directories, and cannot have: a server that does not answer, a
        store that refuses, each opening with the field. Asked after `faults_here`, before anything is trained or
        written; whoever asks a server waits for a few seconds at most (PREFLIGHT_TIMEOUT_S)."""
        yield from ()

    def parts_here(self) -> Iterator[str]:
        """Yield the fields whose components ask from the driver's machine in `preflight`."""
        yield from (f.name for f in dataclasses.fields(self))

    def build(self, context: BuildContext) -> Any:
        """Make the running thing in the process that owns the device."""
        return self

    def identity(self) -> str:
        """A short hash of what this is: equal for equal fields, in any process, on any machine."""
        text = json.dumps(as_plain(self), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def package_fault(package: str, setting: str) -> str | None:
    """What to say where a package is not installed that a component needs.

    Args:
        setting: that leaves the component out.
    """
    if importlib.util.find_spec(package) is not None:
        return None
    return f"needs the package {package}, which is not installed. Run: {install_command(package)}, or set {setting}."


def as_plain(value: Any) -> Any:
    """The JSON form of a description: nested dicts, each with its `_target_`."""
    if isinstance(value, Description):
        kind = type(value)
        fields = {f.name: as_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"_target_": f"{kind.__module__}.{kind.__qualname__}", **fields}
    if isinstance(value, dict):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


@functools.cache
def field_types(kind: type[Description]) -> dict[str, Any]:
    """The resolved annotation of every field of a description class, in order."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


MaybeInfinite = typing.Annotated[float, "maybe infinite"]
"""The annotation of a field whose value may be infinite or nan; a plain `float` must be finite."""


def type_fault(value: Any, annotation: Any) -> str | None:
    """What was expected, in words, where `value` is not of the annotated type; None where it is."""
    return None if _fits(value, annotation) else _in_words(annotation)


def non_finite(path: str, value: Any) -> Iterator[tuple[str, float]]:
    """The numbers in a value that are nan or infinite, each with its path."""
    if isinstance(value, float) and not math.isfinite(value):
        yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, item in items:
        yield from non_finite(f"{path}.{key}" if isinstance(value, dict) else f"{path}[{key}]", item)


def _as_declared(value: Any, annotation: Any) -> Any:
    """The value in the declared type, so that equal settings have one form: a list as a tuple, 1 as 1.0."""
    choices = tuple(float if choice == MaybeInfinite else choice for choice in _choices(annotation))
    if float in choices and int not in choices and _fits(value, int):
        return float(value)
    for choice in choices:
        kind: Any = typing.get_origin(choice)
        convertible = isinstance(value, (list, tuple)) if kind is tuple else isinstance(value, list) and kind is list
        if convertible and _fits(kind(value), choice):
            return kind(map(_as_declared, value, _item_types(choice, len(value))))
        if kind is dict and isinstance(value, dict):
            declared = {key: _as_declared(item, typing.get_args(choice)[1]) for key, item in value.items()}
            if _fits(declared, choice):
                return declared
    return value


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; any other annotation alone."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _item_types(annotation: Any, length: int) -> tuple[Any, ...]:
    """The annotation of each item of a list or tuple; a fixed-length tuple has its own number of them."""
    args = typing.get_args(annotation)
    return args if typing.get_origin(annotation) is tuple and args[-1:] != (...,) else args[:1] * length


def _fits(value: Any, annotation: Any) -> bool:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return True
    if len(choices := _choices(annotation)) > 1:
        return any(_fits(value, choice) for choice in choices)
    if origin is typing.Literal:
        return any(value == arg and type(value) is type(arg) for arg in args)
    if origin in (tuple, list):
        if not isinstance(value, origin):
            return False
        item_types = _item_types(annotation, len(value))
        return len(item_types) == len(value) and all(map(_fits, value, item_types))
    if origin is dict:
        return isinstance(value, dict) and all(_fits(k, args[0]) and _fits(v, args[1]) for k, v in value.items())
    if annotation in (None, type(None)):
        return value is None
    if annotation is float or annotation == MaybeInfinite:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and (annotation == MaybeInfinite or isinstance(value, int) or math.isfinite(value))
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin or annotation)


_WORDS = {float: "a number", int: "a whole number", str: "a text", bool: "true or false", type(None): "null"}


def _in_words(annotation: Any) -> str:
    if annotation == MaybeInfinite:
        return _WORDS[float]
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_in_words(arg) for arg in args)
    if origin is typing.Literal:
        return "one of " + ", ".join(str(arg) for arg in args)
    if origin is tuple and args[-1:] != (...,):
        return "a list of " + ", ".join(_in_words(arg) for arg in args)
    if origin in (tuple, list):
        return f"a list in which each item is {_in_words(args[0])}"
    if origin is dict:
        return f"a mapping in which each value is {_in_words(args[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Description):
        return f"a component with _target_ of kind {annotation.__name__}"
    return _WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)))
