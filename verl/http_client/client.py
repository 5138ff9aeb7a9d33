"""An HTTP client for many concurrent requests: rate and concurrency limits, time-outs, retries with back-off.

caller ── ask(requests) ──> thread ── [ slot ── rate limit ── POST ── read ] per request ──> server
       <── reports ──                └── back-off <── 429, 5xx, no answer, unusable ──┘

The event loop runs in a separate thread, so that callers need no asyncio.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import random
import sys
import threading
import time
import traceback
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from verl.errors import ComponentHung, end_cut
from verl.http_client.request import (
    EndpointSettings,
    Kind,
    NotRetryable,
    Request,
    RequestReport,
    RetryableAnswer,
    encoded,
)
from verl.utils.progress import Progress, ProgressWatch, report
from verl.utils.redact import MASK, redact
from verl.utils.signals import as_component_exit

T = TypeVar("T")

END_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 1.0
LONGEST_BACKOFF_S = 60.0
PASSING = (408, 425, 429)  # statuses below 500 after which the same request may succeed
SHOWN = 200  # characters of an answer in a message
logger = logging.getLogger(__name__)


class EventLoopThread:
    """An event loop in a thread, which starts with the first coroutine and ends with `close`."""

    def __init__(self, name: str):
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine, and return its future."""
        if self._loop is None:
            self._loop, self._turns = asyncio.new_event_loop(), Progress(num_slots=1)
            # A daemon thread, so that a call that never returns does not keep the process alive.
            self._thread = threading.Thread(target=_serve, args=(self._loop,), name=self._name, daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def wait(self, future: Future[T], timeout_s: float | None = None, stuck_s: float | None = None) -> T:
        """Wait for the result of a coroutine. An exception in the caller, such as Ctrl-C, cancels it.

        Args:
            future: from `begin`.
            timeout_s: the longest wait; None for no limit.
            stuck_s: how long code may block the event loop.
        Raises:
            TimeoutError: it has not finished in time.
            ComponentHung: code blocks the event loop; names its line.
        """
        try:
            return future.result(timeout_s) if stuck_s is None else self._watched(future, stuck_s)
        except BaseException:
            future.cancel()
            raise

    def _watched(self, future: Future[T], stuck_s: float) -> T:
        poll_interval_s = min(POLL_INTERVAL_S, stuck_s)
        watch = ProgressWatch(self._turns, stuck_s, poll_interval_s=2 * poll_interval_s)
        while True:
            assert self._loop is not None
            assert self._thread is not None
            self._loop.call_soon_threadsafe(self._turns.advance)
            concurrent.futures.wait([future], timeout=poll_interval_s)
            if future.done() or not self._thread.is_alive():
                return future.result(END_TIMEOUT_S)
            if watch.is_overdue:
                frame = sys._current_frames().get(self._thread.ident or 0)
                stack = "".join(traceback.format_stack(frame)[-4:])
                raise ComponentHung(f"code in the thread {self._name!r} has not returned for {stuck_s:g} s:\n{stack}")

    def close(self) -> None:
        """Cancel running coroutines and end the thread; a thread blocked by user code is abandoned."""
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_TIMEOUT_S)
        if not self._thread.is_alive():
            self._turns.close()
        self._loop = self._thread = None


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def backoff_s(base_s: float, retry: int, random_part: float) -> float:
    """Seconds before retry number `retry`, from 0: base * 2^k, less a random part of at most half."""
    return min(base_s * 2.0 ** min(retry, 30), LONGEST_BACKOFF_S) * (1.0 - 0.5 * random_part)


def retry_after_s(headers: Mapping[str, str]) -> float:
    """Seconds to wait by the header `Retry-After`; 0 without it, or where it is a date."""
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return 0.0
    return seconds if 0 < seconds < 1e9 else 0.0


@dataclass(frozen=True)
class _RequestFault:
    why: str
    kind: Kind
    may_pass: bool = True
    wait_s: float = 0.0  # requested by the server


class _Batch:
    """Requests that were sent together, with the time since the last usable answer.

    Time in which this process was suspended or busy does not count.

    Attributes:
        is_over: the time limit has passed; open requests are abandoned.
    """

    def __init__(self, timeout_s: float):
        self.is_over = False
        self._timeout_s = self._left_s = timeout_s

    def restart(self) -> None:
        """Restart the time limit after a usable answer."""
        report()
        self._left_s = self._timeout_s

    async def sleep(self, seconds: float) -> None:
        """Sleep; raises TimeoutError at once if the time limit would pass meanwhile."""
        if seconds > self._left_s:
            raise TimeoutError
        await asyncio.sleep(seconds)

    async def end_in_time(self, tasks: Sequence[asyncio.Task[RequestReport]]) -> None:
        """Abandon open requests when the time limit has passed."""
        while self._left_s > 0:
            pause_s = min(self._left_s, POLL_INTERVAL_S)
            await asyncio.sleep(pause_s)
            self._left_s -= pause_s
        self.is_over = True
        for task in tasks:
            task.cancel()


