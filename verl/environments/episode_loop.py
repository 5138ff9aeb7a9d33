"""The episode loop: the rollout engine generates turns, environments answer, each episode is a row of a batch.

    reset ──> turn ──> step ──> observation ──> turn ──> ... ──> end          of each episode
       calls run in the thread of `CallRunner`      turns run in this one, all ready ones together

An episode that waits for its environment does not block others. Its tokens depend on (seed, stream, step, prompt,
sample, turn, position) and on its environment's answers, not on other episodes.
"""

from __future__ import annotations

import copy
import itertools
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from verl.component import BuildContext
from verl.data.chat_template import ChatTemplate
from verl.data.images import BadImage
from verl.environments.base import Action, EnvironmentDescription, Fault, Observation, StepResult
from verl.environments.calls import CallResult, CallRunner
from verl.environments.episode import End, Episode, EpisodeSample, Turn, dropped_with, episode_batch, episode_record
from verl.environments.journal import EpisodeJournal, JournalEntry, refuse_other_answer
from verl.environments.observation_tokens import ConversationRenderer, ObservationEncoder, as_messages, contents
from verl.environments.tool_calls.parse import ToolFormat, parse_calls
from verl.environments.tool_calls.round_trip import format_of
from verl.errors import ConfigError, RolloutError
from verl.model_paths.images import row_media
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest, Rollout, RolloutEngine, TurnEngine, TurnLimits, TurnRequest, TurnResult
from verl.rollout.lockstep import in_lockstep
from verl.rollout.responses import ResponseGenerator
from verl.rollout.rows import longest_prompt, prompt_tokens
from verl.utils.progress import report
from verl.utils.seeding import derive_seed

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.5  # interval of deadline checks while no turn can be generated


