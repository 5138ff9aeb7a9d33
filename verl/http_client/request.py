"""A request to a server, and what became of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

# refused:      the server wants none of it (wrong key, wrong path, a redirection), and will not next time either
# unreachable:  no answer arrived
# answer:       this question has no usable answer; others may have one
Kind = Literal["refused", "unreachable", "answer"]


class RetryableAnswer(Exception):
    """Raised by `Request.read`: the answer cannot be used, which may pass; says why."""


class NotRetryable(RetryableAnswer):
    """The answer cannot be used, and no other one of this server will be: it is not asked again."""


class Request:
    """One question, which is sent until its answer can be used. Both methods are called in the client's thread.

    Attributes:
        path: added to the address of the server.
    """

    path: str = ""

    def body(self) -> Any:
        """What is sent, as JSON; None for a GET. Called before each attempt, so it may ask for what is still open."""
        return None

    def parse(self, content: bytes) -> Any:
        """The content of an answer; a ValueError counts as one that cannot be used."""
        return json.loads(content)

    def read(self, answer: Any) -> None:
        """Take the answer, as `parse` gave it.

        Raises:
            RetryableAnswer: it is asked again, as long as retries are left.
        """


@dataclass(frozen=True)
class RequestReport:
    """What became of a question.

    Attributes:
        seconds: of each attempt.
        failure: in words, why it has no answer; None where it has one.
        kind: of the failure.
    """

    seconds: tuple[float, ...]
    failure: str | None = None
    kind: Kind | None = None

    @property
    def attempts(self) -> int:
        return len(self.seconds)


def encoded(body: Any) -> bytes:
    """JSON, the same for equal bodies; numbers and arrays of numpy and torch, which columns of data hold, are plain.

    Raises:
        TypeError, ValueError: it holds what JSON has no word for.
    """
    return json.dumps(body, default=_plain, allow_nan=False, sort_keys=True).encode()


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} has no form in JSON")
