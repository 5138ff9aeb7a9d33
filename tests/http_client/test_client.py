"""The client against a real server on loopback that also misbehaves."""

import dataclasses
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from http_client.servers import Say, in_turn, serving

from verl.component import BuildContext
from verl.errors import ComponentExit, ComponentHung
from verl.http_client.client import backoff_s, retry_after_s
from verl.http_client.request import Request, RetryableAnswer, encoded

ROOT = Path(__file__).resolve().parents[2]
KEY = "sk-abcdef0123456789abcdef"


class Number(Request):
    """Sends a number and takes one."""

    path = "/number"

    def __init__(self, number=0):
        self.number, self.answer = number, None

    def body(self):
        return {"number": self.number}

    def read(self, answer):
        if not isinstance(answer, int):
            raise RetryableAnswer(f"{answer!r} in place of a number")
        self.answer = answer


@pytest.fixture
def asked_of():
    """Ask a server; gives what became of each question."""
    clients = []

    def ask(server, asks, stop_at_failure=False, **settings):
        clients.append(server.endpoint(**settings).build(BuildContext()))
        return clients[-1].ask(asks, stop_at_failure)

    yield ask
    for client in clients:
        client.close()


def test_answers_go_to_their_questions_at_most_so_many_at_a_time(asked_of):
    def later(asked):
        return Say(asked.body["number"] * 2, delay_s=0.005 * (asked.body["number"] % 3))

    asks = [Number(i) for i in range(24)]
    with serving(later) as server:
        reports = asked_of(server, asks, max_concurrency=3)
    assert [ask.answer for ask in asks] == [2 * i for i in range(24)]
    assert all(report.failure is None and report.attempts == 1 for report in reports)
    assert server.most_at_once <= 3
    assert len(server.asked) == 24
    assert {asked.path for asked in server.asked} == {"/number"}


@pytest.mark.first_rows(4)
@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (Say(status=500, body="broken"), 'HTTP 500: "broken"'),
        (Say(status=429, body="slower"), "HTTP 429"),
        (Say(content=b"<html>not found</html>"), "not JSON: <html>"),
        (Say(content=b"\xff\xfe\x00"), "not JSON"),
        (Say(content=b"[" * 100_000), "not JSON"),
        (Say(content=b""), "not JSON"),
        (Say(body="seven"), "'seven' in place of a number"),
        (Say(hang_up=True), "RemoteProtocolError"),
        (Say(body=1, delay_s=30.0), "no answer within timeout_s, which is 1"),
        (Say(body="a" * 3_000_000), "an answer of more than 1 MiB (max_answer_mib)"),
    ],
)
def test_what_may_pass_is_asked_again_and_says_why_it_failed_in_the_end(bad, why, asked_of):
    is_late = why.startswith("no answer")  # so may any answer be on a slow machine
    settings = {"timeout_s": 1.0 if is_late else 60.0, "max_answer_mib": 1.0}
    with serving(in_turn(bad, 7)) as server:
        ask = Number()
        report = asked_of(server, [ask], **settings, **({"retries": 20} if is_late else {}))[0]
        assert (report.failure, ask.answer) == (None, 7)
        assert report.attempts == 2 or (is_late and report.attempts > 2)
        assert len(server.asked) == 2 or is_late
    with serving(in_turn(bad)) as server:
        report = asked_of(server, [Number()], **settings)[0]
        assert why in report.failure
        assert report.attempts == 3
        assert len(server.asked) == 3 or is_late
        assert len(report.failure) < 400


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "answer"), (422, "answer"), (401, "refused"), (403, "refused"), (404, "refused")]
)
def test_what_will_not_pass_is_asked_once(status, kind, asked_of):
    with serving(in_turn(Say(status=status, body="no"))) as server:
        report = asked_of(server, [Number()])[0]
    assert (report.failure, report.kind, report.attempts) == (f'HTTP {status}: "no"', kind, 1)
    assert len(server.asked) == 1


def test_retry_after_holds_back_every_request(asked_of):
    with serving(in_turn(Say(status=429, headers={"Retry-After": "0.3"}), 1)) as server:
        reports = asked_of(server, [Number(i) for i in range(4)], max_concurrency=1)
    assert [report.failure for report in reports] == [None] * 4
    first, *others = [asked.time_s for asked in server.asked]
    assert len(others) == 4
    assert min(others) - first > 0.29  # a lower bound: no other request came within the wait


def test_a_wait_that_cannot_end_in_time_is_not_begun(asked_of):
    with serving(in_turn(Say(status=503, headers={"Retry-After": "3600"}))) as server:
        reports = asked_of(server, [Number(i) for i in range(3)], total_timeout_s=30.0, max_concurrency=1)
    assert "no usable answer within total_timeout_s, which is 30; before that: HTTP 503" in reports[0].failure
    assert all("total_timeout_s" in report.failure for report in reports)
    assert len(server.asked) == 1


@pytest.mark.parametrize(("retry", "longest"), [(0, 0.5), (1, 1.0), (4, 8.0), (50, 60.0)])
def test_back_off_doubles_up_to_a_minute_and_takes_off_up_to_half(retry, longest):
    assert (backoff_s(0.5, retry, 0.0), backoff_s(0.5, retry, 1.0)) == (longest, longest / 2)


def test_retry_after_is_a_number_of_seconds():
    texts = {"7": 7.0, " 1.5 ": 1.5, "Wed, 21 Oct 2026 07:28:10 GMT": 0, "-3": 0, "nan": 0, "inf": 0, "": 0}
    assert {text: retry_after_s({"retry-after": text}) for text in texts} == texts


