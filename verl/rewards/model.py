"""Rewards by a model: any sequence-classification model of Hugging Face, whatever its tokenizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from verl.component import BuildContext
from verl.errors import ConfigError, faults_below
from verl.model_paths.classifier import text_batches_for
from verl.models.heads import RewardHeadModel, label_fault
from verl.models.pretrained import Pretrained
from verl.ops.batching import micro_batches
from verl.protocol import DataProto
from verl.rewards.base import Rating, Reward, RewardDescription, texts_of
from verl.rewards.reading import Form, Reader, Reading, chosen_form
from verl.rewards.results import checked_scores
from verl.rewards.running_norm import RunningNorm
from verl.utils.progress import report


@dataclass(frozen=True, kw_only=True)
class RewardModel(RewardDescription):
    """What a reward model says of the prompt with its response.

    It lives in the trainer's process, or where `trainer.placement` puts the role `rm`.

    Args:
        model: a sequence-classification model, its dtype and its tokenizer.
        label: whose logit is the score, for a model with several.
        reads: `auto` gives it the ids of the policy if the two tokenizers and chat templates are equal, else the
            conversation if its tokenizer has a chat template, else prompt and response as one text. Or one of
            `tokens`, `chat`, `text` and `pair` (the two texts of a pair, for encoders trained so).
        max_length: tokens of a row; null for the length of its context.
        truncation: of longer rows: `error` ends the run, `left` cuts off their start and counts them in
            `reward/truncated`.
        micro_batch_tokens: tokens of one forward pass, padding included; changes no result but by rounding.
        normalize: `running` gives scores less the mean and over the standard deviation of all scores of training so
            far, and logs `reward/raw`.
    """

    model: Pretrained
    label: int | None = None
    reads: Form = "auto"
    max_length: int | None = None
    truncation: Literal["error", "left"] = "error"
    micro_batch_tokens: int = 16384
    normalize: Literal["none", "running"] = "none"
    is_model: ClassVar[bool] = True

    def faults(self) -> Iterator[str]:
        if (fault := self.model.classifier_fault()) is not None:
            yield f"model.{fault}"
        elif (labels := self.model.labels()) is not None and (fault := label_fault(self.label, labels)) is not None:
            yield fault
        elif self.label is not None and self.label < 0:
            yield f"label is {self.label}: must not be negative."
        if self.max_length is not None and self.max_length < 2:
            yield f"max_length is {self.max_length}: must be at least 2, or null for the context of the model."
        if self.micro_batch_tokens < 1:
            yield f"micro_batch_tokens is {self.micro_batch_tokens}: must be at least 1."

    def build(self, context: BuildContext) -> ModelReward:
        with faults_below("model"):
            tokenizer = self.model.load_tokenizer()
        form = chosen_form(self.reads, tokenizer, context.tokenizer)
        with faults_below("model"):
            classifier = self.model.load_classifier(context.device)
        names = [str(name) for name in classifier.config.id2label.values()]
        if (fault := label_fault(self.label, names)) is not None:
            raise ConfigError(fault)
        reader = Reader(tokenizer, form, self.max_length or _context_of(classifier, tokenizer), self.truncation)
        model = RewardHeadModel(classifier, self.label, tokenizer.pad_token_id or 0)
        return ModelReward(model, reader, self.micro_batch_tokens, normalize=self.normalize == "running")


class NormalisedReward(Reward):
    """Base of rewards by a model, wherever it runs: its scores, normalised by those of training so far or as they are.

    Attributes:
        norm: what the scores are normalised by, or None.
    """

    def __init__(self, normalize: bool):
        self.norm = RunningNorm() if normalize else None
        self._learns = True

    @property
    def producer(self) -> Callable:
        return self.rate_batch

    def raw(self, batch: DataProto) -> Rating:
        """What the model says, with `truncated` where rows may be cut."""
        raise NotImplementedError

    def rate_batch(self, batch: DataProto) -> Rating:
        """Score every row; `parts` has `raw` where scores are normalised."""
        rating = self.raw(batch)
        if self.norm is None or not len(batch):
            return rating
        if self._learns:
            self.norm.update(rating.scores)
        return Rating(self.norm(rating.scores), {"raw": rating.scores, **rating.parts})

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        before, self._learns = self._learns, False
        try:
            yield
        finally:
            self._learns = before

    def reset_stats(self) -> None:
        if self.norm is not None:
            self.norm.reset()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.norm is None else self.norm.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.norm is not None and self.norm.state_dict().keys() <= state.keys():  # else another kind of reward's
            self.norm.load_state_dict(state)


class ModelReward(NormalisedReward):
    """The running form of `RewardModel`, of any module that returns `scores` [B] for `input_ids`, `attention_mask`."""

    def __init__(self, model: torch.nn.Module, reader: Reader, micro_batch_tokens: int, *, normalize: bool = False):
        super().__init__(normalize)
        self.model: torch.nn.Module | None = model.eval().requires_grad_(False)
        self.reader, self.micro_batch_tokens = reader, micro_batch_tokens
        self.device = next(model.parameters()).device

    def raw(self, batch: DataProto) -> Rating:
        prompts, responses, _ = texts_of(batch)
        if not len(batch):
            return Rating(np.zeros(0))
        reading = self.reader(batch, self.producer)
        scores = checked_scores(self._scores(reading), prompts, responses, self.producer)
        parts = {"truncated": reading.was_cut.astype(float)} if self.reader.truncation == "left" else {}
        return Rating(scores, parts)

    @torch.no_grad()
    def _scores(self, reading: Reading) -> Tensor:
        """[B] float64, in the order of the rows; micro-batches are cut over rows sorted by length."""
        assert self.model is not None, "the reward is closed"
        scores = torch.empty(len(reading.ids), dtype=torch.float64)
        for rows in self._batches([len(ids) for ids in reading.ids]):
            chosen = rows.tolist()
            inputs = {"input_ids": _padded([reading.ids[row] for row in chosen])}
            inputs["attention_mask"] = _padded([[1] * len(reading.ids[row]) for row in chosen])
            if reading.types is not None:
                inputs["token_type_ids"] = _padded([reading.types[row] for row in chosen])
            inputs = {name: x.to(self.device) for name, x in inputs.items()}
            scores[rows] = self.model(**inputs).scores.double().cpu()
            report()
        return scores

    def _batches(self, lengths: list[int]) -> list[Tensor]:
        """Texts that are scored beside each other: by length, and of one length where others would change a score."""
        if text_batches_for(self.model, max(lengths)) == "padded":
            return micro_batches(lengths, self.micro_batch_tokens)
        sizes = torch.tensor(lengths)
        alike = [(sizes == length).nonzero()[:, 0] for length in sizes.unique()]
        return [kind[rows] for kind in alike for rows in micro_batches(sizes[kind], self.micro_batch_tokens)]

    def close(self) -> None:
        """Let go of the weights."""
        self.model = None


def _padded(rows: list[list[int]]) -> Tensor:
    """[b S] int64, zeros on the right; the model puts its own pad token there."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def _context_of(classifier: Any, tokenizer: Any) -> int | None:
    """Tokens that a model can read. Tokenizers know of places that are taken, as RoBERTa's first two are."""
    config = classifier.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    known = [length for length in (positions, tokenizer.model_max_length) if length and 0 < length < 10**9]
    return min(known, default=None)
