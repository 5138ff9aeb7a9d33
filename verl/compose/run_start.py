"""RunStart: what happens to a checked run before it is built, from a command line and from a script alike.

checks of this machine -> lock of the run directory -> differences from the defaults, config.yaml, run.log
    -> missing warm starts are trained -> data, weights, processes
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from verl.checkpoint.ownership import lock_run_directory
from verl.component import BuildContext
from verl.compose.compose import choices_of, compose_root
from verl.compose.overrides import options_in
from verl.compose.schema import CHOOSERS, LISTS, group_options
from verl.compose.validate import TARGET, refuse_here
from verl.compose.warm_start import resolve_warm_starts
from verl.errors import ConfigError, end_cut
from verl.tracking.console import print_line, shown_path, visible
from verl.tracking.logging_setup import setup_logging
from verl.utils.external_input import plain
from verl.utils.redact import redact, redact_tree

if TYPE_CHECKING:
    from rich.console import Console


@dataclass
class RunStart:
    """The start of one run.

    Attributes:
        config: the composed root.
        root: a name of `ROOTS`.
        choices: the option of every group, to print the differences from the defaults; None prints nothing.
        run_dir: directory of the run.
        console: standard output.
        name: name of the job in a sweep, or empty.
        overrides: as the user gave them.
        faults: found on the command line, to be reported by the validation.
        swept: overrides in which this job differs from others of its sweep.
        closing: exit stack that is closed with the run.
    """

    config: DictConfig
    root: str
    choices: Mapping[str, str | None] | None
    run_dir: Path
    console: Console
    name: str = ""
    overrides: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    swept: tuple[str, ...] = ()
    closing: ExitStack = field(default_factory=ExitStack)
    is_recorded: bool = False
    is_new: bool = False

    @property
    def context(self) -> BuildContext:
        return BuildContext(run_dir=self.run_dir, job=self.name, swept=self.swept)

    def build(self, run: Any, tokenizer: Any = None) -> Any:
        """Check, record and build a run.

        Args:
            run: the validated description.
            tokenizer: of the actor; None for the one saved with its model.
        Returns:
            The trainer; the caller closes it, and `closing` after it.
        Raises:
            ConfigError: this machine cannot run it, or another run writes into the run directory.
        """
        refuse_here(run, self.context)
        self.record()
        return resolve_warm_starts(run, self.console).build(replace(self.context, tokenizer=tokenizer))

    def record(self) -> None:
        """Print the differences from the defaults and the run directory, save the redacted configuration there, and
        start run.log. If the run is refused later, `withdraw` removes these files.

        Raises:
            ConfigError: another run writes into the run directory, or it cannot be written.
        """
        is_new = not self.run_dir.exists() or not any(self.run_dir.iterdir())
        if (lock := lock_run_directory(self.run_dir)) is not None:
            self.closing.callback(lock.release)
        self.is_new = is_new
        changed: dict[str, tuple[Any, Any]] = {}
        if self.choices is not None:
            changed = print_start(self.config, self.root, self.choices, self.run_dir, self.console)
        self.is_recorded = True
        try:
            save_config(self.config, self.overrides, self.run_dir)
            if self.choices is not None:
                start = {"name": run_name(self.config), "differences": changed}
                text = json.dumps(redact_tree(plain(start)), indent=1) + "\n"
                (self.run_dir / "start.json").write_text(text, "utf-8")
            self.closing.callback(setup_logging(self.run_dir))
        except OSError as error:
            raise ConfigError(
                f"hydra.run.dir is {shown_path(self.run_dir)}: {error.filename or 'it'} cannot be written "
                f"({error.strerror}). Give this run a directory that can be written: hydra.run.dir=DIR."
            ) from error

    def withdraw(self) -> None:
        """Remove the files of `record` and of a refused build, if the directory has no others."""
        if self.is_new:
            remove_refused(self.run_dir)


def print_start(
    config: DictConfig, root: str, choices: Mapping[str, str | None], run_dir: Path, console: Any
) -> dict[str, tuple[Any, Any]]:
    """Print the name of a run, its directory, and its differences from the defaults; returns these as `differences`.

    Args:
        config: a composed and validated root.
        root, choices: a name of `ROOTS`, and the option of every group.
        run_dir: of the run.
        console: a rich console.
    """
    changed = differences(config, root, choices)
    lines = ["differs from the defaults (--cfg job shows the whole configuration):"] if changed else []
    names = {path: visible(f"{path}={_text(now)}") for path, (now, _) in changed.items()}
    column = min(max(map(len, names.values()), default=0), console.width // 2)
    for path, (_, before) in changed.items():
        line = f"  {names[path]:<{column}}  was {visible(_text(before))}"
        lines.append(line if len(line) <= console.width else end_cut(f"  {names[path]}", console.width))
    print_line(console, visible(redact(f"{run_name(config)} writes to {shown_path(run_dir)}")), "bold", wraps=False)
    for line in lines:
        print_line(console, line)
    return changed


def run_name(config: DictConfig) -> str:
    """Project and experiment."""
    return f"{config.trainer.project_name}/{config.trainer.experiment_name}"


def differences(config: DictConfig, root: str, choices: Mapping[str, str | None]) -> dict[str, tuple[Any, Any]]:
    """(value, default) by group or path, redacted; without values that are references to others."""
    default, known = choices_of(root), group_options()
    changed: dict[str, tuple[Any, Any]] = {}
    for group in dict.fromkeys([*default, *choices]):
        now, before = choices.get(group), default.get(group)
        is_list = group in LISTS and now is None  # Hydra does not report lists of options: compare their members
        if now != before and not is_list and not group.startswith("hydra/"):
            changed[group] = now, before
    chosen = {group: _text(now) for group, (now, _) in changed.items() if now is not None and group not in CHOOSERS}
    shown = {
        group: text
        for group, text in chosen.items()
        if {*options_in(text)} <= {*known.get(group.partition("@")[0], [])}  # `sharding` of `sharding@actor.sharding`
    }
    options = [f"{'+' if '@' in group else ''}{group}={text}" for group, text in shown.items()]
    base = compose_root(root, options)
    raw, raw_base = (OmegaConf.to_container(node, resolve=False) for node in (config, base))
    now, before = (redact_tree(OmegaConf.to_container(node, resolve=True)) for node in (config, base))
    for path in _differing(raw, raw_base, ()):
        value, former = _at(now, path), _at(before, path)
        if value != former:
            changed[".".join(path)] = value, former
    return {path.rpartition("@")[2]: values for path, values in changed.items()}  # no group before @


def _differing(node: Any, other: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield paths of values that differ; a component of another class is one value."""
    both = isinstance(node, dict) and isinstance(other, dict)
    if both and node.get(TARGET) == other.get(TARGET):
        for key in dict.fromkeys([*node, *other]):
            yield from _differing(node.get(key), other.get(key), (*path, str(key)))
    elif node != other:
        yield path


