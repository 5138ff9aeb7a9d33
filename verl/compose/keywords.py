"""Mappings that are passed to the library's faces in place of configuration: their keys are checked by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from verl.component import Description, field_types
from verl.compose.nearest import hint, nearest
from verl.errors import ConfigError, faults_below

Kind = TypeVar("Kind", bound=Description)


def key_faults(argument: str, given: Mapping[str, Any], known: Iterable[str]) -> Iterator[str]:
    """One sentence for each key of `argument` that is not among the known ones.

    >>> list(key_faults("rollout_config", {"temprature": 1.0}, ["temperature", "top_p"]))
    ['rollout_config.temprature is not a known key. Did you mean temperature?']
    """
    known = list(known)
    for key in given:
        if key not in known:
            listed = f" Known: {', '.join(known)}."
            yield f"{argument}.{key} is not a known key.{hint(nearest(str(key), known)) or listed}"


def described(kind: type[Kind], argument: str, given: Kind | Mapping[str, Any] | None) -> Kind:
    """The description that a mapping gives; one that is a description already stays as it is.

    Args:
        argument: its name, which opens every fault.
    Raises:
        ConfigError: unknown keys with the nearest known one, and values that the description refuses.
    """
    if isinstance(given, kind):
        return given
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"{argument} is {given!r}: expected a mapping of the keys of {kind.__name__}.")
    given = dict(given or {})
    if faults := list(key_faults(argument, given, field_types(kind))):
        raise ConfigError(faults)
    with faults_below(argument):
        return kind(**given)
