"""Metrics to Weights & Biases; without an API key to offline files for `wandb sync`."""

from __future__ import annotations

import contextlib
import json
import netrc
import os
import random
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field

from verl.component import BuildContext, component
from verl.tracking.base import ContinuedTracker, TrackerDescription
from verl.utils.directories import TemporaryDirectory

RUN_FILE = "wandb.json"  # in the run directory: URL or directory of its W&B run
_TEMPORARY: list[TemporaryDirectory] = []  # of this process, once it has used W&B


@component
class WandB(TrackerDescription):
    """Logs to a W&B run, with its files below the run directory. The jobs of a sweep form a group.

    Args:
        project: W&B project.
        entity: team or user; null for the default of the account.
        tags: labels of the run.
        mode: `auto` uses WANDB_MODE if it is set, else online if WANDB_API_KEY or a netrc file has a key, else offline.
        on_resume: a resumed run continues the `same` W&B run, or is a `child`: a new run in a group named after the id
            of the first run.
    """

    package: ClassVar[str] = "wandb"

    project: Annotated[str, Field(min_length=1)] = "verl"
    entity: str | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["auto", "online", "offline"] = "auto"
    on_resume: Literal["same", "child"] = "same"

    def build(self, context: BuildContext) -> WandBTracker:
        sweep = context.run_dir.resolve().parent.name if context.job and context.run_dir is not None else None
        return WandBTracker(self, sweep)


class WandBTracker(ContinuedTracker):
    """A W&B run. Metrics are logged with their own `step`, so an evaluation may be logged after its step."""

    def __init__(self, settings: WandB, sweep: str | None = None):
        self._settings, self._sweep = settings, sweep
        self._run: Any = None
        self._root: str | None = None

    def identity(self) -> dict[str, Any]:
        return {} if self._run is None else {"id": self._run.id, "root": self._root}

    def start(self, run_name: str, config: dict[str, Any], run_dir: Path, total_steps: int | None) -> None:
        with _own_temporary_files():
            self._start(run_name, config, run_dir)

    def _start(self, run_name: str, config: dict[str, Any], run_dir: Path) -> None:
        import wandb
        from wandb.sdk.lib import retry

        # its threads must not use the global generator
        retry.random = random.Random()  # pyright: ignore[reportPrivateImportUsage] - the module that it imports
        chosen = self._settings
        self._wandb = wandb
        is_same = chosen.on_resume == "same"
        run_id = self.former.get("id") if is_same else None
        run_id = run_id or secrets.token_hex(4)
        self._root = self.former.get("root", run_id)
        self._run = wandb.init(
            project=chosen.project,
            entity=chosen.entity,
            tags=chosen.tags,
            name=run_name,
            config=config,
            dir=run_dir,
            id=run_id,
            resume="allow" if is_same and self.former else None,
            group=self._sweep if is_same else self._root,
            mode=wandb_mode(chosen.mode),
            reinit="create_new",  # separate runs in a sweep; a run of the user is not touched
            settings=wandb.Settings(console="off", quiet=True),
        )
        location = {"id": run_id, "url": self._run.url, "directory": str(Path(self._run.dir).parent)}
        (run_dir / RUN_FILE).write_text(json.dumps(location, indent=2) + "\n", "utf-8")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._run.log({**metrics, "step": step})

    def samples(self, rows: list[dict[str, Any]], step: int, name: str) -> None:
        columns: list[Any] = list(dict.fromkeys(key for row in rows for key in row))
        table = self._wandb.Table(columns=columns, data=[[_cell(row.get(key)) for key in columns] for row in rows])
        self._run.log({f"samples/{name}": table, "step": step})

    def close(self, status: str) -> None:
        if self._run is None:
            return
        try:
            self._run.finish(exit_code=0 if status in ("finished", "stopped") else 1)
        finally:
            # `finish` leaves the last records to a background process; stopping that process waits for them. It is not
            # stopped if it serves other runs of this process.
            if getattr(self._wandb.setup(), "most_recent_active_run", None) is None:
                self._wandb.teardown()


@contextlib.contextmanager
def _own_temporary_files() -> Iterator[None]:
    """Inside this context temporary files are made in a directory that is deleted after this process, even if it is
    killed.

    W&B makes some on import, and its background process on start; both live as long as this process.
    """
    if not _TEMPORARY:
        _TEMPORARY.append(TemporaryDirectory("verl-wandb-"))
    before, variable = tempfile.tempdir, os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = _TEMPORARY[0].name
    try:
        yield
    finally:
        tempfile.tempdir = before
        if variable is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = variable


def wandb_mode(setting: str) -> Any:
    """Resolve the setting `mode` to `online`, `offline` or the value of WANDB_MODE."""
    if setting != "auto":
        return setting
    if environment := os.environ.get("WANDB_MODE"):
        return environment
    return "online" if os.environ.get("WANDB_API_KEY") or _key_in_netrc() else "offline"


def _key_in_netrc() -> bool:
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return False


def _cell(value: Any) -> Any:
    """Numbers and texts unchanged, other values as text, since a table column has one type."""
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)