def _at(tree: Any, path: Sequence[str]) -> Any:
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _text(value: Any) -> str:
    """A value as override text; a component as its class with its plain fields."""
    if isinstance(value, dict):
        fields = ", ".join(f"{key}={_text(item)}" for key, item in value.items() if key != TARGET)
        return f"{value[TARGET].rpartition('.')[2]}({fields})" if TARGET in value else f"{{{fields}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    if value == "???":
        return "not set"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def save_config(config: DictConfig, overrides: Sequence[str], run_dir: Path) -> None:
    """Write `config.yaml`, with references unresolved, and `overrides.yaml`."""
    save_overrides(overrides, run_dir)
    _write_yaml(redact_tree(OmegaConf.to_container(config, resolve=False)), run_dir / "config.yaml")


def save_overrides(overrides: Sequence[str], run_dir: Path) -> None:
    """Write `overrides.yaml`, the overrides of the command line."""
    run_dir.mkdir(parents=True, exist_ok=True)
    _write_yaml([*map(redact, overrides)], run_dir / "overrides.yaml")


def _write_yaml(tree: Any, file: Path) -> None:
    file.write_text(redact(OmegaConf.to_yaml(OmegaConf.create(tree))), "utf-8")


_BEFORE_THE_FIRST_STEP = {
    "config.yaml",
    "overrides.yaml",
    "start.json",
    "run.log",
    "plan.txt",
    "plan.json",
    "environment.json",
    "metrics.jsonl",
    "tensorboard",
}


def remove_refused(run_dir: Path) -> None:
    """Remove the files of a run that was refused, if the directory has no others."""
    present = {path.name for path in run_dir.iterdir()} if run_dir.is_dir() else set()
    has_steps = any(path.stat().st_size for path in run_dir.glob("metrics.jsonl"))
    if present <= _BEFORE_THE_FIRST_STEP and not has_steps:
        shutil.rmtree(run_dir, ignore_errors=True)
