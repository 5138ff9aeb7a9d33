"""Rewards by a model: any sequence-classification model of Hugging Face, with any tokenizer.

Forms of its input:

    tokens   the token ids of the policy
    chat     the messages of the prompt and the response as assistant message, through the chat template
    text     prompt and response as one text
    pair     prompt and response as a text pair, with the separator of the tokenizer
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor

from verl.component import BuildContext, component
from verl.data.chat_template import pinned_date, tokens_around, with_one_start
from verl.errors import ConfigError, faults_below
from verl.model_paths.check import bound_of
from verl.model_paths.families import row_limit
from verl.models.heads import RewardHeadModel, label_fault
from verl.models.interfaces import reads_alike
from verl.models.pretrained import Pretrained
from verl.models.structure import unwrapped
from verl.ops.batching import micro_batches
from verl.protocol import DataProto
from verl.rewards.base import Reward, RewardDescription, RewardResult, checked_scores, reward_error, texts_of
from verl.rewards.normalization import ScaledReward
from verl.utils.memory import make_current, release_cached
from verl.utils.progress import report

log = logging.getLogger(__name__)

RewardInput = Literal["auto", "tokens", "chat", "text", "pair"]


@dataclass(frozen=True)
class RewardTokens:
    """B texts as token ids.

    Attributes:
        ids: by row.
        types: by row, token type ids of a text pair; None for tokenizers without them.
        was_cut: [B] bool, whether the start of the row was truncated.
    """

    ids: list[list[int]]
    types: list[list[int]] | None
    was_cut: np.ndarray


def chosen_form(form: RewardInput, tokenizer: Any, actors: Any) -> RewardInput:
    """Resolve `auto` from the tokenizers, and check any other form against them.

    Args:
        form: the setting `reads`.
        tokenizer: of the reward model.
        actors: the policy's tokenizer; None if unknown.
    Raises:
        ConfigError: `tokens` with a tokenizer other than the policy's, or `chat` without a chat template.
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
    """Tokenises batches for a reward model.

    Args:
        tokenizer: of the reward model.
        form: any but `auto`.
        max_length: the most tokens that the model accepts; None for no limit.
        truncation: longer rows raise an error (`error`) or lose their start (`left`).
    """

    def __init__(self, tokenizer: Any, form: RewardInput, max_length: int | None, truncation: Literal["error", "left"]):
        assert form != "auto"
        self.tokenizer, self.form, self.max_length, self.truncation = tokenizer, form, max_length, truncation

    def __call__(self, batch: DataProto, producer: Callable) -> RewardTokens:
        """Tokenise every row of a batch.

        Args:
            batch: responses with their prompts.
            producer: the function that errors name.
        Raises:
            RewardError: a row is too long, has no tokens, or is refused by the chat template; with its number.
        """
        prompts, responses, columns = texts_of(batch)
        messages = columns.get("prompt_messages") or [None] * len(prompts)
        if self.form == "tokens":
            rows = zip(batch.batch["input_ids"].cpu(), batch.batch["attention_mask"].bool().cpu(), strict=True)
            ids, types = [row[selected].tolist() for row, selected in rows], None
        elif self.form == "chat":
            texts = [self._rendered(row, prompts, responses, messages[row], producer) for row in range(len(prompts))]
            ids, types = self._encoded(texts, add_special_tokens=False)
        else:
            questions = [_plain(prompt, chat) for prompt, chat in zip(prompts, messages, strict=True)]
            if self.form == "pair":
                ids, types = self._encoded(questions, responses)
            else:
                ids, types = self._encoded([before + after for before, after in zip(questions, responses, strict=True)])
        if self.form in ("pair", "text"):  # the prompt may be a chat that the actor's tokenizer has rendered
            start = tokens_around(self.tokenizer)[0]
            ids = [with_one_start(row, start) for row in ids]
            types = types and [kinds[len(kinds) - len(row) :] for kinds, row in zip(types, ids, strict=True)]
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

    def _encoded(self, *texts: list[str], **options: Any) -> tuple[list[list[int]], list[list[int]] | None]:
        encoded = self.tokenizer(*texts, **options)
        return [list(row) for row in encoded["input_ids"]], encoded.get("token_type_ids")

    def _cut(self, ids: list[list[int]], types: list[list[int]] | None, was_cut: np.ndarray) -> None:
        """Truncate rows at the start, after the tokens that the tokenizer puts before every text, such as [CLS]."""
        assert self.max_length is not None
        for row in np.flatnonzero(was_cut):
            opening = int(ids[row][0] in (self.tokenizer.cls_token_id, self.tokenizer.bos_token_id))
            positions = [*range(opening), *range(len(ids[row]) - self.max_length + opening, len(ids[row]))]
            ids[row] = [ids[row][position] for position in positions]
            if types is not None:
                types[row] = [types[row][position] for position in positions]

    def _rendered(self, row: int, prompts: list, responses: list, messages: Any, producer: Callable) -> str:
        turns = [*(messages or [{"role": "user", "content": prompts[row]}])]
        turns.append({"role": "assistant", "content": responses[row]})
        try:
            return self.tokenizer.apply_chat_template(turns, tokenize=False, **pinned_date(self.tokenizer))
        except Exception as error:  # a template may raise anything
            roles = ", ".join(str(turn["role"]) for turn in turns)
            expected = f"a chat template that takes the roles {roles} (or set reads=text)"
            raise reward_error(expected, f"{error}", producer, prompts, responses, row) from error


