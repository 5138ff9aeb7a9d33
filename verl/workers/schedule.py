"""The schedule of an engine: the steps at which weights were loaded, batches begun, and open rows recomputed.

{"head": {...}, "crc32": 2853013386}                                 hardware, libraries, settings
{"engine_step": 41, "event": "weights", "number": 3, "open_rows": 9, "crc32": 1634562331}

`crc32` covers the line number and the line before it, so that altered, lost and moved lines are detected.

The trainer issues events in a fixed order. Only the engine step before which each is processed depends on timing: an
engine that processes the same events before the same steps generates the same bits. A checkpoint holds the schedule up
to its step, and the file of a resumed run begins with that schedule.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from verl.component import BuildContext
from verl.errors import ConfigError, RolloutError
from verl.tracking.jsonl import LineFile
from verl.utils.external_input import ExternalInputError, checked_as, parse_mapping

log = logging.getLogger(__name__)

FILE = "schedule.jsonl"
SUM = ', "crc32": '
MOST_STEPS = 10**7  # engine steps between two events; a response has fewer tokens
EventKind = Literal["begin", "weights", "save", "generate", "answer", "lost"]


@dataclass(frozen=True)
class ScheduledEvent:
    """An event before a step of the engine.

    Attributes:
        engine_step: number of engine steps before the event.
        event: `begin` of a batch, new `weights`, a `save`, `generate` of other responses (such as an evaluation's), the
            `answer` of an environment that does not answer at once, or `lost`: the engine died and open rows restart.
        number: version of the weights, or training step of the batch, save or other responses; for an answer, the step
            times a million plus the number of the episode in its batch.
        open_rows: number of unfinished responses or turns before the event.
    """

    engine_step: int
    event: EventKind
    number: int
    open_rows: int

    def __str__(self) -> str:
        return f"{self.event} {self.number} before engine step {self.engine_step} with {self.open_rows} open rows"


@dataclass(frozen=True)
class ScheduleOptions:
    """Head and replayed events of the schedule of an engine; see `Schedule`.

    Attributes:
        head: JSON text of the head.
        replayed: events to replay, by engine; empty for none.
    """

    head: str
    replayed: tuple[tuple[ScheduledEvent, ...], ...] = ()

    def build(self, context: BuildContext) -> Schedule:
        """The schedule, with its file in the run directory; without that directory, the driver writes it."""
        run_dir, engine = context.run_dir, context.rank
        file = ScheduleFile(schedule_path(run_dir, engine)) if run_dir is not None and run_dir.is_dir() else None
        return Schedule(json.loads(self.head), file, self.replayed[engine] if self.replayed else ())


def schedule_path(run_dir: str | Path, engine: int = 0) -> Path:
    return Path(run_dir) / (f"schedule_{engine}.jsonl" if engine else FILE)


class ScheduleFile:
    """The schedule file of a run. Lines that cannot be written, as on a full disk, are retried with later ones;
    checkpoints hold them too."""

    def __init__(self, path: Path):
        self._file, self._is_refused = LineFile(path), False

    def write(self, first: int, lines: Sequence[str]) -> None:
        """Append lines, of which `first` precede; overwrites the file if it is 0."""
        try:
            self._file.add("".join(f"{x}\n" for x in lines).encode(), replaces=not first)
            self._is_refused = False
        except OSError as error:
            if not self._is_refused:
                log.warning("The schedule is not written: %s. Its lines are kept, and tried again.", error)
            self._is_refused = True


class Schedule:
    """Events so far, with their file, and the events of a replayed run.

    Args:
        head: facts on which the bits depend in addition to the events.
        file: receives each line; None for no file.
        replayed: events of another run, to be processed before the same steps.
    """

    def __init__(
        self, head: Mapping[str, Any], file: ScheduleFile | None = None, replayed: Sequence[ScheduledEvent] = ()
    ):
        self._head, self._file, self._replayed = {"head": dict(head)}, file, tuple(replayed)
        self._lines: list[str] = []
        self._num_events = self._num_taken = 0
        self.load(b"")

    @property
    def next(self) -> ScheduledEvent | None:
        """The next event of the replayed run; None after its last one, or without a replay."""
        return self._replayed[self._num_events] if self._num_events < len(self._replayed) else None

    def note(self, event: ScheduledEvent) -> None:
        """Record an event.

        Raises:
            RolloutError: the replayed run has a different event here.
        """
        if (expected := self.next) is not None and expected != event:
            why = "this is not the same training, or its engine does not give equal bits."
            if event.event == "save":  # which recomputes open rows
                why = (
                    "a replay may leave saves out, and adds none. Set checkpoint=off, or checkpoint.save_interval back."
                )
            raise RolloutError(
                f"trainer.replay_schedule: event {self._num_events + 1} is {expected} there and {event} here: {why}"
            )
        self._num_events += 1
        self._write(json.dumps(asdict(event)))

    def state(self) -> bytes:
        """All lines, for `load`."""
        return "".join(f"{line}\n" for line in self._lines).encode()

    def take_unwritten(self) -> tuple[int, list[str]]:
        """The number of lines before, and lines since the last call if there is no file; see `ScheduleFile.write`."""
        first, count = self._num_taken, len(self._lines)
        self._num_taken = count
        return (first, self._lines[first:]) if self._file is None else (count, [])

    def load(self, state: bytes) -> None:
        """Restore what `state` returned; empty for a new schedule.

        Raises:
            RolloutError: the replayed run begins with different events.
        """
        self._lines = state.decode().splitlines()
        heads, events = read_lines(self._lines)
        self._num_events, self._num_taken = len(events), 0
        if self._replayed and tuple(events) != self._replayed[: len(events)]:
            raise RolloutError("trainer.replay_schedule: the checkpoint is of another schedule. Start without resume.")
        if self._file is not None:
            self._file.write(0, self._lines)
        if heads[-1:] != [self._head["head"]]:
            self._write(json.dumps(self._head))

    def _write(self, line: str) -> None:
        line = _with_sum(line[:-1], len(self._lines) + 1)
        if self._file is not None:
            self._file.write(len(self._lines), [line])
        self._lines.append(line)


def _with_sum(line: str, number: int) -> str:
    """A line with its checksum; `line` comes without its closing brace."""
    return f"{line}{SUM}{zlib.crc32(f'{number}{line}'.encode())}}}"


def read_lines(lines: Sequence[str]) -> tuple[list[dict[str, Any]], list[ScheduledEvent]]:
    """The heads and events of a schedule; ExternalInputError for a line that is neither or was altered."""
    heads, events = list[dict[str, Any]](), list[ScheduledEvent]()
    has_sum, fields = False, {*ScheduledEvent.__dataclass_fields__}
    for number, text in enumerate(lines, start=1):
        try:
            line = parse_mapping(text)
            has_sum = line.pop("crc32", None) is not None or has_sum  # absent in older schedules
            if has_sum and text != _with_sum(text.rpartition(SUM)[0], number):
                raise ExternalInputError("its crc32 is another: it was altered, or lines are missing before it")
            if {*line} == {"head"}:
                heads.append(checked_as(dict, line["head"]))
                continue
            event, last = checked_as(ScheduledEvent, line), events[-1].engine_step if events else 0
            if not last <= event.engine_step <= last + MOST_STEPS or event.open_rows < -1 or {*line} != fields:
                raise ExternalInputError(f"{event} cannot follow engine step {last}")
            events.append(event)
        except ExternalInputError as error:
            raise ExternalInputError(f"line {number}: {error}") from error
    return heads, events


def read_schedule(run_dir: str | Path, head: Mapping[str, Any], engine: int = 0) -> tuple[ScheduledEvent, ...]:
    """The events of an engine of a run, for replay with the given head.

    A truncated last line (killed run, full disk) is ignored: after the last event a replay is a normal run.

    Raises:
        ConfigError: there is no valid schedule, or its hardware, libraries or settings differ.
    """
    file = schedule_path(run_dir, engine)
    try:
        *lines, remaining = file.read_text("utf-8").split("\n")
        heads, events = read_lines(lines)
        if not heads:
            raise ExternalInputError("it has no head")
        if "}" in remaining.rpartition(SUM)[2][:-1]:  # not merely truncated
            raise ExternalInputError(f"line {len(lines) + 1} does not end where it should")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"trainer.replay_schedule is {str(run_dir)!r}: {file} cannot be read: {error}. Name the directory of a run "
            "with rollout.weight_update=in_flight."
        ) from error
    if remaining:
        log.warning("trainer.replay_schedule: the last line of %s is cut off and left out.", file)
    here = json.loads(json.dumps(head))
    faults = []
    for name in sorted({*here}.union(*heads)):
        values = list(dict.fromkeys(json.dumps(other.get(name)) for other in heads))
        if values != [json.dumps(here.get(name))]:
            was, is_one = ", then ".join(values), len(values) == 1
            remedy = "Set it back, or replay there." if is_one else "It was resumed so, and no single run repeats it."
            faults.append(
                f"trainer.replay_schedule: {name} was {was} in {run_dir}, and is {json.dumps(here.get(name))} here, "
                f"which gives other bits. {remedy}"
            )
    if faults:
        raise ConfigError(faults)
    return tuple(events)
