"""Responses of the next step, drawn while this one trains: one step of sampling ahead of the weights.

step k      take(k) ── begin(k+1) ── score, update ── collect(k+1) ── sync
engine                 └────── draws k+1 with the weights before ──┘
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from verl.algorithms.algorithm import Algorithm
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest, Rollout

log = logging.getLogger(__name__)


class RolloutAhead:
    """The one batch that is drawn ahead.

    Weights may change only after `collect`, for the engine draws with those it has. What was drawn is part of a
    checkpoint: it came from weights that no longer exist.

    Args:
        actor: the handle of a role whose engine draws beside training.
    """

    def __init__(self, actor: Any):
        self._actor = actor
        self._asked: tuple[DataProto, GenerationRequest] | None = None
        self._drawn: DataProto | None = None
        self._is_loaded = False  # what was drawn comes from a checkpoint

    def begin(self, prompts: DataProto, request: GenerationRequest) -> None:
        """Have the engine begin; returns at once."""
        assert self._asked is None
        assert self._drawn is None
        self._actor.begin_generate(prompts, request).result()
        self._asked = prompts, request

    def collect(self) -> None:
        """Wait for what was begun. May be called again, to no effect."""
        if self._asked is not None:
            asked, self._asked = self._asked, None
            self._drawn, self._is_loaded = self._actor.finish_generate(*asked).result(), False

    def take(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        """The responses to these prompts: drawn ahead, or drawn now where nothing was."""
        self.collect()
        drawn, self._drawn = self._drawn, None
        if drawn is not None:
            wanted = prompts.batch["prompt_ids"].repeat_interleave(request.num_samples)
            if wanted.equal(drawn.batch["prompt_ids"]):
                return drawn
            assert self._is_loaded, "what was drawn ahead belongs to another batch"
            log.warning("What the checkpoint holds as drawn ahead is of a batch of another size: it is drawn anew.")
        return self._actor.generate(prompts, request).result()

    def state(self) -> dict[str, Tensor]:
        """What was drawn and not yet trained on; empty if nothing."""
        self.collect()
        return {} if self._drawn is None else dict(self._drawn.batch)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on with what a checkpoint holds, in place of what was begun or drawn here.

        It is of use where the next batch has its prompts; after a change of the size of a batch it has not.
        """
        self.collect()
        self._drawn, self._is_loaded = DataProto.from_dict(dict(tensors)) if tensors else None, True


def ahead_faults(rollout: Rollout, algorithm: Algorithm) -> Iterator[str]:
    """Why a run may not draw ahead."""
    said = "trainer.rollout_ahead is 1"
    if not rollout.runs_ahead:
        yield (
            f"{said}: {type(rollout).__name__} samples with the very tensors that train, so sampling would race the "
            "optimizer. Set rollout=vllm, or trainer.rollout_ahead=0."
        )
    if algorithm.correction is None:
        yield (
            f"{said}: responses come from weights that are one step older, which only importance weights make up for. "
            "Set algorithm.correction={_target_:verl.algorithms.importance_sampling.TruncatedIS}, or "
            "trainer.rollout_ahead=0."
        )
    if algorithm.selection is not None:
        yield f"{said}: algorithm.selection draws further batches within a step. Set trainer.rollout_ahead=0."
    if algorithm.needs_greedy_baseline:
        yield f"{said}: the greedy baseline would be that of other weights. Set trainer.rollout_ahead=0."