class EpisodeGenerator(ResponseGenerator):
    """Samples episodes with an environment, or single responses if a request uses none.

    Args:
        engine: generates the turns.
        rollout: the description of that engine.
    """

    def __init__(
        self,
        options: EnvironmentDescription,
        engine: RolloutEngine,
        rollout: Rollout,
        tokenizer: Any,
        stop_ids: tuple[int, ...],
        context: BuildContext,
    ):
        super().__init__(engine, rollout, tokenizer.pad_token_id)
        self.options, self.tokenizer = options, tokenizer
        self.seed = context.seed
        self.stop_ids = stop_ids
        self.chat = ChatTemplate(tokenizer, max_pixels=context.max_pixels)
        self.style: ToolFormat = format_of(
            self.chat, options.tool_format if options.has_tools or context.tools else "plain"
        )
        self.encoder = ObservationEncoder(tokenizer, self.chat, stop_ids, options.max_observation_tokens, self.style)
        self.renderer: ConversationRenderer | None = None
        if options.history == "rerender":
            self.renderer = ConversationRenderer(self.chat, self.encoder, context.tools)
        self._context = context
        self._calls: CallRunner | None = None
        self.journal = self.new_journal()

    @property
    def calls(self) -> CallRunner:
        """The call runner of this process, started at the first episode."""
        if self._calls is None:
            self._calls = CallRunner(self.options.factory(self._context), self.options)
        return self._calls

    def new_journal(self) -> EpisodeJournal | None:
        """A journal for one step at a time; None if episodes are not recorded."""
        if not self.options.journal or self._context.journal_dir is None:
            return None
        return EpisodeJournal(self._context.journal_dir, self.options.identity(), self._context.rank)

    def limits(self, batches: Sequence[DataProto], request: GenerationRequest) -> TurnLimits:
        if not request.uses_environment:
            return super().limits(batches, request)
        return TurnLimits(longest_prompt(batches) + self.options.max_tokens, self.options.kv_cache_gib)

    def sample(self, turns: TurnEngine, batches: Sequence[DataProto], request: GenerationRequest) -> list[DataProto]:
        """The episodes of each part of the prompts, which are played concurrently."""
        if not request.uses_environment:
            return super().sample(turns, batches, request)
        return in_lockstep(self.engine.group.tensor_group, turns, lambda turns: self._played(turns, batches, request))

    def _played(self, turns: TurnEngine, batches: Sequence[DataProto], request: GenerationRequest) -> list[DataProto]:
        numbers, groups = itertools.count(), itertools.count()  # over all parts
        episodes_of = [self.episodes(part, request, numbers, groups) for part in batches]
        try:
            self.play(turns, list(chain.from_iterable(episodes_of)), request)
        except RolloutError:
            self._close_calls()  # they may be answered yet, and the same episodes be played again
            raise
        return [self.batch_of(part, request, played, turns) for part, played in zip(batches, episodes_of, strict=True)]

    def play(self, turns: TurnEngine, episodes: list[Episode], request: GenerationRequest) -> None:
        """Play episodes until they end."""
        if not episodes:
            return
        self.calls.begin_play()
        if self.journal is not None:
            self.journal.open(request.step)
        EpisodeLoop(self, turns, request, episodes, self.journal).run()

    @property
    def has_rows(self) -> bool:
        """Whether an episode may have several rows."""
        return self.renderer is not None

    def samples_of(self, episode: Episode) -> list[EpisodeSample]:
        """The samples of a finished episode."""
        return episode.by_turn() if self.has_rows else episode.whole()

    def batch_of(
        self,
        prompts: DataProto,
        request: GenerationRequest,
        episodes: Sequence[Episode],
        turns: TurnEngine,
        has_versions: bool = False,
    ) -> DataProto:
        """The batch of finished episodes; see `episode_batch`."""
        samples = [[] if episode.end == "dropped" else self.samples_of(episode) for episode in episodes]
        records = [episode_record(episode) for episode in episodes]
        has: dict[str, Any] = {"has_rows": self.has_rows, "has_versions": has_versions}
        if self.options.images:
            has["media"] = [x.prompt_media if x.end == "dropped" else x.media for x in episodes]
        return episode_batch(prompts, request, samples, records, self.pad_id, turns.dtype, **has)

    def show(self, episode: Episode, images: Sequence[str]) -> None:
        """Add images of an observation, as data URLs, to those that an episode's turns see."""
        episode.images = [*episode.images, *images]
        episode.media = self.chat.images.joined(episode.media, [self.chat.images.read(url) for url in images])

    def second(self) -> EpisodeGenerator:
        other = copy.copy(self)
        other._calls, other.journal = None, other.new_journal()
        return other

    def stop(self) -> None:
        self._close_calls()
        if self.journal is not None:
            self.journal.close()

    def close(self) -> None:
        self.stop()
        super().close()

    def _close_calls(self) -> None:
        if self._calls is not None:
            self._calls.close()
            self._calls = None

    def episodes(
        self, prompts: DataProto, request: GenerationRequest, numbers: Iterator[int], groups: Iterator[int]
    ) -> list[Episode]:
        """An episode for each sample of the prompts; `numbers` and `groups` number episodes and groups."""
        columns = prompts.non_tensor_batch
        episodes = []
        for row_number, (tokens, media) in enumerate(zip(prompt_tokens(prompts), row_media(prompts), strict=True)):
            prompt_id = int(prompts["prompt_ids"][row_number])
            row = {name: values[row_number] for name, values in columns.items()} | {"prompt_id": prompt_id}
            if self.renderer is not None:
                if media[0]:
                    raise ConfigError(
                        "environment.history is 'rerender': a conversation that is rendered again has no tokens for "
                        "the images of its prompt. Set environment.history=append, or leave the images out."
                    )
                self.renderer.refuse_other_prompt(row)
            seed = derive_seed(self.seed, "environment", request.stream, request.step, prompt_id)
            group = next(groups)
            episodes += [
                Episode(next(numbers), tokens, prompt_id, sample, group, row, seed, prompt_media=media)
                for sample in range(request.num_samples)
            ]
        return episodes


