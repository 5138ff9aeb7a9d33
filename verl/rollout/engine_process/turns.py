"""Requests to the process of an engine: turns in, tokens out. They are added at any time, generated while
environments answer others, and know nothing of the weights that draw them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from verl.errors import RolloutError
from verl.rollout.base import TurnEngine, TurnRequest, TurnResult
from verl.rollout.engine_process.messages import TurnOutput
from verl.rollout.engine_process.process import EngineDied, EngineError, EngineProcess
from verl.rollout.token_sampler import TokenSampler
from verl.utils.progress import report
from verl.utils.threads import using_threads

ADVANCE_S = 0.02  # of one call, unless a turn ends before; then environments are looked at again
GONE = "The engine that generated the open turns is not running."
ADVANCE_ALL_S = 5.0  # where there is no environment: the engine waits for no call in between


class ProcessTurns(TurnEngine):
    """Turns in progress in the process of an engine.

    Args:
        max_new_tokens: maximum tokens of a turn.
        is_single, is_stepwise: as in `TurnLimits`.
        num_threads: threads of each side until the turns are closed; None: as many as each has.
        restart: called if the process dies: restarts it with the same weights, and the turns are generated again with
            the same noise. None: the error is raised.
    Attributes:
        cached_tokens: tokens of the turns' prompts that came from the engine's prefix cache.
        is_paused: the weights may change.
    """

    def __init__(
        self,
        process: EngineProcess,
        token_sampler: TokenSampler,
        max_new_tokens: int,
        *,
        is_single: bool,
        is_stepwise: bool = False,
        experts: tuple[int, int] | None,
        num_threads: int | None,
        restart: Callable[[EngineDied], None] | None,
    ):
        self.process, self.token_sampler, self.restart = process, token_sampler, restart
        self.max_new_tokens, self.is_single, self.experts = max_new_tokens, is_single, experts
        self.num_threads, self.is_stepwise, self.is_paused = num_threads, is_stepwise, False
        self._budget_s = 0.0 if is_stepwise else ADVANCE_ALL_S if is_single else ADVANCE_S
        self.cached_tokens, self.is_open = 0, True
        self._new: list[TurnRequest] = []
        self._open: dict[int, TurnRequest] = {}  # by episode
        self._begun_in: int | None = None  # id of the process that has the open turns
        self._contexts = contextlib.ExitStack()
        if num_threads is not None:
            self._contexts.enter_context(using_threads(num_threads))

    @property
    def num_pending(self) -> int:
        return len(self._open)

    @property
    def is_active(self) -> bool:
        """Whether the process knows of the turns."""
        return self.is_open and self._begun_in is not None and self._begun_in == self.process.process_id

    def add(self, turn: TurnRequest) -> None:
        self._open[turn.episode] = turn
        self._new.append(turn)

    def advance(self) -> list[TurnResult]:
        """See `TurnEngine.advance`.

        Raises:
            EngineDied: the process ended or made no progress, without `restart` or after it.
            EngineError: the engine failed.
        """
        report()
        if not self._open:
            return []
        try:
            output = self._advance()
        except EngineDied as death:
            if self.restart is None:
                raise
            self.restart(death)
            output = self._advance()
        self.cached_tokens += output.cached_tokens
        sampled = []
        for place, (episode, tokens) in enumerate(zip(output.episodes, output.tokens, strict=True)):
            del self._open[episode]
            experts = None
            if self.experts is not None:
                experts = None if output.experts is None else output.experts[place]
                shape = None if experts is None else tuple(experts.shape[1:])
                if shape != self.experts:
                    raise RolloutError(
                        f"the engine recorded experts of shape {shape} for each token, the actor has {self.experts} "
                        "(layers, experts of a token). Set rollout.router_replay=false."
                    )
            is_complete = tokens[-1] in self.token_sampler.stop_ids
            sampled.append(TurnResult(episode, tokens, output.log_probs[place], is_complete, experts))
        return sampled

    def open_turns(self) -> list[TurnResult]:
        if self._begun_in is None:
            return []
        if not self.is_active:
            raise EngineDied(GONE)
        output: TurnOutput = self._call("open_turns")
        lines = zip(output.episodes, output.tokens, output.log_probs, strict=True)
        return [TurnResult(episode, tokens, log_probs, False) for episode, tokens, log_probs in lines]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def close(self) -> None:
        if self.is_active:
            with contextlib.suppress(RolloutError):
                self._call("end_turns")
        self.is_open, self._begun_in = False, None
        self._open.clear()
        self._new.clear()
        self._contexts.close()

    def _advance(self) -> TurnOutput:
        new, self._new = self._new, []
        if not self.is_active:
            if self._begun_in is not None and self.restart is None:
                raise EngineDied(GONE)
            self._call("begin_turns", self.token_sampler, self.max_new_tokens, self.num_threads, self.is_stepwise)
            self._begun_in = self.process.process_id
            new = list(self._open.values())
        # a tensor that is a view would be sent with all that it is a view of
        media = {id(x): {name: v.clone() for name, v in x.items()} for turn in new if (x := turn.media) is not None}
        new = [turn if turn.media is None else replace(turn, media=media[id(turn.media)]) for turn in new]
        return self._call("advance_turns", new, self._budget_s, self.is_single)

    def _call(self, method: str, *args: Any) -> Any:
        try:
            return self.process.call(method, *args)
        except EngineError:  # requests may be left in it: the next turns get a new one
            self.process.kill()
            raise
