"""Base classes of environments: the interface of a user's class, and the settings that all environments share.

Deadlines of calls count only time in which the event loop ran, so that delays of the trainer do not count.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from verl.component import BuildContext, Description, component
from verl.environments.tool_calls import ParseFault, ToolCall, ToolFormat
from verl.utils.signals import as_component_exit

Outcome = Literal["ok", "tool_error", "timeout", "infra"]
Observation = str | Sequence[Mapping[str, Any]] | None
Recovery = Literal["stateless", "deterministic", "restart"]
History = Literal["append", "rerender"]
OnInfra = Literal["drop_member", "drop_group", "stop"]
Fault = Literal["own", "crash", "suspect", "neighbour", "late"]
POLL_INTERVAL_S = 0.25  # interval of checks of a call with a deadline
MAX_ERROR = 600  # maximum characters of an error in the record of a call


class InfraError(Exception):
    """Raised by an environment or a tool for failures that the model did not cause, such as a service that is down.

    Attributes:
        fault: whose failure it is if several episodes share a process; see `CallRecord.fault`.
        trace: the traceback of another process; empty if there is none.
    """

    def __init__(self, message: str, fault: Fault = "own", trace: str = ""):
        super().__init__(message)
        self.fault: Fault = fault
        self.trace = trace


class ToolError(Exception):
    """Raised by a tool for an error that the model caused; the message is shown to the model."""


@dataclass(frozen=True)
class Action:
    """One turn of the model.

    Attributes:
        text: text of the turn, without the stop token.
        calls: its tool calls in order, including those that could not be parsed (`ParseFault`).
        call_id: unique in the training run, and the same when a resumed run repeats the turn, so that a service can use
            it as an idempotency key.
    """

    text: str
    calls: tuple[ToolCall | ParseFault, ...] = ()
    call_id: str = ""


@dataclass(frozen=True)
class CallRecord:
    """One call of an environment or a tool, and its outcome.

    Attributes:
        call_id: unique in the run: step, prompt, sample, turn and place in the turn.
        name: `reset`, `step`, or the name of the tool.
        error: error in one line; empty for none.
        fault: cause of an `infra` outcome, which decides how the episode is restarted. `own`: this call, counted
            against `environment.retries`. `crash`: this call ended its process; also counted. `suspect`: one of several
            calls in progress when their process ended. `neighbour`: a call of another episode ended the process.
            `late`: the call took too long next to others; it is scored only if this happens in a separate process.
            After two `crash` or `suspect` an episode gets its own process.
    """

    call_id: str
    name: str
    outcome: Outcome
    seconds: float
    error: str = ""
    fault: Fault = "own"


@dataclass(frozen=True)
class StepResult:
    """Result of one step of an environment.

    Attributes:
        observation: text or chat messages shown to the model next; None if nothing follows. The content of a message
            is a text, or a list of texts and images (`environment.images`; see `hosts.host_main.as_content`).
        reward: of the turn, finite in float32; assigned to the turn's last token. A bool counts as 1 or 0.
        terminated: the episode reached its end.
        truncated: the environment ended the episode early.
        info: any values by name, as in gymnasium; not used.
        calls: records of the tool calls of the turn.
    """

    observation: Observation = None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    calls: tuple[CallRecord, ...] = ()


class Environment:
    """The environment of one episode; a new object is created for each. A user's class inherits this or has the same
    methods.

    Both methods may be coroutines or plain functions. `step` returns a `StepResult`, or a tuple (observation, reward,
    terminated, truncated, info) as in gymnasium.

    Attributes:
        recovery: how its state is restored if a run was killed during an episode, see `verl.environments.journal`:
            `stateless` if results depend only on the action, `deterministic` if the same seed and actions give the same
            results, otherwise `restart`.
        answers_at_once: its methods return immediately, so they are called in the thread that generates turns, without
            a deadline. Coroutine methods must not suspend.
        keeps_deadlines: its methods enforce `environment.step_timeout_s` and `reset_timeout_s` themselves.
    """

    recovery: Recovery = "restart"
    answers_at_once: bool = False
    keeps_deadlines: bool = False

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Begin an episode.

        Args:
            row: the columns of the data, `prompt_text` among them.
            seed: equal for all episodes of one prompt in one step.
        Returns:
            An observation that follows the prompt, or None.
        """
        return None

    async def step(self, action: Action) -> StepResult | tuple[Any, ...]:
        """Take one turn of the model."""
        raise NotImplementedError

    async def close(self) -> None:
        """Called when the episode has ended."""


