"""Reads the arguments of a command that trains: flags, assignments, and values in Hydra's grammar.

    argument -> flag of Hydra | assignment -> value in the grammar -> aliases and options -> arguments for Hydra

A value that the grammar cannot parse is a string. A path is taken literally: `~`, commas, quotes, brackets, `#` and
letters of any language are part of it. Errors are collected and reported together, without Hydra's messages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString, ValueType
from hydra.errors import HydraException
from omegaconf import OmegaConf, grammar_parser
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from verl.component import hint, nearest
from verl.compose.compose import compose_root, parsed_override, readable
from verl.compose.overrides import WITHOUT_PACKAGE, Overrides, assign, no_option, split_at_commas, with_copies
from verl.compose.schema import CHOOSERS, ROOTS, group_options, root_keys, set_own_conf_dirs
from verl.errors import ConfigError, root_cause

_ASSIGNMENT = re.compile(r"^(?P<prefix>\+{0,2})(?P<key>[^\W\d]\w*(\.\w+)*)=(?P<value>.*)$", re.DOTALL)
_OF_A_PACKAGE = re.compile(r"^\+?[\w/]+@[\w./:]*=|^\+?[\w/]+/[\w/@]+=")  # group@package=option, hydra/launcher=basic
_CONFIG_DIR = ("--config-dir", "-cd")
_CONFIG_PATH = ("--config-path", "-cp")
_PATH = re.compile(r"(^|[._])(path|paths|dir|dirs|directory|file|files|root|resume)$")
QUOTES = "'\""
_NO_PATH = ("", "null", "???")

SWITCHES = ("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m",
            "--shell-completion", "-sc", "--info", "-i")  # fmt: skip
WITH_VALUE = ("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")
_INFORMED_OF = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_MULTIRUN = ("-m", "--multirun")
SHOWS_ONLY = ("--cfg", "-c", "--info", "-i")  # these print and never reach the run's own check
PRINTS_ONLY = (*SHOWS_ONLY, "--help", "-h", "--hydra-help", "--version")
_SHOWN = ("job", "hydra", "all")


def command_line(root: str, arguments: Sequence[str]) -> tuple[list[str], Overrides]:
    """Parse command-line arguments into arguments for Hydra and `Overrides`.

    A plain `a.b=c` becomes `++a.b=c`, so that an unknown key reaches our validation, which reports all faults at once
    with the nearest known keys, where Hydra would stop at the first. Flags, `hydra.*`, `~key` and `group@package` are
    passed unchanged.
    """
    flags, words, faults = _flags(arguments)
    config_dir = _value_of(flags, _CONFIG_DIR)
    if config_dir is not None and not os.path.isdir(config_dir):
        raise ConfigError([*faults, f"--config-dir is {config_dir}: no such directory."])
    directories = [directory for directory in (config_dir, _value_of(flags, _CONFIG_PATH)) if directory is not None]
    sweeps = any(flag in _MULTIRUN for flag in flags) or any(word.startswith("sweep=") for word in words)
    for_hydra, pairs = [], []
    for word in words:
        match = _ASSIGNMENT.match(word)
        if match is None:
            fault = _not_assigned(root, word)
            faults += [fault] if fault else []
            for_hydra += [] if fault else [word]
        elif match["key"].split(".")[0] == "hydra":
            if match["key"] == "hydra.searchpath":
                directories += re.findall(r"file://([^,\]'\"]+)", match["value"])
            value = in_grammar(match["key"], match["value"], sweeps=sweeps)
            for_hydra.append(f"{match['prefix']}{match['key']}={value}")
        else:
            pairs.append((match["key"], match["value"]))
    set_own_conf_dirs(Path(directory).absolute() for directory in directories)
    assigned = assign(root, pairs, sweeps=sweeps)
    assigned.values = [(key, in_grammar(key, value, sweeps=sweeps)) for key, value in assigned.values]
    of_values = [_value_fault(root, key, value, sweeps) for key, value in assigned.values]
    faults += [fault for fault in of_values if fault is not None]
    assigned.values = [x for x, fault in zip(assigned.values, of_values, strict=True) if fault is None]
    assigned.notes += _twice(pairs)
    assigned.faults = [*faults, *assigned.faults]
    assigned.values = with_copies(root, assigned)
    options = [readable(option) for option in [*_replaced(assigned), *assigned.options]]
    if (package := _value_of(flags, ("--package", "-p"))) is not None and not faults:
        try:
            has_part = OmegaConf.select(compose_root(root, assigned.options), package) is not None
        except (HydraException, OmegaConfBaseException):
            has_part = True  # reported by Hydra when it composes
        if not has_part:
            assigned.faults.append(f"--package is {package}: the configuration has no such part.")
    return [*flags, *for_hydra, *options, *(f"++{key}={value}" for key, value in assigned.values)], assigned


def _replaced(assigned: Overrides) -> Iterator[str]:
    """Groups whose default option is removed because a component replaces it: `reward={_target_:my.Rule}`.

    Otherwise the keys of the default option would be merged into the component. The actor's option stays, because it
    determines that of the critic, and so does an option that was chosen explicitly.
    """
    chosen = {option.partition("=")[0] for option in assigned.options}
    for key, value in assigned.values:
        is_component = isinstance(value, str) and re.match(r"\{\s*['\"]?_target_['\"]?\s*:", value) is not None
        if is_component and key in group_options() and key not in {"actor", *chosen}:
            yield f"~{key}"


def is_path(key: str) -> bool:
    """Whether the value of a key is a path or a list of paths, by the name of the key."""
    return _PATH.search(key) is not None


def in_grammar(key: str, text: str, *, sweeps: bool = False) -> str:
    """A value in Hydra's grammar: unchanged if the grammar parses it, else quoted.

    Args:
        key: the key that it is assigned to.
        text: as typed, without quotes of the shell.
        sweeps: whether comma-separated values are the jobs of a sweep.
    """
    if is_path(key) and text not in _NO_PATH and "${" not in text:
        return _path_in_grammar(text, sweeps)
    if parsed_override(f"key={text}") is not None:
        return text
    if sweeps and len(pieces := split_at_commas(text)) > 1:
        return ",".join(in_grammar(key, piece) for piece in pieces)
    return _quoted(text)


def _path_in_grammar(text: str, sweeps: bool) -> str:
    parsed = parsed_override(f"key={text}")
    if not os.path.exists(text):  # which a path that is too long does not
        if text[:1] in "'\"" and parsed is not None and not parsed.is_sweep_override():
            return text  # already quoted
        if text.startswith("[") and text.endswith("]"):
            return f"[{','.join(_path_in_grammar(path, sweeps=False) for path in _listed(text[1:-1]))}]"
        if sweeps and parsed is not None and parsed.is_sweep_override() and "~" not in text:
            return text
        if sweeps and len(pieces := split_at_commas(text)) > 1:
            return ",".join(_path_in_grammar(piece, sweeps=False) for piece in pieces)
        text = os.path.expanduser(text)
        parsed = parsed_override(f"key={text}")
    is_plain = parsed is not None and not parsed.is_sweep_override() and parsed.value() == text
    return text if is_plain else _quoted(text)


def _listed(text: str) -> list[str]:
    """The paths in brackets; a comma is part of a path if a file of that name exists."""
    pieces, paths = split_at_commas(text), []
    while pieces:
        count = next((n for n in range(len(pieces), 1, -1) if os.path.exists(",".join(pieces[:n]).strip())), 1)
        paths.append(",".join(pieces[:count]).strip())
        pieces = pieces[count:]
    return [path for path in paths if path]


def _quoted(text: str) -> str:
    return QuotedString(text, Quote.single).with_quotes()


def parse_overrides(overrides: Sequence[str]) -> tuple[list[tuple[str, Any]], list[str]]:
    """Parse overrides given by a script: keys with Python values, and faults."""
    pairs, faults = [], []
    for text in overrides:
        match = _ASSIGNMENT.match(text)
        if match is None:
            faults.append(f"overrides: {text!r} is not of the form key=value.")
            continue
        parsed = parsed_override(f"key={in_grammar(match['key'], match['value'])}")
        assert parsed is not None, "in_grammar has quoted what cannot be parsed"
        if parsed.is_sweep_override():
            faults.append(f"overrides: {text!r} has several values; give one.")
        else:
            pairs.append((match["key"], parsed.value()))
    return pairs, faults


def _flags(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Split arguments into flags for Hydra with their values, and all others; with faults of flags."""
    flags: list[str] = []
    words: list[str] = []
    faults: list[str] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        name, sign, _ = argument.partition("=")
        if not argument.startswith("-") or argument == "-":
            words.append(argument)
        elif name in ("--info", "-i") and waiting and waiting[0] in _INFORMED_OF:
            flags += [argument, waiting.pop(0)]
        elif argument in SWITCHES:
            flags.append(argument)
        elif name in WITH_VALUE and (sign or waiting):
            flags += [argument] if sign else [argument, waiting.pop(0)]
        elif name in WITH_VALUE:
            faults.append(f"{name} needs a value: {name} {'job' if name in SHOWS_ONLY else 'VALUE'}.")
        elif re.fullmatch(r"--resume([_-]from([_-]\w+)*)?", name):
            value = argument.partition("=")[2] or (waiting.pop(0) if waiting else "PATH")
            faults.append(f"{name} is a flag of scripts/train.py: here write resume={value}.")
        else:
            faults.append(_no_flag(argument))
    names = [flag.partition("=")[0] for flag in flags]
    shown = _value_of(flags, ("--cfg", "-c"))
    if shown is not None and shown not in _SHOWN:
        faults.append(f"--cfg is {shown}: expected {', '.join(_SHOWN)}.{hint(nearest(shown, _SHOWN))}")
    if any(name in _MULTIRUN for name in names) and any(name in SHOWS_ONLY for name in names):
        faults.append(
            "-m cannot be combined with --cfg: a sweep has several configurations. Leave -m out to see one of them."
        )
    return flags, words, faults


