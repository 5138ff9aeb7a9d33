"""Rewards by rules: exact match, regular expression, response length, and equality of mathematical answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from verl.component import BuildContext, component, package_fault
from verl.errors import RewardError
from verl.protocol import DataProto
from verl.rewards.base import Reward, RewardDescription, RewardResult
from verl.rewards.process_pool import SampleReward


@component
class ExactMatch(RewardDescription, Reward):
    """Compare each response with a column of the data.

    Args:
        answer_key: column of the answer, a text or an integer.
        ignore_whitespace: whether to strip white space from both texts.
        correct, wrong: the two scores.
    """

    scores_ahead = scores_groups = True

    answer_key: str = "answer"
    ignore_whitespace: bool = True
    correct: float = 1.0
    wrong: float = 0.0

    def faults(self) -> Iterator[str]:
        if self.correct <= self.wrong:
            yield f"correct is {self.correct}: must exceed wrong, which is {self.wrong}."

    def columns_read(self) -> Iterator[tuple[str, str]]:
        yield f"answer_key is {self.answer_key!r}", self.answer_key

    def score(self, prompts: list[str], responses: list[str], **columns: list) -> list[float]:
        """`correct` for each response that equals its answer, else `wrong`.

        Raises:
            RewardError: the data has no such column, or an answer in it is neither text nor integer.
        """
        if self.answer_key not in columns:
            present = ", ".join(columns) or "none"
            raise RewardError(
                f"answer_key is {self.answer_key!r}: the data has no such column. Its columns: {present}."
            )
        scores = []
        for index, (response, answer) in enumerate(zip(responses, columns[self.answer_key], strict=True)):
            if isinstance(answer, bool) or not isinstance(answer, (str, int)):
                raise RewardError(
                    f"column {self.answer_key!r} is {answer!r} at sample {index} of the batch: "
                    "expected a text or an integer."
                )
            texts = response, str(answer)
            is_same = len({text.strip() if self.ignore_whitespace else text for text in texts}) == 1
            scores.append(self.correct if is_same else self.wrong)
        return scores


@component
class Format(RewardDescription, Reward):
    """`correct` where the response matches a regular expression, `wrong` elsewhere.

    A pattern with nested repetition, such as `(a+)+$`, can take exponential time.

    Args:
        pattern: regular expression of Python's `re`; `.` also matches line breaks.
        whole: whether the whole response, without surrounding white space, must match, or any part of it.
        correct, wrong: the two scores.
    """

    scores_ahead = scores_groups = True

    pattern: str
    whole: bool = True
    correct: float = 1.0
    wrong: float = 0.0

    def faults(self) -> Iterator[str]:
        try:
            re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            yield f"pattern is {self.pattern!r}: not a regular expression ({error})."
        if self.correct <= self.wrong:
            yield f"correct is {self.correct}: must exceed wrong, which is {self.wrong}."

    def score(self, prompts: list[str], responses: list[str], **columns: list) -> list[float]:
        """`correct` or `wrong` for each response."""
        expression = re.compile(self.pattern, re.DOTALL)
        match = expression.fullmatch if self.whole else expression.search
        return [self.correct if match(text.strip() if self.whole else text) else self.wrong for text in responses]


@component
class Length(RewardDescription, Reward):
    """`inside` if a response has min_tokens to max_tokens tokens, both included, else `outside`.

    Args:
        min_tokens: lower bound.
        max_tokens: upper bound; null for none.
        inside, outside: the two scores.
    """

    scores_ahead = scores_groups = True

    min_tokens: NonNegativeInt = 1
    max_tokens: int | None = None
    inside: float = 0.0
    outside: float = -1.0

    def faults(self) -> Iterator[str]:
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            yield f"max_tokens is {self.max_tokens}: must be at least min_tokens, which is {self.min_tokens}."

    def score_batch(self, batch: DataProto) -> RewardResult:
        """`inside` or `outside` for each response; needs no texts."""
        lengths = response_lengths(batch)
        fits = (lengths >= self.min_tokens) & (lengths <= (np.inf if self.max_tokens is None else self.max_tokens))
        return RewardResult(np.where(fits, self.inside, self.outside))


@component
class Overlong(RewardDescription, Reward):
    """Soft overlong punishment: 0 up to the start of a buffer before the limit, then linear down to -penalty at it.

                   0                                            |y| <= L_max - L_cache
        R(y) =     penalty * ((L_max - L_cache) - |y|) / L_cache   below L_max
                   -penalty                                     L_max < |y|

    Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13, where penalty is 1.
    Degenerate: a buffer of 0 tokens punishes only responses longer than the limit.

    Args:
        max_tokens: L_max, the limit; usually `rollout.max_new_tokens`.
        buffer_tokens: L_cache, at most max_tokens.
        penalty: subtracted from a response at or above the limit.
    """

    scores_ahead = scores_groups = True

    max_tokens: PositiveInt
    buffer_tokens: NonNegativeInt
    penalty: NonNegativeFloat = 1.0

    def faults(self) -> Iterator[str]:
        if self.buffer_tokens > self.max_tokens:
            yield f"buffer_tokens is {self.buffer_tokens}: must lie in [0, max_tokens], which is {self.max_tokens}."

    def score_batch(self, batch: DataProto) -> RewardResult:
        """Score each response in [-penalty, 0]; needs no texts."""
        over = response_lengths(batch) - (self.max_tokens - self.buffer_tokens)
        share = over / self.buffer_tokens if self.buffer_tokens else (over > 0).astype(float)
        return RewardResult(-self.penalty * np.clip(share, 0.0, 1.0) + 0.0)  # + 0.0: no -0.0 in tables


def response_lengths(batch: DataProto) -> np.ndarray:
    """Number of tokens of each response [B], float64."""
    return batch.batch["response_mask"].sum(dim=1).double().cpu().numpy()


@component
class MathAnswer(RewardDescription):
    """Compare the final answer of a response with a column of the data, by value: 0.5, 1/2 and \\boxed{\\frac12} agree.

    The column holds a solution in the form of GSM8K (`... #### 72`) or of MATH (`... \\boxed{72}`), or the answer
    alone, as a number or LaTeX. math-verify compares the two in worker processes, since it does not terminate on some
    expressions. A response that times out, makes it fail, or whose answer in the data cannot be parsed is scored
    `wrong` and counted in `reward/failed`.

    Args:
        answer_key: column of the answer.
        correct, wrong: the two scores.
        timeout_s: deadline of one response, after which its process is killed.
        num_workers: number of processes.
    """

    answer_key: str = "answer"
    correct: float = 1.0
    wrong: float = 0.0
    timeout_s: Annotated[float, Field(gt=0, lt=1e6)] = 5.0
    num_workers: PositiveInt = 4

    def faults(self) -> Iterator[str]:
        if self.correct <= self.wrong:
            yield f"correct is {self.correct}: must exceed wrong, which is {self.wrong}."

    def machine_faults(self) -> Iterator[str]:
        fault = package_fault("math_verify", "reward=exact_match")
        if fault is not None:
            yield f"_target_ is {type(self).__name__}: {fault}"

    def columns_read(self) -> Iterator[tuple[str, str]]:
        yield f"answer_key is {self.answer_key!r}", self.answer_key

    def build(self, context: BuildContext) -> SampleReward:
        return SampleReward(
            "verl.rewards.math_rules:math_score",
            {"correct": self.correct, "wrong": self.wrong},
            columns={"answer": self.answer_key},
            timeout_s=self.timeout_s,
            num_workers=self.num_workers,
            error_score=self.wrong,
            preloaded=("math_verify",),
        )
