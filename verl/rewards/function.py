"""Rewards by a Python function of the user, named in the configuration or passed as it is."""

from __future__ import annotations

import logging
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from verl.component import BuildContext, component
from verl.errors import RewardError
from verl.protocol import DataProto
from verl.protocol.provenance import Source
from verl.rewards.base import Reward, RewardDescription, RewardResult, texts_of
from verl.rewards.import_path import (
    Signature,
    awaited,
    own_line,
    path_faults,
    required_arguments,
    signature_of,
    takes_batch,
)
from verl.rewards.process_pool import ProcessPool, SampleReward
from verl.rewards.validation import TOKEN_REWARDS, check_columns, checked_token_scores, reward_error
from verl.utils.component_exits import raised_by_code


@component
class RewardFunction(RewardDescription):
    """A function of the user, found by name:

        def my_reward(prompts: list[str], responses: list[str], **columns: list) -> list[float]

    or, of one argument, all of the batch, to say which token is worth what; it returns a DataProto with
    `token_level_rewards` [B T], 0 wherever `response_mask` is False:

        def my_reward(batch: DataProto) -> DataProto

    It is called once per batch, by keyword, and returns one finite number per response. A function without `**columns`
    receives only those columns of the data that it names. An `async def` is awaited; a list of coroutines is awaited
    concurrently. With `per_sample` it is called once per response, and returns one number:

        def my_reward(prompt: str, response: str, **columns) -> float

    so that a call that hangs or crashes costs its own sample only. Either is called in a process of its own, which
    imports its file and never the main script.

    Args:
        path: `package.module:function`, or `file.py:function` with the file relative to the working directory.
        kwargs: further keyword arguments of every call; they win over a column of the same name.
        per_sample: whether the function rates one response at a time, in worker processes.
        timeout_s: seconds for one call, after which its process is killed; null is 10 for a sample and 60 for a batch.
        num_workers: processes that rate samples, under `per_sample`; null is 4. A batch is one call, in one process.
        on_error: `raise` ends the run at a sample that raises, hangs, crashes or gives no finite number; `score` gives
            it `error_score`, warns, and counts it in `reward/failed`. `score` needs `per_sample`.
        error_score: see `on_error`.
    """

    path: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    per_sample: bool = False
    timeout_s: Annotated[float, Field(gt=0, lt=1e6)] | None = None
    num_workers: PositiveInt | None = None
    on_error: Literal["raise", "score"] = "raise"
    error_score: float = 0.0

    def faults(self) -> Iterator[str]:
        texts = ("prompt", "response") if self.per_sample else ("prompts", "responses")
        for name in texts:
            if name in self.kwargs:
                yield f"kwargs.{name}: is what the function is called with. Choose another name."
        if not self.per_sample and self.num_workers not in (None, 1, NUM_WORKERS):  # configurations of before hold it
            yield (
                f"num_workers is {self.num_workers}: a function of the whole batch is one call, in one process. Set "
                "per_sample=true, or num_workers=null."
            )
        if self.on_error == "score" and not self.per_sample:
            yield "on_error is score: a function of the whole batch fails as a whole. Set per_sample=true."
        yield from path_faults(self.path, self.kwargs, texts)

    @property
    def call_timeout_s(self) -> float:
        """Of one call."""
        usual = SAMPLE_TIMEOUT_S if self.per_sample else BATCH_TIMEOUT_S
        return usual if self.timeout_s is None else self.timeout_s

    def columns_read(self) -> Iterator[tuple[str, str]]:
        texts = ("prompt", "response") if self.per_sample else ("prompts", "responses")
        if not self.per_sample and takes_batch(self.path, self.kwargs):
            return
        for name in required_arguments(self.path, (*texts, *self.kwargs)):
            yield f"path is {self.path!r}, which takes {name}", name

    def build(self, context: BuildContext) -> Reward:
        if not self.per_sample:
            return ProcessReward(self.path, self.kwargs, self.call_timeout_s)
        return SampleReward(
            self.path,
            self.kwargs,
            timeout_s=self.call_timeout_s,
            num_workers=NUM_WORKERS if self.num_workers is None else self.num_workers,
            error_score=self.error_score if self.on_error == "score" else None,
        )

    @staticmethod
    def wrap(function: Callable, **kwargs: Any) -> CallableReward:
        """The reward that calls `function`, for use as a library."""
        return CallableReward(function, kwargs)


