"""Base class of rewards from a server: requests, failures, statistics, and scores parsed from replies.

samples ──> requests ──> client ──> texts ──> scores

Subclasses define the content of requests and replies. A score is read from a reply by a pattern, or by a path in its
JSON.
"""

from __future__ import annotations

import json
import logging
import math
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from verl.component import BuildContext, component
from verl.errors import ConfigError, RewardError, faults_below
from verl.http_client.endpoint import Endpoint
from verl.http_client.request import Kind, Request, RequestReport, RetryableAnswer, encoded
from verl.protocol import DataProto
from verl.rewards.base import LARGEST, Reward, RewardDescription, RewardResult, reward_error, shown, texts_of

if TYPE_CHECKING:
    from verl.http_client.client import HTTPClient

# Only {name} is replaced, so that templates may contain JSON; {{name}} is the literal text {name}.
_PLACEHOLDER = re.compile(r"\{\{(?P<literal>\w+)\}\}|\{(?P<name>[A-Za-z_]\w*)\}")


def placeholders(template: str) -> list[str]:
    """The names in a template, in order."""
    return list(dict.fromkeys(match["name"] for match in _PLACEHOLDER.finditer(template) if match["name"]))


def filled(template: str, texts: Mapping[str, Any]) -> str:
    """Fill in a template; the values are not searched for further names.

    Raises:
        RewardError: a name of the template is not a column.
    """

    def put(match: re.Match[str]) -> str:
        name = match["name"]
        if name is None:
            return f"{{{match['literal']}}}"
        return as_text(column(texts, name, "template names {" + name + "}"))

    return _PLACEHOLDER.sub(put, template)


def column(texts: Mapping[str, Any], name: str, required_by: str) -> Any:
    """A column by its name.

    Args:
        texts: columns by name.
        name: name of the column.
        required_by: start of the message, naming what needs the column.
    Raises:
        RewardError: there is no such column.
    """
    if name not in texts:
        raise RewardError(f"{required_by}, and the data has no such column. It has {', '.join(sorted(texts))}.")
    return texts[name]


def as_text(value: Any) -> str:
    """A value as text: lists and mappings as JSON, anything else by `str`."""
    if isinstance(value, (dict, list, tuple)):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def by_pattern(text: str, pattern: re.Pattern[str]) -> float:
    """The number in the last match of a pattern: its first group, or the whole match if it has no group.

    The last match is used, because a judge that reasons first writes its verdict at the end.

    Raises:
        RetryableAnswer: there is no match, or the match is not a number.
    """
    matches = list(pattern.finditer(text))
    if not matches:
        raise RetryableAnswer(f"an answer that score_pattern does not match: {shown(text)}")
    return number(matches[-1][1 if pattern.groups else 0])


def by_path(text: str, path: str) -> float:
    """The number at a path such as `scores.0.value` in the JSON of a text, which may be within prose or a code fence.

    Raises:
        RetryableAnswer: there is no JSON, no such path, or no number there.
    """
    for value in _json_values(text):
        try:
            return number(at(value, path))
        except LookupError:
            continue
    raise RetryableAnswer(f"an answer without JSON that has {path}: {shown(text)}")


def at(value: Any, path: str | None) -> Any:
    """The value at a dotted path of keys and indices; `value` itself for None.

    Raises:
        LookupError: there is no such path.
    """
    for step in path.split(".") if path else ():
        if isinstance(value, list) and step.lstrip("-").isdigit():
            value = value[int(step)]
        elif isinstance(value, dict):
            value = value[step]
        else:
            raise LookupError(step)
    return value


def number(value: Any) -> float:
    """Convert a number, a bool or a text with a number to a float.

    Raises:
        RetryableAnswer: the value is not a finite number.
    """
    try:
        is_one = isinstance(value, (bool, int, float)) or (isinstance(value, str) and "_" not in value)  # 1_0 is 10
        number = float(value) if is_one else None
    except (ValueError, OverflowError):
        number = None
    if number is None:
        raise RetryableAnswer(f"{shown(value)} in place of a number")
    if math.isnan(number) or abs(number) > LARGEST:
        raise RetryableAnswer(f"the score {number!r}")
    return number


