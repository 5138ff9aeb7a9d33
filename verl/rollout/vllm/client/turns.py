"""Turns of episodes by vLLM, as the trainer sees them: added at any time, drawn while environments answer others."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING

from verl.errors import RolloutError
from verl.rollout.base import DrawnTurn, GenerationRequest, TurnEngine, TurnRequest
from verl.rollout.token_sampler import TokenSampler
from verl.rollout.vllm.messages import NumberedTurn, TurnOutput
from verl.utils.progress import report

if TYPE_CHECKING:
    from verl.rollout.vllm.client.client import VLLMClient

ADVANCE_S = 0.02  # of one call, unless a turn ends before; then environments are looked at again


class VLLMTurns(TurnEngine):
    """Turns under way in the vLLM process. If it dies they are drawn again by another, with the same noise.

    Attributes:
        cached_tokens: of prompts of turns, that came from vLLM's prefix cache.
    """

    def __init__(self, client: VLLMClient, request: GenerationRequest):
        self.client = client
        self.drawing = TokenSampler.of(client.options, request, client.seed, client.stop_ids)
        self.cached_tokens = 0
        self._numbers = itertools.count()
        self._new: list[NumberedTurn] = []
        self._open: dict[int, TurnRequest] = {}
        self._begun_in: int | None = None  # the process that knows of the turns under way

    @property
    def num_pending(self) -> int:
        return len(self._open)

    def add(self, turn: TurnRequest) -> None:
        number = next(self._numbers)
        self._open[number] = turn
        self._new.append(NumberedTurn(number, turn))

    def advance(self) -> list[DrawnTurn]:
        """See `TurnEngine.advance`.

        Raises:
            RolloutError: the engine failed, or died twice in a row.
        """
        report()
        if not self._open:
            return []
        found = self.client.outliving_death(self._advance)
        self.cached_tokens += found.cached_tokens
        drawn = []
        for number, tokens, log_probs in zip(found.numbers, found.tokens, found.log_probs, strict=True):
            turn = self._open.pop(number)
            drawn.append(DrawnTurn(turn.episode, tokens, log_probs, tokens[-1] in self.drawing.stop_ids))
        return drawn

    def close(self) -> None:
        self._open.clear()
        self._new.clear()
        if self._begun_in is not None and self._begun_in == self.client.process_id:
            with contextlib.suppress(RolloutError):
                self.client.call("end_turns")
        self._begun_in = None

    def _advance(self) -> TurnOutput:
        new, self._new = self._new, []
        if self._begun_in is None or self._begun_in != self.client.process_id:
            self.client.call("begin_turns", self.drawing, self.client.options.max_new_tokens)
            self._begun_in = self.client.process_id
            new = [NumberedTurn(number, turn) for number, turn in self._open.items()]
        return self.client.call("advance_turns", new, ADVANCE_S)
