"""Sums and products that the built-in model cannot compute itself, and other tasks that show how to call a tool."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, PositiveInt

from verl.component import BuildContext, Description, UnitInterval, component
from verl.data.base import DataSplits, PromptSource, Split, TextSource
from verl.data.rlhf_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset

EOS = "<eos>"


@component
class CalculatorPrompts(PromptSource):
    """Problems such as `347*9182=`, half sums and half products, with the column `answer`.

    Args:
        min_digits, max_digits: digits of each of the two numbers.
        train_size, held_out: numbers of training and evaluation problems, which do not overlap.
        seed: of the problems.
        max_prompt_length: the most tokens of a prompt; a token is a character.
    """

    min_digits: Annotated[int, Field(ge=1, le=6)] = 3
    max_digits: Annotated[int, Field(ge=1, le=6)] = 4
    train_size: PositiveInt = 20000
    held_out: PositiveInt = 500
    seed: int = 0
    max_prompt_length: PositiveInt = 16

    def faults(self) -> Iterator[str]:
        if self.max_digits < self.min_digits:
            yield f"max_digits is {self.max_digits}: must be at least min_digits {self.min_digits}."
        if self.max_prompt_length < 2 * self.max_digits + 2:
            yield (
                f"max_prompt_length is {self.max_prompt_length}: a problem has up to {2 * self.max_digits + 2} "
                "characters. Raise it."
            )
        count = (10**self.max_digits - 10 ** (self.min_digits - 1)) ** 2
        if 2 * (self.train_size + self.held_out) > count:
            yield f"train_size is {self.train_size}: with {self.held_out} held out there are too few problems."

    def columns(self) -> dict[str, frozenset[str]]:
        return {"data": frozenset({"answer"})}

    def rows(self, split: Split) -> list[dict[str, str]]:
        """The problems of a split: `{"prompt": "347+918=", "answer": "1265"}`."""
        chosen = random.Random(f"calculator/{self.seed}")
        seen: dict[str, str] = {}
        while len(seen) < self.held_out + self.train_size:
            left, right = (_number(chosen, self.min_digits, self.max_digits) for _ in range(2))
            sign = chosen.choice("+*")
            seen.setdefault(f"{left}{sign}{right}=", str(left + right if sign == "+" else left * right))
        rows = [{"prompt": prompt, "answer": answer} for prompt, answer in seen.items()]
        return rows[: self.held_out] if split == "eval" else rows[self.held_out :]

    def build(self, context: BuildContext) -> DataSplits:
        return DataSplits.generated(RLHFDataset, self.rows, context, max_prompt_length=self.max_prompt_length)


@component
class CalculatorSFT(TextSource, Description):
    """Examples that show the form of a call and how its result is used, on other tasks than `CalculatorPrompts`. Most
    examples of two-number sums and products make no call, so that calling is left to reinforcement learning.

        57831-204=    calc(57831-204)<eos>    57627\\n    57627<eos>      differences are computed by a call
        61+803*5=     calc(61+803*5)<eos>     4076\\n     4076<eos>       so are expressions of three numbers
        7+5=          12<eos>                                             sums and products mostly are not

    Args:
        max_digits: digits of the numbers in differences.
        pair_digits: digits of the numbers in sums and products; fewer than in the problems to be learned.
        pair_share: fraction of the problems that are sums and products of two numbers.
        pair_calls: fraction of these that are computed by a call; the others are answered directly.
        train_size, held_out: numbers of problems, each of one or two texts.
        seed: of the problems.
        max_length: the most tokens of a text.
    """

    max_digits: Annotated[int, Field(ge=1, le=9)] = 7
    pair_digits: tuple[PositiveInt, ...] = (1, 2, 5, 6)
    pair_share: UnitInterval = 0.4
    pair_calls: UnitInterval = 0.1
    train_size: PositiveInt = 6000
    held_out: PositiveInt = 200
    seed: int = 0
    max_length: PositiveInt = 64

    def rows(self, split: Split) -> list[dict[str, str]]:
        """Texts of a split, each a prompt and a completion without its EOS."""
        chosen = random.Random(f"calculator warm start/{split}/{self.seed}")
        rows: list[dict[str, str]] = []
        for _ in range(self.train_size if split == "train" else self.held_out):
            problem, calls = self._problem(chosen)
            value = calculated(problem)
            if calls:
                rows.append({"prompt": f"{problem}=", "completion": f"calc({problem})"})
                rows.append({"prompt": f"{problem}=calc({problem}){EOS}{value}\n", "completion": value})
            else:
                rows.append({"prompt": f"{problem}=", "completion": value})
        return rows

    def _problem(self, chosen: random.Random) -> tuple[str, bool]:
        """An expression, and whether it is computed by a call."""
        if chosen.random() < self.pair_share:
            left, right = (_number(chosen, digits, digits) for digits in chosen.choices(self.pair_digits, k=2))
            return f"{left}{chosen.choice('+*')}{right}", chosen.random() < self.pair_calls
        if chosen.random() < 0.5:
            left, right = (_number(chosen, 1, self.max_digits) for _ in range(2))
            return f"{left}-{right}", True
        numbers = [_number(chosen, 1, 4) for _ in range(3)]
        signs = [chosen.choice("+-*") for _ in range(2)]
        return f"{numbers[0]}{signs[0]}{numbers[1]}{signs[1]}{numbers[2]}", True

    def build(self, context: BuildContext) -> DataSplits:
        return DataSplits.generated(SFTDataset, self.rows, context, may_repeat=True, max_length=self.max_length)


def calculated(problem: str) -> str:
    """The value of an expression of integers with +, - and *, as text.

    >>> calculated("2+3*4")
    '14'
    """
    total = 0
    for term in problem.replace("-", "+-").split("+"):
        value = 1
        for factor in term.split("*"):
            value *= int(factor)
        total += value
    return str(total)


def _number(chosen: random.Random, low: int, high: int) -> int:
    """A random number of `low` to `high` digits; each number of digits is equally likely."""
    digits = chosen.randint(low, high)
    return chosen.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
