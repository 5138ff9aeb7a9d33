"""Suggestions for mistyped names, and checks of mappings that are passed as configuration."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from verl.component import Description, field_types, hint, nearest
from verl.errors import ConfigError, faults_below


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


Kind = TypeVar("Kind", bound=Description)


def key_faults(argument: str, keys: Mapping[str, Any], known: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for each unknown key of a mapping; `argument` is its name.

    >>> list(key_faults("rollout_config", {"temprature": 1.0}, ["temperature", "top_p"]))
    ['rollout_config.temprature is not a known key. Did you mean temperature?']
    """
    known = list(known)
    for key in keys:
        if key not in known:
            listed = f" Known: {', '.join(known)}."
            yield f"{argument}.{key} is not a known key.{hint(nearest(str(key), known)) or listed}"


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
    values = dict(values or {})
    if faults := list(key_faults(argument, values, field_types(kind))):
        raise ConfigError(faults)
    with faults_below(argument):
        return kind(**values)
