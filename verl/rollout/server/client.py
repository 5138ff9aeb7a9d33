"""The engine of `rollout=server`: one request for each turn, and weight updates if the server supports them.

prompts ──> requests, each with its seed ──> client ──> server
rows    <── tokens and log-probs         <──┘   retried: only failed requests
sync    ──> weights ──> server, proven by log-probs of fixed text on both sides

Prefix caching is up to the server.
"""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from verl.errors import ConfigError, RolloutError
from verl.http_client.client import HTTPClient
from verl.http_client.request import RequestReport
from verl.models.parallel_info import Autocast, parallel_info_of
from verl.ops.sampling import NO_TURN, uniform
from verl.protocol import DataProto
from verl.rollout.base import RolloutEngine, SyncResult, TurnEngine, TurnLimits, TurnRequest, TurnResult
from verl.rollout.generation_group import OneGenerates
from verl.rollout.model_log_probs import response_log_probs, trainer_log_probs
from verl.rollout.proof.probe import ALLOWED_NATS, probe_rows
from verl.rollout.rows import refuse_wrong_responses
from verl.rollout.server.options import ServerOptions
from verl.rollout.server.protocols import GenerateRequest, SamplingRequest, ServerProtocol, ServerResponse
from verl.rollout.server.weight_update import ServerWeightUpdate
from verl.rollout.token_sampler import noise_keys
from verl.rollout.weight_sync.transfer import TransferToFirst
from verl.utils.progress import report

logger = logging.getLogger(__name__)

WAIT_S = 0.02  # wait for the next answer before environments are polled again
NOISE_NATS = 1e-5  # smaller differences do not distinguish weights


_OpenTurn = tuple[TurnRequest, GenerateRequest]


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
        self._queue: list[_OpenTurn] = []
        self._open: dict[Future[list[RequestReport | None]], _OpenTurn] = {}

    @property
    def num_pending(self) -> int:
        return len(self._queue) + len(self._open)

    def add(self, turn: TurnRequest) -> None:
        sampling_params = replace(
            self.sampling_params, greedy=turn.greedy, max_tokens=turn.max_new_tokens, seed=self._seed_of(turn)
        )
        pending = turn, GenerateRequest(self.protocol, turn.tokens, sampling_params)
        if self.is_single:
            self._queue.append(pending)
        else:
            self._open[self.client.begin([pending[1]], stop_at_failure=True)] = pending

    def advance(self) -> list[TurnResult]:
        """The turns whose responses have arrived; waits briefly for the first, or for all if turns are single. A limit
        applies to the time without any answer.

        Raises:
            RolloutError: the server gives no usable answer after all retries.
        """
        report()
        if self.is_single:
            pending, self._queue = self._queue, []
            reports = self.client.wait(self.client.begin([ask for _, ask in pending], stop_at_failure=True))
        else:
            done, _ = concurrent.futures.wait(
                self._open, timeout=WAIT_S, return_when=concurrent.futures.FIRST_COMPLETED
            )
            ended = [future for future in list(self._open) if future in done]
            pending, reports = [self._open.pop(future) for future in ended], [future.result()[0] for future in ended]
        for (turn, _), answer in zip(pending, reports, strict=True):
            if answer is not None and answer.failure is not None:
                what = "response" if turn.turn == NO_TURN else f"turn {turn.turn}"
                raise RolloutError(
                    f"The server at {self.client.endpoint.base_url} gives no {what} to prompt {turn.prompt_id}, sample "
                    f"{turn.sample_id}, sent {answer.attempts} times: {answer.failure}"
                )
        if again := sum(answer is not None and answer.attempts > 1 for answer in reports):
            logger.warning("%d of %d responses needed more than one request.", again, len(reports))
        return [self._turn_result(turn, ask) for turn, ask in pending]

    def close(self) -> None:
        for future in self._open:
            future.cancel()
        self._open.clear()
        self._queue.clear()

    def _turn_result(self, turn: TurnRequest, ask: GenerateRequest) -> TurnResult:
        assert ask.response is not None
        ids, stop_ids = ask.response.ids, self.sampling_params.stop_ids
        return TurnResult(turn.episode, ids, ask.response.log_probs, ids[-1] in stop_ids)

    def _seed_of(self, turn: TurnRequest) -> int | None:
        """Derived from the turn's noise key; below 2^53, which JSON numbers represent exactly."""
        if self.seed is None:
            return None
        stream, step, prompt_id, sample_id, number = noise_keys([turn])
        return int(uniform(self.seed, step, prompt_id, sample_id, 0, stream, number) * 2.0**53)


TEXTS = ("12+34=46", "what is 6*7? it is 42", "0 1 2 3 4 5 6 7 8 9", "the sum of 3 and 4 is 7")
PROBE_TOKENS = 4  # tokens sampled per row, to determine how the server computes log-probs
DEFAULT_CONTEXT = 4096  # tokens, if the server does not report its limit
SAME_NATS = 0.05  # nats: closer log-probs count as equal

