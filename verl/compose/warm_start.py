"""Warm starts: `warm-start://NAME` is the actor that `verl sft experiment=NAME` trains, cached on disk.

run with warm-start://NAME -> conf/sft.yaml + experiment NAME -> key -> <cache>/warm_starts/NAME-key/actor
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import verl
from verl.component import BuildContext, Description, as_plain, hint, nearest
from verl.compose.compose import compose_root
from verl.compose.schema import group_options
from verl.compose.validate import validate
from verl.errors import ConfigError
from verl.models.model_files import WARM_START
from verl.utils.directories import TemporaryDirectory, cache_root, unwritable
from verl.utils.memory import gpu_name_from_outside

if TYPE_CHECKING:
    from rich.console import Console


def resolve_warm_starts(run: Any, console: Console, overrides: Sequence[str] = ()) -> Any:
    """Replace every `warm-start://NAME` in a run by a directory, and train those that are not cached.

    Args:
        run: the validated description of a run.
        console: for messages about the wait.
        overrides: further overrides of the fine-tuning run, in Hydra's syntax.
    Raises:
        ConfigError: there is no such experiment.
    """

    same_machine = [
        f"++trainer.device={run.trainer.device}",
        f"++trainer.num_threads={'null' if run.trainer.num_threads is None else run.trainer.num_threads}",
    ]

    @functools.cache
    def directory(name: str) -> str:
        return str(_actor_dir(name, console, [*same_machine, *overrides], run))

    return _with_sources(run, lambda source, name: dataclasses.replace(source, path=directory(name)))


def warm_start_dir(name: str, run: Any) -> Path:
    """Cache directory of a warm start, which may not exist yet; its key includes all that the weights depend on."""
    return cache_root() / "warm_starts" / f"{name}-{cache_key(run)}"


def with_architectures(run: Any) -> Any:
    """Replace each `warm-start://NAME` in a run by the untrained model of that experiment, to compute sizes.

    Raises:
        ConfigError: there is no such experiment.
    """

    def untrained(source: Any, name: str) -> Any:
        return dataclasses.replace(_warm_start_run(name, []).actor.model, dtype=source.dtype)

    return _with_sources(run, untrained)


def _with_sources(value: Any, source_of: Callable[[Any, str], Any]) -> Any:
    """The value with a new source in place of each whose path is `warm-start://NAME`; unchanged if there is none.

    Args:
        source_of: makes it from the source and NAME.
    """
    if not isinstance(value, Description):
        return value
    path = getattr(value, "path", None)
    if isinstance(path, str) and path.startswith(WARM_START):
        return source_of(value, path.removeprefix(WARM_START))
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    new = {name: _with_sources(item, source_of) for name, item in fields.items()}
    changed = {name: item for name, item in new.items() if item is not fields[name]}
    return dataclasses.replace(value, **changed) if changed else value


def _warm_start_run(name: str, overrides: Sequence[str]) -> Any:
    known = group_options().get("experiment", [])
    if name not in known:
        raise ConfigError(f"{WARM_START}{name}: there is no experiment {name}.{hint(nearest(name, known))}")
    return validate(compose_root("sft", [f"experiment={name}", "tracker=none", "checkpoint=off", *overrides]))


def _actor_dir(name: str, console: Console, overrides: Sequence[str], used_by: Any) -> Path:
    run = _warm_start_run(name, overrides)
    final = warm_start_dir(name, run)
    if (final / "actor" / "config.json").is_file():
        console.print(f"{WARM_START}{name} lies in {final}", soft_wrap=True)
        return final / "actor"
    if (fault := unwritable(final.parent)) is not None:
        raise ConfigError(f"VERL_CACHE leads to {final.parent}: {fault}. Set it to a directory that can be written.")
    with_architectures(used_by)  # refuses lengths beyond the model's context before it is trained
    console.print(f"{WARM_START}{name} is trained once; later runs find it ...", soft_wrap=True)
    begin = time.monotonic()
    _make(run, final)
    console.print(f"{WARM_START}{name} trained in {time.monotonic() - begin:.0f} s, saved in {final}", soft_wrap=True)
    return final / "actor"


def _make(run: Any, final: Path) -> None:
    """Train into a temporary directory and rename it, so that a partial result is never used."""
    final.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(f".{final.name}-", final.parent) as directory:
        making = Path(directory)
        trainer = run.build(BuildContext(run_dir=making))
        try:
            trainer.fit()
        finally:
            trainer.close()
        assert (making / "actor" / "config.json").is_file(), "supervised fine-tuning saved no actor"
        publish(making, final)


def publish(making: Path, final: Path) -> None:
    """Rename a finished directory into its place; another process may have been there first."""
    try:
        os.rename(making, final)
    except OSError:
        if not (final / "actor" / "config.json").is_file():
            raise
        # Another process was faster; its weights are equal.


def cache_key(run: Any) -> str:
    import torch

    gpu = gpu_name_from_outside(0) if torch.cuda.is_available() else None  # torch would open a context in the driver
    device = gpu or platform.processor() or platform.machine()
    versions = [torch.__version__, importlib.metadata.version("transformers")]
    parts = [
        json.dumps(as_plain(run), sort_keys=True),
        source_identity(),
        *versions,
        device,
        str(torch.get_num_threads()),
    ]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


def source_identity() -> str:
    """One hash of every source file of the package."""
    digest, package = hashlib.blake2b(digest_size=16), Path(verl.__file__).resolve().parent
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package).as_posix()}\n".encode())
        digest.update(hashlib.blake2b(file.read_bytes()).digest())
    return digest.hexdigest()
