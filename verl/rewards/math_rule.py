"""Whether two mathematical answers are the same; light, for it is imported by processes that do nothing else."""

from __future__ import annotations

import logging
import re
from typing import Any


def rate(prompt: str, response: str, answer: str | float, correct: float, wrong: float) -> float:
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
