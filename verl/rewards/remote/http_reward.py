"""Scoring service: a JSON list of samples is posted, a JSON list of scores comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Any

from pydantic import PositiveInt

from verl.component import BuildContext, component
from verl.http_client.request import RetryableAnswer
from verl.rewards.base import shown
from verl.rewards.remote.remote_base import (
    RemoteDescription,
    RemoteReward,
    RemoteSample,
    at,
    column,
    number,
)


@component
class HTTPReward(RemoteDescription):
    """Post samples to `base_url`; the server returns their scores in the same order.

        POST [{"prompt": ..., "response": ...}, ...]  ->  [0.5, ...]

    Args:
        fields: name in the request -> `prompt`, `response` or a column of the data.
        items_key: key of the list in the request; null if the request is the list.
        options: further fields of the request; requires `items_key`.
        scores_path: path of the list of scores in the response body, such as `result.scores`; null if the body is the
            list.
        score_path: path of the score in an item of that list; null if the item is the score.
        batch_size: samples per request.
    """

    fields: dict[str, str] = field(default_factory=lambda: {"prompt": "prompt", "response": "response"})
    items_key: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    scores_path: str | None = None
    score_path: str | None = None
    batch_size: PositiveInt = 32

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if "response" not in self.fields.values():
            yield "fields has no response: the service would not see what it scores."
        if self.options and self.items_key is None:
            yield "options is set, but a request that is a list has no other fields. Set items_key, its key."
        if self.items_key is not None and self.items_key in self.options:
            yield f"options.{self.items_key}: is the key of the list of samples (items_key). Choose another name."

    def columns_read(self) -> Iterator[tuple[str, str]]:
        for name, source in self.fields.items():
            if source not in ("prompt", "response"):
                yield f"fields.{name} is {source!r}", source

    def build(self, context: BuildContext) -> HTTPScorer:
        return HTTPScorer(self, self.connect(context), self.batch_size)


class HTTPScorer(RemoteReward):
    """The reward that `HTTPReward` builds."""

    described: HTTPReward

    def question(self, texts: dict[str, Any]) -> dict[str, Any]:
        """The cache key of a sample: its item and the other fields of the request."""
        fields = self.described.fields.items()
        item = {name: column(texts, source, f"fields.{name} is {source}") for name, source in fields}
        return {"item": item, "options": self.described.options}

    def score_of(self, sample: RemoteSample, text: str) -> float:
        try:
            return number(at(json.loads(text), self.described.score_path))
        except LookupError:
            raise RetryableAnswer(f"no {self.described.score_path} in {shown(text)}") from None

    def body(self, samples: Sequence[RemoteSample]) -> Any:
        described, items = self.described, [sample.question["item"] for sample in samples]
        return items if described.items_key is None else {**described.options, described.items_key: items}

    def replies(self, answer: Any, count: int) -> list[str]:
        path = self.described.scores_path
        try:
            items = at(answer, path)
        except LookupError:
            raise RetryableAnswer(f"an answer without {path}: {shown(answer)}") from None
        if not isinstance(items, list) or len(items) != count:
            what = f"{len(items)} scores" if isinstance(items, list) else shown(items)
            raise RetryableAnswer(f"{what} in place of a list of {count} scores")
        return [json.dumps(item) for item in items]
