"""The interface of trackers, and the set of all trackers of a run.

Secrets are redacted from all text here. A tracker that fails during training does not stop the run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Any, ClassVar

from verl.component import BuildContext, Description, component, package_fault
from verl.errors import ConfigError
from verl.utils.redact import MASK, redact, redact_tree
from verl.utils.seeding import kept_generators
from verl.utils.signals import RAISED_BY_CODE, as_component_exit


@component
class TrackerDescription(Description):
    """Base class of tracker components: builds a `Tracker`.

    Attributes:
        package: package that it needs, or None.
        shows_others: whether it displays messages of other trackers; it is started and closed after them.
        if_installed: without its package the tracker is left out with a log message; False refuses the run.
    """

    package: ClassVar[str | None] = None
    shows_others: ClassVar[bool] = False

    if_installed: bool = False


class Tracker:
    """Base class of trackers, which record the metrics and texts of a run.

    Methods do nothing unless overridden. Secrets are already redacted from all text, and every metric is a plain int or
    float, which may not be finite.

    Attributes:
        num_lost: records lost in spite of retries, known after `close`; None for trackers without retries, which lose
            one record per failed call.
    """

    num_lost: int | None = None

    def resume(self, identity: Mapping[str, Any]) -> None:
        """The run resumes a checkpoint of a run with this `identity`; called before `start`."""

    def identity(self) -> dict[str, Any]:
        """Values that a resumed run needs to continue this record, such as a run id; empty if none."""
        return {}

    def start(self, run_name: str, config: dict[str, Any], run_dir: Path, total_steps: int | None) -> None:
        """Open files and connections, so that faults show before training. `run_dir` exists."""

    def stage(self, name: str, seconds: float, note: str) -> None:
        """A stage of a step has ended, such as `gen` after 1.24 seconds; `note` says what it did."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """The metrics of a finished training step."""

    def evaluation(self, metrics: dict[str, float], step: int) -> None:
        """The metrics of an evaluation of the weights after `step` steps; 0 is before training."""

    def samples(self, rows: list[dict[str, Any]], step: int, name: str) -> None:
        """A table of sampled responses; `name` of the table, such as `eval`."""

    def evaluated_rows(self, rows: list[dict[str, Any]], step: int) -> None:
        """Every response of the evaluation after `step` steps; see `verl.monitoring.ppo_metrics`."""

    def token_rows(self, rows: list[dict[str, Any]], step: int) -> None:
        """Some responses of a training step, token by token; see `verl.monitoring.ppo_metrics`."""

    def message(self, text: str) -> None:
        """A message for the user."""

    def result(self, summary: Mapping[str, Any]) -> None:
        """The result of the run, as in `summary.json`; called once, before `close`."""

    def close(self, status: str) -> None:
        """Release everything. Called once, with `finished`, `stopped`, `interrupted`, `restarting` or `failed`."""


class ContinuedTracker(Tracker):
    """Base class of trackers that log an evaluation as they log a step, and whose record a resumed run continues.

    Attributes:
        former: the `identity` of the resumed run; empty without one.
    """

    former: Mapping[str, Any] = {}

    def resume(self, identity: Mapping[str, Any]) -> None:
        self.former = dict(identity)

    def evaluation(self, metrics: dict[str, float], step: int) -> None:
        self.log(metrics, step)


def stage_line(name: str, seconds: float, note: str = "") -> str:
    """`[gen] 1.24s  384 responses, 1536 tokens`"""
    return f"[{name}] {seconds:.2f}s" + (f"  {note}" if note else "")


def short(value: float, digits: int = 4) -> str:
    """A number with at most `digits` significant digits; integers in full."""
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e6):
        return str(int(value))
    return f"{value:.{digits}g}"


# Metrics that tell most of a run, the most telling first
HEADLINE = (
    "eval/accuracy", "eval/score", "eval/loss", "reward/mean", "sft/loss", "preference/loss", "kl/reference_nats",
)  # fmt: skip


def headline(metrics: Mapping[str, float], most: int) -> dict[str, float]:
    """The metrics of a run that tell most of it, the first ones if it has none of those."""
    return {name: metrics[name] for name in ([x for x in HEADLINE if x in metrics] or list(metrics))[:most]}


def metrics_line(metrics: dict[str, float]) -> str:
    """`reward/mean 0.8125  rollout/response_length_tokens 4`"""
    return "  ".join(f"{key} {short(value)}" for key, value in metrics.items())


_log = logging.getLogger(__name__)
_TO_FILE_ONLY = {"console": False}  # the console tracker shows these lines itself; run.log needs them too


@component
class Trackers(Description):
    """The trackers of a run, by name; null for a tracker that is not used.

    They are chosen by a list, `tracker=[console,jsonl,mine]`. `tracker.mine` of a user-defined tracker sets
    `more.mine`.

    Args:
        console, jsonl, tensorboard, wandb, report: the trackers of verl.
        more: user-defined trackers by name.
    """

    other_keys: ClassVar[str] = "more"

    console: TrackerDescription | None = None
    jsonl: TrackerDescription | None = None
    tensorboard: TrackerDescription | None = None
    wandb: TrackerDescription | None = None
    report: TrackerDescription | None = None
    more: dict[str, TrackerDescription] = field(default_factory=dict)

    def faults(self) -> Iterator[str]:
        for name in self.more.keys() & {tracker.name for tracker in fields(self)}:
            yield f"more has the name {name!r} of a built-in tracker: choose another."

    def machine_faults(self) -> Iterator[str]:
        for name, kind in self._described().items():
            fault = _package_fault(name, kind)
            if fault is not None and not kind.if_installed:
                yield f"{name} {fault}"

    def build(self, context: BuildContext) -> TrackerSet:
        built = {}
        for name, kind in self._described().items():
            if kind.if_installed and (fault := _package_fault(name, kind)):
                _log.info("tracker.%s is left out: %s", name, fault)
            else:
                built[name] = kind.build(context)
        return TrackerSet(built)

    def _described(self) -> dict[str, TrackerDescription]:
        """Trackers by name in order of their start; those with `shows_others` last."""
        by_name = {x.name: getattr(self, x.name) for x in fields(self) if x.name != "more"} | self.more
        there = [(name, kind) for name, kind in by_name.items() if kind is not None]
        return dict(sorted(there, key=lambda item: item[1].shows_others))


def _package_fault(name: str, kind: TrackerDescription) -> str | None:
    return None if kind.package is None else package_fault(kind.package, f"tracker.{name}=null")


class TrackerSet(Tracker):
    """The trackers of a run, behind the interface of one. After `close` all calls do nothing.

    A tracker that fails in `start` is an error. One that fails later is reported once by a warning, and training
    continues; it is still called, so that it can recover, e.g. when a full disk has room again. The global random state
    is restored after each call, so that trackers do not change training.

    Args:
        trackers: by name in the configuration.
    """

    def __init__(self, trackers: Mapping[str, Tracker]):
        self.trackers = dict(trackers)
        self._failed: dict[str, int] = {}  # calls by tracker

    def start(self, run_name: str, config: dict[str, Any], run_dir: Path | str, total_steps: int | None) -> None:
        """Start every tracker.

        Args:
            run_name: shown to people.
            config: the composed configuration as plain dicts, lists and scalars.
            run_dir: directory for files; created if missing.
            total_steps: training steps of the whole run; None if unknown.
        Raises:
            ConfigError: a tracker could not start; those started before have been closed.
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
            if not isinstance(error, RAISED_BY_CODE):
                raise
            cause = _cause(error)
            fault = f"tracker.{name} could not start: {cause.rstrip('. ')}. Fix it, or set tracker.{name}=null."
            raise ConfigError(fault) from error

    def resume(self, identity: Mapping[str, Any]) -> None:
        for name, tracker in self.trackers.items():
            if name in identity:
                with kept_generators():
                    tracker.resume(identity[name])

    def identity(self) -> dict[str, Any]:
        """Identities by name of the tracker."""
        with kept_generators():
            identities = {name: tracker.identity() for name, tracker in self.trackers.items()}
        return {name: identity for name, identity in identities.items() if identity}

    def stage(self, name: str, seconds: float, note: str = "") -> None:
        note = redact(note)
        _log.info("%s", stage_line(name, seconds, note), extra=_TO_FILE_ONLY)
        self._each("stage", name, seconds, note)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        numbers = {key: _number(key, value) for key, value in metrics.items()}
        _log.info("step %d  %s", step, metrics_line(numbers), extra=_TO_FILE_ONLY)
        self._each("log", numbers, step)

    def evaluation(self, metrics: Mapping[str, Any], step: int) -> None:
        numbers = {key: _number(key, value) for key, value in metrics.items()}
        _log.info("evaluation after step %d  %s", step, metrics_line(numbers), extra=_TO_FILE_ONLY)
        self._each("evaluation", numbers, step)

    def samples(self, rows: list[dict[str, Any]], step: int, name: str = "samples") -> None:
        self._each("samples", redact_tree(rows), step, name)

    def evaluated_rows(self, rows: list[dict[str, Any]], step: int) -> None:
        self._each("evaluated_rows", rows, step)

    def token_rows(self, rows: list[dict[str, Any]], step: int) -> None:
        self._each("token_rows", [_without_secrets(row) for row in rows], step)

    def message(self, text: str) -> None:
        text = redact(text)
        _log.info("%s", text, extra=_TO_FILE_ONLY)
        self._each("message", text)

    def result(self, summary: Mapping[str, Any]) -> None:
        self._each("result", redact_tree(dict(summary)))

    def close(self, status: str = "finished") -> None:
        trackers, self.trackers = self.trackers, {}
        for name, tracker in trackers.items():
            try:
                with kept_generators():
                    tracker.close(status)
            except RAISED_BY_CODE as error:  # the others still have to be released
                _log.warning("tracker.%s failed while closing: %s", name, _cause(error))
        for name, calls in self._failed.items():
            lost = trackers[name].num_lost if name in trackers else None
            loss_text = f"lost {calls if lost is None else lost} records of this run" if lost != 0 else "lost no record"
            _log.warning("tracker.%s failed %d times and %s.", name, calls, loss_text)
        self._failed = {}

    def _each(self, method: str, *arguments: Any) -> None:
        for name, tracker in self.trackers.items():
            try:
                with kept_generators():
                    getattr(tracker, method)(*arguments)
            except RAISED_BY_CODE as error:  # a failing tracker must not end training
                if name not in self._failed:
                    _log.warning("tracker.%s FAILED, training goes on: %s", name, _cause(error))
                self._failed[name] = self._failed.get(name, 0) + 1


def _without_secrets(row: dict[str, Any]) -> dict[str, Any]:
    """A row of tokens with its prompt redacted; without texts and ids if a secret is divided over them."""
    row, text = {**row, "prompt": redact(row["prompt"])}, "".join(row["texts"])
    if redact(text) != text:
        del row["ids"]
        row["texts"] = [MASK] * len(row["texts"])
    return row


def _cause(error: BaseException) -> str:
    """Description of an error, redacted; for SystemExit with the line that raised it."""
    cause = error if isinstance(error, Exception) else as_component_exit(error)
    return redact(f"{type(cause).__name__}: {cause}")


def _number(key: str, value: Any) -> float:
    """Convert a scalar of any kind to a plain int or float."""
    try:
        return value if type(value) is int else float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metric {key} is {value!r}: must be one number.") from error