SAMPLE_TIMEOUT_S, BATCH_TIMEOUT_S, NUM_WORKERS = 10.0, 60.0, 4


class CallableReward(Reward):
    """A reward that calls a function of the user.

    Args:
        function: as in `RewardFunction`.
        kwargs: further keyword arguments of every call.
    Raises:
        RewardError: `function` cannot be called, or does not take `prompts` and `responses`.
    """

    def __init__(self, function: Callable, kwargs: Mapping[str, Any] | None = None):
        if not callable(function):
            raise RewardError(f"reward is {function!r}: expected a function of prompts and responses.")
        self._describe(function, kwargs or {}, signature_of(function, kwargs or {}))

    def _describe(self, function: Callable | Source, kwargs: Mapping[str, Any], signature: Signature) -> None:
        self.function: Any = function
        self.kwargs, self._accepted, self._takes_batch = dict(kwargs), signature.accepted, signature.takes_batch
        for name in self.kwargs if self._takes_batch else ("prompts", "responses", *self.kwargs):
            if self._accepted is not None and name not in self._accepted:
                raise reward_error(f"a function that takes `{name}`", f"it takes {', '.join(self._accepted)}", function)

    @property
    def producer(self) -> Callable:
        return self.function

    def rate(self, prompts: list[str], responses: list[str], **columns: list) -> Any:
        """What the function returns, unchecked.

        When it raises, it is called again on halves of the batch to find the first sample on which it does: on about
        as many rows in all as the batch has.

        Raises:
            RewardError: the function raised, or needs a column that the data lacks.
        """
        check_columns(self._accepted, columns, ("prompts", "responses", *self.kwargs), self.function)
        try:
            return self._call(prompts, responses, columns)
        except BaseException as error:  # whatever user code raises is reported with its place
            if not raised_by_code(error):
                raise
            sample = self._find_sample(prompts, responses, columns, error)
            expected = f"{len(responses)} finite numbers, one for each response"
            raise reward_error(expected, self._words(error), self.function, prompts, responses, sample) from error

    def rate_batch(self, batch: DataProto) -> RewardResult:
        """Rate every response, by token where the function takes the batch as it is."""
        if not self._takes_batch or not len(batch):
            return super().rate_batch(batch)
        prompts, responses, _ = texts_of(batch)
        own = DataProto.from_dict(
            tensors={name: tensor.clone() for name, tensor in batch.batch.items()},
            non_tensors={name: values.copy() for name, values in batch.non_tensor_batch.items()},
            meta_info=dict(batch.meta_info),
        )
        try:
            result = self._invoke(own)
        except BaseException as error:  # whatever user code raises is reported with its place
            if not raised_by_code(error):
                raise
            raise reward_error(TOKEN_REWARDS, self._words(error), self.function) from error
        scores = checked_token_scores(result, batch.batch["response_mask"], prompts, responses, self.function)
        return RewardResult(scores.double().sum(dim=1).cpu().numpy(), token_scores=scores)

    def _call(self, prompts: list[str], responses: list[str], columns: Mapping[str, list]) -> Any:
        if self._accepted is not None:
            columns = {name: values for name, values in columns.items() if name in self._accepted}
        # Lists of its own, so that a function that changes them does not change what it is checked against.
        columns = {name: list(values) for name, values in columns.items()}
        return self._invoke({"prompts": list(prompts), "responses": list(responses), **columns})

    def _invoke(self, given: DataProto | dict[str, Any]) -> Any:
        """Call the function with a batch, or with keyword arguments."""
        with told_while_it_hangs(self.function):
            if isinstance(given, DataProto):
                return awaited(self.function(given, **self.kwargs))
            return awaited(self.function(**{**given, **self.kwargs}))

    def _words(self, error: BaseException) -> str:
        """What was raised, with the line of the user's file."""
        return f"{type(error).__name__}: {error}{own_line(error, self.function)}"

    def _is_alike(self, error: BaseException, first: BaseException) -> bool:
        return isinstance(error, type(first))

    def _find_sample(
        self, prompts: list, responses: list, columns: Mapping[str, list], first: BaseException
    ) -> int | None:
        """The first sample on which the function raises this kind of error by itself, or None."""
        if len(responses) == 1:
            return 0

        def raises(start: int, end: int) -> bool:
            part = {name: values[start:end] for name, values in columns.items()}
            return self._raises(prompts[start:end], responses[start:end], part, first)

        start, end = 0, len(responses)
        while end - start > 1:
            middle = (start + end) // 2
            start, end = (start, middle) if raises(start, middle) else (middle, end)
        return start if raises(start, end) else None

    def _raises(self, prompts: list, responses: list, columns: Mapping[str, list], first: BaseException) -> bool:
        try:
            self._call(prompts, responses, columns)
        except BaseException as error:  # user code may raise anything
            if not raised_by_code(error):
                raise
            return self._is_alike(error, first)
        return False