class EnvironmentFactory:
    """Creates the environments of one process and owns their shared resources.

    Args:
        make: creates an environment; None for a subclass that overrides the method.
    Attributes:
        tool_parameters: JSON schemas of the arguments of the tools that a turn may call, by tool name.
    """

    tool_parameters: Mapping[str, Mapping[str, Any]] = {}

    def __init__(self, make: Callable[[], Any] | None = None):
        self._make = make

    async def start(self) -> None:
        """Open shared resources, in the event loop that runs the environments."""

    def make(self) -> Any:
        """A new environment."""
        assert self._make is not None
        return self._make()

    def make_alone(self) -> Any:
        """A new environment in its own process, if environments run in other processes."""
        return self.make()

    async def stop(self) -> None:
        """Close what `start` opened. Idempotent."""


@component
class EnvironmentDescription(Description):
    """Settings of episodes that all environments share.

    A turn has at most `rollout.max_new_tokens` tokens. A turn that reaches a limit ends the episode; its tool calls are
    not executed.

    Args:
        max_turns: maximum turns of the model in an episode.
        max_tokens: maximum tokens of an episode after its prompt, including observations.
        max_observation_tokens: the middle of a longer observation is replaced by a note.
        step_timeout_s: timeout of one step of the environment, and of each tool call.
        reset_timeout_s: timeout of `reset`.
        max_concurrent: concurrent calls in each process.
        retries: how often an episode is restarted in a new environment after a failure that the model did not cause.
        on_infra: what happens to an episode after these retries. It never gets a reward: `drop_member` drops the
            episode (and its whole group if fewer than two are left); `drop_group` drops all episodes of the prompt;
            `stop` ends the run. Dropping favours episodes that make few calls.
        history: what the model reads before a turn. `append`: the previous token ids followed by new ones, so that an
            episode is one sample. `rerender`: the conversation rendered again by the chat template, so that each turn
            is a separate sample; for templates that rewrite earlier turns (Qwen3 removes their thinking).
        tool_format: format of tool calls, see `verl.environments.tool_calls.parse`. `auto` is the one that parses what
            the chat template renders, or `plain`, a line `name(arguments)`, if the template does not support tools.
        images: observations and results of tools may have images.
        journal: record running episodes on disk, next to the checkpoints, so that a run killed during an episode can
            continue it.
        kv_cache_gib: size of the key-value cache of unfinished episodes, under rollout=hf. Episodes waiting for their
            environment are evicted first and recomputed later.
    Attributes:
        has_tools: whether the model gets tools; a turn without a call is then the answer.
        plays_in_flight: whether weights may change within its episodes.
    """

    has_tools: ClassVar[bool] = False
    plays_in_flight: ClassVar[bool] = True

    max_turns: PositiveInt = 8
    max_tokens: PositiveInt = 1024
    max_observation_tokens: PositiveInt = 512
    step_timeout_s: PositiveFloat = 30.0
    reset_timeout_s: PositiveFloat = 60.0
    max_concurrent: PositiveInt = 64
    retries: NonNegativeInt = 2
    on_infra: OnInfra = "drop_member"
    history: History = "append"
    tool_format: ToolFormat = "auto"
    kv_cache_gib: NonNegativeFloat = 2.0
    images: bool = False
    journal: bool = True

    def columns_read(self) -> tuple[str, ...]:
        """Columns of the data that the environment requires."""
        return ()

    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        """JSON schemas of its tools, which the chat template writes into the prompt."""
        return ()

    def response_generator(
        self, engine: Any, rollout: Any, tokenizer: Any, stop_ids: tuple[int, ...], context: BuildContext
    ) -> Any:
        """The generator of its episodes; None for `EpisodeGenerator`.

        Args:
            engine, rollout: a `RolloutEngine`, and its description.
            stop_ids: tokens that end a turn.
        """
        return None

    def prompts(self, count: int) -> Sequence[Sequence[Mapping[str, Any]]]:
        """Initial chat messages of its first tasks, at most this many; empty if it has no prompts."""
        return ()

    def factory(self, context: BuildContext) -> EnvironmentFactory:
        raise NotImplementedError


