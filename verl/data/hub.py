"""`data=hub`: prompts from a data set of the Hugging Face hub, or from a local directory of the same form.

    name, branch ──> commit ──> rows of a split ──> prompt, answer, other columns

The hub is read through the packages huggingface_hub and datasets. The commit that a branch or tag stands for when the
run starts is read once; a checkpoint records it as `data.revision`. A local directory is read by itself, without those
packages: what its files say about other files and addresses is not followed, so that the recorded digest of its files
covers every row.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar

from pydantic import PositiveInt

from verl.component import BuildContext, component, package_fault
from verl.data.base import DataSplits, PromptOptions, PromptRendering
from verl.data.chat_template import as_chat, shortened
from verl.data.readers import FILE_TYPES, DataRows, RowErrors, from_arrow, read_rows
from verl.data.rlhf_dataset import RESERVED_COLUMNS, RLHFDataset
from verl.errors import ConfigError
from verl.protocol.fields import FIELDS
from verl.utils.external_input import checked_name, read_record

log = logging.getLogger(__name__)

COMMIT = re.compile(r"[0-9a-f]{40}")
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
REQUEST_S = 10.0
SPLIT_NAMES = {"training": "train", "valid": "validation", "val": "validation", "dev": "validation", "testing": "test"}


@component
class HubPrompts(PromptRendering):
    """Prompts of a data set on the hub, such as `openai/gsm8k`, or of a local directory.

    Args:
        dataset: name on the hub; or a directory, written by `save_to_disk` or holding parquet or JSONL files, of which
            those of a split have its name in theirs or in that of a directory; if none has one, all are of `train`.
        name: configuration of the data set, such as `main`; null for its only one. Of a directory, one below it.
        revision: branch, tag or commit; null for the default branch. A resume needs the commit that the run began with.
        split: of the training rows.
        eval_split: of the evaluation rows; null for no evaluation.
        max_rows: training rows to use, from the first; null for all.
        streaming: read rows over the network without a copy of the data set on the disk.
        prompt: column of the prompt, a text or a list of chat messages.
        answer: column that the reward gets as `answer`; null for none.
        answer_after: the answer is what follows the last occurrence of this text, such as `####`; null for the whole
            column. A row without it is unusable.
        instruction: text appended on a separate line to each prompt that is a text; null for none.
        as_chat: whether a text prompt becomes a message of the user, which the chat template renders; null for yes if
            there is a chat template.
        keep_columns: other columns that the reward reads; null for all.
    """

    example_values: ClassVar[Mapping[str, str]] = {"dataset": "openai/gsm8k", "prompt": "question"}
    settled_fields: ClassVar[tuple[str, ...]] = ("revision",)

    dataset: str
    name: str | None = None
    revision: str | None = None
    split: str = "train"
    eval_split: str | None = None
    max_rows: PositiveInt | None = None
    streaming: bool = False
    prompt: str = "prompt"
    answer: str | None = None
    answer_after: str | None = None
    instruction: str | None = None
    as_chat: bool | None = None
    keep_columns: tuple[str, ...] | None = None

    @property
    def is_local(self) -> bool:
        return Path(self.dataset).is_dir()

    def faults(self) -> Iterator[str]:
        if self.answer_after is not None and self.answer is None:
            yield f"answer_after is {self.answer_after!r}: answer names no column. Set answer, or answer_after=null."
        if self.answer_after == "":
            yield "answer_after is '': expected a text such as '####', or null."
        yield from super().faults()

    def machine_faults(self) -> Iterator[str]:
        if not self.is_local and (fault := package_fault("datasets", "data=files")) is not None:
            yield f"dataset is {self.dataset!r}: it {fault}"
        if not self.is_local and not HUB_NAME.fullmatch(self.dataset):
            yield f"dataset is {self.dataset!r}: neither a directory nor a name on the hub, such as openai/gsm8k."
        if self.is_local and self.revision is not None:
            yield f"revision is {self.revision!r}: dataset {self.dataset!r} is a local directory, without revisions."

    def build(self, context: BuildContext) -> DataSplits:
        if faults := list(self.machine_faults()):
            raise ConfigError(faults)
        commit = None if self.is_local else self._commit()
        has_template = self.chat_template is not None or getattr(context.tokenizer, "chat_template", None) is not None
        is_chat = has_template if self.as_chat is None else self.as_chat
        options = PromptOptions(**{field.name: getattr(self, field.name) for field in fields(PromptRendering)})

        def made(split: str, setting: str, max_rows: int | None) -> RLHFDataset:
            bad = RowErrors(self.on_bad_row)
            rows = self._rows(split, setting, commit, max_rows, is_chat, bad)
            return RLHFDataset.from_rows(rows, context.tokenizer, options, bad, tools=context.tools)

        train = made(self.split, "split", self.max_rows)
        evaluation = None if self.eval_split is None else made(self.eval_split, "eval_split", None)
        return DataSplits(train=train, eval=evaluation, settled={} if commit is None else {"revision": commit})

    def _commit(self) -> str:
        """The commit that `revision` stands for now."""
        if self.revision is not None and COMMIT.fullmatch(self.revision):
            return self.revision
        from huggingface_hub import HfApi

        seen = f"dataset is {self.dataset!r}, revision {self.revision or 'the default branch'}"
        try:
            commit = HfApi().dataset_info(self.dataset, revision=self.revision, timeout=REQUEST_S).sha
        except Exception as error:
            raise ConfigError(
                f"{seen}: the hub gives no commit for it ({_first_line(error)}). Without a network set revision to a "
                "commit of 40 digits whose rows are in the cache, or dataset to a local directory."
            ) from error
        if commit is None:
            raise ConfigError(f"{seen}: the hub names no commit for it. Set revision to a commit.")
        log.info("The data set %s is read at commit %s.", self.dataset, commit)
        return commit

    def _local_files(self, split: str) -> list[Path]:
        """The files of a split of a local directory.

        Raises:
            ValueError: there are none, or one leads out of the directory.
        """
        directory = Path(self.dataset) / (self.name or "")
        splits = (read_record(directory / "dataset_dict.json") or {}).get("splits")
        if splits or (directory / "state.json").is_file():
            if split not in (splits or ["train"]):
                raise ValueError(f"it has the splits {', '.join(map(str, splits or ['train']))}")
            top = directory / split if splits else directory
            named = read_record(top / "state.json")["_data_files"]
            files = [top / checked_name(entry["filename"]) for entry in named]
        else:
            found = sorted(file for file in directory.rglob("*") if file.suffix in FILE_TYPES and file.is_file())
            known = {file: _split_names(file.relative_to(directory)) for file in found}
            is_named = any({"train", "validation", "test", split} & names for names in known.values())
            files = [
                x for x in found if SPLIT_NAMES.get(split, split) in known[x] or (split == "train" and not is_named)
            ]
            if not files:
                there = ", ".join(str(file.relative_to(directory)) for file in found) or "no parquet and no JSONL file"
                raise ValueError(f"no file has this name; it has {there}")
        for file in files:
            if not file.resolve().is_relative_to(Path(self.dataset).resolve()):
                raise ValueError(f"{file} leads out of the directory: copy the file into it")
        return files

    def _local_rows(self, split: str, bad: RowErrors) -> Iterator[tuple[int, tuple[str, int], Mapping[str, Any]]]:
        """Index over all files, counting unusable lines, with location and content of each row."""
        count = 0
        for file in self._local_files(split):
            before = len(bad)
            if file.suffix == ".arrow":
                import pyarrow as pa

                with open(file, "rb") as stream:
                    rows = DataRows([from_arrow(row) for row in pa.ipc.open_stream(stream).read_all().to_pylist()])
            else:
                rows = read_rows([file], bad, "dataset")
            for index, row in enumerate(rows.values):
                number, places = count + rows.number(index), rows.locations
                yield number, (f"{self.dataset}, split {split}", number) if places is None else places[index], row
            count += len(rows) + len(bad) - before

    def _hub_rows(self, split: str, commit: str | None) -> Iterator[tuple[int, tuple[str, int], Mapping[str, Any]]]:
        import datasets  # type: ignore[import-not-found]

        where = {"split": split, "revision": commit, "streaming": self.streaming}
        for number, row in enumerate(datasets.load_dataset(self.dataset, self.name, **where)):
            yield number, (f"{self.dataset}, split {split}", number), from_arrow(row)

    def _rows(
        self, split: str, setting: str, commit: str | None, max_rows: int | None, is_chat: bool, bad: RowErrors
    ) -> DataRows:
        location = f"{self.dataset}, split {split}"
        try:
            loaded = self._local_rows(split, bad) if self.is_local else self._hub_rows(split, commit)
            rows = list(itertools.islice(loaded, max_rows))
        except Exception as error:
            raise ConfigError(
                f"{setting} is {split!r}: these rows of dataset {self.dataset!r} cannot be read ({_first_line(error)})."
            ) from error
        if not rows:
            bad.settle(len(bad))
            raise ConfigError(f"{setting} is {split!r}: dataset {self.dataset!r} has no rows there.")
        self._refuse_columns(list(dict.fromkeys(name for *_, row in rows for name in row)), location)
        found = DataRows([row for *_, row in rows], [place for _, place, _ in rows], [number for number, *_ in rows])
        values = [self._converted(row, is_chat) for row in found.values]
        for index, value in enumerate(values):
            if isinstance(value, str):
                bad.add(f"{value} at {found.location(index)}")
        usable = [index for index, value in enumerate(values) if not isinstance(value, str)]
        return replace(found, values=values).only(usable)

    def _refuse_columns(self, present: list[str], location: str) -> None:
        named = {"prompt": self.prompt, "answer": self.answer}
        named |= {f"keep_columns[{index}]": name for index, name in enumerate(self.keep_columns or ())}
        faults = [
            f"{setting} is {name!r}: {location} has no such column. Its columns: {', '.join(present)}."
            for setting, name in named.items()
            if name is not None and name not in present
        ]
        others = present if self.keep_columns is None else self.keep_columns
        taken = [name for name in others if name in FIELDS or name in RESERVED_COLUMNS]
        if taken:
            faults.append(
                f"keep_columns is {shortened(self.keep_columns)}: {', '.join(taken)} of {location} has the name of a "
                "batch field. Name only the columns that the reward reads; [] for none."
            )
        if faults:
            raise ConfigError(faults)

    def _converted(self, row: Mapping[str, Any], is_chat: bool) -> dict[str, Any] | str:
        """A row as `RLHFDataset` takes it, or its fault."""
        prompt, kept = as_chat(row.get(self.prompt)), row if self.keep_columns is None else self.keep_columns
        kept = [*kept, self.images_key] if self.images_key in row else kept
        others = {name: row.get(name) for name in kept if name not in (self.prompt, self.answer, "prompt")}
        if isinstance(prompt, str) and prompt:
            prompt = prompt if self.instruction is None else f"{prompt}\n{self.instruction}"
            prompt = [{"role": "user", "content": prompt}] if is_chat else prompt
        if self.answer is None:
            return {"prompt": prompt, **others}
        answer = row.get(self.answer)
        if self.answer_after is not None:
            if not isinstance(answer, str) or self.answer_after not in answer:
                return f"{self.answer} is {shortened(answer)}: expected a text with {self.answer_after!r}"
            answer = answer.rpartition(self.answer_after)[2].strip()
        return {"prompt": prompt, **others, "answer": answer}


def _split_names(file: Path) -> set[str]:
    """The splits that a file may be of, by the words of its path: `data/train-00000-of-00002.parquet`."""
    text = re.sub(r"-\d{5}-of-\d{5}.*", "", file.with_suffix("").as_posix())
    words = {*re.findall(r"[a-z]+", text.lower()), *text.split("/")}
    return words | {SPLIT_NAMES[word] for word in words & SPLIT_NAMES.keys()}


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
