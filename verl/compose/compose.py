"""Composes a root configuration without `hydra.main`, and applies values to it."""

from __future__ import annotations

import copy
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl.compose import schema
from verl.compose.defaults import fill_defaults
from verl.compose.schema import conf_dir, own_conf_dirs

_PARSER = OverridesParser.create()
_FORCED_VALUE = re.compile(r"^\+\+(?!hydra\.)\w+(\.\w+)+=")  # chooses no option: its key is no group


def compose_root(root: str, overrides: Sequence[str] = ()) -> DictConfig:
    """Compose a root with Hydra overrides, as `hydra.main` would, with the defaults of its components.

    It may be called inside a Hydra job, whose global state is restored.

    Args:
        root: a name of `ROOTS`.
        overrides: in Hydra's syntax, such as `algorithm=grpo` or `++trainer.seed=1`.
    """
    return _composition(root, overrides)[0]


def choices_of(root: str, overrides: Sequence[str] = ()) -> dict[str, str | None]:
    """The option of every group of a composed root, including those chosen by an experiment."""
    return _composition(root, overrides)[1]


def _composition(root: str, overrides: Sequence[str]) -> tuple[DictConfig, dict[str, str | None]]:
    """A configuration with its choices, for the caller alone.

    The options are composed once in this process, unless they depend on more than the words and this package's own
    files; values are set in a copy, in order, as Hydra sets them.
    """
    schema.register()
    directories = [QuotedString(f"file://{path}", Quote.single).with_quotes() for path in own_conf_dirs()]
    search_path = [f"hydra.searchpath=[{','.join(directories)}]"] if directories else []
    words = (*search_path, *(readable(override) for override in overrides))
    forced = list(itertools.takewhile(_FORCED_VALUE.match, reversed(words)))[::-1]
    options, values = words[: len(words) - len(forced)], [parsed_override(word) for word in forced]
    if any("searchpath" in word or "${" in word for word in options):
        return _compose(root, words)
    files = tuple(sorted((str(file), file.stat().st_mtime_ns) for file in conf_dir().rglob("*.yaml")))
    config, choices = copy.deepcopy(_compose_once(root, options, files))
    try:
        for value in values:
            if value is None or value.is_sweep_override():
                return _compose(root, words)  # which Hydra refuses in its words
            with open_dict(config):
                OmegaConf.update(config, value.key_or_group, value.value(), merge=True, force_add=True)
    except OmegaConfBaseException:
        return _compose(root, words)
    fill_defaults(config)
    return config, choices


@functools.lru_cache(maxsize=128)
def _compose_once(
    root: str, words: tuple[str, ...], files: tuple[tuple[str, int], ...]
) -> tuple[DictConfig, dict[str, str | None]]:
    return _compose(root, words)


def _compose(root: str, words: Sequence[str]) -> tuple[DictConfig, dict[str, str | None]]:
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(conf_dir()), job_name=f"main_{root}", version_base="1.3"):
            config = compose(root, [*words], return_hydra_config=True)
    finally:
        GlobalHydra.instance().hydra = running
    choices = dict(config.hydra.runtime.choices)
    with open_dict(config):
        del config["hydra"]
    return config, choices


def readable(choice: str) -> str:
    """Quote a choice of options where Hydra needs it: the option of `debug=nan` would be parsed as a number."""
    group, assigned, options = choice.partition("=")
    if "." in group or not assigned:
        return choice
    quoted = (f"'{option}'" if option in ("nan", "inf") else option for option in options.split(","))
    return f"{group}={','.join(quoted)}"


def parsed_override(text: str) -> Override | None:
    """An override in Hydra's grammar; None if the grammar cannot parse it."""
    try:
        return _PARSER.parse_override(text)
    except HydraException:
        return None


def apply_values(config: DictConfig, values: Iterable[tuple[str, Any]]) -> None:
    """Set values by path, in order, in place; a node that is a reference is first replaced by a copy.

    A mapping with a `_target_` replaces the whole node, so that no key of the former component remains.
    """
    with open_dict(config):
        for path, value in values:
            # a reference such as `${actor.model}`, so that setting a key below it does not change the actor
            for node, target, _ in references_above(config, path):
                copy = OmegaConf.to_container(OmegaConf.select(config, target), resolve=False)
                OmegaConf.update(config, node, OmegaConf.create(copy), merge=False)
            OmegaConf.update(config, path, value, merge=False, force_add=True)


def references_above(config: DictConfig, path: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the parents of `path` that are references: their path, the target path, and the keys of the target."""
    keys = path.split(".")
    node: Any = config
    for depth, key in enumerate(keys[:-1], start=1):
        if not isinstance(node, DictConfig) or key not in node or OmegaConf.is_missing(node, key):
            return
        if OmegaConf.is_interpolation(node, key) and isinstance(node[key], DictConfig):
            raw: Any = OmegaConf.to_container(node, resolve=False)
            target = str(raw[key]).strip("${}")
            yield ".".join(keys[:depth]), target, [str(name) for name in node[key]]
        node = node[key]
