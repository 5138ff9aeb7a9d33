"""The rule for grade-school mathematics: the number that a response ends with, compared as a number."""

from __future__ import annotations

import re
from decimal import Decimal

MARK = "####"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def score(prompts: list[str], responses: list[str], answer: list[str], needs_mark: bool = False) -> list[float]:
    """1 where a response gives the answer, 0 elsewhere; for `reward=function reward.path=verl.rewards.gsm8k:score`.

    Args:
        prompts: not looked at.
        answer: the column with the number, such as `1,250`.
        needs_mark: count only a number that follows `####`.
    """
    return [
        float(given is not None and given == number_of(truth))
        for given, truth in ((final_number(text, needs_mark), truth) for text, truth in zip(responses, answer))
    ]


def final_number(text: str, needs_mark: bool = False) -> Decimal | None:
    """The first number after the last `####`, or without a mark the last number; None where there is none."""
    _, mark, after = text.rpartition(MARK)
    if mark:
        found = NUMBER.search(after)
        return None if found is None else number_of(found[0])
    found = NUMBER.findall(text)
    return None if needs_mark or not found else number_of(found[-1])


def number_of(text: str) -> Decimal | None:
    """A number as it is written in text, thousands divided by commas; None where it is none."""
    found = NUMBER.fullmatch(text.strip().removeprefix("$").removesuffix("."))
    return None if found is None else Decimal(found[0].replace(",", ""))
