"""Batches that are generated while weights change: their rows, which are responses or turns of episodes.

    ResponseBatch  begin ──> a row for each response ────────────────────────────> drew: the row is finished
    EpisodeBatch   begin ──> reset ──> a row for a turn ──> drew ──> step ──> answer ──> a row for the next turn ...

An environment that `answers_at_once` is stepped in the engine's thread, so its answers are not events. Other answers
arrive between two steps of the engine, depending on timing: each is an event of the schedule (`Environments`).

A checkpoint holds turns and answers of episodes, from which environments of open episodes are rebuilt: `stateless` ones
are created anew; `deterministic` ones repeat their actions, and each answer must equal the recorded one. With `restart`
the episode starts over.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from verl.environments.base import StepResult
from verl.environments.calls import CallResult
from verl.environments.episode import Episode, episode_state, load_episode
from verl.environments.episode_loop import IDLE_WAIT_S, EpisodeGenerator, EpisodeLoop
from verl.environments.journal import JournalEntry, refuse_other_answer
from verl.model_paths.images import with_media
from verl.protocol import DataProto
from verl.protocol.serialization import json_text
from verl.rollout.base import GenerationRequest, TurnEngine, TurnRequest, TurnResult
from verl.rollout.responses import ResponseGenerator
from verl.rollout.rows import assemble_turns, right_padded

PROMPT_FIELDS = ("prompts", "prompt_mask", "prompt_ids", "group_ids")
NUMBERS = 1_000_000  # numbers reserved for the rows or episodes of a batch: step 3 has 3,000,000 and up
MADE_AGAIN = ("stateless", "deterministic")
T = TypeVar("T")


@dataclass(eq=False)
class OpenRow:
    """A response, or a turn of an episode, in generation.

    Attributes:
        request: the request that began it.
        batch: the batch that it belongs to.
        tokens, log_probs, versions: of the tokens sampled before the engine's current turns were opened.
        updates: later weight updates that kept its keys and values (`kv_cache=keep`): for each, the number of tokens
            sampled until then since those turns were opened, and the version of the previous weights.
    """

    request: TurnRequest
    batch: ResponseBatch
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    updates: list[tuple[int, int]] = field(default_factory=list)
    is_finished: bool = False

    def add(self, sampled: TurnResult, version: int) -> None:
        """Append the tokens sampled by the engine's current turns; the last of them with weights of this `version`."""
        versions: list[int] = []
        for count, former in [*self.updates, (len(sampled.tokens), version)]:
            versions += [former] * (min(count, len(sampled.tokens)) - len(versions))
        self.tokens += sampled.tokens
        self.log_probs += sampled.log_probs
        self.versions += versions
        self.updates = []

    def begin_anew(self) -> None:
        """Discard all sampled tokens."""
        self.tokens, self.log_probs, self.versions, self.updates = [], [], [], []

    @property
    def further(self) -> TurnRequest:
        """The request for the remaining tokens."""
        request = self.request
        return replace(request, tokens=[*request.tokens, *self.tokens], position=len(self.tokens))


