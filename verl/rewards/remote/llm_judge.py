"""LLM judge: a chat model behind an OpenAI-compatible server reads prompt and response and writes a score."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, ClassVar

from pydantic import Field

from verl.component import BuildContext, component
from verl.http_client.request import RetryableAnswer
from verl.rewards.base import shown
from verl.rewards.remote.remote_base import (
    RemoteDescription,
    RemoteReward,
    RemoteSample,
    by_path,
    by_pattern,
    filled,
    placeholders,
)

OURS = ("model", "messages", "stream", "n")  # fields of the request that `options` may not set


@component
class LLMJudge(RemoteDescription):
    """Scores each response with a chat model, by one request to `base_url/chat/completions`.

    Either `score_pattern` or `score_path` parses the score from the reply. A reply without a score counts as a failed
    request and is retried, since a judge samples its replies.

    Args:
        model: model name, as the server knows it.
        template: the user message; `{prompt}`, `{response}` and `{NAME}` for any column of the data are replaced,
            `{{NAME}}` gives the literal text `{NAME}`.
        system: the system message; null for none.
        options: further fields of the request, such as `temperature`, `max_tokens` or `response_format`.
        score_pattern: regular expression; the score is the first group of its last match.
        score_path: path of the score in the JSON of the reply, such as `verdict.score`.
        min_score, max_score: a reply with a score outside these bounds is retried; null for no bound.
    """

    example_values: ClassVar[Mapping[str, str]] = {"model": "gpt-4o-mini"}

    model: Annotated[str, Field(min_length=1)]
    template: str
    system: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    score_pattern: str | None = None
    score_path: str | None = None
    min_score: float | None = None
    max_score: float | None = None

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if "response" not in placeholders(self.template):
            yield "template has no {response}: the judge would not see the response."
        for name in OURS:
            if name in self.options:
                yield f"options.{name}: is set by this reward. Remove it."
        if (self.score_pattern is None) == (self.score_path is None):
            yield "score_pattern, score_path: exactly one must be set."
        if self.score_pattern is not None:
            try:
                re.compile(self.score_pattern)
            except re.error as error:
                yield f"score_pattern is {self.score_pattern!r}: is not a regular expression ({error})."
        if self.min_score is not None and self.max_score is not None and self.min_score >= self.max_score:
            yield f"min_score is {self.min_score:g}: must be below max_score, which is {self.max_score:g}."

    def columns_read(self) -> Iterator[tuple[str, str]]:
        for key in ("template", "system"):
            for name in placeholders(getattr(self, key) or ""):
                if name not in ("prompt", "response"):
                    yield f"{key} has {{{name}}}", name

    def build(self, context: BuildContext) -> LLMJudgeReward:
        return LLMJudgeReward(self, self.connect(context))


class LLMJudgeReward(RemoteReward):
    """The reward that `LLMJudge` builds."""

    path = "/chat/completions"
    described: LLMJudge

    def question(self, texts: dict[str, Any]) -> dict[str, Any]:
        system = self.described.system
        messages = [] if system is None else [{"role": "system", "content": filled(system, texts)}]
        messages.append({"role": "user", "content": filled(self.described.template, texts)})
        return {**self.described.options, "model": self.described.model, "messages": messages}

    def score_of(self, sample: RemoteSample, text: str) -> float:
        pattern, path = self.described.score_pattern, self.described.score_path
        score = by_path(text, path or "") if pattern is None else by_pattern(text, re.compile(pattern))
        low, high = self.described.min_score, self.described.max_score
        if (low is not None and score < low) or (high is not None and score > high):
            bounds = f"[{'-inf' if low is None else f'{low:g}'}, {'inf' if high is None else f'{high:g}'}]"
            raise RetryableAnswer(f"the score {score:g}, outside {bounds}, in {shown(text)}")
        return score

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
