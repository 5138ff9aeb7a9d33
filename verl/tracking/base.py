"""The interface of trackers, and the set of all trackers of a run.

Secrets are removed from all text here. A tracker that fails during training does not stop the run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Any, ClassVar

from verl.component import BuildContext, Description, component, package_fault
from verl.errors import ConfigError
from verl.utils.component_exits import as_component_exit, raised_by_code
from verl.utils.redact import redact, redact_tree
from verl.utils.seeding import kept_generators


@component
class TrackerDescription(Description):
    """Base of what a place under `tracker` may be: builds a `Tracker`.

    Attributes:
        package: that it needs to be installed, or None.
        shows_others: it tells what other trackers report of themselves, so it starts and closes after them.
        if_installed: without its package this tracker is left out, which is logged; False refuses the run.
    """

    package: ClassVar[str | None] = None
    shows_others: ClassVar[bool] = False

    if_installed: bool = False


class Tracker:
    """One place that a run's numbers and texts go to.

    Every method does nothing unless overridden, so a tracker names only what it cares for. All text it receives is
    already free of secrets, and every metric is a plain int or float, perhaps not finite.

    Attributes:
        num_lost: for a tracker that tries again after a failure, the records that it could not write after all, known
            once it is closed; None for others, which lose a record with each call that fails.
    """

    num_lost: int | None = None

    def resume(self, identity: Mapping[str, Any]) -> None:
        """The run goes on from a checkpoint of one that went by this `identity`; called before `start`."""

    def identity(self) -> dict[str, Any]:
        """What a later run needs to go on where this one is recorded; empty for a place that has no such thing."""
        return {}

    def start(self, run_name: str, config: dict[str, Any], run_dir: Path, total_steps: int | None) -> None:
        """Open everything that can fail, so that a fault shows before training. `run_dir` exists."""

    def stage_begins(self, name: str) -> None:
        """One stage of a step begins, such as `gen`."""

    def stage(self, name: str, seconds: float, note: str) -> None:
        """One stage of a step has ended, such as `gen` after 1.24 seconds, with what was done."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """The metrics of a finished training step."""

    def evaluation(self, metrics: dict[str, float], step: int) -> None:
        """The metrics of an evaluation of the weights after `step` steps; 0 is before training."""

    def samples(self, rows: list[dict[str, Any]], step: int, name: str) -> None:
        """A table of responses with what is known of each; `name` says which table, such as `eval`."""

    def message(self, text: str) -> None:
        """A sentence for the person who watches the run."""

    def result(self, summary: Mapping[str, Any]) -> None:
        """What the run came to, as in `summary.json`; called once, before `close`."""

    def close(self, status: str) -> None:
        """Release everything. Called once, with `finished`, `stopped`, `interrupted`, `restarting` or `failed`."""


def stage_line(name: str, seconds: float, note: str = "") -> str:
    """`[gen] 1.24s  384 responses, 1536 tokens`"""
    return f"[{name}] {seconds:.2f}s" + (f"  {note}" if note else "")


def short(value: float, digits: int = 4) -> str:
    """A number in so many significant digits at most; whole numbers whole."""
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e6):
        return str(int(value))
    return f"{value:.{digits}g}"


def metrics_line(metrics: dict[str, float]) -> str:
    """`reward/mean 0.8125  rollout/response_length_tokens 4`"""
    return "  ".join(f"{key} {short(value)}" for key, value in metrics.items())


_log = logging.getLogger(__name__)
_TO_FILE_ONLY = {"console": False}  # the console tracker shows these lines itself; run.log needs them too


@component
class Trackers(Description):
    """Where a run's numbers go: one description for each tracker, by name; null leaves one out.

    A configuration composes them from a list, `tracker=[console,jsonl,mine]`. A name that is no field is one of `more`,
    so that `tracker.mine` is written as `tracker.console` is.

    Args:
        console, jsonl, tensorboard, wandb, curves: those that come with the package.
        more: all others by their names.
    """

    other_keys: ClassVar[str] = "more"

    console: TrackerDescription | None = None
    jsonl: TrackerDescription | None = None
    tensorboard: TrackerDescription | None = None
    wandb: TrackerDescription | None = None
    curves: TrackerDescription | None = None
    more: dict[str, TrackerDescription] = field(default_factory=dict)

    def faults(self) -> Iterator[str]:
        for name in self.more.keys() & {one.name for one in fields(self)}:
            yield f"more has the name {name!r}, which is a tracker of its own: choose another."

    def faults_here(self) -> Iterator[str]:
        for name, kind in self._described().items():
            fault = _package_fault(name, kind)
            if fault is not None and not kind.if_installed:
                yield f"{name} {fault}"

    def build(self, context: BuildContext) -> TrackerSet:
        described = self._described()
        absent = {
            name: fault
            for name, kind in described.items()
            if kind.if_installed
            if (fault := _package_fault(name, kind))
        }
        for name, fault in absent.items():
            _log.info("tracker.%s is left out: %s", name, fault)
        return TrackerSet({name: kind.build(context) for name, kind in described.items() if name not in absent})

    def _described(self) -> dict[str, TrackerDescription]:
        """By name, in the order in which they start; those that show what the others have to say last."""
        found = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "more"} | self.more
        there = {name: kind for name, kind in found.items() if kind is not None}
        return dict(sorted(there.items(), key=lambda item: item[1].shows_others))


def _package_fault(name: str, kind: TrackerDescription) -> str | None:
    return None if kind.package is None else package_fault(kind.package, f"tracker.{name}=null")


class TrackerSet(Tracker):
    """The running trackers of one run. `close` may be called any number of times; later calls of all kinds do nothing.

    A tracker that fails in `start` is an error. One that fails afterwards is named once in a warning and training
    goes on; it is called again all the same, so that a disk which has room again is written to again. What a tracker
    draws from the global random generators is put back: with it and without it training is the same.

    Args:
        trackers: running trackers by the name under which the configuration knows them.
    """

    def __init__(self, trackers: Mapping[str, Tracker]):
        self.trackers = dict(trackers)
        self._failed: dict[str, int] = {}  # calls by tracker

    def start(self, run_name: str, config: dict[str, Any], run_dir: Path | str, total_steps: int | None) -> None:
        """Start every tracker.

        Args:
            run_name: shown to people.
            config: the composed configuration as plain dicts, lists and scalars.
            run_dir: where files go; made if it is not there.
            total_steps: training steps of the whole run, or None where that is not known.
        Raises:
            ConfigError: a tracker could not start; those already started have been closed again.
        """
        run_dir, config = Path(run_dir), redact_tree(config)
        run_dir.mkdir(parents=True, exist_ok=True)
        name, started = "", {}
        try:
            for name, tracker in self.trackers.items():
                started[name] = tracker
                with kept_generators():
                    tracker.start(redact(run_name), config, run_dir, total_steps)
        except BaseException as error:
            self.trackers = started
            self.close("failed")
            if not raised_by_code(error):
                raise
            cause = _cause(error)
            fault = f"tracker.{name} could not start: {cause}. Fix it, or set tracker.{name}=null."
            raise ConfigError(fault) from error

    def resume(self, identity: Mapping[str, Any]) -> None:
        known = {name.removeprefix("more."): value for name, value in identity.items()}  # as 0.2 wrote them
        for name, tracker in self.trackers.items():
            if name in known:
                with kept_generators():
                    tracker.resume(known[name])

    def identity(self) -> dict[str, Any]:
        """By name of the tracker."""
        with kept_generators():
            found = {name: tracker.identity() for name, tracker in self.trackers.items()}
        return {name: identity for name, identity in found.items() if identity}

    def stage_begins(self, name: str) -> None:
        self._each(lambda tracker: tracker.stage_begins(name))

    def stage(self, name: str, seconds: float, note: str = "") -> None:
        note = redact(note)
        _log.info("%s", stage_line(name, seconds, note), extra=_TO_FILE_ONLY)
        self._each(lambda tracker: tracker.stage(name, seconds, note))

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        numbers = {key: _number(key, value) for key, value in metrics.items()}
        _log.info("step %d  %s", step, metrics_line(numbers), extra=_TO_FILE_ONLY)
        self._each(lambda tracker: tracker.log(numbers, step))

    def evaluation(self, metrics: Mapping[str, Any], step: int) -> None:
        numbers = {key: _number(key, value) for key, value in metrics.items()}
        _log.info("evaluation after step %d  %s", step, metrics_line(numbers), extra=_TO_FILE_ONLY)
        self._each(lambda tracker: tracker.evaluation(numbers, step))

    def samples(self, rows: list[dict[str, Any]], step: int, name: str = "samples") -> None:
        rows = redact_tree(rows)
        self._each(lambda tracker: tracker.samples(rows, step, name))

    def message(self, text: str) -> None:
        text = redact(text)
        _log.info("%s", text, extra=_TO_FILE_ONLY)
        self._each(lambda tracker: tracker.message(text))

    def result(self, summary: Mapping[str, Any]) -> None:
        shown = redact_tree(dict(summary))
        self._each(lambda tracker: tracker.result(shown))

    def close(self, status: str = "finished") -> None:
        trackers, self.trackers = self.trackers, {}
        for name, tracker in trackers.items():
            self._close(name, tracker, status)
        for name, calls in self._failed.items():
            lost = trackers[name].num_lost if name in trackers else None
            loss_text = f"lost {calls if lost is None else lost} records of this run" if lost != 0 else "lost no record"
            _log.warning("tracker.%s failed %d times and %s.", name, calls, loss_text)
        self._failed = {}

    def _close(self, name: str, tracker: Tracker, status: str) -> None:
        try:
            with kept_generators():
                tracker.close(status)
        except BaseException as error:  # the others still have to be released
            if not raised_by_code(error):
                raise
            _log.warning("tracker.%s failed while closing: %s", name, _cause(error))

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in self.trackers.items():
            self._call(name, tracker, call)

    def _call(self, name: str, tracker: Tracker, call: Callable[[Tracker], None]) -> None:
        try:
            with kept_generators():
                call(tracker)
        except BaseException as error:  # a number that cannot be shown is no reason to lose a training run
            if not raised_by_code(error):
                raise
            if name not in self._failed:
                _log.warning("tracker.%s FAILED, training goes on: %s", name, _cause(error))
            self._failed[name] = self._failed.get(name, 0) + 1


def _cause(error: BaseException) -> str:
    """What failed, without secrets; an exit with the line that wanted it."""
    found = error if isinstance(error, Exception) else as_component_exit(error)
    return redact(f"{type(found).__name__}: {found}")


def _number(key: str, value: Any) -> float:
    """A plain int or float, whatever kind of scalar came in."""
    try:
        return value if type(value) is int else float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metric {key} is {value!r}: must be one number.") from error
