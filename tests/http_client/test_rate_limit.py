"""When the next request may be sent."""

from __future__ import annotations

import random
from datetime import UTC, datetime

import pytest

from verl.http_client.client import Backoff, RateLimit, retry_after_s


def test_turns_are_evenly_spaced():
    pace, now, taken = RateLimit(per_minute=30), 100.0, []
    for _ in range(4):
        now += pace.wait_s(now)
        pace.take(now)
        taken.append(now)
    assert taken == [100.0, 102.0, 104.0, 106.0]
    assert pace.wait_s(1000.0) == 0  # turns that nobody took are not saved up
    pace.take(1000.0)
    assert pace.wait_s(1000.0) == 2.0


def test_without_a_limit_only_the_server_holds_turns_back():
    pace = RateLimit(None)
    pace.take(5.0)
    assert pace.wait_s(5.0) == 0
    pace.hold(9.0)
    pace.hold(7.0)
    assert pace.wait_s(5.0) == 4.0
    assert pace.wait_s(9.5) == 0


def test_back_off_doubles_up_to_a_minute_and_takes_off_up_to_half():
    delays = [[Backoff(0.5, random.Random(seed)).delay_s(retry) for seed in range(200)] for retry in (0, 1, 4, 50)]
    for found, longest in zip(delays, (0.5, 1.0, 8.0, 60.0), strict=True):
        assert longest / 2 < min(found) < longest * 0.52
        assert longest * 0.98 < max(found) <= longest


def test_back_off_leaves_the_random_numbers_of_the_run_alone():
    before = random.getstate()
    Backoff(1.0).delay_s(0)
    assert random.getstate() == before


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7", 7.0),
        (" 1.5 ", 1.5),
        ("Wed, 21 Oct 2026 07:28:10 GMT", 10.0),
        ("Wed, 21 Oct 2026 07:27:00 GMT", 0.0),
        ("soon", 0.0),
        ("-3", 0.0),
        ("nan", 0.0),
        ("inf", 0.0),
        ("", 0.0),
    ],
)
def test_retry_after_is_a_number_or_a_date(text, seconds):
    now = datetime(2026, 10, 21, 7, 28, 0, tzinfo=UTC)
    assert retry_after_s({"retry-after": text}, now) == seconds
    assert retry_after_s({}, now) == 0.0
