"""Turns of episodes by a server: one request per turn, sent when the turn is added. Prefix caching is up to the
server."""

from __future__ import annotations

import concurrent.futures
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from verl.errors import RolloutError
from verl.http_client.client import HTTPClient
from verl.http_client.request import RequestReport
from verl.ops.counter_rng import uniform
from verl.rollout.base import DrawnTurn, GenerationRequest, TurnEngine, TurnRequest
from verl.rollout.server.protocols import GenerateRequest, SamplingRequest, ServerProtocol
from verl.utils.progress import report

WAIT_S = 0.02  # for the next answer, before environments are looked at again


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
        request: GenerationRequest,
        seed: int | None,
    ):
        self.client, self.protocol, self.request, self.seed = client, protocol, request, seed
        self.sampling_params = replace(sampling_params, greedy=request.greedy)
        self._open: dict[Future[list[RequestReport | None]], tuple[TurnRequest, GenerateRequest]] = {}

    @property
    def num_pending(self) -> int:
        return len(self._open)

    def add(self, turn: TurnRequest) -> None:
        sampling_params = replace(self.sampling_params, max_tokens=turn.max_new_tokens, seed=self._seed_of(turn))
        ask = GenerateRequest(self.protocol, turn.tokens, sampling_params)
        self._open[self.client.begin([ask], stop_at_failure=True)] = turn, ask

    def advance(self) -> list[DrawnTurn]:
        """The turns whose responses have arrived; waits briefly for the first.

        Raises:
            RolloutError: the server gives no usable answer after all retries.
        """
        report()
        done, _ = concurrent.futures.wait(self._open, timeout=WAIT_S, return_when=concurrent.futures.FIRST_COMPLETED)
        return [self._drawn(future) for future in list(self._open) if future in done]

    def close(self) -> None:
        for future in self._open:
            future.cancel()
        self._open.clear()

    def _drawn(self, future: Future[list[RequestReport | None]]) -> DrawnTurn:
        turn, ask = self._open.pop(future)
        (found,) = future.result()
        if found is None or found.failure is not None or ask.drawn is None:
            why = "it was given up" if found is None else found.failure
            raise RolloutError(
                f"The server at {self.client.endpoint.base_url} gives no turn {turn.turn} to prompt {turn.prompt_id}, "
                f"sample {turn.sample_id}: {why}"
            )
        ids = ask.drawn.ids
        return DrawnTurn(turn.episode, ids, ask.drawn.log_probs, ids[-1] in self.sampling_params.stop_ids)

    def _seed_of(self, turn: TurnRequest) -> int | None:
        if self.seed is None:
            return None

        def one(value: int) -> Any:
            return torch.tensor([value])

        request = self.request
        noise = uniform(
            self.seed,
            request.step,
            one(turn.prompt_id),
            one(turn.sample_id),
            0,
            stream=request.stream,
            turns=one(turn.turn),
        )
        return int(noise * 2.0**53)
