"""The reward that is 1 where a response is the answer, and 0 elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl.errors import RewardError
from verl.rewards.base import Reward, RewardDescription


@dataclass(frozen=True, kw_only=True)
class ExactMatch(RewardDescription, Reward):
    """Compare each response with a column of the data.

    Args:
        answer_key: the column that holds the answer, a text or a whole number.
        ignore_whitespace: whether white space before and after both texts is left out of the comparison.
        correct, wrong: the two scores.
    """

    answer_key: str = "answer"
    ignore_whitespace: bool = True
    correct: float = 1.0
    wrong: float = 0.0

    def faults(self) -> Iterator[str]:
        if self.correct <= self.wrong:
            yield f"correct is {self.correct}: must exceed wrong, which is {self.wrong}."

    def rate(self, prompts: list[str], responses: list[str], **columns: list) -> list[float]:
        """`correct` for each response that equals its answer, `wrong` for every other one.

        Raises:
            RewardError: the data has no such column, or an answer in it is no text or whole number.
        """
        if self.answer_key not in columns:
            present = ", ".join(columns) or "none"
            raise RewardError(
                f"answer_key is {self.answer_key!r}: the data has no such column. Its columns: {present}."
            )
        return [
            self.correct if self._same(response, answer, index) else self.wrong
            for index, (response, answer) in enumerate(zip(responses, columns[self.answer_key], strict=True))
        ]

    def _same(self, response: str, answer: str | int, index: int) -> bool:
        if isinstance(answer, bool) or not isinstance(answer, (str, int)):
            raise RewardError(
                f"column {self.answer_key!r} is {answer!r} at sample {index} of the batch: "
                "expected an answer as a text or a whole number."
            )
        answer = str(answer)
        return response.strip() == answer.strip() if self.ignore_whitespace else response == answer
