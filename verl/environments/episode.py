"""One episode: its turns, its state while it is played, and its restarts after failures of others than the model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from verl.environments.base import CallRecord, EnvironmentDescription, EnvironmentFactory, Fault, Observation
from verl.environments.journal import JournalEntry, PrefixHash
from verl.errors import RolloutError
from verl.ops.counter_rng import EVALUATION
from verl.rollout.base import GenerationRequest

End = Literal["", "terminated", "truncated", "timeout", "turns", "tokens", "turn_tokens", "dropped"]
ENDS: tuple[End, ...] = ("terminated", "truncated", "timeout", "turns", "tokens", "turn_tokens", "dropped")
CRASHES_BESIDE_OTHERS = 2  # of an episode, before it gets a process of its own


@dataclass
class Turn:
    """One turn of the model and its result.

    Attributes:
        text: the text that was parsed, without the stop token.
        start: index of its first token among the tokens after the prompt.
        before: everything that the model read, if each turn is a sample of its own.
        observation: what the environment answered; None after the last turn.
        observed: number of tokens of the observation.
    """

    start: int
    tokens: list[int]
    log_probs: list[float]
    before: list[int] = field(default_factory=list)
    text: str = ""
    is_complete: bool = True
    reward: float = 0.0
    observation: Observation = None
    observed: int = 0
    calls: list[CallRecord] = field(default_factory=list)
    parse_errors: int = 0


@dataclass
class Episode:
    """State of one episode.

    Attributes:
        number: its number in this call of the engine.
        sample_key: sample index for the sampling noise; changes after a refill.
        context: token ids before the next turn, including the prompt; they are only appended to, unless the template
            renders them again before each turn.
        end: how it ended; empty while it runs.
        answers: messages written and answered so far, if the template renders them again.
        tries: restarts that count as one of `environment.retries`.
        crashes: how often its call ended a process, or may have done so.
        is_alone: it is played in a process of its own.
        is_unwanted: too few of its group are left, so that it is dropped when it ends.
        infra: failures that the model did not cause, including retried ones.
        prefix: hash of the tokens so far, for journal keys.
        key: journal key of the current call.
        known: the journal's entry for the current call, if the call is repeated for comparison.
        reads_journal: whether answers are taken from the journal.
        needs_replay_of_actions: the environment has not received the actions that were answered from the journal.
        reused, replayed: calls answered from the journal; calls repeated and compared.
        restarted: the journal had a part of the episode, which was restarted.
    """

    number: int
    prompt: list[int]
    prompt_id: int
    sample_id: int
    group: int
    row: Mapping[str, Any]
    seed: int
    sample_key: int = 0
    attempt: int = 0
    tries: int = 0
    refills: int = 0
    crashes: int = 0
    is_alone: bool = False
    is_unwanted: bool = False
    environment: Any = None
    context: list[int] = field(default_factory=list)
    opening: int = 0
    turns: list[Turn] = field(default_factory=list)
    end: End = ""
    infra: list[str] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)
    answers: list[tuple[str | None, Observation]] = field(default_factory=list)
    prefix: PrefixHash | None = None
    key: str = ""
    known: JournalEntry | None = None
    reads_journal: bool = True
    needs_replay_of_actions: bool = False
    reused: int = 0
    replayed: int = 0
    restarted: bool = False
    begun_s: float = 0.0
    seconds: float = 0.0

    @property
    def response(self) -> list[int]:
        """Token ids after the prompt, in the order in which they came, where they only grow."""
        return self.context[len(self.prompt) :]

    @property
    def length(self) -> int:
        """Tokens beside those of the prompt."""
        return len(self.context) - len(self.prompt)

    @property
    def reward(self) -> float:
        return sum(turn.reward for turn in self.turns)

    def begin(self, factory: EnvironmentFactory) -> None:
        """Start from the prompt in a new environment."""
        self.environment = factory.make_alone() if self.is_alone else factory.make()
        self.context, self.turns, self.opening = list(self.prompt), [], 0
        self.calls, self.answers, self.begun_s, self.needs_replay_of_actions = [], [], time.monotonic(), False
        self.prefix = None
        self.attempt += 1

    def is_restarted(self, why: str, fault: Fault, options: EnvironmentDescription, request: GenerationRequest) -> bool:
        """Note a failure that the model did not cause; it never becomes a reward.

        Args:
            fault: see `CallRecord.fault`.
        Returns:
            Whether the episode is to be started again, perhaps with other noise or in a process of its own; else it is
            dropped.
        Raises:
            RolloutError: `on_infra` is `stop`, and all retries have failed.
        """
        self.infra.append(why)
        self.crashes += fault in ("crash", "suspect")
        self.is_alone |= fault == "late" or self.crashes >= CRASHES_BESIDE_OTHERS
        if self.is_unwanted:
            return False
        if fault not in ("own", "crash"):
            return True
        if self.tries < options.retries:
            self.tries += 1
            return True
        if options.on_infra == "stop":
            raise RolloutError(
                f"environment: prompt {self.prompt_id}, sample {self.sample_id} failed {self.tries + 1} times for "
                f"reasons outside of the model, the last time with {why}. environment.on_infra is stop."
            )
        if options.on_infra == "refill" and request.stream != EVALUATION and self.refills < max(1, options.retries):
            self.refills, self.tries = self.refills + 1, 0
            self.sample_key += request.num_samples
            return True
        return False


def dropped_with(
    episode: Episode, episodes: Sequence[Episode], options: EnvironmentDescription, request: GenerationRequest
) -> list[Episode]:
    """The other episodes of the group that are dropped because this one was."""
    others = [other for other in episodes if other.group == episode.group and other.end != "dropped"]
    is_whole = options.on_infra == "drop_group" or request.stream == EVALUATION
    return others if is_whole or (request.num_samples > 1 and len(others) < 2) else []