def _value_of(flags: Sequence[str], names: Sequence[str]) -> str | None:
    """The value of the last flag with one of these names."""
    for index in reversed(range(len(flags))):
        name, sign, value = flags[index].partition("=")
        if name in names:
            return value if sign else flags[index + 1]
    return None


def _no_flag(argument: str) -> str:
    if _ASSIGNMENT.match(bare := argument.lstrip("-")):
        return (
            f"{argument}: a value is assigned without dashes. Write {bare}, or use scripts/train.py, which has flags."
        )
    near = nearest(argument.partition("=")[0], [*SWITCHES, *WITH_VALUE])
    return f"{argument} is not a known flag; --help lists them.{hint(near)}"


def _not_assigned(root: str, word: str) -> str | None:
    """The fault of a word that is not an assignment; None if Hydra may accept it."""
    if word.startswith("~"):
        key = word[1:].partition("=")[0]
        top, keys = re.split(r"[.@]", key, maxsplit=1)[0], root_keys(root)
        known = top in keys or top.startswith("hydra")
        if not known:
            return f"{word}: {root}.yaml has no {top} to remove.{hint(nearest(top, keys))}"
        options = group_options().get(top, [])
        is_needed = key == top and options and not {"none", "off"} & {*options} and top not in CHOOSERS
        return f"{word}: a run needs one. Write {top}=OPTION; there are {', '.join(options)}." if is_needed else None
    if _OF_A_PACKAGE.match(word):
        group, keys = word.lstrip("+").partition("@")[0].partition("=")[0], [*group_options()]
        known = group in keys or group.startswith("hydra/")
        return None if known else f"{word}: there is no group {group}.{hint(nearest(group, keys))}"
    key, sign, _ = word.partition("=")
    if sign:
        better = re.sub(r"\W*\.\W*", ".", key.strip()).replace("-", "_")
        near = f" Did you mean {better}?" if better != key and _ASSIGNMENT.match(f"{better}=") else ""
        return f"{word}: {key!r} is not a key; keys are names joined by dots.{near}"
    groups = [group for group, options in group_options().items() if word in options]
    if groups:
        return f"{word} has no key. Did you mean {' or '.join(f'{group}={word}' for group in groups[:3])}?"
    return f"{word} has no value: write {word}=VALUE."