class _PingRequest(Request):
    def parse(self, content: bytes) -> Any:
        return content


class HTTPClient:
    """The client that `Endpoint` builds.

    Args:
        endpoint: address, limits and time-outs.
        key: API key, sent with every request and redacted from messages.
    """

    def __init__(self, endpoint: EndpointSettings, key: str | None):
        self.endpoint, self._key = endpoint, key
        self._background = EventLoopThread("verl remote")
        self._chance = random.Random()  # separate generator: training must not depend on retries
        self._interval_s = 60.0 / (endpoint.requests_per_minute or math.inf)
        self._next_s = -math.inf  # by the clock of the loop: when the next request may be sent
        self._http: httpx.AsyncClient | None = None
        self._slots = asyncio.Semaphore(endpoint.max_concurrency)
        logging.getLogger("httpx").setLevel(logging.WARNING)  # httpx logs every request
        if key is not None and not endpoint.is_local and not endpoint.base_url.lower().startswith("https:"):
            logger.warning("%s is not encrypted: the key can be read on its way there.", endpoint.base_url)

    def ask(self, asks: Sequence[Request], stop_at_failure: bool = False) -> list[RequestReport | None]:
        """Send requests, and wait for all answers.

        Args:
            asks: the requests.
            stop_at_failure: the first request that fails after all retries cancels the others.
        Returns:
            A report of each; None for cancelled ones.
        """
        return self.wait(self.begin(asks, stop_at_failure))

    def begin(self, asks: Sequence[Request], stop_at_failure: bool = False) -> Future[list[RequestReport | None]]:
        """Start to send requests; `wait` returns the reports."""
        return self._background.begin(self._all(asks, stop_at_failure))

    def wait(self, begun: Future[list[RequestReport | None]]) -> list[RequestReport | None]:
        """Wait for the reports of requests started by `begin`.

        Raises:
            ComponentHung: code that parses an answer has not returned for `total_timeout_s`.
        """
        return self._background.wait(begun, stuck_s=self.endpoint.total_timeout_s)

    def absence(self) -> str | None:
        """Why no server answers at the address; None if one does, with any status."""
        (report,) = self.ask([_PingRequest()])
        assert report is not None
        return report.failure if report.kind == "unreachable" else None

    def close(self) -> None:
        """Cancel requests and end the thread; calling it again does nothing."""
        if self._http is not None:
            http, self._http = self._http, None
            with contextlib.suppress(TimeoutError):
                self._background.wait(self._background.begin(http.aclose()), END_TIMEOUT_S)
        self._background.close()

    async def _all(self, asks: Sequence[Request], stop_at_failure: bool) -> list[RequestReport | None]:
        batch = _Batch(self.endpoint.total_timeout_s)
        tasks = [asyncio.create_task(self._ask_once(ask, batch)) for ask in asks]
        watch = asyncio.create_task(batch.end_in_time(tasks))
        try:
            for finished in asyncio.as_completed(tasks):
                report = await finished
                if stop_at_failure and report.failure is not None:
                    break
            return [task.result() if task.done() else None for task in tasks]
        finally:
            for task in [*tasks, watch]:
                task.cancel()

    async def _ask_once(self, ask: Request, batch: _Batch) -> RequestReport:
        """Send a request until it has a usable answer or has failed after all retries.

        Raises:
            ComponentExit: code that makes the request or parses the answer raised SystemExit or KeyboardInterrupt.
        """
        seconds: list[float] = []
        fault, retries = None, self.endpoint.retries
        try:
            for retry in range(retries + 1):
                fault = await self._tried(ask, batch, seconds)
                if fault is None or not fault.may_pass:
                    break
                if retry < retries:
                    delay_s = backoff_s(self.endpoint.backoff_s, retry, self._chance.random())
                    await batch.sleep(max(fault.wait_s, delay_s))
        except SystemExit as error:  # of code that makes the request or parses the answer
            raise as_component_exit(error) from error  # else it ends the event loop
        except (TimeoutError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not batch.is_over:
                raise
            limit = f"no usable answer within total_timeout_s, which is {self.endpoint.total_timeout_s:g}"
            last = "" if fault is None else f"; before that: {fault.why}"
            fault = _RequestFault(limit + last, "unreachable" if fault is None else fault.kind)
        if fault is None:
            batch.restart()
            return RequestReport(tuple(seconds))
        return RequestReport(tuple(seconds), redact(self.without_key(fault.why)), fault.kind)

    async def _tried(self, ask: Request, batch: _Batch, seconds: list[float]) -> _RequestFault | None:
        """Run one attempt; returns its fault, or None if the answer was accepted."""
        async with self._slots:
            now = asyncio.get_running_loop().time
            while (wait_s := self._next_s - now()) > 0:
                await batch.sleep(wait_s)
            self._next_s = now() + self._interval_s
            started = time.perf_counter()
            try:
                async with asyncio.timeout(self.endpoint.timeout_s):
                    response, body = await self._send(ask.path, ask.body())
            except TimeoutError:
                return _RequestFault(f"no answer within timeout_s, which is {self.endpoint.timeout_s:g}", "unreachable")
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                return _RequestFault(f"{type(error).__name__}: {error}".rstrip(": "), "unreachable")
            finally:
                seconds.append(time.perf_counter() - started)
        if not 200 <= response.status_code < 300:
            return self._refusal(response, body)
        if body is None:
            return _RequestFault(
                f"an answer of more than {self.endpoint.max_answer_mib:g} MiB (max_answer_mib)", "answer"
            )
        try:
            answer = ask.parse(body)
        except (ValueError, RecursionError):
            return _RequestFault(f"an answer that is not JSON: {_shown(body)}", "answer")
        try:
            ask.read(answer)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"
            return _RequestFault(f"an answer of an unexpected form ({why}): {_shown(body)}", "answer")
        except NotRetryable as error:
            return _RequestFault(str(error), "refused", may_pass=False)
        except RetryableAnswer as error:
            return _RequestFault(str(error), "answer")
        return None

    async def _send(self, path: str, body: Any) -> tuple[httpx.Response, bytes | None]:
        """The response and its body, None if it is too long. Redirects are not followed, since they would get the
        key.
        """
        self._http = self._http or self._connect()
        url = self.endpoint.url(path)
        if body is None:
            request = self._http.build_request("GET", url)
        else:
            content, kind = encoded(body), {"Content-Type": "application/json"}
            request = self._http.build_request("POST", url, content=content, headers=kind)
        response = await self._http.send(request, stream=True)
        try:
            pieces, left = [], self.endpoint.max_answer_mib * 2**20
            async for piece in response.aiter_bytes():
                pieces.append(piece)
                left -= len(piece)
                if left < 0:
                    return response, None
            return response, b"".join(pieces)
        finally:
            await response.aclose()

    def _connect(self) -> httpx.AsyncClient:
        headers = dict(self.endpoint.headers)
        if self._key is not None:
            name = self.endpoint.key_header
            headers[name] = f"Bearer {self._key}" if name.lower() == "authorization" else self._key
        count = self.endpoint.max_concurrency
        return httpx.AsyncClient(
            headers=headers,
            timeout=None,  # an attempt has one time-out as a whole; that of httpx restarts with every read
            limits=httpx.Limits(max_connections=count, max_keepalive_connections=count),
            follow_redirects=False,
            trust_env=not self.endpoint.is_local,  # no proxy for requests to this machine
        )

    def _refusal(self, response: httpx.Response, body: bytes | None) -> _RequestFault:
        status = response.status_code
        reason = f"HTTP {status}: {_shown(body or b'')}".rstrip(": ")
        if status in PASSING or status >= 500:
            wait_s = retry_after_s(response.headers)
            self._next_s = max(self._next_s, asyncio.get_running_loop().time() + wait_s)
            return _RequestFault(reason, "answer", wait_s=wait_s)
        if 300 <= status < 400:
            reason = f"HTTP {status}, to {response.headers.get('location', 'nowhere')}, which is not followed"
        per_question = status in (400, 409, 413, 422)
        return _RequestFault(reason, "answer" if per_question else "refused", may_pass=False)

    def without_key(self, text: str) -> str:
        """Redact the key from text of a server, for logs and files."""
        return text.replace(self._key, MASK) if self._key else text


def _shown(body: bytes) -> str:
    return end_cut(" ".join(body[: 4 * SHOWN].decode(errors="replace").split()), SHOWN)
