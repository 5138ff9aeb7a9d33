"""`environment=agent_program`: an unchanged program plays an episode against an endpoint that is exact in tokens.

    row, base_url ──> the program, in another process ── chat completions ──> endpoint ──> the run's rollout engine
    reward        <──┘                                                           │
    rows          <── requests of its session, joined if one continues another ──┘

Each request is recorded with its token ids and log-probs. Requests become one row only if the prompt of the later one
begins with exactly the tokens of the earlier one; others are separate rows, and credit is assigned to the episode.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from pydantic import PositiveFloat

from verl.component import BuildContext, component
from verl.environments.base import Fault, Observation
from verl.environments.calls import CallResult
from verl.environments.episode import End, Episode, EpisodeSample, Turn, dropped_with
from verl.environments.episode_loop import EpisodeGenerator
from verl.environments.hosts.host_pool import HostedDescription
from verl.environments.hosts.host_process import PROGRAMS
from verl.errors import RolloutError
from verl.rollout.base import GenerationRequest, Rollout, RolloutEngine, TurnEngine
from verl.serving.conversations import RecordedTurn, Session, merge_turns
from verl.serving.endpoint import PolicyEndpoint
from verl.serving.http_api import PolicyServer
from verl.utils.progress import report

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


@component
class AgentProgram(HostedDescription):
    """A program of the user that speaks to an OpenAI-compatible endpoint; see docs/environments.md.

    Args:
        path: `file.py:function` or `module:function`, called as `function(row, base_url)`, a coroutine function or not;
            returns the reward of the episode, a number, or None if `reward` scores the last turn.
        command: in place of `path`, a program and its arguments: the row is JSON on its standard input, OPENAI_BASE_URL
            and OPENAI_API_KEY are in its environment, and the reward is the last line that it prints.
        program_timeout_s: for one episode.
        turn_timeout_s: for the answer to one request.
        ignore_sampling: accept requests with another temperature or top_p, and sample with those of the rollout.
    """

    example_values: ClassVar[Mapping[str, str]] = {"path": "agent.py:run"}
    plays_in_flight: ClassVar[bool] = False

    path: str | None = None
    command: tuple[str, ...] = ()
    program_timeout_s: PositiveFloat = 600.0
    turn_timeout_s: PositiveFloat = 300.0
    ignore_sampling: bool = False

    def faults(self) -> Iterator[str]:
        if (self.path is None) is not bool(self.command):
            yield "path and command: give one of the two."
        if self.path is not None and not self.path.rpartition(":")[0]:
            yield f"path is {self.path!r}: expected file.py:function or module:function."
        if self.history != "append":
            yield "history is rerender: the program writes its messages itself. Set it to append."
        if self.images:
            yield "images is true: requests of programs are texts. Set it to false."

    def machine_faults(self) -> Iterator[str]:
        yield from super().machine_faults()
        file = (self.path or "").rpartition(":")[0]
        if file.endswith(".py") and not Path(file).is_file():
            yield f"path is {self.path!r}: there is no file {file}."

    def preflight(self, context: BuildContext) -> Iterator[str]:
        yield from self.start_faults(f"path is {self.path!r}" if self.path else "command", **{"try": "make"})

    def host_options(self) -> dict[str, Any]:
        arguments = {"path": self.path, "command": list(self.command), "timeout_s": self.program_timeout_s}
        return {"kind": "class", "path": f"{PROGRAMS / 'program_adapter.py'}:ProgramEpisode", "arguments": arguments}

    def response_generator(
        self, engine: RolloutEngine, rollout: Rollout, tokenizer: Any, stop_ids: tuple[int, ...], context: BuildContext
    ) -> AgentProgramGenerator:
        options = replace(self, reset_timeout_s=self.program_timeout_s)  # a program runs in `reset`
        return AgentProgramGenerator(options, engine, rollout, tokenizer, stop_ids, context)


class AgentProgramGenerator(EpisodeGenerator):
    """Samples episodes that programs play."""

    options: AgentProgram

    @property
    def has_rows(self) -> bool:
        return True

    def play(self, turns: TurnEngine, episodes: list[Episode], request: GenerationRequest) -> None:
        self._runs = _Programs(self, request, episodes)
        if episodes:
            self._runs.run(turns)

    def samples_of(self, episode: Episode) -> list[EpisodeSample]:
        return self._runs.samples(episode)


class _Programs:
    """The episodes of one call, each a program."""

    def __init__(self, engine: AgentProgramGenerator, request: GenerationRequest, episodes: Sequence[Episode]):
        self.engine, self.request, self.episodes, self.options = engine, request, episodes, engine.options
        self.sessions: dict[int, Session] = {}
        self.num_open = len(episodes)

    def run(self, turns: TurnEngine) -> None:
        """Play all of them.

        Raises:
            RolloutError: the engine failed, or programs keep failing under `on_infra=stop`.
        """
        engine, options = self.engine, self.options
        calls = engine.calls
        calls.begin_play()
        longest = max(len(episode.prompt) for episode in self.episodes)
        limits = engine.rollout.max_new_tokens, longest + options.max_tokens
        endpoint = PolicyEndpoint(
            lambda: turns, engine.tokenizer, engine.stop_ids, *limits,
            tool_format=options.tool_format, request=self.request,
        )  # fmt: skip
        sampling = {"temperature": engine.rollout.temperature, "top_p": engine.rollout.top_p}
        timeout_s = options.turn_timeout_s
        server = PolicyServer(endpoint, LOOPBACK, 0, "policy", sampling, options.ignore_sampling, timeout_s)
        serving = threading.Thread(target=server.serve_forever, args=(0.05,), name="verl endpoint", daemon=True)
        serving.start()
        try:
            for episode in self.episodes:
                self._start(server, episode)
            while self.num_open:
                for result in calls.take(0.2):
                    self._ended(server, result)
                if endpoint.failure is not None:
                    raise RolloutError(f"environment: {endpoint.failure}")
                report(f"programs left: {self.num_open}")
        finally:
            calls.hand_over()  # the last ends
            for session in self.sessions.values():
                session.is_closed = True
            server.shutdown()
            server.server_close()
            endpoint.close()
            serving.join(10.0)

    def samples(self, episode: Episode) -> list[EpisodeSample]:
        """The rows of an episode: its requests, joined if one continues another."""
        turns = self.sessions[episode.number].recorded[: len(episode.turns)]  # without what ended after the program
        numbers = {turn.request_id: number for number, turn in enumerate(turns)}
        samples = []
        for row in merge_turns(turns):
            row_turns = [turns[numbers[name]] for name in row.request_ids]
            start, ids = len(row_turns[0].prompt_ids), list(row.ids)
            turn_of, rewards = [0] * len(ids), [0.0] * len(ids)
            for turn in row_turns:
                begin, end = len(turn.prompt_ids), len(turn.ids)
                turn_of[begin:] = [numbers[turn.request_id]] * (len(ids) - begin)
                rewards[end - 1] = episode.turns[numbers[turn.request_id]].reward
            samples.append(
                EpisodeSample(
                    ids[:start], ids[start:], row.mask[start:], row.log_probs[start:], turn_of[start:], rewards[start:]
                )
            )
        return samples

    def _start(self, server: PolicyServer, episode: Episode) -> None:
        calls = self.engine.calls
        episode.begin(calls.factory)
        session = Session(episode.prompt_id, episode.sample_id, self.options.max_turns)
        self.sessions[episode.number] = session
        name = secrets.token_hex(8)
        server.sessions[name] = session
        row = {**episode.row, "base_url": server.session_url(name)}
        of_step = f"{self.request.stream}.{self.request.step}"
        call_id = f"{of_step}.{episode.prompt_id}.{episode.sample_id}.{episode.attempt}"
        calls.reset(episode.number, episode.attempt, call_id, episode.environment, row, episode.seed)

    def _ended(self, server: PolicyServer, result: CallResult) -> None:
        episode = self.episodes[result.episode]
        if result.attempt != episode.attempt or episode.end:
            return
        session, record = self.sessions[episode.number], result.record
        session.is_closed = True
        episode.calls.append(record)
        self.engine.calls.end(episode.environment)
        if record.outcome == "ok":
            try:
                reward = _reward_of(result.value)
            except ValueError as error:
                self._failed(server, episode, f"program: {error}")
                return
            if not session.recorded:
                self._failed(server, episode, "program: it ended without a request")
                return
            self._close(episode, session, "terminated", reward)
        elif session.cut and session.recorded:  # a limit of the run, not a failure
            self._close(episode, session, session.cut, 0.0)  # type: ignore[arg-type]
        else:
            self._failed(server, episode, f"program: {record.error}", record.fault)

    def _close(self, episode: Episode, session: Session, end: End, reward: float) -> None:
        turns = list(session.recorded)
        for number, turn in enumerate(turns):
            tokens, log_probs, observed = list(turn.token_ids), list(turn.log_probs), _new_tokens(turns, number)
            episode.turns.append(
                Turn(0, tokens, log_probs, text=turn.text, is_complete=turn.is_complete, observed=observed)
            )
        episode.turns[-1].reward = reward
        self._end(episode, end)

    def _end(self, episode: Episode, end: End) -> None:
        episode.end, episode.seconds = end, time.monotonic() - episode.begun_s
        self.num_open -= 1

    def _failed(self, server: PolicyServer, episode: Episode, why: str, fault: Fault = "own") -> None:
        """Restart the program of an episode after a failure that the model did not cause, or drop the episode."""
        if episode.is_restarted(why, fault, self.options):
            log.info("The program of prompt %d is restarted: %s", episode.prompt_id, why)
            self._start(server, episode)
            return
        log.warning("An episode of prompt %d is left out: %s", episode.prompt_id, why)
        self._end(episode, "dropped")
        for other in dropped_with(episode, self.episodes, self.options, self.request):
            if not other.end:  # the end of its program is not awaited
                self.sessions[other.number].is_closed = True
                other.attempt += 1
                self.engine.calls.end(other.environment)
                self._end(other, "dropped")
            other.end = "dropped"


def _reward_of(value: Observation) -> float:
    """The reward of a program, which its adapter returns as text; 0 for none."""
    reward = 0.0 if value is None else float(str(value))
    if not math.isfinite(reward):
        raise ValueError(f"it gave the reward {value}: expected a finite number")
    return reward


def _new_tokens(turns: Sequence[RecordedTurn], number: int) -> int:
    """Number of tokens between a turn and the next one that continues it; 0 if none does."""
    tokens = turns[number].ids
    following = (turn.prompt_ids for turn in turns[number + 1 :] if turn.prompt_ids[: len(tokens)] == tokens)
    return next((len(ids) - len(tokens) for ids in following), 0)
