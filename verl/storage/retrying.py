"""Asking again: back-off that doubles, jitter, and an end to it."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import TypeVar

from verl.errors import StorageUnreachable
from verl.utils.progress import report
from verl.utils.redact import redact

T = TypeVar("T")

LONGEST_BACKOFF_S = 30.0
log = logging.getLogger(__name__)


class Passing(Exception):
    """What may be otherwise the next time: no connection, no answer in time, a server that is overloaded."""


class Retrying:
    """Makes requests until one is answered.

    Args:
        retries: after the first try.
        backoff_s: before the first retry.
    """

    def __init__(self, retries: int, backoff_s: float):
        self._retries, self._backoff_s = retries, backoff_s
        self._closed = threading.Event()

    def __call__(self, what: str, request: Callable[[], T]) -> T:
        """The answer.

        Args:
            what: is asked, for messages, such as `put s3://models/a`.
        Raises:
            StorageUnreachable: no try was answered.
        """
        for number in range(self._retries + 1):
            report()  # a request is bounded by itself
            try:
                return request()
            except Passing as error:
                said = redact(f"{type(error.__cause__ or error).__name__}: {error}")
                if number == self._retries or self._closed.wait(self._pause_s(number)):
                    raise StorageUnreachable(f"{what} failed {number + 1} times, at last with {said}") from error
                log.info("%s: asking again after %s", what, said)
        raise AssertionError("the last try returned or raised")

    def close(self) -> None:
        """End every wait: what is being asked again fails now."""
        self._closed.set()

    def _pause_s(self, number: int) -> float:
        longest = min(self._backoff_s * 2**number, LONGEST_BACKOFF_S)
        return longest * random.uniform(0.5, 1.0)  # so that many that failed at once do not come back at once
