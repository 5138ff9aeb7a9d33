"""The schedule of an engine: at which of its steps weights were taken, batches begun, and open rows computed anew.

{"head": {...}}                                                      hardware, libraries, settings
{"engine_step": 41, "event": "weights", "number": 3, "open_rows": 9}

The trainer asks for events in an order that its program fixes. What depends on speed is the engine step before which
each of them is carried out, and nothing else: an engine that carries out the same events at the same steps generates
the same bits. A checkpoint holds the schedule so far, so that the file of the run that goes on begins with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from verl.component import BuildContext
from verl.errors import ConfigError, RolloutError

FILE = "schedule.jsonl"
EventKind = Literal["begin", "weights", "save", "generate", "answer", "lost"]


@dataclass(frozen=True)
class ScheduledEvent:
    """An event before a step of the engine.

    Attributes:
        engine_step: steps that the engine has made before.
        event: `begin` of a batch, new `weights`, a `save`, `generate`: other responses, such as an evaluation's, the
            `answer` of an environment that does not answer at once, or `lost`: the engine died, open rows begin anew.
        number: of the version, or of the training step of the batch, the save or the other responses; of an answer that
            step, times a million, plus the number of the episode in its batch.
        open_rows: responses, or turns of episodes, that are begun and not finished, before the event.
    """

    engine_step: int
    event: EventKind
    number: int
    open_rows: int


@dataclass(frozen=True)
class ScheduleOptions:
    """Head and replayed events of the schedule of an engine; see `Schedule`.

    Attributes:
        head: as JSON.
    """

    head: str
    replayed: tuple[ScheduledEvent, ...] = ()

    def build(self, context: BuildContext) -> Schedule:
        """The schedule, in the directory of the run; on a machine that lacks it the driver writes the file."""
        run_dir = context.run_dir
        file = run_dir / FILE if run_dir is not None and run_dir.is_dir() else None
        return Schedule(json.loads(self.head), file, self.replayed)


class Schedule:
    """Events so far, in a file of the run; and those of the run that is replayed.

    Args:
        head: facts on which the bits depend, beside the events.
        file: appended to; None for no file.
        replayed: the events of another run, to be carried out at the same steps.
    """

    def __init__(self, head: Mapping[str, Any], file: Path | None = None, replayed: Sequence[ScheduledEvent] = ()):
        self._head, self._file, self._replayed = {"head": dict(head)}, file, tuple(replayed)
        self._lines: list[str] = []
        self._num_events = self._num_taken = 0
        self.load(b"")

    @property
    def next(self) -> ScheduledEvent | None:
        """The next event of the run that is replayed; None after its last one, or without such a run."""
        return self._replayed[self._num_events] if self._num_events < len(self._replayed) else None

    def note(self, event: ScheduledEvent) -> None:
        """Record an event.

        Raises:
            RolloutError: it is not that of the run that is replayed.
        """
        if (expected := self.next) is not None and expected != event:
            why = "this is not the same training, or its engine does not give equal bits."
            if event.event == "save":
                why = "a replay saves at steps where that run did, or at some of them. Set checkpoint.save_interval so."
            raise RolloutError(
                f"trainer.replay_schedule: event {self._num_events + 1} is {_text(expected)} there and {_text(event)} "
                f"here: {why}"
            )
        self._num_events += 1
        self._write(json.dumps(asdict(event)))

    def state(self) -> bytes:
        """The lines so far."""
        return "".join(f"{line}\n" for line in self._lines).encode()

    def take_unwritten(self) -> tuple[int, list[str]]:
        """Lines since the last call that are in no file, and the number of those before; see `write_lines`."""
        first, count = self._num_taken, len(self._lines)
        self._num_taken = count
        return (first, self._lines[first:]) if self._file is None else (count, [])

    def load(self, state: bytes) -> None:
        """Go on from what `state` gave; empty for a new schedule.

        Raises:
            RolloutError: these are not the first events of the run that is replayed.
        """
        self._lines = state.decode().splitlines()
        heads, events = read_lines(self._lines)
        self._num_events, self._num_taken = len(events), 0
        if self._replayed and tuple(events) != self._replayed[: len(events)]:
            raise RolloutError("trainer.replay_schedule: the checkpoint is of another schedule. Start without resume.")
        if self._file is not None:
            self._file.write_bytes(state)
        if heads[-1:] != [self._head["head"]]:
            self._write(json.dumps(self._head))

    def _write(self, line: str) -> None:
        self._lines.append(line)
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(f"{line}\n")


def write_lines(run_dir: Path, first: int, lines: Sequence[str]) -> None:
    """Put lines into the schedule of a run, behind its first ones."""
    file = run_dir / FILE
    before = file.read_text().splitlines()[:first] if first else []
    file.write_text("".join(f"{line}\n" for line in [*before, *lines]))


def read_lines(lines: list[str]) -> tuple[list[dict[str, Any]], list[ScheduledEvent]]:
    """The heads and the events of a schedule."""
    parsed = [json.loads(line) for line in lines]
    events = [ScheduledEvent(**line) for line in parsed if "head" not in line]
    return [line["head"] for line in parsed if "head" in line], events


def read_schedule(run_dir: str | Path, head: Mapping[str, Any]) -> tuple[ScheduledEvent, ...]:
    """The events of a run that is to be replayed under a head.

    Raises:
        ConfigError: there is no schedule, or it was made with other hardware, libraries or settings; names them.
    """
    file = Path(run_dir) / FILE
    try:
        heads, events = read_lines(file.read_text().splitlines())
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"trainer.replay_schedule is {str(run_dir)!r}: {file} cannot be read: {error}.") from error
    here = json.loads(json.dumps(head))
    faults = []
    for name in sorted({*here}.union(*heads)):
        values = list(dict.fromkeys(json.dumps(other.get(name)) for other in heads))
        if heads and values != [json.dumps(here.get(name))]:
            was, is_one = ", then ".join(values), len(values) == 1
            remedy = "Set it back, or replay there." if is_one else "It was resumed so, and no single run repeats it."
            faults.append(
                f"trainer.replay_schedule: {name} was {was} in {run_dir}, and is {json.dumps(here.get(name))} here, "
                f"which gives other bits. {remedy}"
            )
    if faults:
        raise ConfigError(faults)
    return tuple(events)


def _text(event: ScheduledEvent) -> str:
    return f"{event.event} {event.number} before engine step {event.engine_step} with {event.open_rows} open rows"
