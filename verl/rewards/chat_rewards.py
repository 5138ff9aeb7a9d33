"""Rewards of the tasks of `data=chat_task`, as functions of texts for `reward=function`; imports little."""

from __future__ import annotations

import json
import re

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def json_object(prompts: list[str], responses: list[str], answer: list[str]) -> list[float]:
    """1 for a response that consists of the JSON object `answer`, with any white space; else 0.

    >>> json_object(["", ""], [' {"age": 31}', 'Here: {"age": 31}'], ['{"age": 31}'] * 2)
    [1.0, 0.0]
    """
    return [float(_parsed(text) == json.loads(wanted)) for text, wanted in zip(responses, answer, strict=True)]


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def last_number(prompts: list[str], responses: list[str], answer: list[str]) -> list[float]:
    """1 for a response whose last number is `answer`; else 0.

    >>> last_number([""], ["Of 12 and 1,400, it is 1,400."], ["1400"])
    [1.0]
    """
    numbers = [[number.replace(",", "") for number in NUMBER.findall(text)] for text in responses]
    return [float(found[-1:] == [wanted]) for found, wanted in zip(numbers, answer, strict=True)]


def length_error(prompts: list[str], responses: list[str], answer: list[int]) -> list[float]:
    """Minus the difference between the number of characters of a response and `answer`.

    >>> length_error([""], ["four"], [50])
    [-46.0]
    """
    return [-float(abs(wanted - len(text))) for text, wanted in zip(responses, answer, strict=True)]


def common_subsequence(prompts: list[str], responses: list[str], answer: list[str]) -> list[float]:
    """2 L / (both lengths) of a response and `answer`, with L the characters of their longest common subsequence.

    >>> common_subsequence(["", ""], ["olleh", "ole"], ["olleh", "olleh"])
    [1.0, 0.75]
    """
    return [_similarity(text.strip(), wanted) for text, wanted in zip(responses, answer, strict=True)]


def _similarity(text: str, wanted: str) -> float:
    longest = [0] * (len(wanted) + 1)  # for each prefix of `wanted`
    for character in text[: 4 * len(wanted)]:  # a longer text cannot match
        before = 0
        for place, other in enumerate(wanted, start=1):
            above = longest[place]
            longest[place] = before + 1 if character == other else max(above, longest[place - 1])
            before = above
    return 2 * longest[-1] / max(1, len(text) + len(wanted))
