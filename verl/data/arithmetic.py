"""Generated addition problems such as `37+58=`, with a held-out set for evaluation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

from pydantic import Field, PositiveInt

from verl.component import BuildContext, Description, component
from verl.data.base import SPLITS, DataSplits, PreferenceOptions, PreferenceSource, PromptSource, Split, TextSource
from verl.data.preference_dataset import PreferenceDataset
from verl.data.readers import RowErrors
from verl.data.rlhf_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset
from verl.errors import ConfigError

MAX_ROWS_WITHOUT_SIZE = 100_000
WRONG_BY = (1, 2, 3, 10, 20)  # of wrong sums


@component
class Arithmetic(Description):
    """All sums of two numbers of `digits` digits, in a seeded order, split into training and held-out problems.

    The first `held_out` problems of the order are for evaluation. No training problem is one of
    them, nor one of them with its summands exchanged. Equal `digits`, `held_out` and `seed` give the same held-out
    problems for every `train_size`, so a policy fine-tuned on one data set can be evaluated on the other.

    Args:
        digits: of each summand, from 1 to 6; the first of several is not 0.
        held_out: number of problems to evaluate on.
        seed: order of the problems.
        train_size: number of training problems, the first of the order; None for all that are left.
    """

    digits: Annotated[int, Field(ge=1, le=6)] = 2
    held_out: PositiveInt = 500
    seed: int = 0
    train_size: PositiveInt | None = None

    @property
    def _lowest(self) -> int:
        return 10 ** (self.digits - 1) if self.digits > 1 else 0

    @property
    def _count(self) -> int:
        """Number of possible summands."""
        return 10**self.digits - self._lowest

    def faults(self) -> Iterator[str]:
        total = self._count**2
        # A held-out problem also removes its mirror image from training.
        available = total - 2 * self.held_out
        if available < 1:
            yield f"held_out is {self.held_out}: nothing is left of {total} problems. Set it below {total // 2}."
        elif self.train_size is None and total > MAX_ROWS_WITHOUT_SIZE:
            yield f"train_size is null: {total} problems of {self.digits} digits exist. Set how many to train on."
        elif self.train_size is not None and self.train_size > available:
            yield f"train_size is {self.train_size}: must lie in [1, {available}] with held_out {self.held_out}."

    def rows(self, split: Split) -> list[dict[str, str]]:
        """The problems of a split: `{"prompt": "37+58=", "answer": "95"}`.

        Raises:
            ConfigError: `split` is neither train nor eval.
        """
        if split not in ("train", "eval"):
            raise ConfigError(f"split is {split!r}: expected one of train, eval.")
        order = permutation(self._count**2, self.seed)
        held_out = [next(order) for _ in range(self.held_out)]
        if split == "eval":
            return [self._row(problem) for problem in held_out]
        excluded = set(held_out) | {self._mirror(problem) for problem in held_out}
        rows = []
        for problem in order:
            if len(rows) == self.train_size:
                break
            if problem not in excluded:
                rows.append(self._row(problem))
        return rows

    def _row(self, problem: int) -> dict[str, str]:
        left, right = (self._lowest + number for number in divmod(problem, self._count))
        return {"prompt": f"{left}+{right}=", "answer": str(left + right)}

    def _mirror(self, problem: int) -> int:
        left, right = divmod(problem, self._count)
        return right * self._count + left


@component
class ArithmeticPrompts(Arithmetic, PromptSource):
    """Prompts for reinforcement learning, with the column `answer` for the reward.

    Args:
        max_prompt_length: most tokens of a prompt; must hold the longest problem, one token a character.
    """

    max_prompt_length: int = 16

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        longest = 2 * self.digits + 2
        if self.max_prompt_length < longest:
            yield (
                f"max_prompt_length is {self.max_prompt_length}: a problem of {self.digits} digits has {longest} "
                f"characters. Set it to {longest} or more."
            )

    def columns(self) -> dict[str, frozenset[str]]:
        return {"data": frozenset({"answer"})}

    def build(self, context: BuildContext) -> DataSplits:
        splits = DataSplits.generated(RLHFDataset, self.rows, context, max_prompt_length=self.max_prompt_length)
        return replace(splits, fills_last=self.train_size is not None)  # of chosen rows all are seen


@component
class ArithmeticSFT(Arithmetic, TextSource):
    """Problems with their answers for supervised fine-tuning; each answer ends with the tokenizer's EOS.

    Args:
        max_length: most tokens of problem, answer and EOS together.
    """

    max_length: int = 32

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        yield from length_faults(self.digits, self.max_length)

    def build(self, context: BuildContext) -> DataSplits:
        return DataSplits.generated(SFTDataset, self.rows, context, max_length=self.max_length, completion_key="answer")


@component
class ArithmeticPreferences(Arithmetic, PreferenceSource):
    """Problems with the right sum and one that is wrong by a little, as answers of a policy are.

    Args:
        pairs_per_problem: training pairs of each problem, with different wrong sums.
        max_length: most tokens of problem, answer and EOS together.
    """

    pairs_per_problem: Annotated[int, Field(ge=1, le=len(WRONG_BY))] = 1
    max_length: int = 32

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        yield from length_faults(self.digits, self.max_length)

    def pairs(self, split: Split) -> list[dict[str, str]]:
        """The problems of a split: `{"prompt": "37+58=", "chosen": "95", "rejected": "94"}`."""
        draw = random.Random(f"wrong sums {self.seed} {split}")
        count = self.pairs_per_problem if split == "train" else 1
        return [
            {"prompt": row["prompt"], "chosen": row["answer"], "rejected": wrong}
            for row in self.rows(split)
            for wrong in _wrong(int(row["answer"]), count, draw)
        ]

    def build(self, context: BuildContext) -> DataSplits:
        options = PreferenceOptions(max_length=self.max_length)
        train, held_out = (
            PreferenceDataset.from_rows(self.pairs(split), context.tokenizer, options, RowErrors()) for split in SPLITS
        )
        return DataSplits(train=train, eval=held_out)


def _wrong(answer: int, count: int, draw: random.Random) -> list[str]:
    """Different numbers near the answer, not below 0."""
    nearby = [number for step in WRONG_BY for number in (answer - step, answer + step) if number >= 0]
    return [str(nearby.pop(int(draw.random() * len(nearby)))) for _ in range(count)]


def length_faults(digits: int, max_length: int) -> Iterator[str]:
    """The fault of a `max_length` that a problem with its answer and EOS exceeds."""
    longest = 3 * digits + 4
    if max_length < longest:
        yield (
            f"max_length is {max_length}: a problem of {digits} digits, its answer and EOS have {longest} tokens. Set "
            f"it to {longest} or more."
        )


def permutation(total: int, seed: int) -> Iterator[int]:
    """Yield 0 to total - 1 in a seeded order, in memory proportional to the numbers taken.

    A sparse Fisher-Yates shuffle with `random()`, the only method of `random.Random` whose sequence is the same in all
    versions of Python.
    """
    draw, moved = random.Random(seed), {}
    for index in range(total):
        other = index + int(draw.random() * (total - index))
        yield moved.get(other, other)
        moved[other] = moved.pop(index, index)