def swept_overrides(arguments: Sequence[str], sweeper: Any, overrides: Sequence[str]) -> tuple[str, ...]:
    """The overrides in which a job differs from others of its sweep.

    Args:
        arguments: command-line arguments for Hydra.
        sweeper: configuration of the sweeper, whose `params` may have more.
        overrides: of the job.
    """
    params = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    parsed = [parsed_override(text) for text in (*arguments, *params) if not text.startswith("-")]
    varied = {(x.key_or_group, x.package) for x in parsed if x is not None and x.is_sweep_override()}
    read = [(text, parsed_override(text)) for text in overrides]
    return tuple(text for text, x in read if x is not None and (x.key_or_group, x.package) in varied)


def _value_fault(root: str, key: str, value: Any, sweeps: bool) -> str | None:
    """The fault of a value: several without -m, none for a sweep, a component without a name, an unclosed reference."""
    if not isinstance(value, str):
        return None
    parsed = parsed_override(f"key={value}")
    is_sweep = parsed is not None and parsed.is_sweep_override()
    if is_sweep and not sweeps:
        return f"{key}={value} has several values: add -m for a sweep over them, or write {key}=[{value}] for a list."
    if parsed is not None and is_sweep:
        is_glob = parsed.value_type == ValueType.GLOB_CHOICE_SWEEP  # selects options of a group
        if is_glob or next(iter(parsed.sweep_iterator()), None) is None:
            return f"{key}={value} has no value, so the sweep has no jobs. Write the values."
    kind = re.match(r"'?\{\s*['\"]?_target_['\"]?\s*:\s*['\"]?([\w.$]*)", value) if key in root_keys(root) else None
    if kind is not None and not kind[1]:
        return f"{key}={value.strip(QUOTES)}: its _target_ is empty. Write {{_target_:package.module.Class,...}}."
    if "${" in value:
        text = value if parsed is None or is_sweep else str(parsed.value())
        try:
            grammar_parser.parse(text)
        except GrammarParseError:
            return f"{key} is {text!r}: the reference cannot be parsed. Write ${{other.key}} with a closing brace."
    return None


