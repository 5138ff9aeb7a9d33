"""Generation in steps of an engine, with events between them (`rollout.weight_update=in_flight`).

begin(batch), weights(version), save(step)       in the order of the trainer's requests
        │            answer(episode)             of an environment without `answers_at_once`
   [ event ] step step step [ event ] step ...   a thread; each event is a line of the schedule (`schedule.py`)
        │                                        with the number of its step
        └──> rows of a batch, once all of them are finished, while later batches are open (`open_batches.py`)

Open rows are recomputed by closing the engine's turns and adding them again with the tokens sampled so far
(`TurnRequest.position`). A save does this too, so that an engine that resumes from a checkpoint has bit for bit the
state of the one that saved.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verl.environments.episode_loop import IDLE_WAIT_S, EpisodeGenerator
from verl.errors import RolloutError
from verl.model_paths.images import KEYS, with_media
from verl.protocol import DataProto
from verl.protocol.ragged import flattened, pop_ragged
from verl.rollout.base import EngineLost, GenerationRequest, TurnEngine, TurnLimits
from verl.rollout.responses import ResponseGenerator
from verl.utils.memory import on_current_device
from verl.utils.progress import report
from verl.workers.open_batches import PROMPT_FIELDS, Environments, EpisodeBatch, OpenRow, ResponseBatch
from verl.workers.schedule import EventKind, Schedule, ScheduledEvent

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.05  # interval of checks for finished groups
AWAIT_GROUPS_S = 0.5  # timeout for this engine, before other engines are polled
MOST_LOSSES = 2  # engines lost without a finished row in between


@dataclass(eq=False)
class _Event:
    """A requested event. `future` receives the result of its action; its rows have at most `row_tokens` tokens."""

    kind: EventKind
    number: int
    action: Callable[[], Any]
    row_tokens: int = 0
    future: Future[Any] = field(default_factory=Future)


class StepLoop:
    """The loop and its thread; public methods are called from one other thread.

    Args:
        row_tokens: maximum tokens of a row; None if unknown.
    Attributes:
        engine_step: number of steps of the engine.
        version: version of its weights.
    """

    def __init__(self, generator: ResponseGenerator, row_tokens: int | None, schedule: Schedule):
        self.generator, self._second, self.schedule = generator, generator.second(), schedule
        self.keeps_cache = generator.rollout.kv_cache == "keep"
        self.engine_step, self.version = 0, -1
        self._row_tokens = row_tokens or 0
        self._turns: TurnEngine | None = None
        self._reload: Callable[[], Any] | None = None  # reloads the engine's latest weights
        self._is_lost, self._num_losses = False, 0  # engines lost since a row was finished
        self._rows: dict[int, OpenRow] = {}  # unfinished ones, by number
        self._batches: dict[int, ResponseBatch] = {}  # not yet returned by `finish`, by training step
        self._environments: Environments | None = None
        self._snapshots: dict[int, dict[str, Tensor]] = {}  # saves since the last `begin` or `weights`, by step
        self._idle_s = 0.0
        self._events: deque[_Event] = deque()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._awaited: ResponseBatch | None = None  # batch for which the calling thread waits
        self._is_closed = False
        self._dtype = torch.float32
        self._start()

    def begin(self, prompts: DataProto, request: GenerationRequest) -> None:
        """Request the responses of a batch; returns immediately."""
        batch = self._batches[request.step] = self._new_batch(prompts, request)
        row_tokens = self.generator.limits([batch.prompts], request).row_tokens
        self._ask("begin", request.step, lambda: self._begin(batch, row_tokens), row_tokens)

    def take_weights(self, version: int, load: Callable[[], Any]) -> Any:
        """Call `load`, which changes the weights, between two steps; returns its result."""
        return self._ask("weights", version, lambda: self._load(version, load)).result()

    def finish(self, step: int) -> DataProto:
        """Wait for the responses of a batch; see `ResponseBatch.assembled`.

        Raises:
            RolloutError: the engine failed.
        """
        batch = self._batches[step]
        self._await(batch, lambda: batch.is_finished)
        rows = batch.assembled(self._dtype)
        with self._changed:  # so that no save reads it concurrently
            del self._batches[step]
            batch.close()
        return rows

    def finished_groups(
        self, known: Mapping[int, Collection[int]], awaited: int | None = None
    ) -> tuple[bool, dict[int, DataProto]]:
        """Whether the batch of step `awaited` is finished, and the rows of finished groups by training step, without
        the `known` groups (`group_ids`). With `awaited`, waits a limited time for a new group or the end of that
        batch."""

        def new() -> dict[int, list[int]]:
            batches = {step: self._batches[step] for step in known if step in self._batches}
            ids = {step: batch.prompts["group_ids"].tolist() for step, batch in batches.items()}
            chosen = {
                step: [place for place in batch.finished_groups() if ids[step][place] not in known[step]]
                for step, batch in batches.items()
            }
            return {step: places for step, places in chosen.items() if places}

        is_finished = False
        if awaited is not None:
            batch, began, until = self._batches[awaited], self.engine_step, time.monotonic() + AWAIT_GROUPS_S

            def may_return() -> bool:
                goes_on = self.engine_step > began or self._num_called > 0  # a hanging engine blocks the call
                return batch.is_finished or bool(new()) or (goes_on and time.monotonic() > until)

            self._await(batch, may_return)
            is_finished = batch.is_finished  # before its groups are read
        self._raise_failure()
        return is_finished, {step: self._batches[step].assembled(self._dtype, groups) for step, groups in new().items()}

    def save(self, step: int) -> dict[str, Tensor]:
        """The state after a training step, for `restore`; open rows are recomputed.

        Raises:
            RolloutError: the replayed run has no save here.
        """
        return self._ask("save", step, lambda: self._save(step)).result()

    def restore(self, state: Mapping[str, Tensor], version: int, load: Callable[[], Any]) -> Any:
        """Replace everything by a saved state, or start from nothing if it is empty; `load` loads the weights of that
        state."""
        self.close()
        self.schedule.load(state["schedule"].numpy().tobytes() if state else b"")
        self.engine_step, self._row_tokens = (int(x) for x in state["engine_step"]) if state else (0, self._row_tokens)
        self.version, self._failure, self._is_closed, self._is_lost = version, None, False, False
        self._rows, self._batches, self._snapshots, self._environments = {}, {}, {}, None
        self._events.clear()
        for step in state["steps"].tolist() if state else []:
            prefix = f"{step}."
            saved = {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}
            ragged, names = pop_ragged(saved), [*PROMPT_FIELDS, *([KEYS] if KEYS in saved else [])]
            prompts = DataProto.from_dict({name: saved[name] for name in names}, ragged=ragged)
            self._dtype = saved["log_probs"].dtype
            batch = self._new_batch(prompts, GenerationRequest(step, len(saved["lengths"]) // len(prompts)))
            self._batches[step] = batch
            batch.load(saved)
        for batch in self._batches.values():
            batch.go_on()
        self._reload, loaded = load, load()
        self._start()
        return loaded

    def generate(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        """Generate other responses with the current weights while open rows pause; see `ResponseGenerator`."""
        return self._ask("generate", request.step, lambda: self._second.generate(prompts, request)).result()

    def take_idle_s(self) -> float:
        """Seconds without rows to generate since the last call."""
        with self._changed:
            seconds, self._idle_s = self._idle_s, 0.0
        return seconds

    def close(self) -> None:
        """End the thread and free the cache. Idempotent."""
        self._is_closed = True
        self._wake()
        self._thread.join()
        for batch in self._batches.values():
            batch.close()
        self._second.stop()

    def open(self, row: OpenRow) -> None:
        """Start generating a row; called in the loop's thread."""
        self._rows[row.request.episode] = row
        if self._turns is not None:
            self._turns.add(row.further)

    def forget(self, number: int) -> None:
        """Free the cache of a row or an episode; called in the loop's thread."""
        if self._turns is not None:
            self._turns.forget(number)

    def _new_batch(self, prompts: DataProto, request: GenerationRequest) -> ResponseBatch:
        if not isinstance(self.generator, EpisodeGenerator):
            return ResponseBatch(prompts, request, self.generator, self)
        if self._environments is None:
            self._environments = Environments(self.generator, self._batches, self._wake)
        return EpisodeBatch(prompts, request, self.generator, self)

    def _await(self, batch: ResponseBatch, is_there: Callable[[], bool]) -> None:
        """Wait for a condition on a batch, which is polled every `POLL_INTERVAL_S`."""
        with self._changed:
            self._awaited = batch
            self._changed.notify_all()
            while not is_there() and self._failure is None:
                self._changed.wait(POLL_INTERVAL_S)
            self._awaited = None
        self._raise_failure()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _ask(self, kind: EventKind, number: int, action: Callable[[], Any], row_tokens: int = 0) -> Future[Any]:
        with self._changed:
            self._raise_failure()
            self._events.append(event := _Event(kind, number, action, row_tokens))
            self._changed.notify_all()
        return event.future

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # In the loop's thread

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
                    try:
                        self._advance()
                    except EngineLost as error:
                        self._lose(error)
        except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
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
        """The event to process before the next step; None to make a step or to end. Waits for an event if there is
        nothing to generate or the replayed run had an event here."""
        with self._changed:
            while not self._is_closed:
                self._settle()
                if self._asks_for_save and (saved := self._snapshots.get(self._events[0].number)) is not None:
                    self._events.popleft().future.set_result(saved)
                    continue
                scheduled = self.schedule.next
                is_due = scheduled is None or scheduled.engine_step <= self.engine_step
                if scheduled is not None and is_due and scheduled.event == "save" and not self._asks_for_save:
                    return _Event("save", step := scheduled.number, lambda: self._save(step))
                if scheduled is not None and is_due and scheduled.event == "lost":
                    return _Event("lost", self.version, self._drop_rows)
                if is_due or not self._rows:
                    if (answer := self._next_answer(scheduled)) is not None:
                        return answer
                    may_come = scheduled is not None and scheduled.event == "answer" and self._num_called > 0
                    if self._events and not may_come:
                        return self._events.popleft()
                if self._rows and (scheduled is None or not is_due):
                    return None
                self._wait(scheduled)
        return None

    @property
    def _num_called(self) -> int:
        """Number of environment calls without an answer."""
        return 0 if self._environments is None else self._environments.num_pending

    def _next_answer(self, scheduled: ScheduledEvent | None) -> _Event | None:
        """The next answer of an environment to process, as an event."""
        if (environments := self._environments) is None or not environments.waiting:
            return None
        number = next(iter(environments.waiting)) if scheduled is None else scheduled.number
        if number not in environments.waiting or (scheduled is not None and scheduled.event != "answer"):
            return None
        return _Event("answer", number, lambda: environments.carry_out(number))

    def _wait(self, scheduled: ScheduledEvent | None) -> None:
        """Wait for an event, or for the answer of an environment."""
        has_calls = self._num_called > 0
        if self._awaited is not None and not self._awaited.is_finished and not has_calls:
            raise RolloutError(
                f"the engine has nothing to generate at step {self.engine_step}, and responses are awaited"
                + ("." if scheduled is None else f": trainer.replay_schedule has {scheduled} next.")
            )
        began = time.monotonic()
        self._changed.wait(IDLE_WAIT_S if has_calls else None)
        seconds = time.monotonic() - began
        self._idle_s += seconds
        if self._environments is not None and has_calls:
            report("waiting for the environment")
            self._environments.note_idle(seconds)

    def _settle(self) -> None:
        """Continue episodes whose environments answered immediately, and report a finished batch."""
        if self._environments is not None:
            self._environments.settle()
        if self._awaited is not None and self._awaited.is_finished:
            self._wake()

    @property
    def _asks_for_save(self) -> bool:
        return bool(self._events) and self._events[0].kind == "save"

    def _carry_out(self, event: _Event) -> None:
        try:
            if event.kind in ("save", "generate", "weights") or event.row_tokens > self._row_tokens:
                try:
                    if event.kind == "weights" and self.keeps_cache:
                        self._note_sampled()
                    else:
                        self._close_turns()
                except EngineLost as error:
                    self._lose(error)
            self.schedule.note(ScheduledEvent(self.engine_step, event.kind, event.number, len(self._rows)))
            result = event.action()
            self._settle()
            event.future.set_result(result)
        except BaseException as error:
            event.future.set_exception(error)
            raise

    def _advance(self) -> None:
        if self._is_lost:
            assert self._reload is not None
            self._reload()
            self._is_lost = False
        turns = self._turns or self._open_turns()
        for sampled in turns.advance():
            row = self._rows.pop(sampled.episode)
            row.add(sampled, self.version)
            self._num_losses = 0
            row.batch.drew(row, is_complete=sampled.is_complete)
        self._settle()
        self.engine_step += 1
        first = next((batch for batch in list(self._batches.values()) if not batch.is_finished), None)
        if first is not None:
            report(f"generating: {first.num_finished} of {first.num_rows} responses of step {first.request.step}")

    def _lose(self, error: EngineLost) -> None:
        """Record a lost engine; the next step starts a new one with the same weights.

        Raises:
            EngineLost: more than MOST_LOSSES engines were lost without a finished row in between.
        """
        self._num_losses += 1
        if self._num_losses > MOST_LOSSES:
            raise error
        log.warning("%s\nAnother one will be started; %d open responses begin anew.", error, len(self._rows))
        self.schedule.note(ScheduledEvent(self.engine_step, "lost", self.version, len(self._rows)))
        self._drop_rows()

    def _drop_rows(self) -> None:
        if self._turns is not None:
            self._turns.close()
            self._turns = None
        for row in self._rows.values():
            row.begin_anew()
        self._is_lost = True

    def _begin(self, batch: ResponseBatch, row_tokens: int) -> None:
        self._snapshots.clear()
        self._row_tokens = max(self._row_tokens, row_tokens)
        batch.begin()

    def _load(self, version: int, load: Callable[[], Any]) -> Any:
        with nullcontext() if self._turns is None else self._turns.paused():
            loaded = load()
        self.version, self._reload, self._is_lost = version, load, False
        self._snapshots.clear()
        return loaded

    def _save(self, step: int) -> dict[str, Tensor]:
        with self._changed:  # no caller waits for a save that only the replayed run requested
            later = [(number, batch) for number, batch in sorted(self._batches.items()) if number > step]
            batches = {number: batch for number, batch in later if batch.is_begun}
            state = {"schedule": torch.frombuffer(bytearray(self.schedule.state()), dtype=torch.uint8)}
            state["engine_step"] = torch.tensor([self.engine_step, self._row_tokens])
            state["steps"] = torch.tensor(list(batches), dtype=torch.int64)
            for number, batch in batches.items():
                prompts = batch.prompts
                fields = {name: prompts[name] for name in with_media(PROMPT_FIELDS, prompts)}
                fields |= flattened(prompts.ragged) | batch.state(self._dtype)
                state |= {f"{number}.{name}": x for name, x in fields.items()}
            self._snapshots[step] = state
        return state

    def _open_turns(self) -> TurnEngine:
        """Open turns of the engine for all open rows, which are recomputed."""
        kv_cache_gib = self.generator.options.kv_cache_gib if isinstance(self.generator, EpisodeGenerator) else 0.0
        limits = TurnLimits(self._row_tokens, kv_cache_gib, while_training=True, is_stepwise=True)
        self._turns = turns = self.generator.engine.turns(limits)
        self._dtype = turns.dtype
        for _, row in sorted(self._rows.items()):
            turns.add(row.further)
        return turns

    def _note_sampled(self) -> None:
        """Record in the rows how many tokens the current weights have sampled, before an update."""
        if self._turns is None:
            return
        for sampled in self._turns.open_turns():
            count = len(sampled.tokens) + self._turns.lookahead
            self._rows[sampled.episode].updates.append((count, self.version))

    def _close_turns(self) -> None:
        """Close the engine's turns and move the tokens they have sampled into the rows."""
        turns, self._turns = self._turns, None
        if turns is None:
            return
        try:
            for sampled in turns.open_turns():
                self._rows[sampled.episode].add(sampled, self.version)
        finally:
            turns.close()