def _plain(prompt: str, messages: Any) -> str:
    """A prompt without the special tokens of the policy's chat template, which another tokenizer does not know."""
    return prompt if not messages else "".join(f"{message['content']}\n" for message in messages)


@component
class RewardModel(RewardDescription):
    """Score each prompt with its response by a reward model.

    Runs in the trainer's process, or in the processes that `trainer.placement` assigns to the role `rm`.

    Args:
        model: a sequence-classification model, its dtype and its tokenizer.
        label: index of the logit that is the score, for a model with several.
        reads: form of the input: `tokens` (the ids of the policy), `chat`, `text` (prompt and response as one text) or
            `pair` (a text pair, for encoders trained that way). `auto` is `tokens` if both tokenizers and chat
            templates are equal, else `chat` if the tokenizer has a template, else `text`.
        max_length: the most tokens of a row; null for the context length of the model.
        truncation: `error` ends the run at a longer row, `left` drops its start and counts it in `reward/truncated`.
        micro_batch_tokens: tokens of one forward pass, padding included; results differ by rounding only.
        normalize: `running` normalises by the mean and standard deviation of all scores of training so far, and logs
            `reward/raw`.
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

    def build(self, context: BuildContext) -> Reward:
        return self.scaled(self.build_unscaled(context))

    def scaled(self, reward: Reward) -> Reward:
        """Wrap this reward, built here or a handle of the role, in normalisation if `normalize` is set."""
        return ScaledReward(reward, has_state=False) if self.normalize == "running" else reward

    def build_unscaled(self, context: BuildContext) -> ModelReward:
        """The reward without normalisation."""
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
        return ModelReward(model, reader, self.micro_batch_tokens)


class ModelReward(Reward):
    """The reward that `RewardModel` builds, around a module that maps `input_ids`, `attention_mask` to `scores` [B]."""

    def __init__(self, model: torch.nn.Module, reader: RewardTokenizer, micro_batch_tokens: int):
        self.model: torch.nn.Module | None = model.eval().requires_grad_(False)
        self.reader, self.micro_batch_tokens = reader, micro_batch_tokens
        self.device = next(model.parameters()).device
        self._pads = True  # whether texts of several lengths may be batched
        self._longest_compared = 0

    def score_batch(self, batch: DataProto) -> RewardResult:
        """Score every response; the part `truncated` if rows may be truncated."""
        prompts, responses, _ = texts_of(batch)
        if not len(batch):
            return RewardResult(np.zeros(0))
        reading = self.reader(batch, self.producer)
        scores = checked_scores(self._scores(reading), prompts, responses, self.producer)
        parts = {"truncated": reading.was_cut.astype(float)} if self.reader.truncation == "left" else {}
        return RewardResult(scores, parts)

    def _scores(self, reading: RewardTokens) -> Tensor:
        """Scores [B] float64, in the order of the rows; micro-batches have rows of similar length."""
        scores = torch.empty(len(reading.ids), dtype=torch.float64, device=self.device)
        for rows in self._batches(reading):
            scores[rows.to(self.device, non_blocking=True)] = self._scores_of(reading, rows.tolist())
            report()
        scores = scores.cpu()
        release_cached(self.device)  # the engine that wakes next may be in another process
        return scores

    @torch.no_grad()
    def _scores_of(self, reading: RewardTokens, rows: list[int]) -> Tensor:
        """Scores [b] float64 of some rows in one forward pass."""
        assert self.model is not None, "the reward has been closed"
        inputs = {"input_ids": _padded([reading.ids[row] for row in rows])}
        inputs["attention_mask"] = _padded([[1] * len(reading.ids[row]) for row in rows])
        if reading.types is not None:
            inputs["token_type_ids"] = _padded([reading.types[row] for row in rows])
        return self.model(**{name: x.to(self.device, non_blocking=True) for name, x in inputs.items()}).scores.double()

    def _batches(self, reading: RewardTokens) -> list[Tensor]:
        """Row indices of each micro-batch, sorted by length; only rows of equal length if padding would change a
        score."""
        lengths = [len(ids) for ids in reading.ids]
        if max(lengths) > self._longest_compared:
            self._compare_with_alone(reading, lengths)
        if self._pads:
            return micro_batches(lengths, self.micro_batch_tokens)
        sizes = torch.tensor(lengths)
        alike = [(sizes == length).nonzero()[:, 0] for length in sizes.unique()]
        return [kind[rows] for kind in alike for rows in micro_batches(sizes[kind], self.micro_batch_tokens)]

    def _compare_with_alone(self, reading: RewardTokens, lengths: list[int]) -> None:
        """Compare the scores of some texts (shortest, median, longest) in one batch with those of each text alone.

        Raises:
            ConfigError: the score of a text depends on other texts in the batch, even at equal length.
        """
        if not isinstance(self.model, RewardHeadModel):  # other modules are not checked
            return
        classifier, self._longest_compared = self.model.classifier, max(lengths)
        by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
        chosen = sorted({by_length[0], by_length[len(lengths) // 2], by_length[-1]}, key=lengths.__getitem__)
        alone = torch.cat([self._scores_of(reading, [row]) for row in chosen])
        again = torch.cat([self._scores_of(reading, [row]) for row in reversed(chosen)]).flip(0)
        together = self._scores_of(reading, chosen)
        alongside = torch.stack([self._scores_of(_with_mirror_image(reading, row), [0, 1])[0] for row in chosen])
        is_number = torch.isfinite(alone)  # other rows are refused when they are read, with their texts
        alone, again, together, alongside = (scores[is_number] for scores in (alone, again, together, alongside))
        if not len(alone):
            return
        bound = bound_of(classifier.dtype, None) * max(1.0, float(alone.abs().max()))
        kind = type(unwrapped(classifier)).__name__
        for other, others in ((again, "that were scored before it"), (alongside, "that are scored with it")):
            if not float((other - alone).abs().max()) <= bound:
                raise ConfigError(f"model is a {kind}: the score of a text depends on the texts {others}.")
        limit, distance = row_limit(classifier.config, None), float((together - alone).abs().max())
        is_beyond = limit is not None and max(lengths) > limit[1]
        if self._pads and (is_beyond or not distance <= bound):
            self._pads = False
            log.warning(
                "%s takes a plain path: texts are scored with others of their length only, since their scores differ "
                "by %.2g next to others.", kind, distance,
            )  # fmt: skip

    def close(self) -> None:
        """Free the weights."""
        self.model = None


def _with_mirror_image(reading: RewardTokens, row: int) -> RewardTokens:
    """A text and another one of the same length, as a batch."""
    ids, types = reading.ids[row], None if reading.types is None else [reading.types[row], reading.types[row][::-1]]
    return RewardTokens([ids, ids[::-1]], types, reading.was_cut[[row, row]])


def _padded(rows: list[list[int]]) -> Tensor:
    """[b S] int64, padded on the right with zeros; the model replaces them by its pad token."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def _context_of(classifier: Any, tokenizer: Any) -> int | None:
    """Context length of a model, or None. The tokenizer's limit counts too: RoBERTa reserves its first two
    positions.
    """
    config = classifier.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    known = [length for length in (positions, tokenizer.model_max_length) if length and 0 < length < 10**9]
    return min(known, default=None)