@contextmanager
def told_while_it_hangs(function: Callable) -> Iterator[None]:
    """Say every minute where a function of this process stands that has not returned; nobody can end it, for it may
    hold whatever this process holds."""
    thread, over = threading.get_ident(), threading.Event()
    name, began = getattr(function, "__qualname__", repr(function)), time.monotonic()

    def watch() -> None:
        while not over.wait(BATCH_TIMEOUT_S):
            frame = sys._current_frames().get(thread)
            stack = "" if frame is None else "".join(traceback.format_stack(frame)[-STACK_LINES:])
            _log.warning(
                "The reward function %s has not returned for %.0f s. A function that is passed as an object runs in "
                "this process and has no deadline; reward=function with reward.path gives it one. It is at:\n%s",
                name, time.monotonic() - began, stack,
            )  # fmt: skip

    threading.Thread(target=watch, name="reward watch", daemon=True).start()
    try:
        yield
    finally:
        over.set()


STACK_LINES = 4
_log = logging.getLogger(__name__)


class CallFailed(Exception):
    """A call in another process came to nothing.

    Attributes:
        kind: of the exception that the function raised; None where it did not answer in time, or its process ended.
    """

    def __init__(self, words: str, kind: str | None):
        super().__init__(words)
        self.kind = kind


class ProcessReward(CallableReward):
    """A reward that calls a function by its path in a process of its own. `close` ends it.

    Args:
        path, kwargs: as in `RewardFunction`.
        timeout_s: for one call; then the process is killed, and the next call starts another.
    Raises:
        RewardError: the function cannot be imported, or does not take what it is given.
    """

    def __init__(self, path: str, kwargs: Mapping[str, Any], timeout_s: float):
        self._pool = ProcessPool(path, "", kwargs, timeout_s, num_workers=1, whole_batch=True)
        try:
            source, signature = self._pool.facts
            self._pool.file = source.file
            self._describe(source, kwargs, signature)
        except BaseException:
            self._pool.close()
            raise

    def close(self) -> None:
        self._pool.close()

    def _invoke(self, given: DataProto | dict[str, Any]) -> Any:
        (outcome,) = self._pool.rate([given])
        assert outcome is not None
        if outcome.failure is not None:
            raise CallFailed(outcome.failure, outcome.failure.partition(":")[0] if outcome.was_raised else None)
        return pickle.loads(outcome.score)

    def _words(self, error: BaseException) -> str:
        return str(error) if isinstance(error, CallFailed) else super()._words(error)

    def _is_alike(self, error: BaseException, first: BaseException) -> bool:
        return isinstance(error, CallFailed) and isinstance(first, CallFailed) and error.kind == first.kind

    def _find_sample(
        self, prompts: list, responses: list, columns: Mapping[str, list], first: BaseException
    ) -> int | None:
        if isinstance(first, CallFailed) and first.kind is None:  # parts of the batch would hang again
            return None
        return super()._find_sample(prompts, responses, columns, first)
