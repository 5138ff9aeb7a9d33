"""Overrides of the command line or a short file, as group options and values by path."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import yaml
from hydra.core.override_parser.types import Glob, ValueType
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from verl.component import hint, nearest
from verl.compose.aliases import SHORT, Overrides, translate
from verl.compose.compose import compose_root, parsed_override, readable, references_above
from verl.compose.schema import CHOOSERS, LISTS, VALUES, group_options, option_file, root_keys

_PLAIN_OPTION = re.compile(r"^[\w,]*$")
OWN_SHARDING = ".sharding"  # of a role: a key that takes an option of the group `sharding`
CURRICULUM = "data.curriculum"  # takes an option of the group `curriculum`


def assign(root: str, pairs: Sequence[tuple[str, Any]], *, sweeps: bool = False) -> Overrides:
    """Sort `key=value` pairs into options and values, translating aliases and collecting what is refused.

    Args:
        root: a name of `ROOTS`.
        pairs: keys with their values.
        sweeps: several values are the jobs of a sweep; otherwise they are a fault.
    """
    groups, keys, out = group_options(), root_keys(root), Overrides(is_sweep=sweeps)
    chosen = {key for key, _ in pairs if key in keys}
    for key, value in pairs:
        if (translated := translate(root, key, value, chosen)) is not None:
            _add(out, translated, pairs, root, f"{key}={value}")
        elif key in VALUES:
            out.values.append((key, value))
        elif (group := _group_of(key, keys)) is not None and _is_option(value):
            fault = _option_fault(group, value, sweeps)
            out.faults += [f"{key}: {fault}"] if fault else []
            out.options += [] if fault else [f"+{group}@{key}={value}"]
        elif (top := key.partition(".")[0]) not in keys:
            out.faults.append(f"{key} is not a known key: {root}.yaml has no {top}.{hint(nearest(top, keys))}")
        elif "." in key or isinstance(value, Mapping) or str(value).startswith("{"):
            out.values.append((key, value))
        elif _is_null(value):
            out.options += [f"{key}=none"] if "none" in groups.get(key, []) else []
            out.faults += (
                [] if "none" in groups.get(key, []) or key in CHOOSERS else [f"{key} is null: a run needs one."]
            )
        elif fault := _option_fault(key, value, sweeps):
            out.faults.append(fault)
        elif (option := f"{key}={_choice(key, value)}") not in out.options:
            out.options.append(option)
    return out


def split_at_commas(text: str) -> list[str]:
    """Split at commas outside of quotes and brackets. A bracket or quote that is not closed is an ordinary character.

    >>> split_at_commas("${processes:${sharding._target_},2},4")
    ['${processes:${sharding._target_},2}', '4']
    """
    pieces, start, position = [], 0, 0
    while position < len(text):
        if text[position] == ",":
            pieces.append(text[start:position])
            start = position + 1
        elif text[position] in _CLOSING:
            position = _end_of_bracket(text, position) or position
        elif text[position] in "'\"" and not text[start:position].strip():
            position = max(position, text.find(text[position], position + 1))
        position += 1
    return [*pieces, text[start:]]


_CLOSING = {"[": "]", "{": "}", "(": ")"}


def _end_of_bracket(text: str, position: int) -> int | None:
    """The position of the bracket that closes the one at `position`; None if there is none."""
    awaited: list[str] = []
    for i in range(position, len(text)):
        if text[i] in _CLOSING:
            awaited.append(_CLOSING[text[i]])
        elif text[i] == awaited[-1]:
            awaited.pop()
            if not awaited:
                return i
    return None


def options_in(choice: str) -> list[str]:
    """All options that a choice names, in a list or for a sweep."""
    pieces = (piece.strip() for piece in split_at_commas(choice))
    listed = (piece[1:-1].split(",") if _is_list(piece) else [piece] for piece in pieces)
    return [option.strip(" '\"") for options in listed for option in options]


def with_copies(root: str, assigned: Overrides) -> list[tuple[str, Any]]:
    """Before a value below a reference, such as `critic.model: ${actor.model}`, set every key of the node to a
    reference of its own. Hydra would otherwise drop all other keys.
    """
    if not any(path.count(".") > 1 for path, _ in assigned.values):
        return assigned.values
    try:
        config = compose_root(root, [split_at_commas(option)[0] for option in assigned.options])
    except (HydraException, OmegaConfBaseException):
        return assigned.values  # Hydra reports it when it composes for itself
    values: list[tuple[str, Any]] = []
    copied: set[str] = set()
    for path, value in assigned.values:
        for node, target, keys in references_above(config, path):
            if node not in copied:
                copied.add(node)
                values += [(f"{node}.{key}", f"${{{target}.{key}}}") for key in keys]
        values.append((path, value))
    return values


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield the leaves of a nested mapping by path; a component with `_target_` is one leaf."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and "_target_" not in value:
            yield from flatten(value, f"{path}.")
        else:
            yield path, value


def _add(out: Overrides, alias: Overrides, pairs: Sequence[tuple[str, Any]], root: str, source: str) -> None:
    """Add the translation of an alias; an option that contradicts an explicit choice is a fault."""
    out.values += alias.values
    out.notes += alias.notes
    out.faults += alias.faults
    for option in alias.options:
        group = option.partition("=")[0]
        if group not in root_keys(root):
            out.faults.append(f"{source} means {option}, but {group} is not a known key: {root}.yaml has no {group}.")
            continue
        others = [f"{key}={value}" for key, value in pairs if key == group] + out.options
        contrary = [other for other in others if other.startswith(f"{group}=") and other != option]
        if contrary:
            out.faults.append(f"{source} means {option}, but {contrary[0]} is given too. Leave one of them out.")
        elif option not in out.options:
            out.options.append(option)


def _group_of(key: str, root_keys: Iterable[str]) -> str | None:
    """The group whose options a key below a root key takes."""
    if key == CURRICULUM:
        return "curriculum"
    return "sharding" if key.endswith(OWN_SHARDING) and key.removesuffix(OWN_SHARDING) in root_keys else None


def _is_option(value: Any) -> bool:
    return isinstance(value, str) and not _is_null(value) and _PLAIN_OPTION.match(value) is not None


def _is_null(value: Any) -> bool:
    return value is None or str(value).lower() in ("null", "")


def _is_list(text: str) -> bool:
    return text.startswith("[") and text.endswith("]")


def _choice(group: str, value: Any) -> str:
    """An option, several for a sweep, or a list of options, in Hydra's spelling."""
    text = f"[{','.join(map(str, value))}]" if isinstance(value, (list, tuple)) else str(value)
    return ",".join(SHORT.get(f"{group}={piece}", piece) for piece in split_at_commas(text))


