"""Turns by vLLM, as the trainer sees them: added at any time, generated while environments answer others."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any, Protocol

from verl.errors import RolloutError
from verl.rollout.base import DrawnTurn, Rollout, TurnEngine, TurnLimits, TurnRequest
from verl.rollout.token_sampler import TokenSampler
from verl.rollout.vllm.messages import NumberedTurn, TurnOutput
from verl.rollout.vllm.shm_stream import using_threads
from verl.utils.progress import report

ADVANCE_S = 0.02  # of one call, unless a turn ends before; then environments are looked at again
ADVANCE_ALL_S = 5.0  # where there is no environment: the engine waits for no call in between


class TurnClient(Protocol):
    """Part of `VLLMClient` that turns need."""

    seed: int
    stop_ids: tuple[int, ...]
    experts: tuple[int, int] | None
    is_synced: bool
    open_turns: VLLMTurns | None

    @property
    def options(self) -> Rollout: ...

    @property
    def process_id(self) -> int | None: ...

    def call(self, method: str, *args: Any) -> Any: ...

    def with_engine_restart(self, action: Callable[[], TurnOutput]) -> TurnOutput: ...


class VLLMTurns(TurnEngine):
    """Turns under way in the vLLM process. If it dies, another one generates them again, with the same noise; while
    training goes on, that is left to the caller, because the weights have changed.

    Args:
        num_threads: threads of each side until the turns are closed; None: as many as each has.
    Attributes:
        cached_tokens: tokens of the turns' prompts that came from vLLM's prefix cache.
    """

    def __init__(self, client: TurnClient, limits: TurnLimits, num_threads: int | None):
        self.client, self.limits, self.num_threads = client, limits, num_threads
        self.sampler = TokenSampler.of(client.options, client.seed, client.stop_ids)
        self.experts, self.cached_tokens = client.experts, 0
        self._numbers = itertools.count()
        self._new: list[NumberedTurn] = []
        self._open: dict[int, TurnRequest] = {}
        self._begun_in: int | None = None  # the process that knows of the turns under way
        self._contexts = contextlib.ExitStack()
        if num_threads is not None:
            self._contexts.enter_context(using_threads(num_threads))

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
        output = self._advance() if self.limits.while_training else self.client.with_engine_restart(self._advance)
        self.cached_tokens += output.cached_tokens
        drawn = []
        for place, (number, tokens) in enumerate(zip(output.numbers, output.tokens, strict=True)):
            turn, experts = self._open.pop(number), None
            if self.experts is not None:
                experts = None if output.experts is None else output.experts[place]
                self._refuse_other_experts(None if experts is None else tuple(experts.shape[1:]))
            is_complete = tokens[-1] in self.sampler.stop_ids
            drawn.append(DrawnTurn(turn.episode, tokens, output.log_probs[place], is_complete, experts))
        return drawn

    def close(self) -> None:
        self._open.clear()
        self._new.clear()
        self._contexts.close()
        if self.client.open_turns is self:
            self.client.open_turns = None
        if self._begun_in is not None and self._begun_in == self.client.process_id and self.client.is_synced:
            with contextlib.suppress(RolloutError):
                self.client.call("end_turns")
        self._begun_in = None

    def _advance(self) -> TurnOutput:
        new, self._new = self._new, []
        if self._begun_in is None or self._begun_in != self.client.process_id:
            self.client.call("begin_turns", self.sampler, self.client.options.max_new_tokens, self.num_threads)
            self._begun_in = self.client.process_id
            new = [NumberedTurn(number, turn) for number, turn in self._open.items()]
        budget_s = ADVANCE_ALL_S if self.limits.is_single else ADVANCE_S
        return self.client.call("advance_turns", new, budget_s, self.limits.is_single)

    def _refuse_other_experts(self, shape: tuple[int, ...] | None) -> None:
        if shape != self.experts:
            raise RolloutError(
                f"vLLM recorded experts of shape {shape} for each token, and the actor has {self.experts} "
                "(layers, experts of a token). Set rollout.router_replay=false."
            )
