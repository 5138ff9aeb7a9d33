"""A request to a server: the server's settings, the request, and the report about it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt, PositiveInt

from verl.component import Description, component

# refused:      the server refuses every request (wrong key, wrong path, a redirect)
# unreachable:  no answer arrived
# answer:       this request has no usable answer; others may have one
Kind = Literal["refused", "unreachable", "answer"]


class RetryableAnswer(Exception):
    """Raised by `Request.read`: the answer is unusable, and a retry may help; the message says why."""


class NotRetryable(RetryableAnswer):
    """The answer is unusable, and a retry would not help."""


class Request:
    """A request that is repeated until its answer is usable. Methods are called in the client's thread.

    Attributes:
        path: appended to the base URL.
    """

    path: str = ""

    def body(self) -> Any:
        """The body, to be sent as JSON; None for a GET. Called before each attempt, so that a retry may be smaller."""
        return None

    def parse(self, content: bytes) -> Any:
        """Parse the content of an answer; a ValueError makes it unusable."""
        return json.loads(content)

    def read(self, answer: Any) -> None:
        """Use the parsed answer.

        Raises:
            RetryableAnswer: it is unusable; the request is retried.
        """


@dataclass(frozen=True)
class RequestReport:
    """Report about a request.

    Attributes:
        seconds: latency of each attempt.
        failure: why it has no usable answer; None if it has one.
        kind: kind of the failure.
    """

    seconds: tuple[float, ...]
    failure: str | None = None
    kind: Kind | None = None

    @property
    def attempts(self) -> int:
        return len(self.seconds)


def encoded(body: Any) -> bytes:
    """Encode as canonical JSON; numbers and arrays of numpy and torch become plain numbers and lists.

    Raises:
        TypeError, ValueError: a value cannot be encoded as JSON.
    """
    return json.dumps(body, default=_plain, allow_nan=False, sort_keys=True).encode()


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be encoded as JSON")


@component
class EndpointSettings(Description):
    """Settings of `Endpoint`.

    Args:
        base_url: prefix of the URL of each request, such as `https://api.openai.com/v1`.
        key_variable: name of the environment variable with the API key; null for no key.
        key_header: header of the key: `Authorization` is sent as `Bearer KEY`, any other with the key only.
        headers: further headers of every request.
        max_concurrency: the most simultaneous requests.
        requests_per_minute: rate limit, including retries, evenly spaced; null for no limit.
        timeout_s: time-out of one attempt, from its start to the last byte of the answer.
        total_timeout_s: the longest time without any usable answer to a batch of requests, including retries. Each
            usable answer restarts it, so that a large batch may take longer.
        retries: the most retries of a request after a transient failure: no connection, no answer in time, status 408,
            425, 429 or 500 and above, an unusable answer.
        backoff_s: wait before the first retry, doubled for each further one up to a minute, less a random part of at
            most half. `Retry-After` of the server prolongs it and delays all requests.
        max_answer_mib: size limit of an answer.
    """

    base_url: str
    key_variable: str | None = None
    key_header: str = "Authorization"
    headers: dict[str, str] = field(default_factory=dict)
    max_concurrency: PositiveInt = 16
    requests_per_minute: Annotated[float, Field(gt=0, lt=1e9)] | None = None
    timeout_s: Annotated[float, Field(gt=0, lt=1e9)] = 60.0
    total_timeout_s: Annotated[float, Field(gt=0, lt=1e9)] = 600.0
    retries: NonNegativeInt = 5
    backoff_s: Annotated[float, Field(ge=0, le=60)] = 0.5
    max_answer_mib: Annotated[float, Field(gt=0, lt=1e9)] = 16.0

    def url(self, path: str = "") -> str:
        """The address of a request."""
        return self.base_url.rstrip("/") + path

    @property
    def is_local(self) -> bool:
        """Whether requests stay on this machine."""
        return urlsplit(self.base_url).hostname in ("localhost", "127.0.0.1", "::1")
