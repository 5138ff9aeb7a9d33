"""Preference learning: workers that score rows and train on one coefficient per row.

A loss of pairs needs only one coefficient per row (`verl.algorithms.preference_losses`), so the two responses of a pair
may be in different micro-batches and processes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from verl.component import BuildContext
from verl.engines.chunked_logprobs import token_log_probs
from verl.engines.engine import TrainingEngine
from verl.engines.parallel_dims import Parallelism
from verl.model_paths.micro_batch import MicroBatch
from verl.models.heads import ScoreHeadModel
from verl.ops.masking import LossTotals
from verl.protocol import DataProto
from verl.protocol.dispatch import by_rows, by_rows_to_one
from verl.workers.actor import Actor
from verl.workers.base import TrainedWorker
from verl.workers.critic import state_values
from verl.workers.first_batch_check import FirstBatchCheck
from verl.workers.load_state import RestoreSource
from verl.workers.sft import SFTWorker


class RowScores(TrainedWorker):
    """Base of learners whose loss is a function of one score per row, the sum of its `token_scores`.

    Takes batches of `verl.data.preference_dataset`.
    """

    first_batch: FirstBatchCheck

    def scored_rows(self, batch: DataProto) -> DataProto:
        """The rows with `response_mask`, true where tokens are scored."""
        return batch

    def token_scores(self, model: nn.Module, micro: MicroBatch) -> Tensor:
        """Scores [b t] per token, which are summed to the score of a row; 0 outside the mask."""
        raise NotImplementedError

    @by_rows
    def row_scores(self, batch: DataProto) -> DataProto:
        """`row_scores` [B] float64: log-prob of the response in nats, or the score of a reward model."""
        rows = self.scored_rows(batch)
        self.first_batch.check(rows)
        found = self.engine.infer(rows, lambda model, micro: {"row_scores": self.token_scores(model, micro)})
        return DataProto.from_dict({name: x.double().sum(dim=1) for name, x in found.items()})

    @by_rows_to_one
    def update(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step that minimises the sum over rows of `row_coefs` [B] times `row_scores`."""
        return self.engine.update(self.scored_rows(batch), self.weighted_sum)

    def weighted_sum(self, model: nn.Module, micro: MicroBatch, totals: LossTotals) -> tuple[Tensor, dict[str, Tensor]]:
        """The share of a micro-batch in the sum that `update` minimises."""
        scores = self.token_scores(model, micro)
        return (micro.tensors["row_coefs"].to(scores.dtype)[:, None] * scores).sum(), {}


class PreferenceWorker(RowScores, SFTWorker):
    """A policy under preference optimisation: the score of a row is the log-prob of its response."""

    def token_scores(self, model: nn.Module, micro: MicroBatch) -> Tensor:
        return token_log_probs(model, self.head, micro).log_probs


class RewardModelWorker(RowScores):
    """A reward model: the score of a row is the score at its last token."""

    def __init__(self, engine: TrainingEngine, tokenizer: Any):
        super().__init__(engine, tokenizer)
        self.first_batch = FirstBatchCheck("actor.model", engine, self._probe, self._probe)

    @classmethod
    def start(
        cls,
        role: Actor,
        context: BuildContext,
        parallel: Parallelism,
        total_updates: int,
        restore: RestoreSource | None = None,
    ) -> RewardModelWorker:
        """Load the backbone, and the head from a checkpoint or an initial reward model if there is one. With LoRA the
        head is trained in full.

        Raises:
            ConfigError: transformers has no classification model of the family with a linear head.
        """
        backbone = role.load("backbone", context.device, restore, "reward_model", parallel, path="actor")
        if backbone.config.get_text_config().pad_token_id is None:
            backbone.config.get_text_config().pad_token_id = context.tokenizer.pad_token_id
        model = ScoreHeadModel(backbone)
        directory = role.model.directory() if restore is None else restore.plain("reward_model")
        if directory is not None and model.head_in(directory) is not None:
            model.load(directory)
        engine = role.engine(model, context, parallel, total_updates, restore, "reward_model", path="actor")
        return cls(engine, context.tokenizer)

    def scored_rows(self, batch: DataProto) -> DataProto:
        return scored_at_end(batch)

    def token_scores(self, model: nn.Module, micro: MicroBatch) -> Tensor:
        return state_values(model, micro)

    def _probe(self, model: nn.Module, micro: MicroBatch) -> dict[str, Tensor]:
        return {"scores": state_values(model, micro, probe=True)}


def scored_at_end(batch: DataProto) -> DataProto:
    """Rows with one appended token, the only one in `response_mask`: it is predicted from the state after the whole
    row."""
    x = dict(batch.batch)
    column = torch.arange(x["responses"].shape[1] + 1)
    lengths = x["response_mask"].sum(dim=1, keepdim=True)
    prompt_width = x["input_ids"].shape[1] - x["responses"].shape[1]

    def widened(name: str) -> Tensor:
        return torch.nn.functional.pad(x[name], (0, 1))

    attention = torch.cat([x["attention_mask"][:, :prompt_width], (column <= lengths).long()], dim=1)
    x |= {name: widened(name) for name in ("input_ids", "responses")}
    x |= {
        "attention_mask": attention,
        "position_ids": (attention.cumsum(dim=1) - 1).clamp_min(0) * attention,
        "response_mask": column == lengths,
    }
    return DataProto.from_dict(x, meta_info=batch.meta_info, ragged=batch.ragged)