def _json_values(text: str) -> Iterator[Any]:
    """JSON values in a text: the whole text, or the objects and lists in it, last first."""
    decoder, values, offset = json.JSONDecoder(), [], 0
    while (opening := re.compile(r"[{\[]").search(text, offset)) is not None:
        try:
            value, offset = decoder.raw_decode(text, opening.start())
            values.append(value)
        except (ValueError, RecursionError):
            offset = opening.start() + 1
    try:
        yield json.loads(text)
    except (ValueError, RecursionError):
        yield from reversed(values)


@dataclass
class RemoteSample:
    """A response that is being scored.

    Attributes:
        row: index in the batch.
        texts: `prompt`, `response` and the columns of the data, of this row.
        question: JSON content of its request.
        report: of its request; None if it was not sent, or cancelled.
    """

    row: int
    texts: dict[str, Any]
    question: Any
    score: float | None = None
    report: RequestReport | None = None

    @property
    def failure(self) -> str | None:
        """Why the request gave it no score."""
        return None if self.score is not None or self.report is None else self.report.failure

    @property
    def kind(self) -> Kind | None:
        """Kind of the failure."""
        return None if self.failure is None or self.report is None else self.report.kind

    @property
    def outcome(self) -> str:
        """`scored in 0.41 s`, `scored in 0.38 s, asked 3 times`, `failed, asked 6 times: HTTP 500`."""
        if self.report is None:
            return "not asked"
        attempts = self.report.attempts
        again = f", asked {attempts} times" if attempts > 1 else ""
        if self.score is None:
            return f"failed{again}: {self.failure}"
        return f"scored in {self.report.seconds[-1]:.2f} s{again}"


logger = logging.getLogger(__name__)


@component
class RemoteDescription(RewardDescription):
    """Base class of components for rewards from a server.

    Args:
        endpoint: address of the server, time-outs, retries and rate limits.
        on_error: `raise` ends the run at a sample without a score after all retries; `score` assigns `error_score` to
            it, warns, and counts it in `reward/failed`. In both cases the run ends if the server refuses every request
            (wrong key or path) or answers none of a batch.
        error_score: see `on_error`.
    """

    endpoint: Endpoint
    on_error: Literal["raise", "score"] = "raise"
    error_score: float = 0.0

    def connect(self, context: BuildContext) -> HTTPClient:
        """The client, after a check that the server answers.

        Raises:
            ConfigError: the API key is missing, or no server answers.
        """
        with faults_below("endpoint"):
            client = self.endpoint.build(context)
            try:
                absence = client.absence()
                if absence is not None:
                    raise ConfigError(f"base_url is {self.endpoint.base_url}: no server answers there ({absence}).")
            except BaseException:
                client.close()
                raise
        return client