def _option_fault(group: str, value: Any, sweeps: bool) -> str | None:
    """The fault of a choice: no such option, a list, several without -m, none for a sweep, or an unreadable file."""
    text, known = _choice(group, value), group_options().get(group, [])
    parsed = parsed_override(readable(f"{group}={text}"))
    if re.match(r"(glob|choice|range|sort|shuffle)\(", text):  # sweep syntax
        is_glob = parsed is not None and parsed.value_type == ValueType.GLOB_CHOICE_SWEEP
        if sweeps and is_glob and not cast(Glob, parsed.value()).filter(known):  # type: ignore[union-attr]
            return f"{group}={text}: there is no such option, so the sweep has no jobs; there are {', '.join(known)}."
    elif group not in LISTS and any(map(_is_list, split_at_commas(text))):
        return f"{group}={text}: it takes one option, not a list; there are {', '.join(known)}."
    elif unknown := [option for option in options_in(text) if option not in (*known, "null")]:
        return no_option(group, unknown[0])
    elif parsed is None:
        return no_option(group, text)
    elif fault := next((fault for option in options_in(text) if (fault := _file_fault(group, option))), None):
        return fault
    if not sweeps and (len(split_at_commas(text)) > 1 or (parsed is not None and parsed.is_sweep_override())):
        return f"{group}={text} has several values: add -m for a sweep over them, or give one."
    return None


def no_option(group: str, option: str) -> str:
    """The fault of an option that a group does not have, or of a group that does not exist."""
    groups = group_options()
    if group.startswith("hydra/"):
        return f"{group}={option}: Hydra has no such option; a plugin that brings it may not be installed."
    if not (known := groups.get(group)):
        return f"{group}/{option}: there is no such group of options.{hint(nearest(group, groups))}"
    return f"{group}={option}: no such option; there are {', '.join(known)}.{hint(nearest(option, known))}"


def _file_fault(group: str, option: str) -> str | None:
    if (file := option_file(group, option)) is None:
        return None
    text = file.read_text(encoding="utf-8", errors="replace")
    if (fault := _yaml_fault(text)) is not None:
        return f"{group}={option}: {file}{fault}."
    if group in CHOOSERS and not re.search(r"^#\s*@package\s+_global_\s*$", text, re.MULTILINE):
        return f"{group}={option}: {file} does not begin with the line `# @package _global_`. {WITHOUT_PACKAGE}"
    return None


@functools.lru_cache(maxsize=256)
def _yaml_fault(text: str) -> str | None:
    try:
        yaml.safe_load(text)
    except yaml.YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        where = "" if line is None else f" line {line + 1}"
        return f"{where} is not readable as YAML: {getattr(error, 'problem', None) or error}"
    return None


WITHOUT_PACKAGE = (
    "Without it the keys of the file are placed below its group instead of at the root. Add it as first line."
)
