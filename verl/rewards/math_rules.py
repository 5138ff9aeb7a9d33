r"""Rules for mathematical answers as functions of text. Light: imported by worker processes that import nothing else.

`gsm8k_score` compares the final number of a response; `math_score` compares answers by value: 0.5, 1/2 and \frac{1}{2}.
"""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from typing import Any

MARK = "####"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def gsm8k_score(prompts: list[str], responses: list[str], answer: list[str], needs_mark: bool = False) -> list[float]:
    """1 where a response gives the answer, 0 elsewhere; for `reward=function
    reward.path=verl.rewards.math_rules:gsm8k_score`.

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


def math_score(prompt: str, response: str, answer: str | float, correct: float, wrong: float) -> float:
    """`correct` where the last answer of a response has the value of `answer`, `wrong` elsewhere.

    Raises:
        ValueError: `answer` holds nothing that can be read as mathematics.
    """
    from math_verify import parse, verify

    gold = _parsed_answer(answer, parse)
    given = parse(_final(response), parsing_timeout=0)
    # Its own time-outs are left off, since they cannot end code that never comes back to Python.
    return correct if given and verify(gold, given, timeout_seconds=0) else wrong


def _parsed_answer(answer: Any, parse: Any) -> list:
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise ValueError(f"the answer in the data is {answer!r}: expected a text or a number")
    text = _final(str(answer)).strip()
    # bare LaTeX is only recognised within an environment
    gold = parse(text if re.search(r"\\boxed|\$|\\\(|\\\[", text) else f"${text}$", parsing_timeout=0)
    if not gold:
        raise ValueError(f"the answer in the data is {answer!r}: it holds nothing that can be read as mathematics")
    return gold


def _final(text: str) -> str:
    """What follows the last `####`, where there is one, as GSM8K marks a final answer."""
    return text.rpartition("####")[2]


for _name in ("math_verify", "math_verify.parser", "math_verify.grader"):  # they warn at every call
    logging.getLogger(_name).setLevel(logging.ERROR)
