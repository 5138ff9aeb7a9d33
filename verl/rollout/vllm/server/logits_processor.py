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
from verl.rollout.token_sampler import NOISE_TOKENS, TokenSampler
from verl.rollout.vllm.server.expert_recorder import ExpertRecorder

TURN = "verl_turn"  # in a request's extra_args: its row, whether it is greedy, `TurnRequest.noise_key` and `position`


@dataclass
class ActiveRequests:
    """The turns that are being generated.

    Attributes:
        log_probs: [B T], filled as tokens are sampled.
        recorder: of the experts that routers choose; None if they are not recorded.
        experts: [B T layers k] int16 in main memory, of the tokens that predict the turns, filled as tokens are
            sampled; UNKNOWN elsewhere. None before the first token.
    """

    drawing: TokenSampler
    log_probs: Tensor
    recorder: ExpertRecorder | None = None
    experts: Tensor | None = None

    def record_experts(self, rows: np.ndarray, positions: Sequence[int]) -> None:
        """Record the experts of the tokens that predict these positions of these rows; the batch has no others."""
        if self.recorder is None:
            return
        experts = self.recorder.of_last_tokens(len(rows))
        if self.experts is None:
            self.experts = experts.new_full((*self.log_probs.shape, *experts.shape[1:]), UNKNOWN)
        self.experts[torch.from_numpy(rows), torch.tensor(positions)] = experts


class CounterNoiseProcessor(LogitsProcessor):
    """See the module.

    Attributes:
        active: set before requests are added; rows without `TURN` (warm-up) are not modified.
    """

    active: ActiveRequests | None = None  # one per process, which samples for one engine

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        size = vllm_config.scheduler_config.max_num_seqs
        self.device, self._pins = device, is_pin_memory
        self._turns = np.zeros((8, size), dtype=np.int64)  # row, is greedy, noise key, position of its first token
        self._sampled: list[list[int] | None] = [None] * size  # vLLM's lists of the tokens so far
        self._noise = np.zeros((size, NOISE_TOKENS))  # of each row, from a position on
        self._noise_of = np.full((6, size), -1, dtype=np.int64)  # noise key, and which part of the turn

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
            self._sampled[index] = None
        for index, params, _, sampled in batch_update.added:
            turn = (params.extra_args or {}).get(TURN)
            self._sampled[index] = None if turn is None else sampled
            if turn is not None:
                self._turns[:, index] = turn
        for source, target, direction in batch_update.moved:
            is_swap = direction == MoveDirectionality.SWAP
            self._sampled[target], left = self._sampled[source], self._sampled[target]
            self._sampled[source] = left if is_swap else None
            turn = self._turns[:, target].copy()
            self._turns[:, target] = self._turns[:, source]
            if is_swap:
                self._turns[:, source] = turn

    def apply(self, logits: Tensor) -> Tensor:
        """Set all logits to -inf except that of each row's sampled token."""
        rows = logits.shape[0]
        sampled = self._sampled[:rows]
        if self.active is None or None in sampled:
            return logits
        drawing, log_probs = self.active.drawing, self.active.log_probs
        row, is_greedy, columns, positions, bits = self._to_device(drawing, sampled)
        greedy = self._turns[1, :rows]
        of_all = bool(greedy[0]) if greedy.min() == greedy.max() else is_greedy.bool()
        tokens = drawing.pick(logits, bits.view(torch.float64), positions, of_all)
        log_probs[row, columns] = drawing.log_probs(logits, tokens)
        self.active.record_experts(self._turns[0, :rows], [len(tokens) for tokens in sampled if tokens is not None])
        return logits.fill_(float("-inf")).scatter_(1, tokens[:, None], 0.0)

    def _to_device(self, drawing: TokenSampler, sampled: Sequence[list[int] | None]) -> Tensor:
        """[5 b]: row index, whether it is greedy, number of tokens in the request, position in the turn and float64
        noise (as bits), copied to the device in one asynchronous transfer."""
        rows = len(sampled)
        columns = np.array([len(tokens) for tokens in sampled if tokens is not None], dtype=np.int64)
        positions = columns + self._turns[7, :rows]
        noise = self._noise_at(drawing, positions)
        packed = torch.from_numpy(np.concatenate([self._turns[:2, :rows], [columns, positions, noise.view(np.int64)]]))
        return packed.pin_memory().to(self.device, non_blocking=True) if self._pins else packed.to(self.device)

    def _noise_at(self, drawing: TokenSampler, positions: np.ndarray) -> np.ndarray:
        """[b], computed for several positions at a time, because the hash consists of many small operations."""
        rows = len(positions)
        keys = np.concatenate([self._turns[2:7, :rows], positions[None] // NOISE_TOKENS])
        is_stale = (keys != self._noise_of[:, :rows]).any(axis=0) & (self._turns[1, :rows] == 0)
        if (stale := np.flatnonzero(is_stale)).size:
            *noise_keys, part = torch.from_numpy(keys[:, stale])[:, :, None]
            at = part * NOISE_TOKENS + torch.arange(NOISE_TOKENS)
            self._noise[stale] = drawing.noise(torch.stack(noise_keys), at).numpy()
            self._noise_of[:, stale] = keys[:, stale]
        return self._noise[np.arange(rows), positions % NOISE_TOKENS]