def _twice(pairs: Sequence[tuple[str, Any]]) -> Iterator[str]:
    """Yield a fault for each key that is assigned several different values."""
    by_key: dict[str, list[str]] = {}
    for key, value in pairs:
        by_key.setdefault(key, []).append(str(value))
    for key, values in by_key.items():
        if len(set(values)) > 1:
            yield f"{key} is given {len(values)} times: {values[-1]} counts, not {', '.join(values[:-1])}."


def composition_faults(root: str, error: Exception) -> Iterator[str]:
    """Faults found by Hydra or OmegaConf during composition, with clearer messages."""
    text = str(error).strip()
    if (match := re.search(r"Could not find '([^']+)'", text)) is not None:
        group, _, option = match[1].rpartition("/")
        yield no_option(group, option)
    elif (match := re.search(r"Key '([^']+)' (?:is )?not in|Could not override '([^'@]+)'", text)) is not None:
        yield _unknown(root, match[1] or match[2])
    else:
        matches = ((re.search(pattern, text, re.DOTALL), words) for pattern, words in _WORDS)
        explanation = next((words.format(*match.groups()) for match, words in matches if match is not None), None)
        other = _of_other_root(root, text)
        yield other or explanation or _in_brief(root, error)


def _of_other_root(root: str, text: str) -> str | None:
    """The fault if an option belongs to the other command: it refers to a node that this root lacks."""
    missing = re.search(r"Interpolation key '(\w+)[^']*' not found", text)
    if missing is None or missing[1] in root_keys(root):
        return None
    others = [f"`verl {other.command}`" for other in ROOTS.values() if missing[1] in root_keys(other.name)]
    if not others:
        return None
    here, there = ROOTS[root].command, " and ".join(others)
    return (
        f"an option that was chosen refers to ${{{missing[1]}}}, which {there} {'have' if others[1:] else 'has'} and "
        f"`verl {here}` does not: it is for {there}. `verl {here} --help` lists what can be chosen."
    )


