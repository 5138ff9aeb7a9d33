"""Turns by a server: one request per turn, sent when the turn is added. Prefix caching is up to the server."""

from __future__ import annotations

import concurrent.futures
import logging
from concurrent.futures import Future
from dataclasses import replace

from verl.errors import RolloutError
from verl.http_client.client import HTTPClient
from verl.http_client.request import RequestReport
from verl.ops.counter_rng import NO_TURN, uniform
from verl.rollout.base import DrawnTurn, TurnEngine, TurnLimits, TurnRequest
from verl.rollout.server.protocols import GenerateRequest, SamplingRequest, ServerProtocol
from verl.rollout.token_sampler import noise_keys
from verl.utils.progress import report

logger = logging.getLogger(__name__)

WAIT_S = 0.02  # for the next answer, before environments are looked at again


_Asked = tuple[TurnRequest, GenerateRequest]


class ServerTurns(TurnEngine):
    """Turns that a server is generating.

    Args:
        sampling_params: sampling options of all turns.
        seed: of the run; None sends no seeds.
    """

    def __init__(
        self,
        client: HTTPClient,
        protocol: ServerProtocol,
        sampling_params: SamplingRequest,
        seed: int | None,
        limits: TurnLimits,
    ):
        self.client, self.protocol, self.sampling_params, self.seed = client, protocol, sampling_params, seed
        self.is_single = limits.is_single
        self._queue: list[_Asked] = []
        self._open: dict[Future[list[RequestReport | None]], _Asked] = {}

    @property
    def num_pending(self) -> int:
        return len(self._queue) + len(self._open)

    def add(self, turn: TurnRequest) -> None:
        sampling_params = replace(
            self.sampling_params, greedy=turn.greedy, max_tokens=turn.max_new_tokens, seed=self._seed_of(turn)
        )
        asked = turn, GenerateRequest(self.protocol, turn.tokens, sampling_params)
        if self.is_single:
            self._queue.append(asked)
        else:
            self._open[self.client.begin([asked[1]], stop_at_failure=True)] = asked

    def advance(self) -> list[DrawnTurn]:
        """The turns whose responses have arrived; waits briefly for the first, and for all of single turns, which share
        a limit on the time without any answer.

        Raises:
            RolloutError: the server gives no usable answer after all retries.
        """
        report()
        if self.is_single:
            asked, self._queue = self._queue, []
            reports = self.client.wait(self.client.begin([ask for _, ask in asked], stop_at_failure=True))
        else:
            done, _ = concurrent.futures.wait(
                self._open, timeout=WAIT_S, return_when=concurrent.futures.FIRST_COMPLETED
            )
            ended = [future for future in list(self._open) if future in done]
            asked, reports = [self._open.pop(future) for future in ended], [future.result()[0] for future in ended]
        for (turn, _), answer in zip(asked, reports, strict=True):
            if answer is not None and answer.failure is not None:
                what = "response" if turn.turn == NO_TURN else f"turn {turn.turn}"
                raise RolloutError(
                    f"The server at {self.client.endpoint.base_url} gives no {what} to prompt {turn.prompt_id}, sample "
                    f"{turn.sample_id}, sent {answer.attempts} times: {answer.failure}"
                )
        if again := sum(answer is not None and answer.attempts > 1 for answer in reports):
            logger.warning("%d of %d responses needed more than one request.", again, len(reports))
        return [self._drawn(turn, ask) for turn, ask in asked]

    def close(self) -> None:
        for future in self._open:
            future.cancel()
        self._open.clear()
        self._queue.clear()

    def _drawn(self, turn: TurnRequest, ask: GenerateRequest) -> DrawnTurn:
        assert ask.drawn is not None
        ids, stop_ids = ask.drawn.ids, self.sampling_params.stop_ids
        return DrawnTurn(turn.episode, ids, ask.drawn.log_probs, ids[-1] in stop_ids)

    def _seed_of(self, turn: TurnRequest) -> int | None:
        """Derived from the turn's noise key; below 2^53, which JSON numbers represent exactly."""
        if self.seed is None:
            return None
        stream, step, prompt_id, sample_id, number = noise_keys([turn])
        return int(uniform(self.seed, step, prompt_id, sample_id, 0, stream, number) * 2.0**53)