class EpisodeLoop:
    """The episodes of one call of the engine, from the first reset to the last turn.

    Args:
        turns: engine turns, to which turns are added.
        journal: open at the step of the request; None if episodes are not recorded.
    Attributes:
        num_open: episodes that have not ended.
        known: answers from the journal.
    """

    def __init__(
        self,
        engine: EpisodeGenerator,
        turns: TurnEngine,
        request: GenerationRequest,
        episodes: Sequence[Episode],
        journal: EpisodeJournal | None,
    ):
        self.engine, self.turns, self.request, self.journal = engine, turns, request, journal
        self.episodes = {episode.number: episode for episode in episodes}
        self.options, self.calls = engine.options, engine.calls
        self.tools = self.calls.factory.tool_parameters
        self.num_open = sum(not episode.end for episode in episodes)
        self.known: deque[CallResult] = deque()
        self.differing = 0

    def run(self) -> None:
        """Play the episodes until all have ended."""
        for episode in self.episodes.values():
            self.start(episode)
        limit_s = self.calls.stuck_after_s(len(self.episodes))
        idle_s = 0.0
        while self.num_open:
            while self.known:
                self.answer(self.known.popleft())
            is_idle = not self.turns.num_pending and bool(self.num_open)
            if self.journal is not None:
                self.journal.flush()  # turns and ends, before calls are submitted
            begin = time.monotonic()
            results = self.calls.take(IDLE_WAIT_S if is_idle else 0.0)
            if self.journal is not None:
                for result in results:
                    self.write_answer(self.journal, result)
                self.journal.flush()
            for result in results:
                self.answer(result)
            for result in self.turns.advance():
                self.draw(result)
            if results or not is_idle:
                idle_s = 0.0
                report(f"episodes left: {self.num_open}")
            elif idle_s > limit_s:
                raise self.calls.stuck_error()
            else:
                idle_s += min(time.monotonic() - begin, 2 * IDLE_WAIT_S)  # more: this process was suspended
                report(f"waiting for the environment; episodes left: {self.num_open}")
        self.calls.hand_over()
        if self.journal is not None:
            self.journal.flush()

    def start(self, episode: Episode) -> None:
        """Start or restart an episode."""
        episode.begin(self.calls.factory)
        self.ask_reset(episode)

    def ask_reset(self, episode: Episode) -> None:
        """Reset its environment, or take the answer from the journal."""
        if not self._is_known(episode, "reset"):
            call_id = self.call_id(episode, "reset")
            self.calls.reset(episode.number, episode.attempt, call_id, episode.environment, episode.row, episode.seed)

    def call_id(self, episode: Episode, what: str) -> str:
        """The id of a call of the current attempt; see `Action`."""
        request = self.request
        return f"{request.stream}.{request.step}.{episode.prompt_id}.{episode.sample_id}.{episode.attempt}.{what}"

    def awaits(self, result: CallResult) -> bool:
        """Whether a result belongs to the current attempt of an episode that has not ended."""
        episode = self.episodes[result.episode]
        return result.attempt == episode.attempt and not episode.end

    def answer(self, result: CallResult) -> None:
        """Continue an episode whose environment has answered."""
        episode = self.episodes[result.episode]
        if not self.awaits(result):
            return
        record = result.record
        episode.calls.append(record)
        is_timeout = record.outcome == "timeout"
        if record.outcome == "infra" or (is_timeout and record.name == "reset"):
            self._failed(episode, f"{record.name}: {record.error}", record.fault)
        elif is_timeout:  # the model's action takes too long: this is scored
            self._finish(episode, "timeout")
        else:
            try:
                self._opened(episode, result.value) if record.name == "reset" else self._stepped(episode, result.value)
            except ConfigError as error:  # the chat template refuses the observation
                self._failed(episode, f"{record.name}: {error}")
            except BadImage as error:
                self._failed(episode, f"{record.name}: an image is not usable: {error}")

    def _opened(self, episode: Episode, observation: Observation) -> None:
        if observation:
            before = episode.length
            episode.context, images = self._continued(episode, observation)
            self.engine.show(episode, images)
            episode.opening = episode.length - before
        self.next_turn(episode)

    def _stepped(self, episode: Episode, step: StepResult) -> None:
        turn = episode.turns[-1]
        turn.reward = float(step.reward)
        turn.calls = list(step.calls)
        if failed := next((call for call in turn.calls if call.outcome == "infra"), None):
            self._failed(episode, f"{failed.name}: {failed.error}", failed.fault)
        elif step.terminated or step.truncated:
            turn.observation = step.observation
            self._finish(episode, "terminated" if step.terminated else "truncated")
        elif len(episode.turns) >= self.options.max_turns:
            self._finish(episode, "turns")
        else:
            turn.observation = step.observation
            context, images = self._continued(episode, step.observation)
            if len(context) - len(episode.prompt) >= self.options.max_tokens:
                self._finish(episode, "tokens")
            elif images and any(self.engine.chat.images.token in turn.tokens for turn in episode.turns):
                self._finish(episode, "truncated")  # a placeholder that was sampled would be taken for that of an image
            else:
                turn.observed = max(0, len(context) - len(episode.context))
                episode.context = context
                self.engine.show(episode, images)
                self.next_turn(episode)

    def _continued(self, episode: Episode, observation: Observation) -> tuple[list[int], list[str]]:
        """Context tokens of the next turn, after an observation, and the images of that as data URLs."""
        images = contents("image", as_messages(observation))
        if images and not self.options.images:
            raise RolloutError("environment: an observation has an image. Set environment.images=true.")
        if self.engine.renderer is None:
            is_chat = episode.row.get("prompt_messages") is not None
            last = episode.turns[-1].tokens[-1] if episode.turns else None
            return episode.context + self.engine.encoder.encode(observation, is_chat=is_chat, last=last), images
        written = self.engine.renderer.text_of(episode.turns[-1].tokens) if episode.turns else None
        episode.answers.append((written, observation))
        return self.engine.renderer.tokens(episode.row, episode.answers), images

    def next_turn(self, episode: Episode) -> None:
        """Add the next turn, or end the episode if there is no room for one."""
        room = self.options.max_tokens - episode.length
        if room < 1:
            self._finish(episode, "tokens")
            return
        self.turns.add(
            TurnRequest(
                episode.number,
                list(episode.context),
                episode.prompt_id,
                episode.sample_id,
                len(episode.turns),
                min(self.engine.rollout.max_new_tokens, room),
                self.request.step,
                self.request.stream,
                self.request.greedy,
                media_key=episode.media[0],
                media=episode.media[1],
            )
        )

    def draw(self, result: TurnResult) -> None:
        """Continue an episode whose turn was generated."""
        episode, tokens = self.episodes[result.episode], result.tokens
        ended, before = result.is_complete, [] if self.engine.renderer is None else episode.context
        text = self.engine.tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=False)
        turn = Turn(episode.length, tokens, result.log_probs, before, text, ended, versions=result.versions)
        self._write_turn(episode, tokens)
        episode.turns.append(turn)
        episode.context = episode.context + tokens
        if not ended:  # calls of a truncated turn are never executed, even if they parse
            is_full = episode.length >= self.options.max_tokens
            self._finish(episode, "tokens" if is_full else "turn_tokens")
            return
        self.ask_step(episode)

    def ask_step(self, episode: Episode) -> None:
        """Send the last turn to its environment, or take the answer from the journal."""
        action = self.action(episode, len(episode.turns) - 1)
        episode.turns[-1].parse_errors = sum(not hasattr(call, "name") for call in action.calls)
        if not self._is_known(episode, "step"):
            self.calls.step(episode.number, episode.attempt, action.call_id, episode.environment, action)

    def action(self, episode: Episode, index: int) -> Action:
        """A turn in the form that the environment receives."""
        text = episode.turns[index].text
        calls = tuple(parse_calls(text, self.engine.style, self.tools))
        return Action(text, calls, self.call_id(episode, str(index)))

    def _failed(self, episode: Episode, why: str, fault: Fault = "own") -> None:
        """Restart an episode after a failure that the model did not cause, or drop it, possibly with its group."""
        self.turns.forget(episode.number)
        self.calls.end(episode.environment)
        if episode.is_restarted(why, fault, self.options):
            log.info("Episode of prompt %d is restarted: %s", episode.prompt_id, why)
            self.start(episode)
            return
        log.warning("An episode of prompt %d is left out: %s", episode.prompt_id, why)
        self._close(episode, "dropped")
        for other in dropped_with(episode, list(self.episodes.values()), self.options, self.request):
            other.is_unwanted = True  # its turns are generated to the end, which frees their memory
            if other.end:
                other.end = "dropped"

    def _finish(self, episode: Episode, end: End) -> None:
        self.turns.forget(episode.number)
        self.calls.end(episode.environment)
        self._close(episode, "dropped" if episode.is_unwanted else end)
        messages = episode.row.get("prompt_messages")
        is_text = self.engine.renderer is None and not episode.media[0]
        if end == "terminated" and messages is not None and len(episode.turns) > 1 and is_text:
            turns = [(turn.text, turn.observation if turn.observed else None) for turn in episode.turns]
            self.engine.encoder.warn_of_difference(messages, turns, episode.context)

    def _close(self, episode: Episode, end: End) -> None:
        episode.end = end
        episode.seconds = time.monotonic() - episode.begun_s
        self.num_open -= 1
        if self.journal is not None and end != "dropped":
            self.journal.write_end(self._end_key(self.journal, episode))

    # The journal

    def _key(self, journal: EpisodeJournal, episode: Episode, what: str, attempt: int) -> str:
        prefix, request = episode.prefix, self.request
        if prefix is None or self.engine.renderer is not None:  # the template may have changed earlier tokens
            prefix = journal.prefix(request.stream, request.step, episode.prompt_id, episode.sample_id)
            episode.prefix = prefix
        if prefix.num_tokens < len(episode.context):
            prefix.append(episode.context[prefix.num_tokens :])
        return prefix.key(attempt, len(episode.turns), what, *filter(None, episode.media[:1]))

    def _end_key(self, journal: EpisodeJournal, episode: Episode) -> str:
        request = self.request
        return journal.prefix("end", request.stream, request.step, episode.prompt_id, episode.sample_id).key()

    def _write_turn(self, episode: Episode, tokens: list[int]) -> None:
        if self.journal is None:
            return
        if self.journal.write_turn(self._key(self.journal, episode, "turn", 0), tokens) and not self.differing:
            self.differing += 1
            log.warning(
                "Turns of step %d differ from those before the interruption, because weights or settings "
                "changed, or because results depend on the batch. Recorded answers of their environments are not "
                "reused.",
                self.request.step,
            )

    def _is_known(self, episode: Episode, what: str) -> bool:
        """Answer the next call of an episode from the journal, if possible. If the call must be repeated, the journal's
        answer is kept for comparison. An episode is restarted if its environment missed actions answered so."""
        episode.known, journal = None, self.journal
        if journal is None:
            return False
        recovery = getattr(episode.environment, "recovery", "restart")
        episode.key = self._key(journal, episode, what, episode.attempt if recovery == "restart" else 0)
        if not journal.answers:  # no earlier process recorded this step
            return False
        if what == "reset" and recovery == "restart":
            group = [other for other in self.episodes.values() if other.group == episode.group]
            episode.reads_journal &= all(self._end_key(journal, other) in journal.ends for other in group)
            episode.restarted |= not episode.reads_journal and episode.key in journal.answers
        if not episode.reads_journal:
            return False
        entry = journal.answers.get(episode.key)
        is_made_again = recovery == "deterministic" or (recovery == "stateless" and what == "reset")
        if entry is None:
            if not episode.needs_replay_of_actions:
                return False
            self.turns.forget(episode.number)
            self.calls.end(episode.environment)
            episode.restarted, episode.reads_journal = True, False
            self.start(episode)
            return True
        if entry.record.outcome == "ok" and is_made_again:
            episode.known = entry
            return False
        episode.reused += 1
        episode.needs_replay_of_actions = recovery == "restart"
        self.known.append(CallResult(episode.number, episode.attempt, entry.record, entry.value))
        return True

    def write_answer(self, journal: EpisodeJournal, result: CallResult) -> None:
        """Record an environment's answer, or compare it with that of an earlier run. Failures that the model did not
        cause are not recorded, since a resumed run tries these calls again."""
        episode, entry = self.episodes[result.episode], JournalEntry(result.record, result.value)
        if entry.is_failure or not self.awaits(result):
            return
        if episode.known is not None and result.record.outcome == "ok":
            refuse_other_answer(episode.known, entry, f"call {result.record.call_id} ({result.record.name})")
            episode.replayed += 1
            return
        journal.write_answer(episode.key, entry)
