"""From the JSON of a server to typed values: the one place where token ids, log-probs and reasons to end are read.

Whatever a server sends, a reader returns the value or raises `RetryableAnswer`, which says what was found and where;
`NotRetryable` where the server means something else by its log-probs, so that asking again is of no use.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from verl.http_client.request import NotRetryable, RetryableAnswer
from verl.rollout.base import log_prob_fault

SHOWN = 60  # characters of a value in a message


def mapping(value: Any, what: str) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise RetryableAnswer(f"{what} is {shown(value)}, and not an object")
    return value


def items(value: Any, what: str) -> list[Any]:
    """A JSON list."""
    if not isinstance(value, list):
        raise RetryableAnswer(f"{what} is {shown(value)}, and not a list")
    return value


def token_id(value: Any, what: str, num_tokens: int | None) -> int:
    """An id of the model.

    Args:
        num_tokens: that the model knows, with ids from 0; None where that is not known.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise RetryableAnswer(f"{what} is {shown(value)}, and not the id of a token")
    if value < 0 or (num_tokens is not None and value >= num_tokens):
        known = "not negative" if num_tokens is None else f"0 to {num_tokens - 1}"
        raise RetryableAnswer(f"{what} is {shown(value)}: ids of the actor's model are {known}")
    return value


def token_ids(value: Any, what: str, num_tokens: int | None) -> list[int]:
    """A list of ids of the model."""
    return [token_id(item, f"{what}[{place}]", num_tokens) for place, item in enumerate(items(value, what))]


def log_prob(value: Any, what: str) -> float:
    """The log-prob of a token that was drawn: a finite number, at most `LARGEST_LOG_PROB`, and no placeholder."""
    found = number(value, what)
    if (fault := log_prob_fault(found)) is not None:
        raise (NotRetryable if found > 0 else RetryableAnswer)(f"{what} is a log-prob of {fault}")
    return found


def log_probs(value: Any, what: str) -> list[float]:
    """A list of log-probs of tokens that were drawn."""
    return [log_prob(item, f"{what}[{place}]") for place, item in enumerate(items(value, what))]


def number(value: Any, what: str) -> float:
    """Any number, finite or not; no text, truth value or list."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise RetryableAnswer(f"{what} is {shown(value)}, and not a number")
    try:
        return float(value)
    except OverflowError:
        raise RetryableAnswer(f"{what} is {shown(value)}, which no floating-point number holds") from None


def reason(value: Any, what: str, known: Collection[str]) -> str:
    """Why a response ended."""
    if not isinstance(value, str):
        raise RetryableAnswer(f"{what} is {shown(value)}, and not a text")
    if value not in known:
        raise RetryableAnswer(f"a response that was broken off (finish_reason {value[:SHOWN]})")
    return value


def shown(value: Any) -> str:
    """A value in a message."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        text = f"an integer of {value.bit_length()} bits"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."
