"""Asks a server many things at once, within limits of number, rate and time, and asks again what may pass.

caller ── ask(questions) ──> thread ── [ slot ── turn ── POST ── read ] per question ──> server
       <── reports ──               └── back-off <── 429, 5xx, no answer, unusable ──┘
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import httpx

from verl.remote.asking import Ask, Kind, Report, Unfit, Unusable, encoded
from verl.remote.background import END_TIMEOUT_S, LOOK_EVERY_S, Background
from verl.remote.endpoint import Endpoint
from verl.remote.pace import Backoff, Pace, retry_after_s
from verl.utils.exits import as_component_exit
from verl.utils.progress import report
from verl.utils.redact import MASK, redact

logger = logging.getLogger(__name__)

PASSING = (408, 425, 429)  # statuses below 500 after which the same request may succeed
SHOWN = 200  # characters of an answer in a message


@dataclass(frozen=True)
class _Fault:
    why: str
    kind: Kind
    may_pass: bool = True
    wait_s: float = 0.0  # that the server asks for


class _Batch:
    """What was asked at once, and how long none of it has had a usable answer.

    Time in which this process was stopped, or busy with other things, does not count.

    Attributes:
        is_over: it was for too long: what has no answer yet is given up.
    """

    def __init__(self, timeout_s: float):
        self.is_over = False
        self._timeout_s = self._left_s = timeout_s

    def restart(self) -> None:
        """There is an answer: the server works, and so does this process."""
        report()
        self._left_s = self._timeout_s

    async def sleep(self, seconds: float) -> None:
        """Sleep; raises TimeoutError at once where no answer could come in time after it."""
        if seconds > self._left_s:
            raise TimeoutError
        await asyncio.sleep(seconds)

    async def end_in_time(self, tasks: Sequence[asyncio.Task[Report]]) -> None:
        """Give up what is open, once nothing was answered for too long."""
        while self._left_s > 0:
            pause_s = min(self._left_s, LOOK_EVERY_S)
            await asyncio.sleep(pause_s)
            self._left_s -= pause_s
        self.is_over = True
        for task in tasks:
            task.cancel()


class _Knock(Ask):
    def parse(self, content: bytes) -> Any:
        return content


class Client:
    """The running form of `Endpoint`. `close` it; it may be closed again.

    Args:
        key: sent with every request, and in no message.
    """

    def __init__(self, endpoint: Endpoint, key: str | None):
        self.endpoint, self._key = endpoint, key
        self._background = Background("verl remote")
        self._backoff, self._pace = Backoff(endpoint.backoff_s), Pace(endpoint.requests_per_minute)
        self._http: httpx.AsyncClient | None = None
        self._slots = asyncio.Semaphore(endpoint.max_concurrency)
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs a line for every request
        if key is not None and not endpoint.is_encrypted and not endpoint.is_local:
            logger.warning("%s is not encrypted: the key can be read on its way there.", endpoint.base_url)

    def ask(self, asks: Sequence[Ask], stop_at_failure: bool = False) -> list[Report | None]:
        """Ask all, and wait for the answers.

        Args:
            stop_at_failure: the first question that fails for good ends the others.
        Returns:
            What became of each; None for those that another one's failure ended.
        """
        return self.wait(self.begin(asks, stop_at_failure))

    def begin(self, asks: Sequence[Ask], stop_at_failure: bool = False) -> Future[list[Report | None]]:
        """Begin to ask, and return at once; `wait` gives what `ask` does."""
        return self._background.begin(self._all(asks, stop_at_failure))

    def wait(self, begun: Future[list[Report | None]]) -> list[Report | None]:
        """Wait for the answers to what was begun.

        Raises:
            ComponentHung: code that reads an answer does not return for `total_timeout_s`.
        """
        return self._background.wait(begun, stuck_s=self.endpoint.total_timeout_s)

    def absence(self) -> str | None:
        """Why no server answers at the address, in words; None where one does, whatever it says."""
        report = self.ask([_Knock()])[0]
        assert report is not None
        return report.failure if report.kind == "unreachable" else None

    def close(self) -> None:
        """End what is under way, and the thread."""
        if self._http is not None:
            http, self._http = self._http, None
            with contextlib.suppress(TimeoutError):
                self._background.wait(self._background.begin(http.aclose()), END_TIMEOUT_S)
        self._background.close()

    async def _all(self, asks: Sequence[Ask], stop_at_failure: bool) -> list[Report | None]:
        batch = _Batch(self.endpoint.total_timeout_s)
        tasks = [asyncio.create_task(self._asked(ask, batch)) for ask in asks]
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

    async def _asked(self, ask: Ask, batch: _Batch) -> Report:
        """One question, to its usable answer or its last failure."""
        seconds: list[float] = []
        fault, retries = None, self.endpoint.retries
        try:
            for retry in range(retries + 1):
                fault = await self._attempt(ask, batch, seconds)
                if fault is None or not fault.may_pass:
                    break
                if retry < retries:
                    await batch.sleep(max(fault.wait_s, self._backoff.delay_s(retry)))
        except (TimeoutError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not batch.is_over:
                raise
            limit = f"no usable answer within total_timeout_s, which is {self.endpoint.total_timeout_s:g}"
            last = "" if fault is None else f"; before that: {fault.why}"
            fault = _Fault(limit + last, "unreachable" if fault is None else fault.kind)
        if fault is None:
            batch.restart()
            return Report(tuple(seconds))
        return Report(tuple(seconds), redact(self.without_key(fault.why)), fault.kind)

    async def _attempt(self, ask: Ask, batch: _Batch, seconds: list[float]) -> _Fault | None:
        """What is wrong with one attempt; None where its answer was taken.

        Raises:
            ComponentExit: code that makes the question or reads the answer wanted to end the program, which would end
                the thread that all answers come through.
        """
        try:
            return await self._tried(ask, batch, seconds)
        except (SystemExit, KeyboardInterrupt) as error:  # no signal comes to this thread
            raise as_component_exit(error) from error

    async def _tried(self, ask: Ask, batch: _Batch, seconds: list[float]) -> _Fault | None:
        async with self._slots:
            await self._turn(batch)
            started = time.perf_counter()
            try:
                async with asyncio.timeout(self.endpoint.timeout_s):
                    response, body = await self._send(ask.path, ask.body())
            except TimeoutError:
                return _Fault(f"no answer within timeout_s, which is {self.endpoint.timeout_s:g}", "unreachable")
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                return _Fault(f"{type(error).__name__}: {error}".rstrip(": "), "unreachable")
            finally:
                seconds.append(time.perf_counter() - started)
        if not 200 <= response.status_code < 300:
            return self._refusal(response, body)
        if body is None:
            return _Fault(f"an answer of more than {self.endpoint.max_answer_mib:g} MiB (max_answer_mib)", "answer")
        try:
            answer = ask.parse(body)
        except (ValueError, RecursionError):
            return _Fault(f"an answer that is no JSON: {_shown(body)}", "answer")
        try:
            ask.read(answer)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"
            return _Fault(f"an answer of an unexpected form ({why}): {_shown(body)}", "answer")
        except Unfit as error:
            return _Fault(str(error), "refused", may_pass=False)
        except Unusable as error:
            return _Fault(str(error), "answer")
        return None

    async def _turn(self, batch: _Batch) -> None:
        now = asyncio.get_running_loop().time
        while (wait_s := self._pace.wait_s(now())) > 0:
            await batch.sleep(wait_s)
        self._pace.take(now())

    async def _send(self, path: str, body: Any) -> tuple[httpx.Response, bytes | None]:
        """The response and its body; None where that is too long. Redirections are not followed: the key would go."""
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
            timeout=None,  # each attempt is timed as a whole: httpx would time each read of a slow trickle
            limits=httpx.Limits(max_connections=count, max_keepalive_connections=count),
            follow_redirects=False,
            trust_env=not self.endpoint.is_local,  # no proxy stands between this machine and itself
        )

    def _refusal(self, response: httpx.Response, body: bytes | None) -> _Fault:
        status = response.status_code
        said = f"HTTP {status}: {_shown(body or b'')}".rstrip(": ")
        if status in PASSING or status >= 500:
            wait_s = retry_after_s(response.headers)
            self._pace.hold(asyncio.get_running_loop().time() + wait_s)
            return _Fault(said, "answer", wait_s=wait_s)
        if 300 <= status < 400:
            said = f"HTTP {status}, to {response.headers.get('location', 'nowhere')}, which is not followed"
        per_question = status in (400, 409, 413, 422)
        return _Fault(said, "answer" if per_question else "refused", may_pass=False)

    def without_key(self, text: str) -> str:
        """What a server wrote, for logs and files: it may repeat the key."""
        return text.replace(self._key, MASK) if self._key else text


def _shown(body: bytes) -> str:
    text = " ".join(body[: 4 * SHOWN].decode(errors="replace").split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."
