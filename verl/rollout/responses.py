"""Responses to prompts, sampled as single turns of a rollout engine.

    prompts ── `GenerationGroup.gather` ──> parts ── turns of the engine ──> rows ── `scatter` ──> rows of the prompts

`verl.environments.episode_loop.EpisodeGenerator` inherits this and plays episodes of several turns instead.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from verl.errors import RolloutError
from verl.model_paths.images import row_media
from verl.ops.sampling import NO_TURN
from verl.protocol import DataProto
from verl.rollout.base import (
    GenerationRequest,
    Rollout,
    RolloutEngine,
    SyncResult,
    TurnEngine,
    TurnLimits,
    TurnRequest,
    TurnResult,
)
from verl.rollout.generation_group import RepeatGeneration
from verl.rollout.rows import assemble_turns, longest_prompt, prompt_tokens
from verl.utils.memory import on_current_device


@dataclass(frozen=True)
class _Begun:
    """A generation in the background: its turns, and the rows of its batches."""

    batches: list[DataProto]
    request: GenerationRequest
    turns: TurnEngine | None
    rows: Future[list[DataProto]]


class ResponseGenerator:
    """Samples responses with a rollout engine.

    Args:
        rollout: the description of the engine.
        pad_id: token id of padding.
    Attributes:
        has_regenerated: the last `finish` returned responses that were generated again with newer weights, because the
            engine died after `begin`.
    """

    def __init__(self, engine: RolloutEngine, rollout: Rollout, pad_id: int):
        self.engine, self.rollout, self.pad_id = engine, rollout, pad_id
        self.has_regenerated = False
        self._begun: _Begun | None = None
        self._thread: ThreadPoolExecutor | None = None

    def generate(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        """Rows of responses, `num_samples` for each prompt in the order of the prompts; see `assemble`. Collective over
        the processes that hold the model.

        Raises:
            ConfigError: a prompt is too long for the engine.
            RolloutError: the engine failed.
        """
        return self._finish(self.engine.group.gather(prompts), request, None)

    def begin(self, prompts: DataProto, request: GenerationRequest) -> None:
        """Start generating with the engine's current weights, in a thread; returns immediately. The engine's weights
        must not change until `finish`."""
        assert self._begun is None
        batches, turns, rows = self.engine.group.gather(prompts), None, Future[list[DataProto]]()
        try:
            turns = self._turns(batches, request, while_training=True) if batches else None
        except RolloutError as error:  # raised in `finish`, where all processes meet
            rows.set_exception(error)
        else:
            if turns is None:
                rows.set_result([])
            else:
                self._thread = self._thread or ThreadPoolExecutor(1, "rollout")
                rows = self._thread.submit(on_current_device(self.sample), turns, batches, request)
        self._begun = _Begun(batches, request, turns, rows)

    def finish(self) -> DataProto:
        """Wait for the responses of `begin`, as `generate` returns them. If the engine died, they are generated again
        with the current weights, and `has_regenerated` is set."""
        assert self._begun is not None
        begun, self._begun = self._begun, None
        self.has_regenerated = False
        return self._finish(begun.batches, begun.request, begun)

    def second(self) -> ResponseGenerator:
        """A second generator with the same engine, for use while turns of this one are paused."""
        return copy.copy(self)

    def stop(self) -> None:
        """End everything that it has started except the engine. Idempotent."""

    def sync(self) -> SyncResult:
        """See `RolloutEngine.sync`."""
        return self.engine.sync()

    def offload(self) -> None:
        """See `RolloutEngine.offload`."""
        self.engine.offload()

    def close(self) -> None:
        """Stop the engine. Idempotent."""
        self.engine.close()
        begun, self._begun = self._begun, None
        if begun is not None and begun.turns is not None:
            begun.turns.close()
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None

    def limits(self, batches: Sequence[DataProto], request: GenerationRequest) -> TurnLimits:
        """Limits of the turns of a generation."""
        return TurnLimits(longest_prompt(batches) + self.rollout.max_new_tokens, is_single=True)

    def sample(self, turns: TurnEngine, batches: Sequence[DataProto], request: GenerationRequest) -> list[DataProto]:
        """The rows of each batch of prompts."""
        sampled: dict[int, TurnResult] = {}
        for turn in self.requests(batches, request):
            turns.add(turn)
        while turns.num_pending:
            sampled |= {turn.episode: turn for turn in turns.advance()}
        rows, first = [], 0
        for part in batches:
            part_turns = [sampled[number] for number in range(first, first + len(part) * request.num_samples)]
            rows.append(assemble_turns(part, part_turns, turns, self.pad_id, request.num_samples))
            first += len(part_turns)
        return rows

    def requests(self, batches: Sequence[DataProto], request: GenerationRequest) -> Iterator[TurnRequest]:
        """A turn for each response, numbered from 0; samples of a prompt are consecutive."""
        numbers, limit = itertools.count(), self.rollout.max_new_tokens
        key = request.step, request.stream, request.greedy
        for part in batches:
            columns = prompt_tokens(part), part["prompt_ids"].tolist(), row_media(part)
            for tokens, prompt_id, (media_key, media) in zip(*columns, strict=True):
                images: dict[str, Any] = {"media_key": media_key, "media": media}
                for sample in range(request.num_samples):
                    yield TurnRequest(next(numbers), tokens, prompt_id, sample, NO_TURN, limit, *key, **images)

    def _turns(self, batches: Sequence[DataProto], request: GenerationRequest, *, while_training: bool) -> TurnEngine:
        return self.engine.turns(replace(self.limits(batches, request), while_training=while_training))

    def _finish(self, batches: list[DataProto], request: GenerationRequest, begun: _Begun | None) -> DataProto:
        group = self.engine.group
        while True:
            try:
                rows = group.run(lambda begun=begun: self._rows(batches, request, begun))
                break
            except RepeatGeneration:
                begun, self.has_regenerated = None, True
                self.engine.sync()
        return self.engine.with_log_probs(group.scatter(rows), request.greedy)

    def _rows(self, batches: list[DataProto], request: GenerationRequest, begun: _Begun | None) -> list[DataProto]:
        turns = None
        try:
            if begun is not None:
                turns = begun.turns
                return begun.rows.result()
            if not batches:
                return []
            turns = self._turns(batches, request, while_training=False)
            return self.sample(turns, batches, request)
        finally:
            if turns is not None:
                turns.close()
