"""Base classes and settings of data sets: what a data component builds, and its options."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import Field, PositiveInt

from verl.component import Description, component
from verl.data.chat_template import FinalAssistant
from verl.data.readers import OnBadRow
from verl.data.sampler import Mixture
from verl.errors import ConfigError
from verl.protocol import DataProto

_log = logging.getLogger(__name__)


class Dataset(Protocol):
    """Rows that were tokenised once and can be joined into a batch in any order."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def collate(self, indices: Sequence[int]) -> DataProto:
        """The rows at `indices`, padded to the longest of them."""
        ...


@component
class PromptSource(Description):
    """Base of what `data` may be in reinforcement learning: builds `DataSplits` of prompts."""

    def columns(self) -> dict[str, frozenset[str]]:
        """The columns beside the prompt, by what names the rows (`train_files`), of those whose columns are known
        without the rows having been read."""
        return {}


@component
class TextSource(Description):
    """Base of what `data` may be in supervised fine-tuning: builds `DataSplits` of texts to imitate."""


def data_counts(splits: DataSplits) -> dict[str, int]:
    """How many rows there are, how many repeat another, and how many of the evaluation are trained on.

    Two rows are the same where their tokens are, whatever their other columns hold. Empty for data sets that do not
    tell their rows apart by `digests`.
    """
    digests = {"train": getattr(splits.train, "digests", None), "eval": getattr(splits.eval, "digests", None)}
    known = {name: found for name, found in digests.items() if found is not None}
    counts = {f"{name}_rows": len(found) for name, found in known.items()}
    counts |= {f"{name}_duplicates": len(found) - len(set(found)) for name, found in known.items()}
    if len(known) == 2:
        trained = set(known["train"])
        counts["eval_rows_in_train"] = sum(digest in trained for digest in known["eval"])
    return counts


def duplicates_sentence(counts: Mapping[str, int]) -> str | None:
    """What `data_counts` found that may not be meant, in words; None where there is nothing of the kind."""
    found = []
    for name, words in (("train", "training"), ("eval", "evaluation")):
        if number := counts.get(f"{name}_duplicates"):
            found.append(f"{number} of {counts[f'{name}_rows']} {words} rows repeat another one")
    if number := counts.get("eval_rows_in_train"):
        found.append(f"{number} of {counts['eval_rows']} evaluation rows are trained on, so evaluations flatter")
    return f"Data: {'; '.join(found)}." if found else None


def report_counts(splits: DataSplits) -> dict[str, int]:
    """`data_counts`, of which what may not be meant is logged."""
    counts = data_counts(splits)
    if (sentence := duplicates_sentence(counts)) is not None:
        _log.warning("%s", sentence)
    return counts


@dataclass(frozen=True)
class DataSplits:
    """The two parts of the data of a run.

    Attributes:
        train: the rows to learn from.
        eval: rows that are never trained on, or None where there are none.
        mixture: the parts of `train` and their shares of an epoch; None visits every row once.
    """

    train: Dataset
    eval: Dataset | None = None
    mixture: Mixture | None = None


Truncation = Literal["error", "left", "right", "drop"]
Options = TypeVar("Options", bound=Description)


@component
class PromptOptions(PromptSource):
    """How rows become prompts.

    Args:
        prompt_key: the column that holds a text or a list of chat messages.
        max_prompt_length: most tokens of a prompt.
        truncation: what happens to a longer prompt. `error` refuses the data set and counts them; `left` and `right`
            cut that end; `drop` leaves the row out. The default refuses, because a cut prompt asks another question
            than the one its answer belongs to, and that shows only as a reward that stays low.
        chat_template: a Jinja template to use in place of the tokenizer's own; for chat messages alone.
        system_prompt: opens every chat that has no system message of its own; with it, a prompt that is a text is the
            message of a user and goes through the chat template too.
        on_bad_row: what happens to a row that cannot be used (no text, empty, not UTF-8, refused by the template).
            `error` refuses the data set; `skip` leaves the row out and says how many and which.
        final_assistant: what happens to a chat that ends with the assistant, whose words would stand in the prompt and
            may be the answer. `error` counts as a row that cannot be used; `drop` takes the message out of the prompt;
            `answer` makes it the column `answer`, too.
    """

    prompt_key: str = "prompt"
    max_prompt_length: PositiveInt = 512
    truncation: Truncation = "error"
    chat_template: str | None = None
    system_prompt: str | None = None
    on_bad_row: OnBadRow = "error"
    final_assistant: FinalAssistant = "error"


@component
class SFTOptions(TextSource):
    """How rows become sequences to imitate.

    Args:
        prompt_key: the column that holds a text or a list of chat messages.
        completion_key: the column that holds the text to learn; None takes `completion` or else `response`.
        messages_key: the column that holds whole conversations, of which the assistant's turns are learned; the two
            columns above are then not read. None takes prompts and completions.
        max_length: most tokens of prompt, completion and EOS together.
        truncation: what happens to a longer sequence. `error` refuses the data set and counts them; `left` cuts the
            start of the prompt, `right` the end of the completion with its EOS; `drop` leaves the row out.
        chat_template: a Jinja template to use in place of the tokenizer's own; for chat messages alone.
        system_prompt: opens every chat that has no system message of its own; with it, a prompt that is a text is the
            message of a user and goes through the chat template too.
        on_bad_row: `error` refuses a data set with a row that cannot be used; `skip` leaves the row out and says how
            many and which.
    """

    prompt_key: str = "prompt"
    completion_key: str | None = None
    messages_key: str | None = None
    max_length: Annotated[int, Field(ge=2)] = 512
    truncation: Truncation = "error"
    chat_template: str | None = None
    system_prompt: str | None = None
    on_bad_row: OnBadRow = "error"


def read_options(kind: type[Options], config: Mapping[str, Any] | None) -> Options:
    """The options that a mapping sets, the others at their defaults.

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
