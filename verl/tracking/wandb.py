"""Metrics to Weights & Biases; without a key, to offline files that `wandb sync` uploads later."""

from __future__ import annotations

import contextlib
import json
import netrc
import os
import random
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field

from verl.component import BuildContext, component
from verl.errors import install_command
from verl.tracking.base import Tracker, TrackerDescription
from verl.utils.child_process.stopped_watch import StoppedWatch, children
from verl.utils.temporary_directory import TemporaryDirectory

RUN_FILE = "wandb.json"  # in the directory of the run: where its W&B run is
SERVICE = b"wandb-core"
_TEMPORARY: list[TemporaryDirectory] = []  # of this process, once it has used W&B


@component
class WandB(TrackerDescription):
    """A W&B run, its files below the run directory; the jobs of a sweep are one group, named after its directory.

    Args:
        project: W&B project.
        entity: team or user; null is the account's default.
        tags: labels of the run.
        mode: `auto` is what WANDB_MODE says if it is set, else online where WANDB_API_KEY or a netrc file has a key,
            else offline.
        on_resume: a run that goes on from a checkpoint is the `same` W&B run, or a `child`: one of its own, in the
            group of the root run, whose id names the group.
        timeout_s: when W&B's background process has been stopped for so long, it is ended, since W&B waits for it
            without a limit; the run goes on without W&B.
    """

    package: ClassVar[str] = "wandb"

    project: Annotated[str, Field(min_length=1)] = "verl"
    entity: str | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["auto", "online", "offline"] = "auto"
    on_resume: Literal["same", "child"] = "same"
    timeout_s: Annotated[float, Field(gt=0, lt=1e9)] = 60.0

    def build(self, context: BuildContext) -> WandBTracker:
        sweep = context.run_dir.resolve().parent.name if context.job and context.run_dir is not None else None
        return WandBTracker(self, sweep)


class WandBTracker(Tracker):
    """One W&B run. Metrics carry our own `step`, so an evaluation may arrive after the step it belongs to."""

    def __init__(self, settings: WandB, sweep: str | None = None):
        self._settings, self._sweep = settings, sweep
        self._run: Any = None
        self._former: dict[str, Any] = {}
        self._root: str | None = None

    def resume(self, identity: Mapping[str, Any]) -> None:
        self._former = dict(identity)

    def identity(self) -> dict[str, Any]:
        return {} if self._run is None else {"id": self._run.id, "root": self._root}

    def start(self, run_name: str, config: dict[str, Any], run_dir: Path, total_steps: int | None) -> None:
        with _own_temporary_files():
            self._start(run_name, config, run_dir)

    def _start(self, run_name: str, config: dict[str, Any], run_dir: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError(f"the package wandb is missing: {install_command('wandb')}") from error
        from wandb.sdk.lib import retry

        retry.random = random.Random()  # its threads wait by chance while training goes on
        chosen = self._settings
        self._wandb = wandb
        is_same = chosen.on_resume == "same"
        run_id = self._former.get("id") if is_same else None
        run_id = run_id or secrets.token_hex(4)
        self._root = self._former.get("root", run_id)
        self._run = wandb.init(
            project=chosen.project,
            entity=chosen.entity,
            tags=chosen.tags,
            name=run_name,
            config=config,
            dir=run_dir,
            id=run_id,
            resume="allow" if is_same and self._former else None,
            group=self._sweep if is_same else self._root,
            mode=wandb_mode(chosen.mode),
            reinit="create_new",  # a sweep's runs are separate, and a user's own run is left alone
            settings=wandb.Settings(console="off", quiet=True),
        )
        place = {"id": run_id, "url": self._run.url, "directory": str(Path(self._run.dir).parent)}
        (run_dir / RUN_FILE).write_text(json.dumps(place, indent=2) + "\n")
        services = dict.fromkeys(children(SERVICE), "W&B's background process")
        self._watch = StoppedWatch(services, chosen.timeout_s, "tracker.wandb.timeout_s")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._run.log({**metrics, "step": step})

    def evaluation(self, metrics: dict[str, float], step: int) -> None:
        self.log(metrics, step)

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
            # `finish` leaves the last records to a background process; ending that one is what waits for them. Runs of
            # other owners in this process would end with it, so then they are left to its exit.
            with contextlib.suppress(ConnectionError) if self._watch.ended else contextlib.nullcontext():
                if self._watch.ended or getattr(self._wandb.setup(), "most_recent_active_run", None) is None:
                    self._wandb.teardown()
            self._watch.close()


@contextlib.contextmanager
def _own_temporary_files() -> Iterator[None]:
    """Within, temporary files are made in a directory that goes with this process, also where it is killed.

    W&B makes some when it is imported, and its background process when it starts; both live as long as this process.
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


def wandb_mode(asked: str) -> Any:
    """`online`, `offline`, or what WANDB_MODE says where nothing is asked for."""
    if asked != "auto":
        return asked
    if environment := os.environ.get("WANDB_MODE"):
        return environment
    return "online" if os.environ.get("WANDB_API_KEY") or _key_in_netrc() else "offline"


def _key_in_netrc() -> bool:
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return False


def _cell(value: Any) -> Any:
    """Numbers and texts as they are; a table's column must hold one kind, so the rest becomes text."""
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)
