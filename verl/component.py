"""Components: what a part of a run is, checked when it is made, built in the process that owns the device.

A `_target_` in the configuration names a description. It is a frozen keyword-only dataclass that pydantic checks
(`@component`), so a config key can be checked against its fields, it travels to workers as it is, and its hash is the
component's identity.

    values -> types and bounds of each field (pydantic) -> rules across fields (`faults`) -> ConfigError with all faults
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import importlib.util
import itertools
import json
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import pydantic.dataclasses
from pydantic import AllowInfNan, ConfigDict, Field, ValidationError
from pydantic_core import ArgsKwargs, core_schema

from verl.errors import ConfigError, install_command

PREFLIGHT_TIMEOUT_S = 5.0

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails, SchemaValidator


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
        bytes_beside_engine: that the roles of the actor's process need on its GPU while an engine beside them is awake,
            as estimated before they load; None where it is not known.
        chat_template: in place of the tokenizer's own, for prompts and observations.
        tools: JSON schemas that chat templates write into prompts.
        prompts: gives the chat messages with which the environment's first tasks begin, at most so many; None where
            there is no environment.
        day: the date that dated chat templates write, such as 2026-11-23; empty for today.
        job: of a sweep, or empty: what must not be shared by its jobs carries it in its name.
        journal_dir: where episodes are written down as they are played, or None.
        swept: configuration paths whose values tell the jobs of the sweep apart.
        shares_device: other processes of the run have roles on the same device.
    """

    device: str = "cpu"
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    tokenizer: Any = None
    run_dir: Path | None = None
    row_tokens: int | None = None
    bytes_beside_engine: int | None = None
    chat_template: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    prompts: typing.Callable[[int], typing.Sequence[Any]] | None = None
    day: str = ""
    job: str = ""
    journal_dir: Path | None = None
    swept: tuple[str, ...] = ()
    shares_device: bool = False


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
    defer_build=True,  # most components of the package are imported and never made
)
Kind = TypeVar("Kind", bound=type)


@typing.dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
def component(kind: Kind) -> Kind:
    """Class decorator of a description: a frozen, keyword-only dataclass whose fields pydantic checks.

    A list becomes the declared tuple, a whole number the declared float; nothing else is converted. Bounds stand in the
    annotation: `Annotated[int, Field(ge=1)]`, or a name of pydantic's such as `PositiveInt`.

    >>> @component
    ... class Decay(Description):
    ...     gamma: UnitInterval = 1.0
    >>> Decay(gamma=2)
    Traceback (most recent call last):
    verl.errors.ConfigError: gamma is 2: must lie in [0, 1].
    """
    made: Any = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=_CONFIG)(kind)
    made.__init__ = _init
    return made


def _init(self: Description, /, **values: Any) -> None:
    if faults := set_fields(self, values):
        raise ConfigError(faults)


@component
class Description:
    """Base of every description.

    Subclasses are decorated by `component`. They add fields, yield in `faults` what the types cannot say, and make the
    running thing in `build`. A pure component, such as a loss, is its own running thing and inherits `build`.

    Attributes:
        other_keys: the field, a mapping, that takes components under keys which are no fields; None refuses such keys.
    Raises:
        ConfigError: on construction, with every fault of type or value, each opening with its field's name.
    """

    other_keys: ClassVar[str | None] = None

    def __post_init__(self):
        # Of a class that `dataclasses.dataclass` made: its fields are set, and not checked yet.
        if not _is_checked(type(self)) and (
            faults := set_fields(self, {f.name: getattr(self, f.name) for f in dataclasses.fields(self)})
        ):
            raise ConfigError(faults)

    def faults(self) -> Iterator[str]:
        """Yield one sentence per fault that the types of the fields cannot say, such as a rule across two of them. It
        opens with the field: `norm_length is 8: only aggregation=seq-mean-token-sum-norm reads it.`"""
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

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        if handler.field_name is not None:  # a component as a field of another: it was checked when it was made
            return core_schema.is_instance_schema(cls)
        schema = handler(source)
        for field in schema["schema"]["fields"]:
            holder = field["schema"] if field["schema"]["type"] == "default" else field
            checked = _lists_too(holder["schema"])
            holder["schema"] = core_schema.no_info_wrap_validator_function(_unless_unsound, checked)
        schema["post_init"] = False  # `set_fields` calls it
        return schema

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        return {"x-component": cls.__name__} if schema["type"] == "is-instance" else handler(schema)


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
    return {f.name: hints[f.name] for f in dataclasses.fields(typing.cast(Any, kind))}


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like `word`, or None where none comes close."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)), None)


def hint(found: str | None) -> str:
    """The sentence that offers what was found; empty where nothing was."""
    return f" Did you mean {found}?" if found else ""


# Checking


