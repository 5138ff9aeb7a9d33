"""The reward for keeping to a form: a regular expression that the response matches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from verl.rewards.base import Reward, RewardDescription


@dataclass(frozen=True, kw_only=True)
class Format(RewardDescription, Reward):
    """`correct` where the response matches a regular expression, `wrong` elsewhere.

    A pattern of nested repetition, such as `(a+)+$`, takes time that grows without bound on some responses.

    Args:
        pattern: of Python's `re`; `.` matches line breaks too.
        whole: whether all of the response must match, white space around it left out, and not only some part of it.
    """

    pattern: str
    whole: bool = True
    correct: float = 1.0
    wrong: float = 0.0

    def faults(self) -> Iterator[str]:
        try:
            re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            yield f"pattern is {self.pattern!r}: no regular expression ({error})."
        if self.correct <= self.wrong:
            yield f"correct is {self.correct}: must exceed wrong, which is {self.wrong}."

    def rate(self, prompts: list[str], responses: list[str], **columns: list) -> list[float]:
        """`correct` or `wrong` for each response."""
        expression = re.compile(self.pattern, re.DOTALL)
        match = expression.fullmatch if self.whole else expression.search
        return [self.correct if match(text.strip() if self.whole else text) else self.wrong for text in responses]
