"""Data sets in files: prompts for reinforcement learning, sequences for fine-tuning, preferences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any, ClassVar

from verl.component import BuildContext, Description, component
from verl.data.base import DataSplits, PreferenceOptions, PromptOptions, SFTOptions
from verl.data.chat_template import with_chats
from verl.data.preference_dataset import PreferenceDataset
from verl.data.readers import DataRows, RowErrors, columns_of, file_faults, read_rows
from verl.data.rlhf_dataset import RLHFDataset
from verl.data.sampler import Mixture
from verl.data.sft_dataset import SFTDataset
from verl.errors import ConfigError


@component
class FileSplits(Description):
    """Base class of data in parquet and JSONL files.

    Args:
        train_files: paths of the training data, in order.
        eval_files: paths of the evaluation data; empty for no evaluation.
        weights: relative share of an epoch of each training file; None to visit every row once.
    """

    example_values: ClassVar[Mapping[str, str]] = {"train_files": "[train.jsonl]"}

    train_files: tuple[str, ...]
    eval_files: tuple[str, ...] = ()
    weights: tuple[float, ...] | None = None

    def faults(self) -> Iterator[str]:
        if not self.train_files:
            yield "train_files is empty: name at least one file."
        yield from file_faults("train_files", self.train_files)
        yield from file_faults("eval_files", self.eval_files)
        weights = self.weights
        if weights is not None and len(weights) != len(self.train_files):
            yield f"weights is {list(weights)}: expected one number for each of {len(self.train_files)} training files."
        elif weights is not None and not all(math.isfinite(weight) and weight > 0 for weight in weights):
            yield f"weights is {list(weights)}: each must be a positive number. Leave a file out to give it no share."
        yield from super().faults()


@component
class PromptFiles(FileSplits, PromptOptions):
    """Prompts from parquet and JSONL files."""

    def faults(self) -> Iterator[str]:
        if self.weights is not None and self.curriculum is not None:
            yield f"weights is {list(self.weights)}: a curriculum draws from all files alike. Set it to null."
        yield from super().faults()

    def columns(self) -> dict[str, frozenset[str]]:
        by_field = {name: columns_of(getattr(self, name)) for name in ("train_files", "eval_files")}
        return {name: columns - {self.prompt_key, self.images_key} for name, columns in by_field.items() if columns}

    def build(self, context: BuildContext) -> DataSplits:
        return _build(self, context, partial(RLHFDataset.from_rows, tools=context.tools), PromptOptions)


@component
class SFTFiles(FileSplits, SFTOptions):
    """Prompts with their completions from parquet and JSONL files."""

    def build(self, context: BuildContext) -> DataSplits:
        return _build(self, context, SFTDataset.from_rows, SFTOptions)


@component
class PreferenceFiles(FileSplits, PreferenceOptions):
    """Pairs of responses, or responses with a label each, from parquet and JSONL files."""

    def build(self, context: BuildContext) -> DataSplits:
        return _build(self, context, PreferenceDataset.from_rows, PreferenceOptions)


@component
class EvaluatedPrompts(PromptFiles):
    """Prompts that are only evaluated or answered. Nothing is trained, so rows in both lists are no overlap.

    Args:
        as_chats: text prompts become user messages, if there is a chat template.
    """

    as_chats: bool = False

    def build(self, context: BuildContext) -> DataSplits:
        def dataset(rows: DataRows, tokenizer: Any, *arguments: Any) -> RLHFDataset:
            key, rows = self.prompt_key, with_chats(rows, self.prompt_key)
            if not self.as_chats:
                rows = replace(rows, sources=None)  # texts on purpose: they are not reported
            elif self.chat_template or getattr(tokenizer, "chat_template", None):
                values = [
                    {**row, key: [{"role": "user", "content": row[key]}]} if isinstance(row.get(key), str) else row
                    for row in rows.values
                ]
                rows = replace(rows, values=values)
            return RLHFDataset.from_rows(rows, tokenizer, *arguments, tools=context.tools)

        return replace(_build(self, context, dataset, PromptOptions), may_repeat=True)


@component
class EvaluatedSequences(SFTFiles):
    """Sequences that are only evaluated. Nothing is trained, so rows in both lists are no overlap."""

    def build(self, context: BuildContext) -> DataSplits:
        return replace(super().build(context), may_repeat=True)


def _build(
    files: PromptFiles | SFTFiles | PreferenceFiles, context: BuildContext, from_rows: Callable[..., Any], options: type
) -> DataSplits:
    config = options(**{field.name: getattr(files, field.name) for field in fields(options)})

    def made(paths: tuple[str, ...], name: str) -> Any:
        bad = RowErrors(files.on_bad_row)
        return from_rows(read_rows(paths, bad, name), context.tokenizer, config, bad)

    train = made(files.train_files, "train_files")
    return DataSplits(
        train=train,
        eval=made(files.eval_files, "eval_files") if files.eval_files else None,
        mixture=None if files.weights is None else _mixture(files, train.sources),
    )


def _mixture(files: PromptFiles | SFTFiles | PreferenceFiles, sources: list[int]) -> Mixture:
    """The mixture of the files; the rows of a file are contiguous in the data set."""
    assert files.weights is not None
    counted = Counter(sources)
    sizes = tuple(counted[index] for index in range(len(files.train_files)))
    if 0 in sizes:
        empty = files.train_files[sizes.index(0)]
        raise ConfigError(f"weights has a share for {empty!r}, which has no usable row. Leave the file out.")
    return Mixture(sizes, files.weights)
