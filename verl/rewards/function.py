"""Rewards by a user-defined Python function, given by its path in the configuration or as an object."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from verl.component import BuildContext, component
from verl.errors import ConfigError, RewardError, error_text
from verl.protocol import DataProto
from verl.protocol.provenance import Source, source_of
from verl.protocol.user_function import Signature, own_line, path_faults, signature_of, source_signature
from verl.rewards.base import (
    TOKEN_REWARDS,
    Reward,
    RewardDescription,
    RewardResult,
    check_columns,
    checked_result,
    checked_token_scores,
    refuse_missing_arguments,
    reward_error,
    texts_of,
)
from verl.rewards.deadline import BATCH_TIMEOUT_S, CallFailed, awaited, call_within
from verl.rewards.process_pool import FunctionPool, SampleReward
from verl.rewards.signatures import with_own_arguments
from verl.utils.signals import RAISED_BY_CODE


@component
class RewardFunction(RewardDescription):
    """A user-defined function, given by its path:

        def my_reward(prompts: list[str], responses: list[str], **columns: list) -> list[float]

    or, for token-level rewards, a function of the whole batch that returns a DataProto with `token_level_rewards` [B
    T], 0 where `response_mask` is False:

        def my_reward(batch: DataProto) -> DataProto

    It is called once per batch with keyword arguments and returns one finite number per response. A function without
    `**columns` receives only the columns that it names. An `async def` is awaited; a list of coroutines is awaited
    concurrently. With `per_sample` it is called once per response and returns one number:

        def my_reward(prompt: str, response: str, **columns) -> float

    so that a call that hangs or crashes affects one sample only. A number may be None, for no reward, or a mapping with
    a `score` and further values. Signatures of verl and TRL are recognised, see `verl.rewards.signatures`. Functions
    run in a separate process that imports their file, but not the main script.

    Args:
        path: `package.module:function`, or `file.py:function` the file is relative to the working directory.
        kwargs: further keyword arguments of every call; they take precedence over columns of the same name.
        per_sample: call the function once per response, in worker processes.
        timeout_s: seconds for one call, after which its process is killed; null for 10 per sample or 60 per batch.
        num_workers: number of processes with `per_sample`; null for 4. Without it a batch is one call in one process.
        on_error: `raise` ends the run at a sample whose call raises, hangs, crashes or returns no finite number;
            `score` assigns `error_score` to it, warns, and counts it in `reward/failed`. `score` needs `per_sample`.
        error_score: see `on_error`.
    """

    example_values: ClassVar[Mapping[str, str]] = {"path": "rewards.py:my_reward"}

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
                yield f"kwargs.{name}: the function already receives an argument of this name. Choose another name."
        if not self.per_sample and self.num_workers is not None:
            yield (
                f"num_workers is {self.num_workers}: without per_sample a batch is one call in one process. Set "
                "per_sample=true, or num_workers=null."
            )
        if self.on_error == "score" and not self.per_sample:
            yield "on_error is score: without per_sample a call fails for the whole batch. Set per_sample=true."
        yield from path_faults(self.path, self.kwargs, texts)

    @property
    def call_timeout_s(self) -> float:
        """Deadline of one call, in seconds."""
        usual = SAMPLE_TIMEOUT_S if self.per_sample else BATCH_TIMEOUT_S
        return usual if self.timeout_s is None else self.timeout_s

    def columns_read(self) -> Iterator[tuple[str, str]]:
        texts = ("prompt", "response") if self.per_sample else ("prompts", "responses")
        if (in_source := source_signature(self.path)) is None:
            return
        signature = signature_of(in_source, self.kwargs)
        for name in signature.required if self.per_sample or not signature.takes_batch else ():
            if name not in (*texts, *self.kwargs):
                yield f"path is {self.path!r}, which takes {name}", name

    def preflight(self, context: BuildContext) -> Iterator[str]:
        if source_signature(self.path) is not None:
            return
        try:
            self.build(context).close()  # faults that only an import reveals, in a separate process
        except ConfigError as error:
            yield from error.faults

    def build(self, context: BuildContext) -> Reward:
        try:
            return self._started()
        except RewardError as error:  # the function cannot be imported
            raise ConfigError(str(error)) from error

    def _started(self) -> Reward:
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
        """A reward that calls `function`, for use as a library. To set a deadline use `CallableReward`."""
        return CallableReward(function, kwargs)


SAMPLE_TIMEOUT_S, NUM_WORKERS = 10.0, 4


class CallableReward(Reward):
    """A reward that calls a user-defined function in this process.

    Args:
        function: as in `RewardFunction`.
        kwargs: further keyword arguments of every call.
        timeout_s: deadline of one call, which is then interrupted.
    Raises:
        RewardError: `function` cannot be called, or does not take `prompts` and `responses`.
    """

    def __init__(self, function: Callable, kwargs: Mapping[str, Any] | None = None, timeout_s: float = BATCH_TIMEOUT_S):
        self.timeout_s = timeout_s
        if not callable(function):
            raise RewardError(f"reward is {function!r}: expected a function of prompts and responses.")
        function = with_own_arguments(function, dict(kwargs or {}))
        self._describe(function, kwargs or {}, signature_of(function, kwargs or {}))

    def _describe(self, function: Callable | Source, kwargs: Mapping[str, Any], signature: Signature) -> None:
        self.function: Any = function
        self.kwargs, self._accepted, self._takes_batch = dict(kwargs), signature.accepted, signature.takes_batch
        texts = () if self._takes_batch else ("prompts", "responses")
        refuse_missing_arguments(self._accepted, (*texts, *self.kwargs), function)

    @property
    def producer(self) -> Callable:
        return self.function

    def score(self, prompts: list[str], responses: list[str], **columns: list) -> Any:
        """Call the function and return its unvalidated result.

        Raises:
            RewardError: the function raised, or needs a column that the data lacks.
        """
        check_columns(self._accepted, columns, ("prompts", "responses", *self.kwargs), self.function)
        try:
            return self._call(prompts, responses, columns)
        except RAISED_BY_CODE as error:  # whatever user code raises is reported with its place
            expected = f"{len(responses)} finite numbers, one for each response"
            raise reward_error(expected, self._words(error), self.function) from error

    def score_batch(self, batch: DataProto) -> RewardResult:
        """Score every response; token scores if the function takes the whole batch."""
        if not self._takes_batch or not len(batch):
            return super().score_batch(batch)
        prompts, responses, _ = texts_of(batch)
        try:
            result = self._invoke(batch)
        except RAISED_BY_CODE as error:  # whatever user code raises is reported with its place
            raise reward_error(TOKEN_REWARDS, self._words(error), self.function) from error
        if getattr(result, "ndim", None) == 1:
            return checked_result(result, prompts, responses, self.function)
        scores = checked_token_scores(result, batch.batch["response_mask"], prompts, responses, self.function)
        return RewardResult(scores.double().sum(dim=1).cpu().numpy(), token_scores=scores)

    def _call(self, prompts: list[str], responses: list[str], columns: Mapping[str, list]) -> Any:
        if self._accepted is not None:
            columns = {name: values for name, values in columns.items() if name in self._accepted}
        return self._invoke({"prompts": prompts, "responses": responses, **columns})

    def _invoke(self, given: DataProto | dict[str, Any]) -> Any:
        """Call the function with a batch, or with keyword arguments."""
        given = copy.deepcopy(given)  # a function that changes its arguments must not change the data of the run

        def call() -> Any:
            if isinstance(given, DataProto):
                return awaited(self.function(given, **self.kwargs))
            return awaited(self.function(**{**given, **self.kwargs}))

        return call_within(self.timeout_s, call, source_of(self.function).file)

    def _words(self, error: BaseException) -> str:
        """The exception with the line of the user's file, or the message of a `CallFailed`."""
        if isinstance(error, CallFailed):
            return str(error)
        return f"{error_text(error)}{own_line(error, self.function)}"


class ProcessReward(CallableReward):
    """A reward that calls a function by its path in a separate process, which `close` ends.

    Args:
        path, kwargs: as in `RewardFunction`.
        timeout_s: deadline of one call; then the process is killed, and the next call starts another.
    Raises:
        RewardError: the function cannot be imported, or does not accept the arguments.
    """

    scores_ahead = True

    def __init__(self, path: str, kwargs: Mapping[str, Any], timeout_s: float):
        self.pool = FunctionPool(path, kwargs, timeout_s, num_workers=1, whole_batch=True)
        try:
            self._describe(self.pool.source, kwargs, self.pool.signature)
        except BaseException:
            self.pool.close()
            raise

    def close(self) -> None:
        self.pool.close()

    def _invoke(self, given: DataProto | dict[str, Any]) -> Any:
        (outcome,) = self.pool.score([given])
        assert outcome is not None
        if outcome.failure is not None:
            raise CallFailed(outcome.failure)
        return pickle.loads(outcome.score)
