"""The queue between generation and training. Depth 1 is one-step-off-policy rollout: generate batch k+1 while training
on batch k.

step k      take(k) ── begin(k+1) ── score, update ── collect(k+1) ── sync
engine                 └────── draws k+1 with the weights before ──┘

`LengthPredictor` estimates the response length of each prompt, to balance the load of processes that generate in
parallel. The estimate for a prompt is its last length; for a new prompt, the mean of all others. A response does not
depend on the process that generates it, but a resumed run must distribute prompts as the original one would, so the
lengths are part of a checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.algorithm import Algorithm
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest, Rollout

log = logging.getLogger(__name__)


class RolloutPipeline:
    """The batches between generation and training.

    With depth 1 the responses to the next batch are generated while the present one is trained on. The engine's weights
    must not change between `begin` and `collect`. Responses that were generated ahead are part of a checkpoint, because
    the weights that generated them no longer exist.

    Args:
        actor: handle of the role that generates.
        depth: batches that are generated ahead: 0, or 1 for an engine that can generate during training.
    """

    def __init__(self, actor: Any, depth: int):
        self._actor, self.depth = actor, depth
        self._begun: tuple[DataProto, GenerationRequest] | None = None
        self._ahead: DataProto | None = None
        self._is_loaded = False  # the responses generated ahead come from a checkpoint

    def begin(self, prompts: DataProto, request: GenerationRequest) -> None:
        """Start generating for the next batch; returns immediately. Does nothing with depth 0."""
        if self.depth:
            assert self._begun is None
            assert self._ahead is None
            self._actor.begin_generate(prompts, request).result()
            self._begun = prompts, request

    def collect(self) -> None:
        """Wait for the responses of `begin`. Idempotent."""
        if self._begun is not None:
            begun, self._begun = self._begun, None
            self._ahead, self._is_loaded = self._actor.finish_generate(*begun).result(), False

    def generate(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        """New responses, beside the pipeline."""
        self.collect()
        return self._actor.generate(prompts, request).result()

    def take(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        """The responses to these prompts: those generated ahead, or new ones if there are none."""
        self.collect()
        rows, self._ahead = self._ahead, None
        if rows is not None:
            expected = prompts.batch["prompt_ids"].repeat_interleave(request.num_samples)
            if expected.equal(rows.batch["prompt_ids"]):
                return rows
            assert self._is_loaded, "the responses generated ahead belong to another batch"
            log.warning(
                "The responses generated ahead in the checkpoint are for another batch size; they are generated again."
            )
        return self.generate(prompts, request)

    def state_dict(self) -> dict[str, Tensor]:
        """The responses that were not trained on yet; empty if there are none."""
        self.collect()
        return {} if self._ahead is None else dict(self._ahead.batch)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the current responses by those of a checkpoint.

        They are used only if the next batch has the same prompts, that is, if the batch size was not changed.
        """
        self.collect()
        self._ahead, self._is_loaded = DataProto.from_dict(dict(state)) if state else None, True


def ahead_faults(rollout: Rollout, algorithm: Algorithm) -> Iterator[str]:
    """Faults: why a run cannot generate ahead."""
    setting = "trainer.rollout_ahead is 1"
    if not rollout.runs_ahead:
        yield (
            f"{setting}: {type(rollout).__name__} generates with the tensors that are being trained, so generation "
            "would race with the optimizer. Set rollout=vllm, or trainer.rollout_ahead=0."
        )
    if algorithm.correction is None:
        yield (
            f"{setting}: responses come from weights that are one step older, which requires importance weights. "
            "Set algorithm.correction={_target_:verl.algorithms.importance_sampling.TruncatedIS}, or "
            "trainer.rollout_ahead=0."
        )
    if algorithm.selection is not None:
        yield f"{setting}: algorithm.selection draws further batches within a step. Set trainer.rollout_ahead=0."
    if algorithm.needs_greedy_baseline:
        yield f"{setting}: the greedy baseline would be that of other weights. Set trainer.rollout_ahead=0."


MOST = 1 << 16  # prompts that are remembered, those seen last


class LengthPredictor:
    """Mean lengths of responses, in tokens, by the id of their prompt."""

    def __init__(self):
        self._means: dict[int, float] = {}

    def note(self, rows: DataProto) -> None:
        """Record the lengths of responses: `prompt_ids` [B], `response_mask` [B T]."""
        ids, index = rows["prompt_ids"].unique(return_inverse=True)
        lengths = rows["response_mask"].sum(dim=1).double()
        means = torch.zeros(len(ids), dtype=torch.float64).scatter_reduce(0, index, lengths, "mean", include_self=False)
        for prompt, mean in zip(ids.tolist(), means.tolist(), strict=True):
            self._means.pop(prompt, None)
            self._means[prompt] = mean
        for prompt in list(self._means)[: max(0, len(self._means) - MOST)]:
            del self._means[prompt]

    def beside(self, prompts: DataProto, num_samples: int) -> DataProto:
        """The prompts [B] with `expected_tokens` [B], the expected total length of each prompt's responses."""
        others = sum(self._means.values()) / max(1, len(self._means))
        means = [self._means.get(prompt, others) for prompt in prompts["prompt_ids"].tolist()]
        expected = (torch.tensor(means, dtype=torch.float64) * num_samples).round().long()
        return prompts.union(DataProto.from_dict({"expected_tokens": expected}))

    def state_dict(self) -> dict[str, list[Any]]:
        """The known lengths, the most recent prompt last."""
        return {"prompts": list(self._means), "means": list(self._means.values())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the lengths; empty for checkpoints of versions that did not save them."""
        if state:
            self._means = dict(zip(state["prompts"], state["means"], strict=True))
