"""Rewards by a model: any sequence-classification model of Hugging Face, whatever its tokenizer.

What it reads of a batch:

    tokens   the ids of the policy, as they are
    chat     the messages of the prompt and the response as the assistant's, through the chat template
    text     prompt and response as one text
    pair     prompt and response as the two texts of a pair, with what the tokenizer puts between them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor

from verl.component import BuildContext, component
from verl.data.chat_template import pinned_date
from verl.errors import ConfigError, faults_below
from verl.model_paths.classifier import text_batches_for
from verl.models.heads import RewardHeadModel, label_fault
from verl.models.interfaces import reads_alike
from verl.models.pretrained import Pretrained
from verl.ops.batching import micro_batches
from verl.protocol import DataProto
from verl.rewards.base import RewardDescription, RewardResult, texts_of
from verl.rewards.normalization import NormalisedReward
from verl.rewards.validation import checked_scores, reward_error
from verl.utils.memory import make_current, release_cached
from verl.utils.progress import report

RewardInput = Literal["auto", "tokens", "chat", "text", "pair"]


@dataclass(frozen=True)
class RewardTokens:
    """B texts as token ids.

    Attributes:
        ids: by row.
        types: by row, which text of a pair each token belongs to, for tokenizers that tell; else None.
        was_cut: [B] bool, whether the start of the row was cut off.
    """

    ids: list[list[int]]
    types: list[list[int]] | None
    was_cut: np.ndarray


def chosen_form(form: RewardInput, tokenizer: Any, actors: Any) -> RewardInput:
    """What `auto` means for two tokenizers; any other form is checked against them.

    Args:
        actors: the tokenizer of the policy, or None where it is not known.
    Raises:
        ConfigError: the form needs a tokenizer that is the policy's, or a chat template, and there is none.
    """
    is_same = actors is not None and reads_alike(tokenizer, actors)
    template = getattr(tokenizer, "chat_template", None)
    if form == "tokens" and not is_same:
        raise ConfigError("reads is tokens: the tokenizer of the reward model is not the actor's. Set reads=auto.")
    if form == "chat" and template is None:
        raise ConfigError("reads is chat: the tokenizer of the reward model has no chat template. Set reads=text.")
    if form != "auto":
        return form
    if is_same and template == getattr(actors, "chat_template", None):
        return "tokens"
    return "text" if template is None else "chat"


class RewardTokenizer:
    """Reads batches for one reward model.

    Args:
        tokenizer: the reward model's.
        form: any but `auto`.
        max_length: tokens that the model can read, or None.
        truncation: of longer rows: `error`, or `left` to cut off their start.
    """

    def __init__(self, tokenizer: Any, form: RewardInput, max_length: int | None, truncation: Literal["error", "left"]):
        assert form != "auto"
        self.tokenizer, self.form, self.max_length, self.truncation = tokenizer, form, max_length, truncation

    def __call__(self, batch: DataProto, producer: Callable) -> RewardTokens:
        """Read every row of a batch.

        Raises:
            RewardError: a row is too long, has no tokens, or is refused by the chat template; names it.
        """
        prompts, responses, columns = texts_of(batch)
        messages = columns.get("prompt_messages") or [None] * len(prompts)
        if self.form == "tokens":
            ids, types = _tokens_of(batch), None
        elif self.form == "chat":
            texts = [self._rendered(row, prompts, responses, messages[row], producer) for row in range(len(prompts))]
            ids, types = self._encoded(texts, add_special_tokens=False)
        else:
            asked = [_plain(prompt, chat) for prompt, chat in zip(prompts, messages, strict=True)]
            ids, types = self._read_texts(asked, responses)
        lengths = np.array([len(row) for row in ids])
        for row in np.flatnonzero(lengths == 0):
            raise reward_error("at least one token to read", "none", producer, prompts, responses, int(row))
        was_cut = lengths > (np.inf if self.max_length is None else self.max_length)
        if self.truncation == "error" and was_cut.any():
            row = int(lengths.argmax())
            expected = f"at most {self.max_length} tokens, the max_length of the reward model (or set truncation=left)"
            raise reward_error(expected, f"{lengths[row]} tokens", producer, prompts, responses, row)
        if was_cut.any():
            self._cut(ids, types, was_cut)
        return RewardTokens(ids, types, was_cut)

    def _read_texts(self, prompts: list[str], responses: list[str]) -> tuple[list[list[int]], list[list[int]] | None]:
        if self.form == "pair":
            return self._encoded(prompts, responses)
        return self._encoded([prompt + response for prompt, response in zip(prompts, responses, strict=True)])

    def _encoded(self, *texts: list[str], **options: Any) -> tuple[list[list[int]], list[list[int]] | None]:
        encoded = self.tokenizer(*texts, **options)
        return [list(row) for row in encoded["input_ids"]], encoded.get("token_type_ids")

    def _cut(self, ids: list[list[int]], types: list[list[int]] | None, was_cut: np.ndarray) -> None:
        """Cut the start off, but not the tokens that the tokenizer puts before every text, such as [CLS]."""
        assert self.max_length is not None
        for row in np.flatnonzero(was_cut):
            opening = self._opening(ids[row])
            kept = [*range(opening), *range(len(ids[row]) - self.max_length + opening, len(ids[row]))]
            ids[row] = [ids[row][place] for place in kept]
            if types is not None:
                types[row] = [types[row][place] for place in kept]

    def _opening(self, ids: list[int]) -> int:
        return int(ids[0] in (self.tokenizer.cls_token_id, self.tokenizer.bos_token_id))

    def _rendered(self, row: int, prompts: list, responses: list, messages: Any, producer: Callable) -> str:
        turns = [*(messages or [{"role": "user", "content": prompts[row]}])]
        turns.append({"role": "assistant", "content": responses[row]})
        try:
            return self.tokenizer.apply_chat_template(turns, tokenize=False, **pinned_date(self.tokenizer))
        except Exception as error:  # a template raises whatever it likes
            roles = ", ".join(str(turn["role"]) for turn in turns)
            expected = f"a chat template that takes the roles {roles} (or set reads=text)"
            raise reward_error(expected, f"{error}", producer, prompts, responses, row) from error


def _tokens_of(batch: DataProto) -> list[list[int]]:
    mask = batch.batch["attention_mask"].bool()
    return [row[kept].tolist() for row, kept in zip(batch.batch["input_ids"].cpu(), mask.cpu(), strict=True)]


def _plain(prompt: str, messages: Any) -> str:
    """A prompt without the marks of the policy's chat template, which another tokenizer does not know."""
    return prompt if not messages else "".join(f"{message['content']}\n" for message in messages)


