"""The reward for a right answer to a mathematical question, however it is written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl.component import BuildContext
from verl.rewards.base import RewardDescription
from verl.rewards.samples import SampleReward, pool_faults


@dataclass(frozen=True, kw_only=True)
class MathAnswer(RewardDescription):
    """Compare the last answer in a response with a column of the data, by value: 0.5, 1/2 and \\boxed{\\frac12} agree.

    The column holds a solution as GSM8K writes it (`... #### 72`), one as MATH does (`... \\boxed{72}`), or the answer
    alone, as a number or LaTeX. math-verify reads and compares the two, in worker processes: some expressions take it
    for ever. A response that runs out of time, or on which it fails, is wrong, and counts in `reward/failed`; so is one
    whose answer in the data cannot be read.

    Args:
        answer_key: the column.
        correct, wrong: the two scores.
        timeout_s: for one response, after which its process is killed.
        num_workers: processes.
    """

    answer_key: str = "answer"
    correct: float = 1.0
    wrong: float = 0.0
    timeout_s: float = 5.0
    num_workers: int = 4

    def faults(self) -> Iterator[str]:
        yield from pool_faults(self.timeout_s, self.num_workers, correct=self.correct, wrong=self.wrong)
        if self.correct <= self.wrong:
            yield f"correct is {self.correct}: must exceed wrong, which is {self.wrong}."

    def build(self, context: BuildContext) -> SampleReward:
        return SampleReward(
            "verl.rewards.math_rule:rate",
            {"correct": self.correct, "wrong": self.wrong},
            columns={"answer": self.answer_key},
            timeout_s=self.timeout_s,
            num_workers=self.num_workers,
            error_score=self.wrong,
        )
