"""Base classes of data components, their options, the `DataSplits` that they build, and tokenised rows."""

from __future__ import annotations

import difflib
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar

import numpy as np
import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from verl.component import BuildContext, Description, component
from verl.data.chat_template import FinalAssistant
from verl.data.curriculum import Curriculum
from verl.data.images import ImagesOfRows
from verl.data.readers import DataRows, OnBadRow
from verl.data.sampler import Mixture
from verl.errors import ConfigError
from verl.protocol import DataProto

_log = logging.getLogger(__name__)


class Dataset(Protocol):
    """Tokenised rows, which can be collated into batches in any order."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def collate(self, indices: Sequence[int] | Tensor) -> DataProto:
        """A batch of the rows at `indices`, padded to the longest of them."""
        ...


@component
class PromptSource(Description):
    """Base class of `data=` components for reinforcement learning: builds `DataSplits` of prompts.

    Args:
        curriculum: samples prompts by their pass rates; None to use every row once per epoch.
    Attributes:
        settled_fields: settings whose value is known when the data are read, such as the commit of a branch.
    """

    settled_fields: ClassVar[tuple[str, ...]] = ()

    curriculum: Curriculum | None = None

    def columns(self) -> dict[str, frozenset[str]]:
        """Columns without the prompt, by the setting that names the rows (`train_files`); only for rows whose columns
        are known without reading them all.
        """
        return {}


@component
class TextSource(Description):
    """Base class of `data=` components for supervised fine-tuning: builds `DataSplits` of sequences."""


@component
class PreferenceSource(Description):
    """Base class of `data=` components for preferences: builds `DataSplits` of pairs, or of labelled responses."""


def data_counts(splits: DataSplits) -> dict[str, int]:
    """Count rows, duplicates, and evaluation rows that are also training rows.

    Rows are duplicates if their tokens are equal; other columns are not compared. Empty for data sets without
    `digests`.
    """
    digests = {"train": getattr(splits.train, "digests", None), "eval": getattr(splits.eval, "digests", None)}
    known = {name: row_digests for name, row_digests in digests.items() if row_digests is not None}
    counts = {f"{name}_rows": len(row_digests) for name, row_digests in known.items()}
    counts |= {f"{name}_duplicates": len(row_digests) - len(set(row_digests)) for name, row_digests in known.items()}
    if len(known) == 2:
        trained = set(known["train"])
        counts["eval_rows_in_train"] = sum(digest in trained for digest in known["eval"])
    return counts


def largest_token(splits: DataSplits) -> int:
    """The largest token id of the rows; 0 if the data sets keep them in another way."""
    kept = [x for data in (splits.train, splits.eval) for x in getattr(data, "__dict__", {}).values()]
    return max((x.largest for x in kept if isinstance(x, RaggedTokens)), default=0)


def duplicates_sentence(counts: Mapping[str, int]) -> str | None:
    """A warning about duplicates and overlap in the counts of `data_counts`; None if there are none."""
    sentences = []
    for name, words in (("train", "training"), ("eval", "evaluation")):
        if number := counts.get(f"{name}_duplicates"):
            sentences.append(f"{number} of {counts[f'{name}_rows']} {words} rows repeat another one")
    if number := counts.get("eval_rows_in_train"):
        sentences.append(
            f"{number} of {counts['eval_rows']} evaluation rows are also training rows, so evaluation scores are too "
            "high"
        )
    return f"Data: {'; '.join(sentences)}." if sentences else None


def report_counts(splits: DataSplits) -> dict[str, int]:
    """Return `data_counts`, and log a warning about duplicates and overlap, unless `splits.may_repeat`."""
    counts = data_counts(splits)
    if not splits.may_repeat and (sentence := duplicates_sentence(counts)) is not None:
        _log.warning("%s", sentence)
    return counts


def named_source(data: Any) -> str:
    """The training data of a `data=` component, for messages: its files if it has any."""
    files = getattr(data, "train_files", ())
    return (
        f"the training data ({', '.join(map(str, files[:3]))}{', ...' if files[3:] else ''})"
        if files
        else ("the training data")
    )


Split = Literal["train", "eval"]
SPLITS: tuple[Split, ...] = ("train", "eval")


@dataclass(frozen=True)
class DataSplits:
    """Training and evaluation rows of a run.

    Attributes:
        train: rows to train on.
        eval: rows to evaluate on; None without evaluation.
        mixture: the parts of `train` and their shares of an epoch; None to visit every row once.
        may_repeat: rows were sampled from a distribution, so that duplicates are expected and cause no warning.
        fills_last: the last batch of an epoch is filled from the next one; else the rows that remain are left out.
        settled: values of `PromptSource.settled_fields`; a checkpoint records them in the identity of the run.
        has_images: whether some row has an image.
    """

    train: Dataset
    eval: Dataset | None = None
    mixture: Mixture | None = None
    may_repeat: bool = False
    fills_last: bool = True
    settled: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_images(self) -> bool:
        return any(getattr(rows, "has_images", False) for rows in (self.train, self.eval))

    @classmethod
    def generated(
        cls,
        kind: Any,
        rows: Callable[[Split], Sequence[Mapping[str, Any]]],
        context: BuildContext,
        may_repeat: bool = False,
        **config: Any,
    ) -> DataSplits:
        """Data sets of generated rows.

        Args:
            kind: class of both data sets, with `from_rows`.
            rows: makes the rows of a split.
            config: options of `kind`.
        """
        train, held_out = (kind.from_rows(rows(split), context.tokenizer, config) for split in SPLITS)
        return cls(train, held_out, may_repeat=may_repeat, fills_last=False)  # as in the runs that are recorded


Truncation = Literal["error", "left", "right", "drop"]
Options = TypeVar("Options", bound=Description)


@component
class RowOptions(Description):
    """Options of reading rows, whatever they are used for.

    Args:
        chat_template: a Jinja template instead of that of the tokenizer, or a file that holds one; applied to chat
            messages only. The model is saved with it.
        chat_template_kwargs: variables of the template, such as `{enable_thinking: false}` for Qwen3. The template that
            the model is saved with has them as defaults.
        system_prompt: system message for chats without one. With it, a text prompt becomes a user message and is
            rendered by the chat template too.
        on_bad_row: treatment of unusable rows (no text, empty, not UTF-8, refused by the template). `error` refuses the
            data set; `skip` leaves them out and logs their number and places.
        images_key: column of an image or of a list of images; null for none. They may also be in content parts of
            messages.
        max_pixels: larger images are scaled down to this many pixels; null for the limits of the model's processor.
    """

    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None
    on_bad_row: OnBadRow = "error"
    images_key: str | None = "images"
    max_pixels: PositiveInt | None = None


@component
class PromptRendering(RowOptions, PromptSource):
    """Options for converting prompts to tokens, independent of their column.

    Args:
        max_prompt_length: the most tokens of a prompt.
        truncation: treatment of longer prompts. `error` refuses the data set and reports their number; `left` and
            `right` cut that end; `drop` leaves the row out. `error` is the default, because a truncated prompt no
            longer asks the question that its answer belongs to, which shows only as a low reward.
        final_assistant: treatment of chats that end with an assistant message, which would be part of the prompt and
            may be the answer. `error` makes the row unusable; `drop` removes the message; `answer` moves it to the
            column `answer`.
    """

    max_prompt_length: PositiveInt = 512
    truncation: Truncation = "error"
    final_assistant: FinalAssistant = "error"


@component
class PromptOptions(PromptRendering):
    """Options that turn rows into prompts.

    Args:
        prompt_key: column of the prompt, a text or a list of chat messages.
    """

    prompt_key: str = "prompt"


@component
class SFTOptions(RowOptions, TextSource):
    """Options that turn rows into sequences for supervised fine-tuning.

    Args:
        prompt_key: column of the prompt, a text or a list of chat messages.
        completion_key: column of the text to learn; None for `completion`, or `response` if there is none.
        messages_key: column of whole conversations, whose assistant turns are learned; the two columns above are then
            unused. None for prompts and completions, or for `messages` or `conversations` without prompts.
        max_length: the most tokens of prompt, completion and EOS together.
        truncation: treatment of longer sequences. `error` refuses the data set and reports their number; `left` cuts
            the start of the prompt, `right` the end of the completion with its EOS; `drop` leaves the row out.
    """

    prompt_key: str = "prompt"
    completion_key: str | None = None
    messages_key: str | None = None
    max_length: Annotated[int, Field(ge=2)] = 512
    truncation: Truncation = "error"


@component
class PreferenceOptions(RowOptions, PreferenceSource):
    """Options that turn rows into preferences, with the column names of TRL.

    Args:
        prompt_key: column of the prompt; a row of a pair without it has the prompt at the start of both responses.
        chosen_key, rejected_key: columns of the better and the worse response.
        completion_key, label_key: columns of a response and of whether it is desirable, for data without pairs.
        margin_key: column of a number, by how much the chosen response is better; used by the loss of reward models.
        max_prompt_length: the most tokens of a prompt.
        max_length: the most tokens of prompt, response and EOS together.
        truncation: treatment of longer rows. `error` refuses the data set, `drop` leaves the row out.
    """

    prompt_key: str = "prompt"
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    completion_key: str = "completion"
    label_key: str = "label"
    margin_key: str = "margin"
    max_prompt_length: PositiveInt = 512
    max_length: Annotated[int, Field(ge=2)] = 1024
    truncation: Literal["error", "drop"] = "error"


def read_options(kind: type[Options], config: Mapping[str, Any] | None) -> Options:
    """Build an options component from a mapping; missing keys have their defaults.

    Raises:
        ConfigError: a key is unknown (names the nearest known one), or a value is wrong.
    """
    known, faults = [field.name for field in fields(kind)], []
    for key in config or {}:
        if key not in known:
            nearest = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"Did you mean {nearest[0]}?" if nearest else f"Known keys: {', '.join(known)}."
            faults.append(f"config.{key} is not a known key. {hint}")
    if faults:
        raise ConfigError(faults)
    return kind(**dict(config or {}))


class RaggedTokens:
    """Rows of different lengths, stored in one flat tensor.

    Attributes:
        lengths: tokens of each row, [N] int64.
    """

    def __init__(self, rows: Sequence[Sequence[int]], dtype: torch.dtype = torch.int64):
        self.lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        self._starts = torch.cumsum(self.lengths, dim=0) - self.lengths
        self._flat = torch.tensor([token for row in rows for token in row], dtype=dtype)

    @property
    def largest(self) -> int:
        """The largest token id, at least 0."""
        return int(self._flat.max()) if len(self._flat) else 0

    def __getitem__(self, index: int) -> Tensor:
        return self._flat[self._starts[index] : self._starts[index] + self.lengths[index]]

    def digests(self, images: ImagesOfRows | None = None) -> list[bytes]:
        """A hash of each row: equal for equal tokens and images."""
        rows = [self[index].numpy().tobytes() for index in range(len(self))]
        keys = [b""] * len(self) if not images else [key.numpy().tobytes() for key in images.keys]
        return [hashlib.blake2b(row + key, digest_size=12).digest() for row, key in zip(rows, keys, strict=True)]

    def __len__(self) -> int:
        return len(self.lengths)

    def padded(self, indices: Tensor, pad_id: int | bool, left: bool) -> tuple[Tensor, Tensor]:
        """The rows at `indices` [B], padded to the longest on one side: tokens [B S] and mask [B S] bool."""
        lengths = self.lengths[indices]
        longest = int(lengths.max()) if len(lengths) else 0
        column = torch.arange(longest).expand(len(indices), longest)
        if left:
            column = column - (longest - lengths).unsqueeze(1)
        mask = (column >= 0) & (column < lengths.unsqueeze(1))
        tokens = torch.full((len(indices), longest), pad_id, dtype=self._flat.dtype)
        tokens[mask] = self._flat[(self._starts[indices].unsqueeze(1) + column)[mask]]
        return tokens, mask


def fit_lengths(
    lengths: Sequence[int],
    limit: int,
    limit_name: str,
    truncation: str,
    location: Callable[[int], str],
    others: str = "left, right or drop",
) -> list[int]:
    """Check row lengths against a limit.

    Args:
        lengths: tokens of each row.
        limit: the most tokens.
        limit_name: the setting, for messages.
        truncation: `error`, `left`, `right` or `drop`.
        location: file and number of a row, for messages.
        others: values of `truncation` besides `error`, for messages.
    Returns:
        Indices of the rows to keep: all, unless `truncation` is `drop`.

    Raises:
        ConfigError: `truncation` is `error` and a row is longer than `limit`, or no row would be left.
    """
    over = [index for index, length in enumerate(lengths) if length > limit]
    if not over:
        return list(range(len(lengths)))
    longest = max(over, key=lambda index: lengths[index])
    seen = (
        f"{limit_name} is {limit}: {len(over)} of {len(lengths)} rows have more tokens; the longest, "
        f"{location(longest)}, has {lengths[longest]}."
    )
    if truncation == "error":
        raise ConfigError(f"{seen} Raise {limit_name}, or set truncation to {others}.")
    _log.warning("%s truncation=%s", seen, truncation)
    if truncation != "drop":
        return list(range(len(lengths)))
    if len(over) == len(lengths):
        raise ConfigError(f"{seen} truncation=drop leaves no rows. Raise {limit_name}.")
    dropped = set(over)
    return [index for index in range(len(lengths)) if index not in dropped]


def refuse_cuts(rows: DataRows, lengths: Mapping[int, int], limit: int, limit_name: str, truncation: str) -> None:
    """Refuse to truncate rows with images, whose tokens belong together.

    Args:
        lengths: tokens of the kept rows, by index.
    Raises:
        ConfigError: a row with images has more than `limit` tokens.
    """
    for index, length in lengths.items():
        if length > limit and rows.images[index]:
            raise ConfigError(
                f"truncation is {truncation!r}: {rows.location(index)} has images and {length} tokens, and rows with "
                f"images are not truncated. Raise {limit_name}, lower max_pixels, or set truncation to drop."
            )


def cut(tokens: list[Any], limit: int, truncation: str) -> list[Any]:
    """Truncate to `limit` tokens: `left` cuts the start, `right` the end."""
    return tokens[-limit:] if truncation == "left" else tokens[:limit]


def pad_id_of(tokenizer: Any) -> int:
    """The token id for padding: the tokenizer's pad token, else its EOS, else 0. Masks mark padding in any case."""
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((token for token in ids if token is not None), 0)


def object_array(values: Sequence[Any]) -> np.ndarray:
    """An object array [N]; lists stay single objects instead of becoming a matrix."""
    return np.fromiter(values, dtype=object, count=len(values))
