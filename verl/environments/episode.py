"""One episode: its turns, its state while it is played, its restarts after failures of others than the model, and the
rows of training that episodes become, where the mask is True on the model's tokens and False on observations.

prompt | turn 0 | observation 0 | turn 1 | observation 1 | ... | turn n
mask         1          0            1          0                  1
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from verl.environments.base import CallRecord, EnvironmentDescription, EnvironmentFactory, Fault, Observation
from verl.environments.journal import JournalEntry, PrefixHash
from verl.errors import RolloutError
from verl.ops.counter_rng import EVALUATION
from verl.protocol import DataProto
from verl.protocol.joined_rows import PART
from verl.rollout.base import GenerationRequest, assemble

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


def rows_of_episodes(
    prompts: DataProto, request: GenerationRequest, episodes: Sequence[Episode], pad_id: int, dtype: torch.dtype
) -> DataProto:
    """Rows in the form of `rollout.base.assemble`, with `turn_ids`, `turn_rewards` [B T], `episode_ids` [B], and the
    record of each episode as `episode` in `non_tensor_batch`. A dropped episode has an empty mask."""
    width = max((len(episode.response) for episode in episodes if episode.end != "dropped"), default=0)
    width = max(width, 1)
    shape = (len(episodes), width)
    responses = torch.full(shape, pad_id, dtype=torch.int64)
    mask, attended = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    log_probs, rewards = torch.zeros(shape, dtype=dtype), torch.zeros(shape)
    turn_ids = torch.full(shape, -1, dtype=torch.int64)
    for row, episode in enumerate(episodes):
        if episode.end == "dropped":
            continue
        length = len(episode.response)
        responses[row, :length] = torch.tensor(episode.response)
        attended[row, :length] = True
        turn_ids[row, : episode.opening] = 0
        for index, turn in enumerate(episode.turns):
            end = turn.start + len(turn.tokens)
            mask[row, turn.start : end] = True
            log_probs[row, turn.start : end] = torch.tensor(turn.log_probs, dtype=dtype)
            turn_ids[row, turn.start : end + turn.observed] = index
            rewards[row, end - 1] = turn.reward
    made = assemble(prompts, request.num_samples, responses, mask, log_probs, pad_id, attended)
    cut = made["responses"].shape[1]
    record: Any = [episode_record(episode) for episode in episodes]
    fields = {
        "turn_ids": turn_ids[:, :cut],
        "turn_rewards": rewards[:, :cut],
        "episode_ids": made["prompt_ids"] * request.num_samples + made["sample_ids"],
    }
    return made.union(DataProto.from_dict(fields, non_tensors={"episode": record}))


@dataclass(frozen=True)
class EpisodeSample:
    """One row of an episode that may have several.

    Attributes:
        prompt: what the model read.
        response: from there on; the policy chose what is on the mask, with these log-probs.
        turns: the turn of each token of the response.
        rewards: of the environment, by token.
    """

    prompt: Sequence[int]
    response: Sequence[int]
    mask: Sequence[bool]
    log_probs: Sequence[float]
    turns: Sequence[int]
    rewards: Sequence[float]


def rows_of_turns(
    prompts: DataProto, request: GenerationRequest, episodes: Sequence[Episode], pad_id: int, dtype: torch.dtype
) -> DataProto:
    """Each turn a row of its own, behind what the model read before it; see `rows_of_samples`."""
    samples = [
        [
            EpisodeSample(
                turn.before,
                turn.tokens,
                [True] * len(turn.tokens),
                turn.log_probs,
                [index] * len(turn.tokens),
                [0.0] * (len(turn.tokens) - 1) + [turn.reward],
            )
            for index, turn in enumerate(episode.turns)
        ]
        if episode.end != "dropped"
        else []
        for episode in episodes
    ]
    return rows_of_samples(prompts, request, samples, [episode_record(e) for e in episodes], pad_id, dtype)


def rows_of_samples(
    prompts: DataProto,
    request: GenerationRequest,
    samples: Sequence[Sequence[EpisodeSample]],
    records: Sequence[dict[str, Any]],
    pad_id: int,
    dtype: torch.dtype,
) -> DataProto:
    """Rows of episodes of several samples each.

    Every episode gets as many rows as that with the most, since the rows of several processes are joined by their
    number: those that are not part of any have -1 as `episode_tokens`, and `kept_rows` leaves them out.

    Args:
        samples: of each episode, in the order of `prompts`, `request.num_samples` for each.
        records: of each episode.
    """
    count = max(1, max((len(parts) for parts in samples), default=1))
    n = request.num_samples
    own = prompts["prompts"], prompts["prompt_mask"]
    bare = [own[0][place][own[1][place]].tolist() for place in range(len(prompts))]
    flat: list[EpisodeSample] = []
    for number, parts in enumerate(samples):
        nothing = EpisodeSample(bare[number // n], (), (), (), (), ())
        flat += [*parts, *[nothing] * (count - len(parts))]
    longest_prompt = max((len(part.prompt) for part in flat), default=1)
    width = max(1, max((len(part.response) for part in flat), default=1))
    total = len(flat)
    tokens = torch.full((total, longest_prompt), pad_id, dtype=torch.int64)
    tokens_mask = torch.zeros(total, longest_prompt, dtype=torch.bool)
    responses = torch.full((total, width), pad_id, dtype=torch.int64)
    mask, attended = (torch.zeros(total, width, dtype=torch.bool) for _ in range(2))
    log_probs, rewards = torch.zeros(total, width, dtype=dtype), torch.zeros(total, width)
    turn_ids = torch.full((total, width), -1, dtype=torch.int64)
    for row, part in enumerate(flat):
        tokens[row, longest_prompt - len(part.prompt) :] = torch.tensor(part.prompt)
        tokens_mask[row, longest_prompt - len(part.prompt) :] = True
        length = len(part.response)
        for whole, values in (
            (responses, part.response),
            (mask, part.mask),
            (log_probs, part.log_probs),
            (turn_ids, part.turns),
            (rewards, part.rewards),
        ):
            whole[row, :length] = torch.tensor(values, dtype=whole.dtype)
        attended[row, :length] = True
    whose = torch.arange(len(prompts)).repeat_interleave(n * count)
    rows = DataProto.from_dict(
        {
            "prompts": tokens,
            "prompt_mask": tokens_mask,
            "prompt_ids": prompts["prompt_ids"][whose],
            "group_ids": prompts["group_ids"][whose],
        }
    )
    sample_ids = torch.arange(n).repeat_interleave(count).repeat(len(prompts))
    made = assemble(rows, 1, responses, mask, log_probs, pad_id, attended, sample_ids=sample_ids)
    cut = made["responses"].shape[1]
    of_episodes = mask.sum(dim=1).view(-1, count).sum(dim=1).repeat_interleave(count)
    parts = torch.tensor([max(1, len(parts)) for parts in samples])
    is_part = torch.arange(count).repeat(len(samples)) < parts.repeat_interleave(count)
    record: Any = [record for record in records for _ in range(count)]
    fields = {
        "turn_ids": turn_ids[:, :cut],
        "turn_rewards": rewards[:, :cut],
        "episode_ids": made["prompt_ids"] * n + sample_ids,
        PART: torch.where(is_part, of_episodes, -1),
    }
    return made.union(DataProto.from_dict(fields, non_tensors={"episode": record}))


def episode_record(episode: Episode) -> dict[str, Any]:
    """The record of an episode in plain values, turn by turn, for metrics and sample tables."""
    return {
        "end": episode.end,
        "reward": episode.reward,
        "seconds": episode.seconds,
        "attempts": episode.attempt,
        "infra": list(episode.infra),
        "journal": {"reused": episode.reused, "replayed": episode.replayed, "restarted": int(episode.restarted)},
        "turns": [
            {
                "text": turn.text,
                "tokens": len(turn.tokens),
                "is_complete": turn.is_complete,
                "reward": turn.reward,
                "observation": turn.observation
                if isinstance(turn.observation, (str, type(None)))
                else [dict(m) for m in turn.observation],
                "observed": turn.observed,
                "parse_errors": turn.parse_errors,
                "calls": [dict(vars(call)) for call in turn.calls],
            }
            for turn in episode.turns
        ],
        "calls": [dict(vars(call)) for call in episode.calls],
    }


def response_texts(rows: DataProto, tokenizer: Any) -> list[str]:
    """The text of each response, for rewards and sample tables; for an episode the text of the model's last turn."""
    episodes = rows.non_tensor_batch.get("episode")
    if episodes is not None:
        return [record["turns"][-1]["text"] if record["turns"] else "" for record in episodes]
    tokens = [r[m].tolist() for r, m in zip(rows["responses"], rows["response_mask"], strict=True)]
    return tokenizer.batch_decode(tokens, skip_special_tokens=True)


def kept_rows(rows: DataProto) -> DataProto:
    """The rows without dropped episodes."""
    if "episode" not in rows.non_tensor_batch:
        return rows
    is_part = rows.batch[PART] >= 0 if PART in rows.batch else torch.ones(len(rows), dtype=torch.bool)
    records = list(zip(rows["episode"], is_part.tolist(), strict=True))
    kept = [place for place, (episode, is_row) in enumerate(records) if is_row and episode["end"] != "dropped"]
    left_out = sum(is_row and episode["end"] == "dropped" for episode, is_row in records)  # none of these has a turn
    if not kept:
        raise RolloutError(
            "environment: every episode of this step failed for reasons outside of the model, and was left out "
            "(environment.on_infra). The last: " + "; ".join(rows["episode"][-1]["infra"][-1:])
        )
    if len(kept) == len(rows):
        return rows
    chosen = rows[kept]
    if left_out:
        chosen["episode"][0]["left_out"] = left_out
    return chosen
