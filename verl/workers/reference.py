"""The reference: the frozen policy of the KL penalty, or the teacher of distillation."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ClassVar

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from verl.algorithms.distillation import CANDIDATES
from verl.component import BuildContext, Description, component
from verl.engines.chunked_logprobs import token_log_probs
from verl.engines.engine import TrainingEngine
from verl.engines.parallel_dims import Parallelism
from verl.engines.sharding import Sharding
from verl.errors import faults_below
from verl.model_paths.check import paths_for
from verl.model_paths.micro_batch import MicroBatch
from verl.models.heads import LMHead
from verl.models.lora import adapter_off
from verl.models.pretrained import ModelSource
from verl.protocol import DataProto
from verl.protocol.dispatch import by_rows, on_all
from verl.utils.memory import release_cached
from verl.workers.actor import Actor
from verl.workers.base import TrainedWorker, load_unsharded
from verl.workers.first_batch_check import FirstBatchCheck


@component
class Reference(Description):
    """The frozen policy that the KL penalty is relative to, or the teacher of distillation.

    Args:
        model: its weights; null uses the actor's initial weights. If the actor trains a LoRA adapter, null costs no
            memory: the reference is the actor with its adapter disabled.
        micro_batch_tokens: tokens of one forward pass, padding included.
        sharding: sharding of this role; null for that of the run. A reference that is the actor has the actor's.
    Attributes:
        precompute: see `PrecomputedReference`.
    """

    model: ModelSource | None = None
    micro_batch_tokens: PositiveInt = 16384
    sharding: Sharding | None = None
    precompute: ClassVar[bool] = False

    def start(
        self,
        context: BuildContext,
        parallel: Parallelism,
        actor: Actor,
        running: TrainedWorker | None,
        temperature: float,
        num_candidates: int = 0,
    ) -> ReferenceWorker:
        """Load the weights, or use the actor's without its LoRA adapter if it runs in this process.

        Args:
            num_candidates: see `ReferenceWorker`.
        """
        if self.model is None and actor.lora is not None and running is not None:
            model = running.engine.model
            return ReferenceWorker(self._engine(model, parallel, actor), temperature, lambda: adapter_off(model))
        with faults_below("actor.model" if self.model is None else "reference.model"):
            model = load_unsharded(self.model or actor.model, "causal_lm", context.device, parallel)
        model.requires_grad_(False)
        paths_for(model, context.row_tokens or 1, "reference.model", shares_tokens=parallel.shares_tokens)
        parallel.shard_model(model, actor.decided_autocast)
        worker = ReferenceWorker(self._engine(model, parallel, actor), temperature)
        if num_candidates:
            worker.num_tokens = len(context.tokenizer)
            worker.num_candidates = min(num_candidates, worker.num_tokens)
        return worker

    def _engine(self, model: nn.Module, parallel: Parallelism, actor: Actor) -> TrainingEngine:
        """An engine with the actor's compute settings, so that equal weights have a KL of zero."""
        return TrainingEngine(
            model, parallel, self.micro_batch_tokens, autocast=actor.decided_autocast, packing=actor.packing
        )


@component
class PrecomputedReference(Reference):
    """A reference for preference training that computes the log-probs of all rows before the first step and is then
    freed; checkpoints hold the log-probs."""

    precompute: ClassVar[bool] = True


class ReferenceWorker:
    """The running reference.

    Args:
        frozen: context in which the engine's model is the reference.
    Attributes:
        num_candidates: number of likeliest tokens returned for each response token; 0 for none.
        num_tokens: size of the vocabulary; a model's logits beyond it are not candidates.
    """

    def __init__(
        self,
        engine: TrainingEngine,
        temperature: float,
        frozen: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ):
        self.engine, self.temperature, self.frozen = engine, temperature, frozen
        self.num_candidates, self.num_tokens = 0, 0
        self.head = LMHead(engine.model)
        self.first_batch = FirstBatchCheck.of_tokens("reference.model", engine, self.head, temperature)

    @by_rows
    def compute_log_probs(self, batch: DataProto) -> DataProto:
        """`ref_log_probs` [B T]; with K candidates also `ref_candidates` and `ref_candidate_log_probs` [B T K]."""
        with self.frozen():
            self.first_batch.check(batch)
            scores = self.engine.infer(batch, self.micro_batch_scores)
        for name in CANDIDATES if self.num_candidates and scores else ():
            scores[name] = torch.stack([scores.pop(f"{name}.{k}") for k in range(self.num_candidates)], dim=-1)
        return DataProto.from_dict(scores)

    @on_all
    def free(self) -> None:
        """Release the model; log-probs cannot be computed afterwards."""
        device = self.engine.device
        del self.engine, self.head, self.first_batch
        gc.collect()
        release_cached(device)

    def micro_batch_scores(self, model: nn.Module, micro: MicroBatch) -> dict[str, Tensor]:
        """Log-probs of the reference policy in nats, [B T], and each candidate k as a separate field `NAME.K`."""
        scores = token_log_probs(
            model, self.head, micro, self.temperature, top_k=self.num_candidates, num_tokens=self.num_tokens
        )
        columns = {"ref_log_probs": scores.log_probs}
        for name, x in zip(CANDIDATES, (scores.candidates, scores.candidate_log_probs), strict=True):
            columns |= {f"{name}.{k}": part for k, part in enumerate(() if x is None else x.unbind(dim=-1))}
        return columns
