"""When a request is sent again."""

from __future__ import annotations

import pytest

from verl.http_client.client import backoff_s, retry_after_s


@pytest.mark.parametrize(("retry", "longest"), [(0, 0.5), (1, 1.0), (4, 8.0), (50, 60.0)])
def test_back_off_doubles_up_to_a_minute_and_takes_off_up_to_half(retry, longest):
    assert (backoff_s(0.5, retry, 0.0), backoff_s(0.5, retry, 1.0)) == (longest, longest / 2)


TEXTS = {"7": 7.0, " 1.5 ": 1.5, "Wed, 21 Oct 2026 07:28:10 GMT": 0.0, "-3": 0.0, "nan": 0.0, "inf": 0.0, "": 0.0}


@pytest.mark.parametrize("text", TEXTS)
def test_retry_after_is_a_number_of_seconds(text):
    assert retry_after_s({"retry-after": text}) == TEXTS[text]
    assert retry_after_s({}) == 0.0
