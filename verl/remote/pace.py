"""When the next request may be sent: an even pace, waits that the server asks for, and back-off. Pure arithmetic."""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

LONGEST_BACKOFF_S = 60.0


class Pace:
    """Turns on a clock that the caller reads, in seconds.

    Args:
        per_minute: turns, evenly spaced; None for no limit.
    """

    def __init__(self, per_minute: float | None):
        self.interval_s = 0.0 if per_minute is None else 60.0 / per_minute
        self._next = self._held = float("-inf")

    def wait_s(self, now: float) -> float:
        """Seconds until the next turn; 0 where it is now."""
        return max(0.0, self._next - now, self._held - now)

    def take(self, now: float) -> None:
        """Take the turn that is now."""
        self._next = now + self.interval_s

    def hold(self, until: float) -> None:
        """No turn before that time."""
        self._held = max(self._held, until)


class Backoff:
    """Seconds before a retry: base * 2^k, less up to half of it by chance, so that many do not come back as one.

    The chance is a generator of its own: the run's random numbers stay as they are.
    """

    def __init__(self, base_s: float, chance: random.Random | None = None):
        self.base_s, self._chance = base_s, chance or random.Random()

    def delay_s(self, retry: int) -> float:
        """Before retry number `retry`, from 0."""
        longest = min(self.base_s * 2.0 ** min(retry, 30), LONGEST_BACKOFF_S)
        return longest * (1.0 - 0.5 * self._chance.random())


def retry_after_s(headers: Mapping[str, str], now: datetime | None = None) -> float:
    """Seconds that the header `Retry-After` asks to wait, given as a number or as a date; 0 where it says nothing."""
    text = headers.get("retry-after", "").strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            moment = parsedate_to_datetime(text)
        except (TypeError, ValueError):
            return 0.0
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        seconds = (moment - (now or datetime.now(UTC))).total_seconds()
    return seconds if 0 < seconds < 1e9 else 0.0