Rows = tuple[tuple[int, ...], ...]


class LogProbCheck:
    """Fixed rows of tokens, and their log-probs on both sides.

    Args:
        sampling_params: sampling options of this run.
    """

    def __init__(self, client: HTTPClient, protocol: ServerProtocol, rows: Rows, sampling_params: SamplingRequest):
        self.client, self.protocol, self.rows = client, protocol, rows
        self.sampling_params = replace(
            sampling_params, max_tokens=1, min_tokens=0, greedy=True, tells_prompt=True, seed=None
        )
        self._drawing = replace(sampling_params, max_tokens=PROBE_TOKENS, min_tokens=0, seed=17)

    def server_log_probs(self) -> np.ndarray | None:
        """Log-probs of each token but the first, from the server, row by row; None if it does not return them.

        Raises:
            RolloutError: the server does not answer.
        """
        responses = ask_server(self.client, self.protocol, self.rows, self.sampling_params)
        scored = [response.prompt_log_probs for response in responses]
        return None if None in scored else np.array([x for row in scored for x in row or ()])

    def trainer_log_probs(self, model: Any, autocast: Autocast) -> np.ndarray:
        """The same log-probs, from the training model."""
        rows = [trainer_log_probs(model, (row,), autocast).ravel() for row in self.rows]
        return np.concatenate(rows)

    def tells_raw(self) -> bool | None:
        """Whether the server returns raw log-probs, before temperature, top_k and top_p.

        None if this cannot be determined, because the server returns no log-probs of prompts.
        """
        responses = ask_server(self.client, self.protocol, self.rows, self._drawing)
        longer = tuple((*row, *response.ids) for row, response in zip(self.rows, responses, strict=True))
        scored = ask_server(self.client, self.protocol, longer, self.sampling_params)
        gaps = []
        for response, whole in zip(responses, scored, strict=True):
            if whole.prompt_log_probs is None:
                return None
            raw = np.array(whole.prompt_log_probs[-len(response.ids) :])
            gaps.append(np.abs(raw - np.array(response.log_probs)))
        return float(np.concatenate(gaps).mean()) < SAME_NATS


def probe_rows_for(protocol: ServerProtocol, tokenizer: Any, vocab_size: int) -> Rows:
    """Rows for the check: random tokens, or plain texts if the protocol sends texts.

    Raises:
        RolloutError: none of the texts survives tokenization unchanged.
    """
    context = protocol.limit or DEFAULT_CONTEXT
    if protocol.takes_ids:
        return probe_rows(vocab_size, context)
    rows = [tuple(tokenizer(text)["input_ids"]) for text in TEXTS]
    usable = tuple(row for row in rows if 2 <= len(row) < context and protocol.can_send(row))
    if not usable:
        raise RolloutError("The actor's tokenizer reads back none of the texts that a probe could be made of.")
    return usable


def ask_server(
    client: HTTPClient, protocol: ServerProtocol, rows: Sequence[Sequence[int]], sampling_params: SamplingRequest
) -> list[ServerResponse]:
    """One response for each row.

    Raises:
        RolloutError: the server gives no usable response after all retries.
    """
    draws = [GenerateRequest(protocol, row, sampling_params) for row in rows]
    for reply in client.ask(draws, stop_at_failure=True):
        if reply is not None and reply.failure is not None:
            raise RolloutError(f"a request for log-probs of fixed text fails: {reply.failure}")
    return [draw.response for draw in draws if draw.response is not None]