def test_the_pace_is_kept_by_retries_too(asked_of):
    with serving(in_turn(Say(status=500), 1)) as server:
        started = time.monotonic()
        asked_of(server, [Number(i) for i in range(4)], requests_per_minute=60 / 0.05)
        seconds = time.monotonic() - started
    assert len(server.asked) == 5
    assert seconds >= 4 * 0.05  # a lower bound: the fifth turn is four intervals after the first


def test_all_that_is_not_answered_in_total_time_fails(asked_of):
    with serving(in_turn(1, Say(1, delay_s=60.0))) as server:
        first, *_, last = asked_of(server, [Number(i) for i in range(3)], total_timeout_s=1.5, max_concurrency=1)
    assert "total_timeout_s, which is 1.5" in last.failure
    assert (first.failure, last.kind) == (None, "unreachable")


def test_the_first_failure_may_end_the_others(asked_of):
    ended = threading.Event()

    def answer(asked):
        return Say(status=400) if asked.body["number"] == 0 else Say(1 if ended.wait(60) else None)

    with serving(answer) as server:
        reports = asked_of(server, [Number(i) for i in range(8)], stop_at_failure=True, max_concurrency=2)
        ended.set()
    assert reports[0].kind == "answer"
    assert reports[2:] == [None] * 6
    assert len(server.asked) < 8


def test_a_server_that_is_gone_is_told_as_unreachable(asked_of):
    with serving(in_turn(1)) as server:
        pass
    client = server.endpoint().build(BuildContext())
    assert "ConnectError" in client.absence()
    client.close()
    with serving(in_turn(Say(status=500))) as server:
        client = server.endpoint().build(BuildContext())
        assert client.absence() is None  # it answers, whatever it says
        client.close()
        client.close()


def test_the_key_is_sent_to_its_server_and_not_with_a_redirection(asked_of, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    there: list[str] = []
    away = lambda asked: Say(status=307, headers={"Location": f"{there[0]}/?key={KEY}"})  # noqa: E731
    with serving(in_turn(1)) as thief, serving(away) as server:
        there.append(thief.url)
        report = asked_of(server, [Number()], key_variable="JUDGE_KEY")[0]
    assert server.asked[0].headers["authorization"] == f"Bearer {KEY}"
    assert thief.asked == []
    assert report.kind == "refused"
    assert "which is not followed" in report.failure
    assert KEY not in report.failure


def test_a_key_may_have_its_own_header_and_a_server_that_repeats_it_does_not_spread_it(asked_of, monkeypatch, caplog):
    monkeypatch.setenv("JUDGE", "pw-K1")  # neither name nor value is known as a secret's by its form
    settings = {"key_variable": "JUDGE", "key_header": "api-key", "headers": {"X-Team": "a"}}
    with serving(in_turn(Say(status=401, body="We do not know pw-K1"))) as server:
        report = asked_of(server, [Number()], **settings)[0]
    headers = server.asked[0].headers
    assert (headers["api-key"], headers["x-team"], "authorization" in headers) == ("pw-K1", "a", False)
    assert report.failure == 'HTTP 401: "We do not know ***"'
    assert "pw-K1" not in caplog.text


def test_an_interrupted_question_is_given_up(asked_of):
    begun = threading.Event()

    def slow(asked):
        begun.set()
        return Say(1, delay_s=120.0)

    source = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts jobs in its background without it
from verl.component import BuildContext
from verl.http_client.request import Request
from verl.http_client.endpoint import Endpoint

class Question(Request):
    def body(self):
        return 1

client = Endpoint(base_url=sys.argv[1]).build(BuildContext())
try:
    client.ask([Question()] * 20)
except KeyboardInterrupt:
    client.close()
    print("interrupted")
"""
    with serving(slow) as server:
        process = subprocess.Popen(
            [sys.executable, "-c", source, server.url], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert begun.wait(60)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=120)[0] == "interrupted\n"
    assert process.returncode == 0


def test_bodies_are_json_whatever_numbers_they_are_made_of():
    body = {"c": [None, "é"], "b": np.arange(2), "a": np.float32(0.5)}
    assert encoded(body) == b'{"a": 0.5, "b": [0, 1], "c": [null, "\\u00e9"]}'
    for wrong in (float("nan"), object()):
        with pytest.raises((TypeError, ValueError)):
            encoded(wrong)


def test_code_that_reads_an_answer_and_does_not_return_is_named_and_cannot_keep_the_client_open(monkeypatch):
    monkeypatch.setattr("verl.http_client.client.END_TIMEOUT_S", 0.1)
    reading, end = threading.Event(), threading.Event()

    class Endless(Number):
        def read(self, answer):
            reading.set()
            end.wait(300)

    with serving(in_turn(1)) as server:
        client = server.endpoint().build(BuildContext())
        begun = client.begin([Endless()])
        assert reading.wait(60)
        client.endpoint = dataclasses.replace(client.endpoint, total_timeout_s=0.3)
        with pytest.raises(ComponentHung, match=r"not returned for 0\.3 s:[\s\S]*in read"):
            client.wait(begun)
        client.close()
        end.set()


@pytest.mark.exhaustive
def test_a_batch_may_take_as_long_as_it_needs_while_answers_come(asked_of):
    with serving(in_turn(Say(1, delay_s=0.3))) as server:
        reports = asked_of(server, [Number(i) for i in range(8)], total_timeout_s=1.5, max_concurrency=1)
    assert [report.failure for report in reports] == [None] * 8


def test_an_exit_of_code_that_reads_an_answer_is_the_callers_error(asked_of):
    class Exiting(Number):
        def read(self, answer):
            sys.exit(0)

    with serving(in_turn(1)) as server, pytest.raises(ComponentExit, match=r"read\(\) at line"):
        asked_of(server, [Exiting()])
