"""A request to a server, and the report about it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

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
