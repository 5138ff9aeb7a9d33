"""The engine of `rollout=server`: one request for each response, and weights that are updated where the server can.

prompts ──> requests, each with its seed ──> client ──> server
rows    <── tokens and log-probs         <──┘   retried: only failed requests
sync    ──> weights ──> server, proven by log-probs of fixed text on both sides
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from verl.errors import ConfigError, RolloutError
from verl.http_client.client import HTTPClient
from verl.models.parallel_info import (
    Autocast,
    ParallelInfo,
    compute_device,
    computing_in,
    release_gathered,
    weights_gathered,
)
from verl.ops.batching import micro_batches
from verl.ops.logprobs import log_probs_of, response_positions
from verl.protocol import DataProto
from verl.rollout.base import RolloutEngine, SyncResult, TurnEngine, TurnLimits
from verl.rollout.generation_group import OneGenerates
from verl.rollout.rows import refuse_wrong_responses
from verl.rollout.server.logprob_check import LogProbCheck
from verl.rollout.server.options import ServerOptions
from verl.rollout.server.protocols import SamplingRequest, ServerProtocol
from verl.rollout.server.turns import ServerTurns
from verl.rollout.server.weight_update import ServerWeightUpdate, named_tensors
from verl.rollout.vllm.client.engine_args import dtype_of
from verl.rollout.vllm.sync.weight_transfer import TransferToFirst
from verl.rollout.weight_verification.logprob_probe import ALLOWED_NATS

logger = logging.getLogger(__name__)

MIB = 1 << 20
MICRO_BATCH_TOKENS = 16384  # of a forward pass where the trainer tells the log-probs
NOISE_NATS = 1e-5  # below it the weights of a server cannot be distinguished


@dataclass(frozen=True)
class ServerConnection:
    """A checked connection to a server.

    Attributes:
        transfer: sends new weights; None if the server's weights are fixed or another process sends them.
        source: where log-probs of responses come from, the server or the trainer.
        gap_nats: mean distance between the log-probs of server and trainer on fixed text at the start; None if the
            server does not return them.
    """

    client: HTTPClient
    protocol: ServerProtocol
    probe: LogProbCheck
    transfer: ServerWeightUpdate | None
    source: Literal["server", "trainer"]
    gap_nats: float | None = None


class ServerSampler(RolloutEngine):
    """See `ServerRollout`. Made by `verl.rollout.server.connect.connect`, which checks the server."""

    def __init__(
        self,
        options: ServerOptions,
        parts: ServerConnection,
        sampling_params: SamplingRequest,
        model: Any,
        tokenizer: Any,
        seed: int,
        autocast: Autocast,
    ):
        self.options, self.parts, self.sampling_params, self.model = options, parts, sampling_params, model
        self.seed = seed
        self.autocast: Autocast = autocast
        self._before: np.ndarray | None = None  # the trainer's log-probs of the probe at the last sync
        self.compute_type, self.row_tokens = self._compute_type(), parts.protocol.limit
        parallel_info: ParallelInfo | None = getattr(model, "parallel_info", None)
        self._transfer = None if parallel_info is None else TransferToFirst(model, dtype_of(model, autocast))
        if (
            parallel_info is not None and len(parallel_info.siblings) > 1
        ):  # of processes with the same rows, one sends the requests
            self.group = OneGenerates(parallel_info, len(parallel_info.siblings))

    def turns(self, limits: TurnLimits) -> TurnEngine:
        """See `RolloutEngine.turns`.

        Raises:
            ConfigError: the server does not return log-probs where they are needed, or an episode is too long for it.
        """
        if self.parts.source == "trainer" and not limits.is_single:
            raise ConfigError(
                "environment: log-probs come from the trainer (rollout.log_probs), and turns of episodes need those of "
                "the server. Use those of the server (docs/rollout_server.md), or set rollout=hf."
            )
        if self.parts.source == "trainer" and limits.while_training:
            raise ConfigError(
                "trainer.mode is async (or trainer.rollout_ahead is 1): log-probs come from the trainer "
                "(rollout.log_probs), whose weights change while the server draws. Use those of the server "
                "(docs/rollout_server.md), or set trainer.mode=sync."
            )
        if (held := self.row_tokens) is not None:
            limit = f"the server takes {held} (vLLM's --max-model-len)"
            limits.refuse_above(held, self.options.max_new_tokens, limit)
        seed = self.seed if self.options.send_seed else None
        return ServerTurns(self.parts.client, self.parts.protocol, self.sampling_params, seed, limits)

    def with_log_probs(self, rows: DataProto, greedy: bool) -> DataProto:
        """The trainer's log-probs, where those of the server are not used or, of greedy responses, have another
        temperature."""
        if self.parts.source == "server" and not (greedy and self.options.temperature != 1):
            return rows
        log_probs = self._trainers_log_probs(rows, rows["responses"].shape[1]).masked_fill(~rows["response_mask"], 0.0)
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
        synced = self._renew() if self.parts.transfer is not None else self._support_first()
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # no process draws before the server holds the weights
        return synced

    def _renew(self) -> SyncResult:
        """Send the current weights to the server and check that it uses them."""
        assert self.parts.transfer is not None
        moved = self.parts.transfer.move(
            named_tensors(self.model, self.autocast) if self._transfer is None else self._transfer.tensors()
        )
        gap, gap_before = self._gaps()
        if gap is None:
            raise RolloutError(
                "The server returns no log-probs of prompts (prompt_logprobs), so its new weights cannot be "
                "verified. Set rollout.weights=fixed, or use a vLLM that returns them."
            )
        self._refuse_wrong_weights(gap, gap_before)
        metrics = {"sync/copy_s": moved.write_s, "sync/load_s": moved.load_s, "sync/bytes": float(moved.num_bytes)}
        note = f"{moved.num_tensors} tensors, {moved.num_bytes / MIB:.1f} MiB to the server"
        return SyncResult(note, metrics | {"sync/probe_gap_nats": gap})

    def _support_first(self) -> SyncResult:
        """Work of a process for the first one, which sends the weights."""
        if self._transfer is not None:
            for _ in self._transfer.tensors():
                pass
            self.model.eval()
            self.parts.probe.trainer_log_probs(self.model, self.autocast)  # a forward pass needs all siblings
        return SyncResult("the first process gives it the weights")

    def close(self) -> None:
        self.parts.client.close()
        if self.parts.transfer is not None:
            self.parts.transfer.close()

    @torch.no_grad()
    def _trainers_log_probs(self, rows: DataProto, width: int) -> Tensor:
        """Log-probs [B width] of the responses, computed by the training model in passes of rows with similar
        lengths."""
        self.model.eval()
        device, log_probs = compute_device(self.model), torch.zeros(len(rows), width)
        lengths = rows["attention_mask"].sum(dim=1).tolist()
        with weights_gathered(self.model):  # processes may have different numbers of passes
            for part in micro_batches(lengths, max(MICRO_BATCH_TOKENS, max(lengths, default=1))):
                inputs = {x: rows[x][part].to(device) for x in ("input_ids", "attention_mask", "position_ids")}
                responses = rows["responses"][part].to(device)
                with computing_in(self.autocast, self.model):
                    logits = response_positions(self.model(**inputs, use_cache=False).logits, responses.shape[1])
                scores = log_probs_of(logits, responses, self.options.temperature)
                log_probs[part, : responses.shape[1]] = scores.float().cpu()
        release_gathered(self.model)
        return log_probs

    def _gaps(self) -> tuple[float | None, float | None]:
        """Mean distance between the server's log-probs and the trainer's: its current ones, and those of the last
        sync."""
        theirs = self.parts.probe.server_log_probs()
        if theirs is None:
            return None, None
        self.model.eval()
        now, before = self.parts.probe.trainer_log_probs(self.model, self.autocast), self._before
        self._before = now
        return float(np.abs(theirs - now).mean()), None if before is None else float(np.abs(theirs - before).mean())

    def _allowed_nats(self) -> float:
        """Largest distance, in nats, between log-probs of fixed text that rounding explains."""
        name = self.autocast or str(self.model.dtype).removeprefix("torch.")
        return self.options.max_gap_nats or ALLOWED_NATS.get(name, ALLOWED_NATS["float32"])

    def _compute_type(self) -> str | None:
        """Servers do not report their data type: assume the trainer's, unless a larger distance was seen or is
        allowed."""
        if self.parts.source == "trainer":
            return None
        seen = self.options.max_gap_nats or self.parts.gap_nats
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
            "tensor: vLLM on a CPU keeps an old output head that is tied to the embeddings (rollout=vllm does not)."
        )
        raise RolloutError(
            f"The server at {self.parts.client.endpoint.base_url} does not hold the trainer's weights after a reload: "
            f"log-probs of fixed text differ by {gap:.3g} nats on average, where {allowed:g} may be rounding. {likely}"
        )
