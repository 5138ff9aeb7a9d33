"""Counter-based sampling noise inside vLLM: a logits processor that masks all tokens but one and keeps its log-prob.

vLLM decodes greedily; all logits are -inf except that of the token that `TokenSampler` sampled. The noise depends only
on the request and the length of its response, so the result does not depend on how vLLM batches, chunks, orders or
repeats requests. Log-probs are stored here, row by row, because vLLM would create a Python object for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from verl.model_paths.expert_routing import UNKNOWN
from verl.rollout.token_sampler import TokenSampler
from verl.rollout.vllm.server.expert_recorder import ExpertRecorder

NOISE_TOKENS = 64  # positions per call of the noise generator, in main memory
WHOSE = "verl_row"  # in a request's extra_args: its row among the responses, its prompt's, sample's and turn's number
NO_TURN = -1  # of a response that is not a turn of an episode


@dataclass
class ActiveRequests:
    """The responses that are being generated.

    Attributes:
        log_probs: [B T], filled as tokens are sampled.
        recorder: of the experts that routers choose; None if they are not recorded.
        experts: [B T layers k] int16 in main memory, of the tokens that predict the responses, filled likewise; UNKNOWN
            elsewhere. None before the first token.
    """

    drawing: TokenSampler
    log_probs: Tensor
    recorder: ExpertRecorder | None = None
    experts: Tensor | None = None

    @classmethod
    def begin(
        cls,
        drawing: TokenSampler,
        rows: int,
        width: int,
        device: torch.device,
        recorder: ExpertRecorder | None = None,
    ) -> ActiveRequests:
        return cls(drawing, torch.zeros(rows, width, device=device), recorder)

    def record_experts(self, rows: np.ndarray, positions: Sequence[int]) -> None:
        """Record the experts of the tokens that predict these positions of these rows; the batch has no others."""
        if self.recorder is None:
            return
        found = self.recorder.of_last_tokens(len(rows))
        if self.experts is None:
            self.experts = found.new_full((*self.log_probs.shape, *found.shape[1:]), UNKNOWN)
        self.experts[torch.from_numpy(rows), torch.tensor(positions)] = found


class CounterNoiseProcessor(LogitsProcessor):
    """See the module.

    Attributes:
        under_way: set before requests are added; rows without `WHOSE` (warm-up) are not modified.
    """

    under_way: ActiveRequests | None = None  # of this process, which draws for one engine

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        size = vllm_config.scheduler_config.max_num_seqs
        self.device, self._pins = device, is_pin_memory
        self._whose = np.zeros((4, size), dtype=np.int64)
        self._drawn: list[list[int] | None] = [None] * size  # vLLM's own lists of the tokens so far
        self._noise = np.zeros((size, NOISE_TOKENS))  # of each row, from a position on
        self._noise_for: TokenSampler | None = None
        self._noise_of = np.full((5, size), -1, dtype=np.int64)  # whose, and which part of the response

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """No validation: all requests come from verl."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows of vLLM's batch."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._drawn[index] = None
        for index, params, _, drawn in batch_update.added:
            whose = (params.extra_args or {}).get(WHOSE)
            self._drawn[index] = None if whose is None else drawn
            if whose is not None:
                self._whose[:, index] = whose
        for source, target, direction in batch_update.moved:
            is_swap = direction == MoveDirectionality.SWAP
            self._drawn[target], left = self._drawn[source], self._drawn[target]
            self._drawn[source] = left if is_swap else None
            whose = self._whose[:, target].copy()
            self._whose[:, target] = self._whose[:, source]
            if is_swap:
                self._whose[:, source] = whose

    def apply(self, logits: Tensor) -> Tensor:
        """Set all logits to -inf except that of each row's sampled token."""
        rows = logits.shape[0]
        drawn = self._drawn[:rows]
        if self.under_way is None or None in drawn:
            return logits
        drawing, log_probs = self.under_way.drawing, self.under_way.log_probs
        row, positions, bits = self._to_device(drawing, drawn)
        tokens = drawing.pick(logits, bits.view(torch.float64), positions)
        log_probs[row, positions] = drawing.log_probs(logits, tokens)
        self.under_way.record_experts(self._whose[0, :rows], [len(tokens) for tokens in drawn if tokens is not None])
        return logits.fill_(float("-inf")).scatter_(1, tokens[:, None], 0.0)

    def _to_device(self, drawing: TokenSampler, drawn: Sequence[list[int] | None]) -> Tensor:
        """[3 b]: row index, position and float64 noise (as bits), copied to the device in one asynchronous
        transfer."""
        rows = len(drawn)
        positions = np.array([len(tokens) for tokens in drawn if tokens is not None], dtype=np.int64)
        noise = np.zeros(rows) if drawing.request.greedy else self._noise_at(drawing, positions)
        packed = torch.from_numpy(np.stack([self._whose[0, :rows], positions, noise.view(np.int64)]))
        return packed.pin_memory().to(self.device, non_blocking=True) if self._pins else packed.to(self.device)

    def _noise_at(self, drawing: TokenSampler, positions: np.ndarray) -> np.ndarray:
        """[b], computed for several positions at a time, because the hash consists of many small operations."""
        rows = len(positions)
        wanted = np.concatenate([self._whose[:, :rows], positions[None] // NOISE_TOKENS])
        if self._noise_for is not drawing:
            self._noise_for, self._noise_of[:] = drawing, -1
        if (stale := np.flatnonzero((wanted != self._noise_of[:, :rows]).any(axis=0))).size:
            _, prompt_ids, sample_ids, turns, part = torch.from_numpy(wanted[:, stale])[:, :, None]
            at = part * NOISE_TOKENS + torch.arange(NOISE_TOKENS)
            # All rows of one drawing are turns of episodes, or none is.
            of_turns = None if bool((turns == NO_TURN).all()) else turns
            self._noise[stale] = drawing.noise(prompt_ids, sample_ids, at, of_turns).numpy()
            self._noise_of[:, stale] = wanted[:, stale]
        return self._noise[np.arange(rows), positions % NOISE_TOKENS]