class ResponseBatch:
    """The responses of a batch; the samples of a prompt are consecutive.

    Args:
        turns: generates rows, a `StepLoop`.
    Attributes:
        is_begun: whether its `begin` event was processed.
        is_finished: whether all rows are generated.
    """

    def __init__(self, prompts: DataProto, request: GenerationRequest, generator: ResponseGenerator, turns: Any):
        fields = {name: prompts[name].clone() for name in with_media(PROMPT_FIELDS, prompts)}
        self.prompts = DataProto.from_dict(fields, non_tensors=prompts.non_tensor_batch, ragged=prompts.ragged)
        self.request, self.generator, self.turns = request, generator, turns
        self.first = request.step * NUMBERS
        self.num_rows, self.num_finished = len(prompts) * request.num_samples, 0
        self.is_begun = self.is_finished = False
        self.rows: list[OpenRow] = []
        assert self.num_rows <= NUMBERS

    def begin(self) -> None:
        self.is_begun = True
        for turn in self.generator.requests([self.prompts], self.request):
            self.rows.append(OpenRow(replace(turn, episode=self.first + turn.episode), self))
            self.turns.open(self.rows[-1])

    def drew(self, row: OpenRow, *, is_complete: bool) -> None:
        """Handle a row whose last token was sampled."""
        row.is_finished = True
        self.turns.forget(row.request.episode)
        self.num_finished += 1
        self.is_finished = self.num_finished == self.num_rows

    def finished_groups(self) -> list[int]:
        """Indices of prompts whose samples are all generated."""
        return self._whole_groups([row.is_finished for row in self.rows])

    def assembled(self, dtype: torch.dtype, groups: Sequence[int] | None = None) -> DataProto:
        """The rows of all groups or the given finished ones, with `token_versions` [B T] and `policy_version` [B], the
        oldest version of a row; `dtype` is that of the log-probs."""
        prompts, own = self._chosen(self.rows, groups)
        sampled = [TurnResult(0, row.tokens, row.log_probs, True) for row in own]
        rows = assemble_turns(prompts, sampled, _with_type(dtype), self.generator.pad_id, self.request.num_samples)
        versions = {
            "token_versions": right_padded([row.versions for row in own], 0, torch.int64),
            "policy_version": torch.tensor([min(row.versions) for row in own]),
        }
        return rows.union(DataProto.from_dict(versions))

    def _whole_groups(self, is_finished: Sequence[bool]) -> list[int]:
        n = self.request.num_samples
        return [group for group in range(len(is_finished) // n) if all(is_finished[group * n : (group + 1) * n])]

    def _chosen(self, of_samples: Sequence[T], groups: Sequence[int] | None) -> tuple[DataProto, list[T]]:
        """The prompts of some groups, and the samples of these groups."""
        chosen, n = range(len(self.prompts)) if groups is None else groups, self.request.num_samples
        return self.prompts[list(chosen)], [x for group in chosen for x in of_samples[group * n : (group + 1) * n]]

    def state(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Tensors for `load`. The engine must not hold tokens that are not in the rows yet."""
        rows = self.rows
        return {
            "tokens": right_padded([row.tokens for row in rows], 0, torch.int64),
            "log_probs": right_padded([row.log_probs for row in rows], 0.0, dtype),
            "versions": right_padded([row.versions for row in rows], 0, torch.int64),
            "lengths": torch.tensor([len(row.tokens) for row in rows]),
            "is_finished": torch.tensor([row.is_finished for row in rows]),
        }

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Restore a batch from its `state`; generation continues with `go_on`."""
        self.is_begun = True
        for index, turn in enumerate(self.generator.requests([self.prompts], self.request)):
            row, length = OpenRow(replace(turn, episode=self.first + turn.episode), self), int(saved["lengths"][index])
            row.tokens = saved["tokens"][index, :length].tolist()
            row.log_probs = saved["log_probs"][index, :length].tolist()
            row.versions = saved["versions"][index, :length].tolist()
            row.is_finished = bool(saved["is_finished"][index])
            self.rows.append(row)
        self.num_finished = sum(row.is_finished for row in self.rows)
        self.is_finished = self.num_finished == self.num_rows

    def go_on(self) -> None:
        """Continue generating, after `load` of all batches."""
        for row in self.rows:
            if not row.is_finished:
                self.turns.open(row)

    def close(self) -> None:
        """Free all resources except tokens. Idempotent; here there are none."""


class EpisodeBatch(ResponseBatch, TurnEngine):
    """The episodes of a batch; turns that its `EpisodeLoop` adds become rows."""

    generator: EpisodeGenerator

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.loop: Any = None  # an `EpisodeLoop` once it has begun
        self._open: dict[int, OpenRow] = {}  # the turn being sampled, by episode
        self._loaded: dict[int, Any] = {}  # by open episode: tokens, log-probs and versions of the open turn, or None
        self._made_again: set[int] = set()  # open episodes whose environments were rebuilt

    def begin(self) -> None:
        self.is_begun = True
        self._play(self._episodes())
        for episode in self.loop.episodes.values():
            self.loop.start(episode)

    def add(self, turn: TurnRequest) -> None:
        row = self._open[turn.episode] = OpenRow(turn, self)
        self.turns.open(row)

    def forget(self, episode: int) -> None:
        self.turns.forget(episode)

    def drew(self, row: OpenRow, *, is_complete: bool) -> None:
        number = row.request.episode
        del self._open[number]
        self.loop.draw(TurnResult(number, row.tokens, row.log_probs, is_complete, versions=row.versions))
        self._count()

    def answer(self, result: CallResult) -> None:
        """Continue an episode whose environment has answered."""
        if (journal := self.loop.journal) is not None:
            self.loop.write_answer(journal, result)
            journal.flush()
        self.loop.answer(result)
        self._count()

    def finished_groups(self) -> list[int]:
        loop = self.loop
        return self._whole_groups([] if loop is None else [bool(episode.end) for episode in loop.episodes.values()])

    def assembled(self, dtype: torch.dtype, groups: Sequence[int] | None = None) -> DataProto:
        prompts, episodes = self._chosen(list(self.loop.episodes.values()), groups)
        return self.generator.batch_of(prompts, self.request, episodes, _with_type(dtype), has_versions=True)

    def state(self, dtype: torch.dtype) -> dict[str, Tensor]:
        episodes = [episode_state(episode) for episode in self.loop.episodes.values()]
        for state, number in zip(episodes, self.loop.episodes, strict=True):
            row = self._open.get(number)
            state["open"] = None if row is None else [row.tokens, row.log_probs, row.versions]
        columns = {name: values.tolist() for name, values in self.prompts.non_tensor_batch.items()}
        texts = {"episodes": json_text("episodes", episodes), "columns": json_text("columns", columns)}
        tensors = {name: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) for name, text in texts.items()}
        return tensors | {
            "lengths": torch.zeros(len(episodes), dtype=torch.int64),
            "log_probs": torch.zeros(0, dtype=dtype),
        }

    def load(self, saved: Mapping[str, Tensor]) -> None:
        self.is_begun = True
        columns, states = (json.loads(saved[name].numpy().tobytes()) for name in ("columns", "episodes"))
        self.prompts = self.prompts.union(DataProto.from_dict(non_tensors=columns))
        episodes = self._episodes()
        for episode, state in zip(episodes, states, strict=True):
            load_episode(episode, state)
            self.generator.show(episode, state.get("images", ()))
        self._play(episodes)
        self._loaded = {x.number: state["open"] for x, state in zip(episodes, states, strict=True) if not x.end}
        self._make_again([episode for episode in episodes if not episode.end])

    def go_on(self) -> None:
        for number, sampled in self._loaded.items():
            episode = self.loop.episodes[number]
            if number not in self._made_again:
                episode.restarted, episode.reads_journal = True, False
                self.loop.start(episode)
            elif sampled is not None:
                self.loop.next_turn(episode)
                row = self._open[number]
                row.tokens, row.log_probs, row.versions = sampled
            elif episode.calls:
                self.loop.ask_step(episode)
            else:
                self.loop.ask_reset(episode)
        self._count()

    def close(self) -> None:
        if self.loop is None:
            return
        for episode in self.loop.episodes.values():
            if not episode.end and episode.environment is not None:
                self.loop.calls.end(episode.environment)
        if self.loop.journal is not None:
            self.loop.journal.close()
        self.loop = None

    def _count(self) -> None:
        self.num_finished = self.num_rows - self.loop.num_open
        if not self.loop.num_open:
            if self.loop.journal is not None:
                self.loop.journal.flush()  # another thread closes it
            self.is_finished = True

    def _episodes(self) -> list[Episode]:
        return self.generator.episodes(self.prompts, self.request, itertools.count(self.first), itertools.count())

    def _play(self, episodes: Sequence[Episode]) -> None:
        if (journal := self.generator.new_journal()) is not None:
            journal.open(self.request.step)
        self.loop = EpisodeLoop(self.generator, self, self.request, episodes, journal)

    def _make_again(self, episodes: Sequence[Episode]) -> None:
        """Rebuild the environments of open episodes if possible."""
        loop, calls, known, given = self.loop, self.loop.calls, {}, self._made_again
        for episode in episodes:
            episode.environment = calls.factory.make_alone() if episode.is_alone else calls.factory.make()
            recovery = getattr(episode.environment, "recovery", "restart")
            if recovery not in MADE_AGAIN:
                continue
            given.add(episode.number)
            if episode.calls:  # it has had calls
                answered = len(episode.turns) - (self._loaded[episode.number] is None)
                known[episode.number] = answered if recovery == "deterministic" else 0
                call_id = loop.call_id(episode, "reset")
                calls.reset(episode.number, episode.attempt, call_id, episode.environment, episode.row, episode.seed)
        places, waited_s = dict.fromkeys(known, 0), 0.0
        while places:
            began = time.monotonic()
            results = calls.take(IDLE_WAIT_S)
            for result in results:
                place, episode = places.pop(result.episode), loop.episodes[result.episode]
                if result.record.outcome != "ok":
                    given.discard(episode.number)
                    calls.end(episode.environment)
                    continue
                if place:
                    _compare(episode, place - 1, result)
                if place < known[episode.number]:
                    places[episode.number] = place + 1
                    action = loop.action(episode, place)
                    calls.step(episode.number, episode.attempt, action.call_id, episode.environment, action)
            waited_s = 0.0 if results else waited_s + time.monotonic() - began
            if waited_s > calls.stuck_after_s(len(episodes)):
                raise calls.stuck_error()


class Environments:
    """Answers of environments to the episodes of all open batches.

    Args:
        batches: open batches, by training step.
        on_result: called from another thread when there may be a result for `settle`.
    Attributes:
        waiting: unprocessed answers, by episode.
    """

    def __init__(self, generator: EpisodeGenerator, batches: Mapping[int, ResponseBatch], on_result: Callable[[], Any]):
        self._generator, self._batches = generator, batches
        self.waiting: dict[int, CallResult] = {}
        self._idle_s = 0.0
        generator.calls.on_result = on_result
        generator.calls.begin_play()

    @property
    def num_pending(self) -> int:
        """Number of calls without an answer."""
        return self._generator.calls.num_pending

    def settle(self) -> None:
        """Process answers of environments that answer at once, and collect the others."""
        while results := [*self._known(), *self._generator.calls.take(0.0)]:
            self._idle_s = 0.0
            for result in results:
                batch = self._batches.get(result.episode // NUMBERS)
                loop = batch.loop if isinstance(batch, EpisodeBatch) else None
                if loop is None or not loop.awaits(result):
                    continue
                self.waiting[result.episode] = result
                if getattr(loop.episodes[result.episode].environment, "answers_at_once", False):
                    self.carry_out(result.episode)

    def carry_out(self, episode: int) -> None:
        """Continue an episode after the answer of its environment."""
        result = self.waiting.pop(episode)
        batch = self._batches[result.episode // NUMBERS]
        assert isinstance(batch, EpisodeBatch)
        batch.answer(result)

    def note_idle(self, seconds: float) -> None:
        """Count seconds spent only waiting for answers.

        Raises:
            RolloutError: an answer is overdue.
        """
        self._idle_s += min(seconds, 2 * IDLE_WAIT_S)  # more: this process was suspended
        if self._idle_s > self._generator.calls.stuck_after_s(sum(b.num_rows for b in list(self._batches.values()))):
            raise self._generator.calls.stuck_error()

    def _known(self) -> list[CallResult]:
        """Answers found in the journals of all batches."""
        known = []
        for batch in list(self._batches.values()):
            if isinstance(batch, EpisodeBatch) and (loop := batch.loop) is not None:
                if loop.journal is not None:
                    loop.journal.flush()
                known += loop.known
                loop.known.clear()
        return known


def _compare(episode: Episode, index: int, result: CallResult) -> None:
    """Check that a repeated answer equals the recorded one of a turn."""
    turn = episode.turns[index]
    before = JournalEntry(result.record, StepResult(turn.observation, turn.reward, calls=tuple(turn.calls)))
    where = f"call {result.record.call_id} ({result.record.name})"
    refuse_other_answer(before, JournalEntry(result.record, result.value), where)


def _with_type(dtype: torch.dtype) -> TurnEngine:
    """A stand-in for an engine with this dtype of log-probs."""
    engine = TurnEngine()
    engine.dtype = dtype
    return engine