def environment_faults(run: Any) -> Iterator[str]:
    """Faults: options that do not work, or were not tested, with an environment."""
    environment = run.environment
    if run.trainer.eval_without_tools and not getattr(environment, "has_tools", False):
        kind = "null" if environment is None else f"a {type(environment).__name__}, which has no tools that could go"
        yield f"trainer.eval_without_tools is true, and environment is {kind}. Set it to false."
    if environment is None:
        if getattr(run.reward, "needs_environment", False):
            yield "reward is of the environment, and environment is null. Set environment=..., or another reward."
        return
    prefix = f"environment is {type(environment).__name__}"
    for name, columns in run.data.columns().items():
        where = "rows of data" if name == "data" else f"rows of data.{name}"
        for column in environment.columns_read():
            if column not in columns:
                yield f"{prefix}: the {where} have no column {column!r}. Their columns: {', '.join(sorted(columns))}."
    if "turns" not in run.rollout.supports:
        yield f"{prefix}: {type(run.rollout).__name__} generates no turns of episodes. Set rollout=hf."
    if getattr(run.rollout, "protocol", "openai") != "openai" or getattr(run.rollout, "log_probs", "") == "trainer":
        yield f"{prefix}: turns of episodes need the ids and log-probs of the server. Set rollout.protocol=openai."
    if run.replay is not None or run.algorithm.replay_fraction:
        yield f"{prefix}: the replay buffer does not keep the masks of episodes. Set replay=off."
    if run.algorithm.needs_greedy_baseline:
        yield f"{prefix}: the greedy baseline of algorithm=remax was not tried with episodes. Choose another algorithm."
    if run.algorithm.selection is not None:
        yield f"{prefix}: algorithm.selection was not tried with episodes. Set algorithm.selection=null."
    if run.critic is not None and run.algorithm.needs_values and run.rollout.max_new_tokens > environment.max_tokens:
        yield f"{prefix}: rollout.max_new_tokens exceeds environment.max_tokens. Lower it."
    if run.rollout.min_new_tokens:
        yield f"{prefix}: rollout.min_new_tokens is {run.rollout.min_new_tokens}: a turn has no minimum. Set it to 0."
    if environment.images and environment.history == "rerender":
        yield f"{prefix} with history=rerender, and images is true: texts alone are rendered again. Set one back."
    if environment.history == "rerender" and type(run.algorithm.policy_loss).__name__ == "GSPO":
        yield (
            f"{prefix} with history=rerender: the ratio of algorithm=gspo is of a row, and an episode has several. Set "
            "environment.history=append, or another algorithm."
        )


class DeadlinePassed(TimeoutError):
    """A call exceeded its deadline."""

    def __init__(self, timeout_s: float):
        super().__init__(f"no answer within {timeout_s:g} s")


async def within(timeout_s: float, awaitable: Awaitable[Any]) -> Any:
    """Await a result for at most `timeout_s`, then cancel it.

    A wait that ends much later than planned is not counted: the process was suspended, or another thread or callback
    blocked the event loop.

    Raises:
        DeadlinePassed: there is no result in time.
    """

    async def guarded() -> Any:
        try:
            return await awaitable
        except SystemExit as error:
            raise as_component_exit(error) from error  # an exit would end the event loop, and all environments with it

    task, left_s = asyncio.ensure_future(guarded()), timeout_s
    try:
        while left_s > 0:
            begin, pause_s = time.monotonic(), min(left_s, POLL_INTERVAL_S)
            await asyncio.wait((task,), timeout=pause_s)
            if task.done():
                return task.result()
            took_s = time.monotonic() - begin
            if took_s < pause_s + POLL_INTERVAL_S:
                left_s -= took_s
        raise DeadlinePassed(timeout_s)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,), timeout=POLL_INTERVAL_S)
