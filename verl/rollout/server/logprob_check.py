"""Log-prob check: does a server compute what the trainer does? Fixed text is scored by both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from verl.errors import RolloutError
from verl.http_client.client import HTTPClient
from verl.models.parallel_info import Autocast
from verl.rollout.server.protocols import GenerateRequest, SamplingRequest, ServerProtocol, ServerResponse
from verl.rollout.weight_verification.logprob_probe import probe_rows, trainer_log_probs

TEXTS = ("12+34=46", "what is 6*7? it is 42", "0 1 2 3 4 5 6 7 8 9", "the sum of 3 and 4 is 7")
DRAWN_TOKENS = 4  # of each row, to learn what log-probs of drawn tokens mean
DEFAULT_CONTEXT = 4096  # tokens, of a server that does not tell its limit
SAME_NATS = 0.05  # log-probs nearer than this mean the same

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
        self._drawing = replace(sampling_params, max_tokens=DRAWN_TOKENS, min_tokens=0, seed=17)

    def server_log_probs(self) -> np.ndarray | None:
        """Log-probs of each token but the first, from the server, row by row; None if it does not return them.

        Raises:
            RolloutError: the server does not answer.
        """
        drawn = ask_server(self.client, self.protocol, self.rows, self.sampling_params)
        scored = [response.prompt_log_probs for response in drawn]
        return None if None in scored else np.array([x for row in scored for x in row or ()])

    def trainer_log_probs(self, model: Any, autocast: Autocast) -> np.ndarray:
        """The same log-probs, from the training model."""
        rows = [trainer_log_probs(model, (row,), autocast).ravel() for row in self.rows]
        return np.concatenate(rows)

    def tells_raw(self) -> bool | None:
        """Whether the server returns raw log-probs, before temperature, top_k and top_p.

        None if this cannot be determined, because the server returns no log-probs of prompts.
        """
        drawn = ask_server(self.client, self.protocol, self.rows, self._drawing)
        longer = tuple((*row, *response.ids) for row, response in zip(self.rows, drawn, strict=True))
        scored = ask_server(self.client, self.protocol, longer, self.sampling_params)
        gaps = []
        for response, whole in zip(drawn, scored, strict=True):
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
    for report in client.ask(draws, stop_at_failure=True):
        if report is not None and report.failure is not None:
            raise RolloutError(f"the server does not answer a request for log-probs of fixed text: {report.failure}")
    return [draw.drawn for draw in draws if draw.drawn is not None]