class Unsound:
    """In place of a value that has a fault already, while the rules across fields are asked for further faults.

    Whatever is computed from it is unsound; a condition on it has the next of `answers`.
    """

    TEXT = "\0unsound\0"
    MOST_ANSWERS = 1000  # a rule that loops on one ends

    def __init__(self, answers: Sequence[bool] = (False,)):
        self.__answers = itertools.islice(itertools.cycle(answers), self.MOST_ANSWERS)

    def __answer(self, *_: Any) -> bool:
        return next(self.__answers)

    def __self(self, *_: Any, **__: Any) -> Unsound:
        return self

    def __len__(self) -> int:
        return int(self.__answer())

    def __iter__(self) -> Iterator[Unsound]:
        return iter((self,) if self.__answer() else ())

    def __getattr__(self, name: str) -> Unsound:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __repr__(self) -> str:
        return self.TEXT

    def __format__(self, _: str) -> str:
        return self.TEXT

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __contains__ = __answer
    __call__ = __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __self
    __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __neg__ = __abs__ = __pow__ = __rpow__ = __self
    __hash__ = object.__hash__


UNSOUND = Unsound()


def set_fields(made: Description, values: Mapping[str, Any]) -> list[str]:
    """Set the fields of a new description from `values`, and give every fault of them, each opening with its field.

    Args:
        values: may hold `UNSOUND` for a field whose fault is known already. It is set to that, as is every field that
            turns out to be at fault.
    """
    kind = type(made)
    validator = _validator(kind)
    unsound = {name for name, value in values.items() if value is UNSOUND}
    try:
        validator.validate_python(ArgsKwargs((), dict(values)), self_instance=made)
        faults = []
    except ValidationError as error:
        details = error.errors(include_url=False)
        faults = faults_of(kind, values, details)
        unsound |= {str(fault["loc"][0]) for fault in details} & field_types(kind).keys()
        known = {name: value for name, value in values.items() if name in field_types(kind)}
        validator.validate_python(ArgsKwargs((), known | dict.fromkeys(unsound, UNSOUND)), self_instance=made)
    if _is_checked(kind) and not unsound:
        made.__post_init__()
    return [*faults, *(_rules_across(made, unsound) if unsound else made.faults())]


def _rules_across(made: Description, unsound: Iterable[str]) -> list[str]:
    """The faults that `made.faults` finds in its sound fields: those told whichever way conditions on others go."""
    runs = []
    for answers in ((False,), (True,), (False, True), (True, False)):
        for name in unsound:
            object.__setattr__(made, name, Unsound(answers))
        runs.append(found := [])
        try:
            found.extend(made.faults())  # those before an exception stay
        except Exception:  # noqa: BLE001  a rule that cannot do without the value
            continue
    return [fault for fault in runs[0] if Unsound.TEXT not in fault and all(fault in run for run in runs[1:])]


def _is_checked(kind: type) -> bool:
    """Whether the class is one that `component` made, or inherits from such a one without a decorator of its own."""
    return "__is_pydantic_dataclass__" in vars(_dataclass_of(kind))


def _dataclass_of(kind: type) -> type:
    return next(base for base in kind.__mro__ if "__dataclass_fields__" in vars(base))


@functools.cache
def _validator(kind: type) -> SchemaValidator:
    made: Any = _dataclass_of(kind)
    if not _is_checked(made):  # by `dataclasses.dataclass`: the same fields in a class that pydantic has seen
        made = component(
            types.new_class(made.__name__, (made,), {}, lambda names: names.update(__module__=kind.__module__))
        )
    pydantic.dataclasses.rebuild_dataclass(made)
    made.__init__ = _init  # building sets that of pydantic
    return made.__pydantic_validator__


def _unless_unsound(value: Any, check: Any) -> Any:
    return value if isinstance(value, Unsound) else check(value)


def _lists_too(schema: Any) -> Any:
    """A pydantic schema in which every tuple is taken from a list too, as YAML has it."""
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


# What pydantic found, in our words


def faults_of(kind: type[Description], values: Mapping[str, Any], details: Sequence[ErrorDetails]) -> list[str]:
    """One sentence for each value that pydantic refused: what it is, and what was expected.

    >>> faults_of(kind, {"betas": (0.9, 7)}, [{"type": "less_than", "loc": ("betas", 1), "input": 7, "ctx": {"lt": 1}}])
    ['betas[1] is 7: must lie in [0, 1).']
    """
    faults = []
    for fault in details:
        field, known = str(fault["loc"][0]), field_types(kind)
        if field not in known:
            near = hint(nearest(field, known))
            faults.append(f"{field} is not a known key: {kind.__name__} has no such field.{near}")
        elif field not in values and fault["type"] in ("missing", "missing_keyword_only_argument"):
            faults.append(f"{field} is missing: {kind.__name__} needs it.")
        else:
            default = next(f for f in dataclasses.fields(typing.cast(Any, kind)) if f.name == field).default
            path, value, annotation = _located(fault["loc"], values.get(field, default), known[field])
            faults.append(f"{path} is {shown(value)}: {_expected(fault, value, annotation)}")
    return list(dict.fromkeys(faults))