@component
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
    label: NonNegativeInt | None = None
    reads: RewardInput = "auto"
    max_length: Annotated[int, Field(ge=2)] | None = None
    truncation: Literal["error", "left"] = "error"
    micro_batch_tokens: PositiveInt = 16384
    normalize: Literal["none", "running"] = "none"
    is_model: ClassVar[bool] = True

    def faults(self) -> Iterator[str]:
        if (fault := self.model.classifier_fault()) is not None:
            yield f"model.{fault}"
        elif (labels := self.model.labels()) is not None and (fault := label_fault(self.label, labels)) is not None:
            yield fault

    def build(self, context: BuildContext) -> ModelReward:
        with faults_below("model"):
            tokenizer = self.model.load_tokenizer()
        form = chosen_form(self.reads, tokenizer, context.tokenizer)
        with faults_below("model"):
            make_current(context.device)
            classifier = self.model.load_classifier(context.device)
        names = [str(name) for name in classifier.config.id2label.values()]
        if (fault := label_fault(self.label, names)) is not None:
            raise ConfigError(fault)
        reader = RewardTokenizer(
            tokenizer, form, self.max_length or _context_of(classifier, tokenizer), self.truncation
        )
        model = RewardHeadModel(classifier, self.label, tokenizer.pad_token_id or 0)
        return ModelReward(model, reader, self.micro_batch_tokens, normalize=self.normalize == "running")


class ModelReward(NormalisedReward):
    """The running form of `RewardModel`, of any module that returns `scores` [B] for `input_ids`, `attention_mask`."""

    def __init__(
        self, model: torch.nn.Module, reader: RewardTokenizer, micro_batch_tokens: int, *, normalize: bool = False
    ):
        super().__init__(normalize)
        self.model: torch.nn.Module | None = model.eval().requires_grad_(False)
        self.reader, self.micro_batch_tokens = reader, micro_batch_tokens
        self.device = next(model.parameters()).device

    def raw(self, batch: DataProto) -> RewardResult:
        prompts, responses, _ = texts_of(batch)
        if not len(batch):
            return RewardResult(np.zeros(0))
        reading = self.reader(batch, self.producer)
        scores = checked_scores(self._scores(reading), prompts, responses, self.producer)
        parts = {"truncated": reading.was_cut.astype(float)} if self.reader.truncation == "left" else {}
        return RewardResult(scores, parts)

    @torch.no_grad()
    def _scores(self, reading: RewardTokens) -> Tensor:
        """[B] float64, in the order of the rows; micro-batches are cut over rows sorted by length."""
        assert self.model is not None, "the reward is closed"
        scores = torch.empty(len(reading.ids), dtype=torch.float64, device=self.device)
        for rows in self._batches([len(ids) for ids in reading.ids]):
            chosen = rows.tolist()
            inputs = {"input_ids": _padded([reading.ids[row] for row in chosen])}
            inputs["attention_mask"] = _padded([[1] * len(reading.ids[row]) for row in chosen])
            if reading.types is not None:
                inputs["token_type_ids"] = _padded([reading.types[row] for row in chosen])
            inputs = {name: x.to(self.device, non_blocking=True) for name, x in inputs.items()}
            scores[rows.to(self.device, non_blocking=True)] = self.model(**inputs).scores.double()
            report()
        scores = scores.cpu()
        release_cached(self.device)  # it may live in another process than the engine that wakes next
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
