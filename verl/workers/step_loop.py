"""Generation in steps of an engine, with events between them (`rollout.weight_update=in_flight`).

begin(batch), weights(version), save(step)       in the order in which the trainer asks for them
        │
   [ event ] step step step [ event ] step ...   a thread; each event is a line of the schedule (`schedule.py`)
        │                                        with the number of its step
        └──> rows of a batch, as soon as the last of them is finished, while later ones are open

Open rows are computed anew by closing the turns of the engine and adding them again behind the tokens that were drawn
(`TurnRequest.position`). A save does that too. So an engine that goes on from a checkpoint has the state of the one
that saved, bit by bit.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from verl.errors import RolloutError
from verl.protocol import DataProto
from verl.protocol.dispatch import on_all
from verl.rollout.base import DrawnTurn, GenerationRequest, TurnEngine, TurnLimits, TurnRequest
from verl.rollout.responses import ResponseSampler
from verl.rollout.rows import assemble_turns, longest_prompt, refuse_wrong_responses, right_padded
from verl.utils.memory import on_current_device
from verl.utils.progress import report
from verl.workers.schedule import EventKind, Schedule, ScheduledEvent

PROMPT_FIELDS = ("prompts", "prompt_mask", "prompt_ids", "group_ids")
ROW_FIELDS = ("tokens", "log_probs", "versions", "lengths", "is_finished")


@dataclass(eq=False)
class OpenRow:
    """A response that is being generated.

    Attributes:
        request: with which it was begun.
        tokens, log_probs, versions: drawn before the present turns of the engine were opened.
        updates: changes of the weights since then, under which it was not computed anew: the number of tokens since
            then that the former weights determine, and their version.
    """

    request: TurnRequest
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    updates: list[tuple[int, int]] = field(default_factory=list)
    is_finished: bool = False

    def add(self, drawn: DrawnTurn, version: int) -> None:
        """Append what the present turns of the engine have drawn, the last of it by the weights of this version."""
        versions: list[int] = []
        for count, former in [*self.updates, (len(drawn.tokens), version)]:
            versions += [former] * (min(count, len(drawn.tokens)) - len(versions))
        self.tokens += drawn.tokens
        self.log_probs += drawn.log_probs
        self.versions += versions
        self.updates = []

    @property
    def further(self) -> TurnRequest:
        """The request for the rest of it."""
        request = self.request
        return replace(request, tokens=[*request.tokens, *self.tokens], position=len(self.tokens))


@dataclass(eq=False)
class OpenBatch:
    """The rows of a batch, a prompt's samples side by side.

    Attributes:
        is_begun: its event has been carried out.
    """

    prompts: DataProto
    request: GenerationRequest
    rows: list[OpenRow]
    is_begun: bool = False

    @property
    def num_finished(self) -> int:
        return sum(row.is_finished for row in self.rows)

    @property
    def is_finished(self) -> bool:
        return self.num_finished == len(self.rows)


@dataclass(eq=False)
class _Event:
    """An event that was asked for; `future` is what its action returns."""

    kind: EventKind
    number: int
    action: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)


class StepLoop:
    """The loop and its thread; its methods are called by one other thread.

    Args:
        row_tokens: the most tokens of a row; None if unknown.
    Attributes:
        engine_step: steps that the engine has made.
        version: of the weights that it has.
    """

    def __init__(self, sampler: ResponseSampler, row_tokens: int | None, schedule: Schedule):
        self.sampler, self.schedule = sampler, schedule
        self.keeps_cache = sampler.rollout.kv_cache == "keep"
        self.engine_step, self.version = 0, -1
        self._row_tokens = row_tokens or 0
        self._turns: TurnEngine | None = None
        self._rows: dict[int, OpenRow] = {}  # those that are not finished, by number, in the order of the data
        self._batches: dict[int, OpenBatch] = {}  # that were not taken, by training step
        self._next_number = 0
        self._snapshots: dict[int, dict[str, Tensor]] = {}  # of the latest save, by training step; asked for or not
        self._idle_s = 0.0
        self._events: deque[_Event] = deque()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._awaited: OpenBatch | None = None  # by the one that asks for events
        self._is_closed = False
        self._dtype = torch.float32
        self._start()

    def begin(self, prompts: DataProto, request: GenerationRequest) -> None:
        """Ask for the responses of a batch; returns immediately."""
        prompts = DataProto.from_dict({name: prompts[name].clone() for name in PROMPT_FIELDS})
        rows = [OpenRow(turn) for turn in self.sampler.requests([prompts], request)]
        batch = self._batches[request.step] = OpenBatch(prompts, request, rows)
        self._ask("begin", request.step, lambda: self._begin(batch))

    def take_weights(self, version: int, load: Callable[[], Any]) -> Any:
        """Have `load` change the weights between two steps; returns its result."""
        return self._ask("weights", version, lambda: self._load(version, load)).result()

    def finish(self, step: int) -> DataProto:
        """Wait for the responses of a batch, with `token_versions` [B T] and `policy_version` [B], the oldest of a row.

        Raises:
            RolloutError: the engine failed.
        """
        batch = self._batches[step]
        with self._changed:
            self._awaited = batch
            self._changed.notify_all()
            while not batch.is_finished and self._failure is None:
                self._changed.wait()
            self._awaited = None
        self._raise_failure()
        del self._batches[step]
        drawn = [DrawnTurn(0, row.tokens, row.log_probs, True) for row in batch.rows]
        engine = TurnEngine()
        engine.dtype = self._dtype
        rows = assemble_turns(batch.prompts, drawn, engine, self.sampler.pad_id, batch.request.num_samples)
        versions = {
            "token_versions": right_padded([row.versions for row in batch.rows], 0, torch.int64),
            "policy_version": torch.tensor([min(row.versions) for row in batch.rows]),
        }
        return rows.union(DataProto.from_dict(versions))

    def save(self, step: int) -> dict[str, Tensor]:
        """The state after a training step, for `restore`; open rows are computed anew.

        Raises:
            RolloutError: another run is replayed, which did not save here.
        """
        return self._ask("save", step, lambda: self._save(step)).result()

    def restore(self, state: Mapping[str, Tensor], version: int, load: Callable[[], Any]) -> Any:
        """Go on from a state in place of what is there, an empty one from nothing; `load` loads the weights that the
        engine had then."""
        self.close()
        self.schedule.load(state["schedule"].numpy().tobytes() if state else b"")
        self.engine_step, self._row_tokens = (int(x) for x in state["engine_step"]) if state else (0, self._row_tokens)
        self.version, self._failure, self._is_closed = version, None, False
        self._rows, self._batches, self._next_number, self._snapshots = {}, {}, 0, {}
        self._events.clear()
        for step in state["steps"].tolist() if state else []:
            self._restore_batch({name: state[f"{step}.{name}"] for name in (*PROMPT_FIELDS, *ROW_FIELDS)}, step)
        loaded = load()
        self._start()
        return loaded

    def generate(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        """Other responses by the weights that the engine has, with open rows set aside; see `ResponseSampler`."""

        def alone() -> DataProto:
            self._close_turns()
            return self.sampler.generate(prompts, request)

        return self._ask("generate", request.step, alone).result()

    def take_idle_s(self) -> float:
        """Seconds since the last call in which there was nothing to generate."""
        with self._changed:
            seconds, self._idle_s = self._idle_s, 0.0
        return seconds

    def close(self) -> None:
        """End the thread and free the cache. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _ask(self, kind: EventKind, number: int, action: Callable[[], Any]) -> Future[Any]:
        with self._changed:
            self._raise_failure()
            self._events.append(event := _Event(kind, number, action))
            self._changed.notify_all()
        return event.future

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # In the thread

    def _start(self) -> None:
        self._thread = threading.Thread(target=on_current_device(self._run), name="step loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._is_closed:
                event = self._next_event()
                if event is not None:
                    self._carry_out(event)
                elif self._rows:
                    self._advance()
        except BaseException as error:  # noqa: BLE001 - raised where somebody waits
            with self._changed:
                self._failure = error
                for event in self._events:
                    event.future.set_exception(error)
                self._events.clear()
                self._changed.notify_all()
        finally:
            if self._turns is not None:
                self._turns.close()
                self._turns = None

    def _next_event(self) -> _Event | None:
        """The event to be carried out before the next step; None to make a step, or to end. Waits for an event where
        there is nothing to generate, or another run is replayed that had one here."""
        with self._changed:
            while not self._is_closed:
                if self._asks_for_save and (saved := self._snapshots.get(self._events[0].number)) is not None:
                    self._events.popleft().future.set_result(saved)
                    continue
                scheduled = self.schedule.next
                is_due = scheduled is None or scheduled.engine_step <= self.engine_step
                if scheduled is not None and is_due and scheduled.event == "save" and not self._asks_for_save:
                    return _Event("save", step := scheduled.number, lambda: self._save(step))
                if self._events and (is_due or not self._rows):
                    return self._events.popleft()
                if self._rows and (scheduled is None or not is_due):
                    return None
                if self._awaited is not None and not self._awaited.is_finished:
                    raise RolloutError(
                        f"the engine has nothing to generate at step {self.engine_step}, and responses are awaited"
                        + ("." if scheduled is None else f": trainer.replay_schedule has {scheduled} next.")
                    )
                began = time.monotonic()
                self._changed.wait()
                self._idle_s += time.monotonic() - began
        return None

    @property
    def _asks_for_save(self) -> bool:
        return bool(self._events) and self._events[0].kind == "save"

    def _carry_out(self, event: _Event) -> None:
        try:
            self.schedule.note(ScheduledEvent(self.engine_step, event.kind, event.number, len(self._rows)))
            event.future.set_result(event.action())
        except BaseException as error:
            event.future.set_exception(error)
            raise

    def _advance(self) -> None:
        """One step of the engine."""
        turns = self._turns or self._open_turns()
        for drawn in turns.advance():
            row = self._rows.pop(drawn.episode)
            row.add(drawn, self.version)
            turns.forget(drawn.episode)
            with self._changed:
                row.is_finished = True
                self._changed.notify_all()
        self.engine_step += 1
        first = next((b for b in self._batches.values() if not b.is_finished), None)
        if first is not None:
            report(f"generating: {first.num_finished} of {len(first.rows)} responses of step {first.request.step}")

    def _begin(self, batch: OpenBatch) -> None:
        longest = longest_prompt([batch.prompts]) + self.sampler.rollout.max_new_tokens
        if longest > self._row_tokens:
            self._row_tokens = longest
            self._close_turns()
        batch.is_begun = True
        for row in batch.rows:
            row.request = replace(row.request, episode=self._next_number)
            self._rows[self._next_number] = row
            self._next_number += 1
            if self._turns is not None:
                self._turns.add(row.request)

    def _load(self, version: int, load: Callable[[], Any]) -> Any:
        if self.keeps_cache and self._turns is not None:
            for drawn in self._turns.open_turns():
                count = len(drawn.tokens) + self._turns.lookahead
                self._rows[drawn.episode].updates.append((count, self.version))
            with self._turns.paused():
                loaded = load()
        else:
            self._close_turns()
            loaded = load()
        self.version = version
        return loaded

    def _save(self, step: int) -> dict[str, Tensor]:
        self._close_turns()
        batches = {number: batch for number, batch in sorted(self._batches.items()) if batch.is_begun}
        state = {"schedule": torch.frombuffer(bytearray(self.schedule.state()), dtype=torch.uint8)}
        state["engine_step"] = torch.tensor([self.engine_step, self._row_tokens])
        state["steps"] = torch.tensor(list(batches), dtype=torch.int64)
        for number, batch in batches.items():
            state |= {f"{number}.{name}": batch.prompts[name] for name in PROMPT_FIELDS}
            state |= {f"{number}.{name}": x for name, x in self._row_fields(batch).items()}
        self._snapshots = {step: state}
        return state

    def _row_fields(self, batch: OpenBatch) -> dict[str, Tensor]:
        rows = batch.rows
        return {
            "tokens": right_padded([row.tokens for row in rows], 0, torch.int64),
            "log_probs": right_padded([row.log_probs for row in rows], 0.0, self._dtype),
            "versions": right_padded([row.versions for row in rows], 0, torch.int64),
            "lengths": torch.tensor([len(row.tokens) for row in rows]),
            "is_finished": torch.tensor([row.is_finished for row in rows]),
        }

    def _restore_batch(self, saved: Mapping[str, Tensor], step: int) -> None:
        prompts = DataProto.from_dict({name: saved[name].clone() for name in PROMPT_FIELDS})
        request = GenerationRequest(step, len(saved["lengths"]) // len(prompts))
        rows = [OpenRow(turn) for turn in self.sampler.requests([prompts], request)]
        self._dtype = saved["log_probs"].dtype
        for index, (row, length) in enumerate(zip(rows, saved["lengths"].tolist(), strict=True)):
            row.tokens = saved["tokens"][index, :length].tolist()
            row.log_probs = saved["log_probs"][index, :length].tolist()
            row.versions = saved["versions"][index, :length].tolist()
            row.is_finished = bool(saved["is_finished"][index])
            row.request = replace(row.request, episode=self._next_number)
            if not row.is_finished:
                self._rows[self._next_number] = row
            self._next_number += 1
        self._batches[step] = OpenBatch(prompts, request, rows, is_begun=True)

    def _open_turns(self) -> TurnEngine:
        """Turns of the engine for all open rows, which are computed anew."""
        self._turns = turns = self.sampler.engine.turns(
            TurnLimits(self._row_tokens, while_training=True, is_stepwise=True)
        )
        self._dtype = turns.dtype
        for row in self._rows.values():
            turns.add(row.further)
        return turns

    def _close_turns(self) -> None:
        """End the turns of the engine; what they have drawn is kept in the rows."""
        turns, self._turns = self._turns, None
        if turns is None:
            return
        for drawn in turns.open_turns():
            self._rows[drawn.episode].add(drawn, self.version)
        turns.close()


class StepWorker:
    """The methods of a role with a `StepLoop` that the driver calls; `loop` is None unless weights change in flight."""

    loop: StepLoop | None = None
    model: Any

    @on_all
    def begin_batch(self, prompts: DataProto, request: GenerationRequest) -> None:
        """Begin to draw the responses of a batch, beside those of earlier batches."""
        assert self.loop is not None
        self.loop.begin(prompts, request)

    @on_all
    def finish_batch(self, step: int) -> tuple[DataProto, float]:
        """The responses of the batch of a training step, and the idle seconds since the last call."""
        assert self.loop is not None
        rows = self.loop.finish(step)
        refuse_wrong_responses(rows, self.model.config.get_text_config().vocab_size)
        return rows, self.loop.take_idle_s()

    @on_all
    def save_rows(self, step: int) -> dict[str, Tensor]:
        """Open rows and finished ones after a training step; see `StepLoop.save`."""
        assert self.loop is not None
        return self.loop.save(step)