def shown(value: Any) -> str:
    """A value as a fault shows it."""
    text = type(value).__name__ if isinstance(value, Description) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _located(loc: Sequence[int | str], value: Any, annotation: Any) -> tuple[str, Any, Any]:
    """The path of a fault, with the value and the annotation there; a union is reported as a whole."""
    path = str(loc[0])
    for key, after in itertools.zip_longest(loc[1:], loc[2:]):
        choices = [choice for choice in _choices(annotation) if choice is not type(None)]
        bare = _bare(choices[0])
        args, origin = typing.get_args(bare), typing.get_origin(bare)
        if len(choices) > 1 or after == "[key]":
            break
        if origin is dict and isinstance(value, dict) and key in value:
            path, value, annotation = f"{path}.{key}", value[key], args[1]
        elif origin in (tuple, list) and isinstance(value, (tuple, list)) and isinstance(key, int) and key < len(value):
            path, value, annotation = f"{path}[{key}]", value[key], _item_types(bare, len(value))[key]
        else:
            break
    return path, value, annotation


NO_TARGET = " It has no _target_: choose an option of its group, or give the whole node."
_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
_EMPTY = ("too_short", "string_too_short")


def _expected(fault: ErrorDetails, value: Any, annotation: Any) -> str:
    choices = [choice for choice in _choices(annotation) if choice is not type(None)]
    alone, or_null = len(choices) == 1, ", or null" if len(choices) < len(_choices(annotation)) else ""
    if fault["type"] == "value_error":
        return str(fault.get("ctx", {}).get("error"))
    if fault["type"] == "finite_number":
        return "must be finite."
    if alone and fault["type"] in _BOUNDS:
        return f"must {_bounds(choices[0])}{or_null}."
    if alone and fault["type"] in _EMPTY and len(value) == 0:
        return f"must not be empty{or_null}."
    return f"expected {in_words(annotation)}.{NO_TARGET if _lacks(value, choices) else ''}"


def _lacks(value: Any, choices: Sequence[Any]) -> bool:
    return isinstance(value, dict) and any(isinstance(kind, type) and issubclass(kind, Description) for kind in choices)


_WORDS_OF_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def _bounds(annotation: Any) -> str:
    """What a number must do: `lie in [0, 1)`, `be at least 1`."""
    found: dict[str, Any] = {}
    for item in _metadata(annotation):
        found |= {
            name: getattr(item, name) for name in ("gt", "ge", "lt", "le") if getattr(item, name, None) is not None
        }
    if _bare(annotation) is int and "gt" in found:
        found["ge"] = found.pop("gt") + 1
    low, high = found.get("ge", found.get("gt")), found.get("le", found.get("lt"))
    if low is not None and high is not None and ("ge" in found or "le" in found):
        return f"lie in {'[' if 'ge' in found else '('}{low:g}, {high:g}{']' if 'le' in found else ')'}"
    if found in ({}, {"ge": 0}):
        return "not be negative" if found else ""
    return "be " + " and ".join(f"{_WORDS_OF_BOUNDS[name]} {bound:g}" for name, bound in found.items())


def _metadata(annotation: Any) -> Iterator[Any]:
    for item in getattr(annotation, "__metadata__", ()):
        yield from getattr(item, "metadata", [item])


def _bare(annotation: Any) -> Any:
    return annotation.__origin__ if hasattr(annotation, "__metadata__") else annotation


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; any other annotation alone."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _item_types(annotation: Any, length: int) -> tuple[Any, ...]:
    """The annotation of each item of a list or tuple; a fixed-length tuple has its own number of them."""
    args = typing.get_args(annotation)
    return args if typing.get_origin(annotation) is tuple and args[-1:] != (...,) else args[:1] * length


_WORDS = {float: "a number", int: "a whole number", str: "a text", bool: "true or false", type(None): "null"}


def in_words(annotation: Any) -> str:
    """What a field takes: `a number or null`."""
    bare = _bare(annotation)
    origin, args = typing.get_origin(bare), typing.get_args(bare)
    if origin in (typing.Union, types.UnionType):
        bounded = len(args) - (type(None) in args) > 1
        return " or ".join(_bounded_words(arg) if bounded else in_words(arg) for arg in args)
    if origin is typing.Literal:
        return "one of " + ", ".join(str(arg) for arg in args)
    if origin is tuple and args[-1:] != (...,):
        return "a list of " + ", ".join(in_words(arg) for arg in args)
    if origin in (tuple, list):
        return f"a list in which each item is {in_words(args[0])}"
    if origin is dict:
        return f"a mapping in which each value is {in_words(args[1])}"
    if isinstance(bare, type) and issubclass(bare, Description):
        return f"a component with _target_ of kind {bare.__name__}"
    return _WORDS.get(bare, getattr(bare, "__name__", str(bare)))


def _bounded_words(annotation: Any) -> str:
    bounds = _bounds(annotation)
    return f"{in_words(annotation)} that must {bounds}" if bounds else in_words(annotation)
