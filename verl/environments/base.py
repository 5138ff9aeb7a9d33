"""What an environment is: the interface that a user's class has, and the settings that all environments share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from verl.component import BuildContext, Description, component
from verl.environments.tool_calls import ParseFault, ToolCall, ToolFormat

Outcome = Literal["ok", "tool_error", "timeout", "infra"]
Observation = str | Sequence[Mapping[str, Any]] | None
Recovery = Literal["stateless", "deterministic", "restart"]
History = Literal["append", "rerender"]
OnInfra = Literal["refill", "drop_member", "drop_group", "stop"]


class InfraError(Exception):
    """Raised by an environment or a tool for what is no fault of the model: a service that is down, a lost machine."""


class ToolError(Exception):
    """Raised by a tool for what is the model's fault; its text is shown to the model."""


@dataclass(frozen=True)
class Action:
    """One turn of the model.

    Attributes:
        text: what it wrote, without the token that ended it.
        calls: the tool calls in it, in order; faults of those that cannot be read stand among them.
        call_id: unique in the training, and the same where a resumed run takes the same turn again: a service that gets
            it can tell a repetition from a second wish.
    """

    text: str
    calls: tuple[ToolCall | ParseFault, ...] = ()
    call_id: str = ""


@dataclass(frozen=True)
class CallRecord:
    """One call of an environment or a tool, and what became of it.

    Attributes:
        call_id: unique in the run: step, prompt, sample, turn and place in the turn.
        name: `reset`, `step`, or the tool's.
        error: in one line, empty where there is none.
    """

    call_id: str
    name: str
    outcome: Outcome
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class StepResult:
    """What an environment makes of an action.

    Attributes:
        observation: what the model reads next, a text or chat messages; None where nothing follows.
        reward: of the turn; it lands on the turn's last token.
        terminated: the episode has come to its end.
        truncated: the environment has cut it off.
        info: anything, for the record of the episode; under `calls` the records of tool calls.
    """

    observation: Observation = None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


class Environment:
    """One episode's world; a new one is made for each episode. A user's class inherits this or has the same methods.

    Both methods may be coroutines or plain functions. `step` may give a `StepResult`, or a tuple (observation, reward,
    terminated, truncated, info) as gymnasium does.

    Attributes:
        recovery: how a run that was killed inside an episode gets its state back, see `verl.environments.journal`:
            `stateless` where an answer depends on the action alone, `deterministic` where the same seed and actions
            give the same answers, else `restart`.
    """

    recovery: Recovery = "restart"

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Begin an episode.

        Args:
            row: the columns of the data, `prompt_text` among them.
            seed: equal for all episodes of one prompt in one step.
        Returns:
            What the model reads after the prompt; None for nothing.
        """
        return None

    async def step(self, action: Action) -> StepResult | tuple[Any, ...]:
        """Take one turn of the model."""
        raise NotImplementedError

    async def close(self) -> None:
        """The episode has ended."""


class EnvironmentFactory:
    """Makes the environments of one process, and holds what they share.

    Attributes:
        tool_names: of the tools that a turn may call, each with the names of its parameters.
    """

    tool_names: Mapping[str, Sequence[str]] = {}

    async def start(self) -> None:
        """Open what the environments share; in the event loop that will run them."""

    def make(self) -> Any:
        """A fresh environment."""
        raise NotImplementedError

    async def abandon(self, environment: Any) -> None:
        """A call of this environment has not come back in time: leave nothing of it running, if that can be."""

    async def stop(self) -> None:
        """End what `start` opened. May be called again."""


@component
class EnvironmentDescription(Description):
    """How episodes are played, in any environment.

    A turn has at most `rollout.max_new_tokens` tokens. A turn that was cut by a limit executes nothing and is the last.

    Args:
        max_turns: of the model in an episode.
        max_tokens: of an episode beside its prompt, observations included.
        max_observation_tokens: a longer observation loses its middle, and says so.
        step_timeout_s: for one call of the environment, and of each tool.
        reset_timeout_s: for `reset`.
        max_concurrent: calls under way at a time, in each process.
        retries: times that an episode is begun anew, in a fresh environment, after a failure that is not the model's.
        on_infra: what becomes of an episode after that. It never gets a reward: `refill` plays another episode of the
            same prompt, with other noise, and drops the member if that fails too; `drop_member` leaves the episode out
            (of a group of which fewer than two are left, all); `drop_group` leaves out all episodes of the prompt;
            `stop` ends the run. Dropping favours episodes that make few calls.
        history: what the model reads before a turn: `append`, the very tokens of before and new ones behind them, so
            that an episode is one sample; `rerender`, the conversation as the chat template renders it anew, each turn
            a sample of its own, for templates that rewrite earlier turns (Qwen3 leaves out their thinking).
        tool_format: how calls are written: `hermes` (Qwen), `llama`, `plain` for `name(arguments)`; `auto` reads it
            from the chat template, and takes `plain` without one.
        journal: whether episodes are written down as they are played, beside the checkpoints, so that a run that is
            killed inside an episode goes on from there.
        kv_cache_gib: for keys and values of episodes under way, under rollout=hf; those of episodes that wait for
            their environment are let go first, and computed again.
    Attributes:
        has_rewards: its steps give rewards, which reward=environment reads.
    """

    has_rewards: ClassVar[bool] = False

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
    journal: bool = True

    def columns_read(self) -> tuple[str, ...]:
        """Columns of the data that it cannot do without."""
        return ()

    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        """JSON schemas of its tools, which the chat template writes into the prompt."""
        return ()

    def engine(
        self, engine: Any, rollout: Any, tokenizer: Any, stop_ids: tuple[int, ...], context: BuildContext
    ) -> Any:
        """The rollout engine whose responses are episodes, in place of `EpisodeEngine`; None for that.

        Args:
            engine, rollout: a `RolloutEngine` that draws turns, and its description.
            stop_ids: tokens that end a turn.
        """
        return None

    def factory(self, context: BuildContext) -> EnvironmentFactory:
        """What makes its environments in this process."""
        raise NotImplementedError