def _in_brief(root: str, error: BaseException) -> str:
    """The override at which Hydra failed, and the reason, from the innermost of its chained errors."""
    first = _first_line(error)
    cause = root_cause(error)
    reason = "" if cause is error else f" ({_first_line(cause).rstrip('.')})"
    what = first.removeprefix("Error merging override ").rstrip(".").lstrip("+")
    words = (
        f"{what}: it cannot be set" if what != first.rstrip(".") else f"the configuration cannot be composed: {what}"
    )
    return f"{words}{reason}. `verl {ROOTS[root].command} --help` lists what can be chosen."


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _unknown(root: str, key: str) -> str:
    top, keys = key.partition(".")[0], root_keys(root)
    if top in CHOOSERS:
        return f"the option file of {top} does not begin with the line `# @package _global_`. {WITHOUT_PACKAGE}"
    if top == "hydra":
        return f"{key} is not a known key of Hydra. `--cfg hydra` lists the known ones."
    if top in keys:
        return f"{key} is not a known key."
    return f"{key} is not a known key: {root}.yaml has no {top}.{hint(nearest(top, keys))}"


_WORDS = (  # message of Hydra, replacement
    (r"Interpolation key '([^']+)' not found\s+full_key: (\S+)", "{1} refers to ${{{0}}}, which does not exist."),
    (r"Interpolation key '([^']+)' not found", "${{{0}}} refers to a key that does not exist."),
    (
        r"Environment variable '([^']+)' not found",
        "${{oc.env:{0}}}: the environment variable {0} is not set. export {0}=..., or write ${{oc.env:{0},DEFAULT}}.",
    ),
    (
        r"Unsupported interpolation type (\S+)",
        "${{{0}:...}}: there is no resolver {0}. Write ${{key}} to refer to another key.",
    ),
    (
        r"raised while resolving interpolation: (.*?)\s+full_key: (\S+)",
        "the reference in {1} cannot be resolved ({0}). `--cfg job` shows the whole configuration.",
    ),
    (r"Cannot find primary config '([^']+)'", "--config-name is {0}: there is no such file. Leave it out."),
    (r"Primary config directory not found", "--config-path names no directory. Leave it out."),
    (r"An item is already at '([^']+)'", "{0} exists already: write {0}=VALUE or ++{0}=VALUE, not +{0}=VALUE."),
    (
        r"no viable alternative at input '([^']*)'",
        "{0} has an unclosed bracket or quote, or is not a value: quote the value, key='\"VALUE\"'.",
    ),
    (r"Could not delete.*'([^']+)' does not exist", "~{0}: there is no {0} to remove."),
    (r"Could not override '([^'@]+)@([^']*)'", "{0}@{1}: nothing is chosen there yet. Write +{0}@{1}=OPTION."),
    (r"Multiple values for ([\w/@.]+)", "{0} is chosen twice. In a file, write `override /{0}: OPTION`."),
    (
        r"maximum recursion depth exceeded",
        "a file of options names itself in its list of defaults, directly or through others. Remove it from there.",
    ),
)
