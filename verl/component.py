"""Components: validated descriptions of the parts of a run, built in the process that owns the device.

A `_target_` in the configuration names a description, a frozen keyword-only dataclass that pydantic validates
(`@component`). So configuration keys are checked against its fields, it can be pickled to workers, and its hash is the
identity of the component.

    values -> types and bounds of each field (pydantic) -> rules across fields (`faults`) -> ConfigError with all faults
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import importlib.util
import itertools
import json
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import pydantic.dataclasses
from pydantic import AllowInfNan, ConfigDict, Field, ValidationError
from pydantic_core import ArgsKwargs, core_schema

from verl.errors import ConfigError, end_cut, install_command

PREFLIGHT_TIMEOUT_S = 5.0

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails, SchemaValidator


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """Facts about the process in which a component is built.

    Attributes:
        device: torch device string of this process.
        seed: run seed; all random numbers derive from it.
        rank, world_size: rank of this process, and number of data-parallel processes.
        tokenizer: of the actor; None before it is loaded.
        run_dir: directory of the run, or None.
        row_tokens: the most tokens of a row, prompt and response; None if unknown.
        trainer_bytes: GPU memory that the roles of the actor's process need while an engine in another process is
            awake, estimated before they load; None if unknown.
        chat_template: replaces that of the tokenizer when it is loaded; None for its own.
        max_pixels: larger images of observations are scaled down to this many pixels; None for the limits of the
            model's processor.
        tools: JSON schemas that chat templates write into prompts.
        prompts: returns the first chat messages of the environment's tasks, at most the given number; None without
            environment.
        day: date for chat templates that write it, such as 2026-11-23; empty for today.
        job: name of the job in a sweep, or empty; part of names that jobs must not share.
        journal_dir: directory of the journal of episodes, or None.
        swept: overrides in which this job differs from others of its sweep.
        shares_device: whether other processes of the run have roles on the same device.
        gap_stops: log-probs of responses that are too far from the engine's end the run before the policy is updated
            (`trainer.safety.log_prob_gap`).
        cpu_matmul: library of large float32 products on a CPU: mkl or onednn (`verl/ops/cpu_matmul.py`).
    """

    device: str = "cpu"
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    tokenizer: Any = None
    run_dir: Path | None = None
    row_tokens: int | None = None
    trainer_bytes: int | None = None
    chat_template: str | None = None
    max_pixels: int | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    prompts: Callable[[int], Sequence[Any]] | None = None
    day: str = ""
    job: str = ""
    journal_dir: Path | None = None
    swept: tuple[str, ...] = ()
    shares_device: bool = False
    gap_stops: bool = False
    cpu_matmul: typing.Literal["mkl", "onednn"] = "mkl"


MaybeInfinite = typing.Annotated[float, AllowInfNan()]
"""The annotation of a field whose value may be infinite or nan; any other `float` must be finite."""
UnitInterval = typing.Annotated[float, Field(ge=0, le=1)]
"""A number from 0 to 1."""

_CONFIG = ConfigDict(
    strict=True,
    extra="forbid",
    allow_inf_nan=False,
    arbitrary_types_allowed=True,
    validate_default=True,
    defer_build=True,  # most components are imported but never instantiated
)
Kind = TypeVar("Kind", bound=type)


@typing.dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
def component(kind: Kind) -> Kind:
    """Class decorator of components: makes a frozen, keyword-only dataclass whose fields pydantic validates.

    A list is converted to a declared tuple and an integer to a declared float; nothing else is converted. Bounds are
    declared in the annotation: `Annotated[int, Field(ge=1)]`, or a type of pydantic such as `PositiveInt`.

    >>> @component
    ... class Decay(Description):
    ...     gamma: UnitInterval = 1.0
    >>> Decay(gamma=2)
    Traceback (most recent call last):
    verl.errors.ConfigError: gamma is 2: input should be less than or equal to 1.
    """
    dataclass_type: Any = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=_CONFIG)(kind)
    dataclass_type.__init__ = _init
    return dataclass_type


def _init(self: Description, /, **values: Any) -> None:
    if faults := set_fields(self, values):
        raise ConfigError(faults)


@component
class Description:
    """Base class of components.

    Subclasses are decorated by `component`. They add fields, yield faults that types cannot express in `faults`, and
    make the running object in `build`. A pure component, such as a loss, inherits `build`, which returns itself.

    Attributes:
        other_keys: name of a mapping field that collects components under unknown keys; None refuses such keys.
        example_values: of required fields, for the message that names one that is not set.
    Raises:
        ConfigError: on construction, with every fault of type or value, each beginning with the field's name.
    """

    other_keys: ClassVar[str | None] = None
    example_values: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self):
        # For a class made by `dataclasses.dataclass`, whose fields are set but not checked.
        if not _is_checked(type(self)) and (
            faults := set_fields(self, {f.name: getattr(self, f.name) for f in dataclasses.fields(self)})
        ):
            raise ConfigError(faults)

    def faults(self) -> Iterator[str]:
        """Yield a sentence per fault that types cannot express, such as a rule across two fields. It begins with the
        field: `norm_length is 8: only aggregation=seq-mean-token-sum-norm uses it.` It must not depend on the machine.
        """
        yield from ()

    def machine_faults(self) -> Iterator[str]:
        """Yield a sentence per requirement that this machine does not meet (a package, a device, a directory),
        beginning with the field. Called before anything is trained or written.
        """
        yield from ()

    def preflight(self, context: BuildContext) -> Iterator[str]:
        """Yield a sentence per external requirement that is not met, beginning with the field: a server that does not
        answer, a store that refuses. Called after `machine_faults`, before anything is trained or written; a request
        may take a few seconds at most (PREFLIGHT_TIMEOUT_S).
        """
        yield from ()

    def preflight_fields(self) -> Iterator[str]:
        """Yield the fields whose components run `preflight` on the driver's machine."""
        yield from (f.name for f in dataclasses.fields(self))

    def build(self, context: BuildContext) -> Any:
        """Make the running object, in the process that owns the device."""
        return self

    def identity(self) -> str:
        """A short hash of class and fields, equal in any process and on any machine."""
        text = json.dumps(as_plain(self), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        if handler.field_name is not None:  # a component as a field of another was checked when it was made
            return core_schema.is_instance_schema(cls)
        schema = handler(source)
        for field in schema["schema"]["fields"]:
            holder = field["schema"] if field["schema"]["type"] == "default" else field
            checked = _lists_too(holder["schema"])
            holder["schema"] = core_schema.no_info_wrap_validator_function(_unless_invalid, checked)
        schema["post_init"] = False  # `set_fields` calls it
        return schema


def package_fault(package: str, setting: str) -> str | None:
    """The fault if a package that a component needs is not installed; None if it is.

    Args:
        package: import name.
        setting: the setting without the component.
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


def components_in(
    value: Any, path: str = "", fields: Callable[[Description], Iterable[str]] | None = None
) -> Iterator[tuple[str, Description]]:
    """Every component in a value with its configuration path, a component before those in its fields.

    Args:
        fields: names of the fields of a component to look into; None for all.
    """
    items: Iterable[tuple[object, Any]] = ()
    if isinstance(value, Description):
        yield path, value
        names = (f.name for f in dataclasses.fields(value)) if fields is None else fields(value)
        items = ((name, getattr(value, name)) for name in names)
    elif isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    for key, item in items:
        yield from components_in(item, join(path, key), fields)


def join(path: str, key: object) -> str:
    """The configuration path of `key` below `path`."""
    return f"{path}.{key}" if path else str(key)


@functools.cache
def field_types(kind: type[Description]) -> dict[str, Any]:
    """The resolved annotation of every field of a description class, in order."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(typing.cast(Any, kind))}


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word closest to `word`, whatever the case of their letters; None if none is close."""
    of_lower = {known_word.lower(): known_word for known_word in known}
    matches = difflib.get_close_matches(word.lower(), of_lower, n=1, cutoff=0.6)
    return of_lower[matches[0]] if matches else None


def hint(word: str | None) -> str:
    """The sentence ` Did you mean ...?`; empty for None."""
    return f" Did you mean {word}?" if word else ""


# Checking


class InvalidValue:
    """Placeholder for a value with a fault. A rule across fields that uses it ends; faults found before are kept."""

    def __use(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a value with a fault was used")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by tools that inspect any object
            raise AttributeError(name)
        self.__use()

    __call__ = __getitem__ = __iter__ = __len__ = __contains__ = __bool__ = __repr__ = __use
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __add__ = __radd__ = __sub__ = __rsub__ = __neg__ = __use
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __use
    __hash__ = object.__hash__


INVALID = InvalidValue()


def set_fields(new: Description, values: Mapping[str, Any]) -> list[str]:
    """Set the fields of a new component from `values`; returns all faults, each beginning with the field.

    Args:
        new: the new component.
        values: by field; `INVALID` for a field with a known fault. Other invalid fields are set to that.
    """
    kind = type(new)
    validator = _validator(kind)
    invalid = {name for name, value in values.items() if value is INVALID}
    try:
        validator.validate_python(ArgsKwargs((), dict(values)), self_instance=new)
        faults = []
    except ValidationError as error:
        details = error.errors(include_url=False)
        faults = faults_of(kind, values, details)
        invalid |= {str(fault["loc"][0]) for fault in details} & field_types(kind).keys()
        known = {name: value for name, value in values.items() if name in field_types(kind)}
        validator.validate_python(ArgsKwargs((), known | dict.fromkeys(invalid, INVALID)), self_instance=new)
    if not invalid:
        if _is_checked(kind):
            new.__post_init__()
        return [*faults, *new.faults()]
    with contextlib.suppress(Exception):  # of a rule that uses an invalid value
        faults.extend(new.faults())
    return faults


def _is_checked(kind: type) -> bool:
    """Whether the class was made by `component`, or inherits from such a class without its own decorator."""
    return "__is_pydantic_dataclass__" in vars(_dataclass_of(kind))


def _dataclass_of(kind: type) -> type:
    return next(base for base in kind.__mro__ if "__dataclass_fields__" in vars(base))


@functools.cache
def _validator(kind: type) -> SchemaValidator:
    dataclass_type: Any = _dataclass_of(kind)
    if not _is_checked(dataclass_type):  # made by `dataclasses.dataclass`: an equal class for pydantic
        dataclass_type = component(
            types.new_class(
                dataclass_type.__name__, (dataclass_type,), {}, lambda names: names.update(__module__=kind.__module__)
            )
        )
    pydantic.dataclasses.rebuild_dataclass(dataclass_type)
    dataclass_type.__init__ = _init  # building the validator replaced it
    return dataclass_type.__pydantic_validator__


def _unless_invalid(value: Any, check: Any) -> Any:
    return value if isinstance(value, InvalidValue) else check(value)


def _lists_too(schema: Any) -> Any:
    """A pydantic schema in which tuples also accept lists, as in YAML."""
    if isinstance(schema, list):
        return [_lists_too(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: item if key == "metadata" else _lists_too(item) for key, item in schema.items()}
    if schema.get("type") == "tuple":
        return core_schema.no_info_before_validator_function(_as_tuple, typing.cast(Any, schema))
    return schema


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


# Messages for faults found by pydantic


def faults_of(kind: type[Description], values: Mapping[str, Any], details: Sequence[ErrorDetails]) -> list[str]:
    """A sentence for each value that pydantic refused: the value, and pydantic's messages about it.

    >>> detail = {"type": "less_than", "loc": ("betas", 1), "input": 7, "msg": "Input should be less than 1"}
    >>> faults_of(AdamW, {"betas": (0.9, 7)}, [detail])
    ['betas[1] is 7: input should be less than 1.']
    """
    messages: dict[str, list[str]] = {}  # by value: a union has one of each of its members
    for fault in details:
        field, known = str(fault["loc"][0]), field_types(kind)
        if field not in known:
            near = hint(nearest(field, known))
            messages[f"{field} is not a known key: {kind.__name__} has no such field.{near}"] = []
        elif field not in values and fault["type"] in ("missing", "missing_keyword_only_argument"):
            messages[f"{field} is missing: {kind.__name__} needs it."] = []
        else:
            default = next(f for f in dataclasses.fields(typing.cast(Any, kind)) if f.name == field).default
            path, value = _located(fault["loc"], values.get(field, default))
            text = fault["msg"].removeprefix("Value error, ")
            if fault["type"] == "tuple_type":
                text = f"Input should be a list, such as [{'' if value is None else value}]"
            if fault["type"] == "is_instance_of" and isinstance(value, dict):
                text += ". It has no _target_: choose an option of its group, or give the whole node"
            messages.setdefault(f"{path} is {shown(value)}: ", []).append(text[:1].lower() + text[1:].removesuffix("."))
    return [f"{start}{', or '.join(texts)}." if texts else start for start, texts in messages.items()]


def shown(value: Any) -> str:
    """A value for a message; none and truth values as YAML writes them."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return end_cut(type(value).__name__ if isinstance(value, Description) else repr(value), 80)


def _located(loc: Sequence[int | str], value: Any) -> tuple[str, Any]:
    """The path and the value of a fault, as far as its location consists of keys and indices of the value."""
    path = str(loc[0])
    for key, after in itertools.zip_longest(loc[1:], loc[2:]):
        if after != "[key]" and isinstance(value, dict) and key in value:
            path, value = f"{path}.{key}", value[key]
        elif isinstance(value, (tuple, list)) and isinstance(key, int) and key < len(value):
            path, value = f"{path}[{key}]", value[key]
        else:
            break
    return path, value
