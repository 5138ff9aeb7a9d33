"""LLM judge: a chat model behind an OpenAI-compatible server reads prompt and response and writes a score."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from verl.component import BuildContext, component
from verl.http_client.request import RetryableAnswer
from verl.protocol.user_function import load_function, path_faults, signature_of, source_signature
from verl.rewards.base import check_columns, shown
from verl.rewards.remote.remote_base import (
    RemoteDescription,
    RemoteReward,
    RemoteSample,
    by_path,
    by_pattern,
    filled,
    number,
    placeholders,
)
from verl.utils.signals import RAISED_BY_CODE

OURS = ("model", "messages", "stream", "n")  # fields of the request that `options` may not set


if TYPE_CHECKING:
    from verl.http_client.client import HTTPClient


@component
class LLMJudge(RemoteDescription):
    """Scores each response with a chat model, by one request to `base_url/chat/completions`.

    Exactly one of `score_pattern`, `score_path` and `score_function` parses the score from the reply. A reply without a
    score counts as a failed request and is retried, since a judge samples its replies.

    Args:
        model: model name, as the server knows it.
        template: the user message; `{prompt}`, `{response}` and `{NAME}` for any column of the data are replaced,
            `{{NAME}}` gives the literal text `{NAME}`.
        system: the system message; null for none.
        options: further fields of the request, such as `temperature`, `max_tokens` or `response_format`.
        score_pattern: regular expression; the score is the first group of its last match.
        score_path: path of the score in the JSON of the reply, such as `verdict.score`.
        score_function: `file.py:function` or `package.module:function`, called as `function(reply=TEXT)` with `prompt`,
            `response` and the columns that it names; returns a number.
        min_score, max_score: a reply with a score outside these bounds is retried; null for no bound.
    """

    example_values: ClassVar[Mapping[str, str]] = {"model": "gpt-4o-mini"}

    model: Annotated[str, Field(min_length=1)]
    template: str
    system: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    score_pattern: str | None = None
    score_path: str | None = None
    score_function: str | None = None
    min_score: float | None = None
    max_score: float | None = None

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if "response" not in placeholders(self.template):
            yield "template has no {response}: the judge would not see the response."
        for name in OURS:
            if name in self.options:
                yield f"options.{name}: is set by this reward. Remove it."
        yield from self._reader_faults()
        if self.min_score is not None and self.max_score is not None and self.min_score >= self.max_score:
            yield f"min_score is {self.min_score:g}: must be below max_score, which is {self.max_score:g}."

    def _reader_faults(self) -> Iterator[str]:
        ways = {name: getattr(self, name) for name in ("score_pattern", "score_path", "score_function")}
        chosen = [name for name, value in ways.items() if value is not None]
        if len(chosen) != 1:
            yield f"{', '.join(ways)}: exactly one must be set, not {', '.join(chosen) or 'none'}."
        if self.score_pattern is not None:
            try:
                re.compile(self.score_pattern)
            except re.error as error:
                yield f"score_pattern is {self.score_pattern!r}: is not a regular expression ({error})."
        if self.score_function is not None:
            for fault in path_faults(self.score_function, {}, ("reply",)):
                yield fault.replace("path is", "score_function is", 1)

    def columns_read(self) -> Iterator[tuple[str, str]]:
        for key in ("template", "system"):
            for name in placeholders(getattr(self, key) or ""):
                if name not in ("prompt", "response"):
                    yield f"{key} has {{{name}}}", name
        in_source = None if self.score_function is None else source_signature(self.score_function)
        for name in () if in_source is None else signature_of(in_source).required:
            if name not in ("reply", "prompt", "response"):
                yield f"score_function is {self.score_function!r}, which takes {name}", name

    def build(self, context: BuildContext) -> LLMJudgeReward:
        function = None if self.score_function is None else load_function(self.score_function)
        return LLMJudgeReward(self, self.connect(context), function)


class LLMJudgeReward(RemoteReward):
    """The reward that `LLMJudge` builds."""

    path = "/chat/completions"
    described: LLMJudge

    def __init__(self, described: LLMJudge, client: HTTPClient, function: Callable | None):
        super().__init__(described, client)
        self._function = function
        self._accepted = None if function is None else signature_of(function).accepted

    def question(self, texts: dict[str, Any]) -> dict[str, Any]:
        system = self.described.system
        messages = [] if system is None else [{"role": "system", "content": filled(system, texts)}]
        messages.append({"role": "user", "content": filled(self.described.template, texts)})
        return {**self.described.options, "model": self.described.model, "messages": messages}

    def score_of(self, sample: RemoteSample, text: str) -> float:
        score = number(self._score_in(text, sample.texts))
        low, high = self.described.min_score, self.described.max_score
        if (low is not None and score < low) or (high is not None and score > high):
            bounds = f"[{'-inf' if low is None else f'{low:g}'}, {'inf' if high is None else f'{high:g}'}]"
            raise RetryableAnswer(f"the score {score:g}, outside {bounds}, in {shown(text)}")
        return score

    def _score_in(self, reply: str, texts: dict[str, Any]) -> Any:
        if self.described.score_pattern is not None:
            return by_pattern(reply, re.compile(self.described.score_pattern))
        if self.described.score_path is not None:
            return by_path(reply, self.described.score_path)
        function, accepted = self._function, self._accepted
        assert function is not None
        check_columns(accepted, {name: [] for name in texts}, ("reply",), function)
        columns = {name: value for name, value in texts.items() if accepted is None or name in accepted}
        try:
            return function(reply=reply, **columns)
        except RAISED_BY_CODE as error:
            raise RetryableAnswer(f"{type(error).__name__} in score_function: {error}, of {shown(reply)}") from error

    def body(self, samples: Sequence[RemoteSample]) -> Any:
        return samples[0].question

    def replies(self, answer: Any, count: int) -> list[str]:
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"]
        except (LookupError, TypeError):
            raise RetryableAnswer(f"an answer without choices[0].message.content: {shown(answer)}") from None
        if not isinstance(text, str) or not text.strip():  # for example, reasoning has used up all tokens
            reason = choice.get("finish_reason")
            hint = "; raise options.max_tokens" if reason == "length" else ""
            raise RetryableAnswer(f"an answer without a text (finish_reason {reason}{hint})")
        return [text]