class ServerEngine(RolloutEngine):
    """See `ServerRollout`. Made by `verl.rollout.server.checks.checked_engine`, which has checked the server.

    Args:
        probe: of the server, with the connection to it.
        update: sends new weights; None if the server's weights are fixed or another process sends them.
        source: source of log-probs of responses.
        gap_nats: mean distance between the log-probs of server and trainer on fixed text at the start; None if the
            server does not return them.
        sampling_params: sampling options of all responses.
    """

    def __init__(
        self,
        options: ServerOptions,
        probe: LogProbCheck,
        update: ServerWeightUpdate | None,
        source: Literal["server", "trainer"],
        gap_nats: float | None,
        sampling_params: SamplingRequest,
        model: Any,
        seed: int,
        autocast: Autocast,
    ):
        self.options, self.probe, self.update, self.source, self.model = options, probe, update, source, model
        self.sampling_params, self.seed, self.row_tokens = sampling_params, seed, probe.protocol.limit
        self.autocast: Autocast = autocast
        self._before: np.ndarray | None = None  # the trainer's log-probs of the probe at the last sync
        self.compute_type = self._compute_type(gap_nats)
        self._transfer, parallel_info = TransferToFirst(model, autocast), parallel_info_of(model)
        self._is_alone = parallel_info.mesh.size == 1
        # one of the processes with the same rows sends the requests
        if len(parallel_info.siblings) > 1:
            self.group = OneGenerates(parallel_info, len(parallel_info.siblings))

    def turns(self, limits: TurnLimits) -> TurnEngine:
        """See `RolloutEngine.turns`.

        Raises:
            ConfigError: the server does not return log-probs where they are needed, or an episode is too long for it.
        """
        if self.source == "trainer" and not limits.is_single:
            raise ConfigError(
                "environment: log-probs come from the trainer (rollout.log_probs), and turns of episodes need those of "
                "the server. Use those of the server (docs/rollout.md), or set rollout=hf."
            )
        if self.source == "trainer" and limits.while_training:
            raise ConfigError(
                "trainer.mode is async: log-probs come from the trainer (rollout.log_probs), whose weights change "
                "while the server draws. Use those of the server (docs/rollout.md), or set trainer.mode=sync."
            )
        if (held := self.row_tokens) is not None:
            limit = f"the server takes {held}"
            limits.refuse_above(held, self.options.max_new_tokens, limit)
        seed = self.seed if self.options.send_seed else None
        return ServerTurns(self.probe.client, self.probe.protocol, self.sampling_params, seed, limits)

    def with_log_probs(self, rows: DataProto, greedy: bool) -> DataProto:
        """The trainer's log-probs, if those of the server are not used or, of greedy responses, not scaled."""
        if self.source == "server" and not (greedy and self.options.temperature != 1):
            return rows
        log_probs = response_log_probs(self.model, rows, self.options.temperature, self.autocast)
        rows["rollout_log_probs"].copy_(log_probs)
        refuse_wrong_responses(rows)
        return rows

    def sync(self) -> SyncResult:
        """Send the current weights to the server and compare log-probs of fixed text on both sides.

        Raises:
            RolloutError: the server rejected the weights, or its log-probs differ.
        """
        if self.options.weights == "fixed":
            is_first = self._before is None
            gap, _ = self._gaps()
            metrics = {} if gap is None else {"sync/probe_gap_nats": gap}
            is_current = is_first and gap is not None and gap <= self._allowed_nats()
            return SyncResult("the server keeps its weights", metrics, is_current)
        synced = self._support_first() if self.update is None else self._renew(self.update)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # no process samples before the server has the weights
        return synced

    def _renew(self, update: ServerWeightUpdate) -> SyncResult:
        """Send the current weights to the server and check that it uses them."""
        moved = update.move(self._transfer.tensors())
        gap, gap_before = self._gaps()
        if gap is None:
            raise RolloutError(
                "The server returns no log-probs of prompts (prompt_logprobs), so its new weights cannot be "
                "verified. Set rollout.weights=fixed, or use a server that returns them."
            )
        self._refuse_wrong_weights(gap, gap_before)
        return replace(moved, metrics=moved.metrics | {"sync/probe_gap_nats": gap})

    def _support_first(self) -> SyncResult:
        """Take part in the collectives of the first process, which sends the weights."""
        if not self._is_alone:
            for _ in self._transfer.tensors():
                pass
            self.model.eval()
            self.probe.trainer_log_probs(self.model, self.autocast)  # a forward pass needs all siblings
        return SyncResult("the first process gives it the weights")

    def close(self) -> None:
        self.probe.client.close()
        if self.update is not None:
            self.update.close()

    def _gaps(self) -> tuple[float | None, float | None]:
        """Mean distance between the server's log-probs and the trainer's: its current ones, and those of the last
        sync."""
        theirs = self.probe.server_log_probs()
        if theirs is None:
            return None, None
        self.model.eval()
        now, before = self.probe.trainer_log_probs(self.model, self.autocast), self._before
        self._before = now
        return float(np.abs(theirs - now).mean()), None if before is None else float(np.abs(theirs - before).mean())

    def _allowed_nats(self) -> float:
        """Largest distance, in nats, between log-probs of fixed text that rounding explains."""
        name = self.autocast or str(self.model.dtype).removeprefix("torch.")
        return self.options.max_gap_nats or ALLOWED_NATS.get(name, ALLOWED_NATS["float32"])

    def _compute_type(self, gap_nats: float | None) -> str | None:
        """Servers do not report their data type: assume the trainer's, unless a larger distance was seen or is
        allowed."""
        if self.source == "trainer":
            return None
        seen = self.options.max_gap_nats or gap_nats
        return None if seen is not None and seen <= ALLOWED_NATS["float32"] else "bfloat16"

    def _refuse_wrong_weights(self, gap: float, gap_before: float | None) -> None:
        allowed = self._allowed_nats()
        is_stale = gap_before is not None and gap > NOISE_NATS and gap_before < gap / 2
        if gap <= allowed and not is_stale:
            return
        likely = (
            "It holds the weights of the step before: its reload did nothing."
            if is_stale
            else "It computes in another type (raise rollout.max_gap_nats), serves another model, or did not load a "
            "tensor, such as an output head that is tied to the embeddings."
        )
        raise RolloutError(
            f"The server at {self.probe.client.endpoint.base_url} does not hold the trainer's weights after a "
            f"reload: log-probs of fixed text differ by {gap:.3g} nats on average, where {allowed:g} may be rounding. "
            f"{likely}"
        )