class RemoteReward(Reward):
    """The reward that a `RemoteDescription` builds.

    Args:
        described: its settings.
        client: sends the requests; `close` closes it too.
        batch_size: samples per request.
    """

    scores_ahead = scores_groups = True
    described: Any

    def __init__(self, described: RemoteDescription, client: HTTPClient, batch_size: int = 1):
        self.described, self.client, self.url = described, client, described.endpoint.url(self.path)
        self.batch_size = batch_size
        self.error_score = described.error_score if described.on_error == "score" else None

    path = ""  # URL path of the requests

    @abstractmethod
    def question(self, texts: dict[str, Any]) -> Any:
        """The JSON content of the request for a sample.

        Raises:
            RewardError: a column is missing.
        """

    @abstractmethod
    def score_of(self, sample: RemoteSample, text: str) -> float:
        """Parse the score from a reply.

        Raises:
            RetryableAnswer: the reply has no score.
        """

    @abstractmethod
    def body(self, samples: Sequence[RemoteSample]) -> Any:
        """The body of the request for some samples, at most `batch_size`."""

    @abstractmethod
    def replies(self, answer: Any, count: int) -> Sequence[str]:
        """The reply for each sample of a request, from the parsed answer.

        Raises:
            RetryableAnswer: the answer does not have `count` replies.
        """

    def score_batch(self, batch: DataProto) -> RewardResult:
        """Score every response; `columns` has the outcome of each request.

        Raises:
            RewardError: a sample has no score and `on_error` is `raise`, the data lacks a column, or the server answers
                nothing.
        """
        prompts, responses, columns = texts_of(batch)
        samples = [
            self._sample(row, {name: values[row] for name, values in columns.items()}, prompts, responses)
            for row in range(len(batch))
        ]
        size = self.batch_size
        asks = [_ScoreRequest(self, samples[start : start + size]) for start in range(0, len(samples), size)]
        reports = self.client.ask(asks, stop_at_failure=self.error_score is None)
        for ask, report in zip(asks, reports, strict=True):
            for sample in ask.samples:
                sample.report = report
        self._judge(samples, prompts, responses)
        return self._result(samples, [report for report in reports if report is not None])

    def close(self) -> None:
        self.client.close()

    def _sample(self, row: int, columns: dict[str, Any], prompts: list[str], responses: list[str]) -> RemoteSample:
        texts = {**columns, "prompt": prompts[row], "response": responses[row]}
        question = self.question(texts)
        try:
            encoded(question)
        except (TypeError, ValueError) as error:
            expected = "texts and numbers, which can be sent as JSON"
            raise reward_error(expected, str(error), self.producer, prompts, responses, row) from error
        return RemoteSample(row, texts, question)

    def _judge(self, samples: list[RemoteSample], prompts: list[str], responses: list[str]) -> None:
        """Raise or warn if samples have no score."""
        failed = [sample for sample in samples if sample.failure is not None]
        if not failed:
            return
        refused = [sample for sample in failed if sample.kind == "refused"]
        first = (refused or failed)[0]
        expected = f"one finite number for each response, from {self.url}"
        error = reward_error(expected, first.failure or "", self.producer, prompts, responses, first.row)
        if self.error_score is None or refused:
            raise error
        if all(sample.kind == "unreachable" for sample in samples):
            raise RewardError(f"{error}\n  No sample of the batch was answered: the server seems to be down.")
        logger.warning(
            "%d of %d samples failed and get error_score %g. The first of them:\n%s",
            len(failed), len(samples), self.error_score, error,
        )  # fmt: skip

    def _result(self, samples: list[RemoteSample], reports: list[RequestReport]) -> RewardResult:
        scores = [self.error_score if sample.score is None else sample.score for sample in samples]
        outcomes = np.array([sample.outcome for sample in samples], dtype=object)
        parts = {}
        if self.error_score is not None:
            parts["failed"] = np.array([float(sample.score is None) for sample in samples])
        counts = {
            "remote_requests": [float(report.attempts) for report in reports],
            "remote_retries": [float(max(0, report.attempts - 1)) for report in reports],
            "remote_failures": [float(sum(sample.score is None for sample in samples))],
            "remote_latency_s": [second for report in reports for second in report.seconds],
        }
        return RewardResult(np.array(scores, dtype=np.float64), parts, {"outcome": outcomes}, counts=counts)


class _ScoreRequest(Request):
    """A request for the scores of some samples; a retry repeats only samples without a score."""

    def __init__(self, reward: RemoteReward, samples: Sequence[RemoteSample]):
        self.path, self.samples, self._reward = reward.path, samples, reward

    def body(self) -> Any:
        return self._reward.body(self._unscored())

    def read(self, answer: Any) -> None:
        faults, unscored = [], self._unscored()
        for sample, text in zip(unscored, self._reward.replies(answer, len(unscored)), strict=True):
            try:
                sample.score = self._reward.score_of(sample, text)
            except RetryableAnswer as fault:
                faults.append(fault)
        if faults:
            raise faults[0]

    def _unscored(self) -> list[RemoteSample]:
        return [sample for sample in self.samples if sample.score is None]
