"""One episode: its turns, its state, and its restarts after failures not caused by the model; and batches of episodes,
whose mask is True on the model's tokens and False on observations.

prompt | turn 0 | observation 0 | turn 1 | observation 1 | ... | turn n
mask         1          0            1          0                  1

An episode has several rows if the model does not read everything before a turn unchanged. Rewards, the KL penalty and
advantages are computed on episodes; roles compute on rows (`training_rows`), and their results are joined
(`per_episode`).

episodes      row 0, row 1, row 2 of a side by side; row 0, row 1 of b; ...        [E T]
rows          row 0 | row 1 | row 2 of a, row 0 | row 1 of b, ...                  [R T']
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from verl.data.images import thumbnail
from verl.environments.base import CallRecord, EnvironmentDescription, EnvironmentFactory, Fault, Observation
from verl.environments.journal import JournalEntry, PrefixHash, plain
from verl.errors import RolloutError
from verl.model_paths.images import KEYS, RowMedia, with_media
from verl.ops.sampling import EVALUATION
from verl.protocol import DataProto
from verl.protocol.fields import FIELDS
from verl.rollout.base import GenerationRequest
from verl.rollout.rows import assemble, masked_rows, media_fields, prompt_tokens, right_padded, sequence_fields

End = Literal["", "terminated", "truncated", "timeout", "turns", "tokens", "turn_tokens", "dropped"]
ENDS: tuple[End, ...] = ("terminated", "truncated", "timeout", "turns", "tokens", "turn_tokens", "dropped")
CRASHES_BESIDE_OTHERS = 2  # of an episode, before it gets its own process


@dataclass
class Turn:
    """One turn of the model and its result.

    Attributes:
        text: the text that was parsed, without the stop token.
        start: index of its first token among the tokens after the prompt.
        before: all tokens that the model read, if each turn is a separate sample.
        observation: the environment's answer; None after the last turn.
        observed: number of tokens of the observation.
        versions: weight version that sampled each token if weights may change during generation, else empty.
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
    versions: list[int] = field(default_factory=list)


@dataclass
class Episode:
    """State of one episode.

    Attributes:
        number: its number in this call of the engine.
        context: token ids before the next turn, including the prompt; only extended, unless the template renders the
            conversation again before each turn.
        end: how it ended; empty while it runs.
        answers: messages of model and environment so far, if the template renders the conversation before each turn.
        tries: restarts that count as one of `environment.retries`.
        crashes: how often its call ended, or may have ended, a process.
        is_alone: it runs in its own process.
        is_unwanted: too few episodes of its group remain, so it is dropped when it ends.
        infra: failures that the model did not cause, including retried ones.
        prefix: hash of the tokens so far, for journal keys.
        key: journal key of the current call.
        known: the journal's entry for the current call, if the call is repeated for comparison.
        reads_journal: whether answers are taken from the journal.
        needs_replay_of_actions: the environment did not receive actions that were answered from the journal.
        reused, replayed: calls answered from the journal; calls repeated and compared.
        restarted: the episode was restarted although the journal had a part of it.
        prompt_media, media: digest and tensors of the images of its prompt, and of all so far.
        images: those of observations so far, as data URLs.
    """

    number: int
    prompt: list[int]
    prompt_id: int
    sample_id: int
    group: int
    row: Mapping[str, Any]
    seed: int
    attempt: int = 0
    tries: int = 0
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
    prompt_media: RowMedia = (0, None)
    media: RowMedia = (0, None)
    images: list[str] = field(default_factory=list)

    @property
    def response(self) -> list[int]:
        """Token ids after the prompt, if the context is only extended."""
        return self.context[len(self.prompt) :]

    @property
    def length(self) -> int:
        """Number of tokens without those of the prompt."""
        return len(self.context) - len(self.prompt)

    @property
    def reward(self) -> float:
        return sum(turn.reward for turn in self.turns)

    def whole(self) -> list[EpisodeSample]:
        length = self.length
        mask, log_probs, turns, rewards = [False] * length, [0.0] * length, [-1] * length, [0.0] * length
        versions = [-1] * length
        turns[: self.opening] = [0] * self.opening
        for index, turn in enumerate(self.turns):
            end = turn.start + len(turn.tokens)
            mask[turn.start : end] = [True] * len(turn.tokens)
            log_probs[turn.start : end] = turn.log_probs
            turns[turn.start : end + turn.observed] = [index] * (len(turn.tokens) + turn.observed)
            rewards[end - 1] = turn.reward
            versions[turn.start : turn.start + len(turn.versions)] = turn.versions
        return [EpisodeSample(self.prompt, self.response, mask, log_probs, turns, rewards, versions)]

    def by_turn(self) -> list[EpisodeSample]:
        """Each turn as a separate sample, whose prompt is what the model read before it."""
        samples = []
        for index, turn in enumerate(self.turns):
            count = len(turn.tokens)
            rewards = [0.0] * (count - 1) + [turn.reward]
            columns = [True] * count, turn.log_probs, [index] * count, rewards, turn.versions
            samples.append(EpisodeSample(turn.before, turn.tokens, *columns))
        return samples

    def begin(self, factory: EnvironmentFactory) -> None:
        """Start over from the prompt in a new environment."""
        self.environment = factory.make_alone() if self.is_alone else factory.make()
        self.context, self.turns, self.opening = list(self.prompt), [], 0
        self.calls, self.answers, self.begun_s, self.needs_replay_of_actions = [], [], time.monotonic(), False
        self.prefix, self.attempt = None, self.attempt + 1
        self.media, self.images = self.prompt_media, []

    def is_restarted(self, why: str, fault: Fault, options: EnvironmentDescription) -> bool:
        """Record a failure that the model did not cause; it never becomes a reward.

        Args:
            fault: see `CallRecord.fault`.
        Returns: Whether to restart the episode, possibly in its own process; otherwise it is dropped.
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
        return False


def dropped_with(
    episode: Episode, episodes: Sequence[Episode], options: EnvironmentDescription, request: GenerationRequest
) -> list[Episode]:
    """The other episodes of the group that are dropped because this one is."""
    others = [other for other in episodes if other.group == episode.group and other.end != "dropped"]
    is_whole = options.on_infra == "drop_group" or request.stream == EVALUATION
    return others if is_whole or (request.num_samples > 1 and len(others) < 2) else []


@dataclass(frozen=True)
class EpisodeSample:
    """A part of an episode that becomes one row: what the model read, and the tokens after it.

    Attributes:
        prompt: what the model read.
        response: tokens after it; those on the mask were sampled by the policy, with these log-probs.
        turns: the turn of each token of the response; -1 for none.
        rewards: rewards of the environment, by token.
        versions: weight version that sampled each token, -1 outside the mask; see `Turn`.
    """

    prompt: Sequence[int]
    response: Sequence[int]
    mask: Sequence[bool]
    log_probs: Sequence[float]
    turns: Sequence[int]
    rewards: Sequence[float]
    versions: Sequence[int] = ()


def episode_batch(
    prompts: DataProto,
    request: GenerationRequest,
    samples: Sequence[Sequence[EpisodeSample]],
    records: Sequence[dict[str, Any]],
    pad_id: int,
    dtype: torch.dtype,
    *,
    has_rows: bool,
    has_versions: bool = False,
    media: Sequence[RowMedia] | None = None,
) -> DataProto:
    """Episodes in the format of `rollout.rows.assemble`, one line each with the tokens of all its samples in sequence.

    Args:
        samples: samples of each episode, `request.num_samples` episodes per prompt in the order of `prompts`; empty for
            a dropped one.
        records: record of each episode.
        dtype: dtype of the log-probs.
        has_rows: an episode may have several rows.
        has_versions: weights changed within episodes.
        media: the images of each episode; None if they are those of its prompt.
    Returns: In addition `turn_ids`, `turn_rewards` [E T], `episode_ids` [E], and `episode` in `non_tensor_batch`; with
        `has_rows` the input of `training_rows`: `row_ids` [E T] and `contexts` [E N P], at least the prompt; with
        `has_versions` `token_versions` [E T] and `policy_version` [E], the oldest. A dropped episode has an empty mask.
    """
    n, contexts = request.num_samples, None
    if has_rows:
        prompts, contexts = _with_contexts(prompts, n, samples, pad_id)
    if media is not None:
        prompts = prompts.select([name for name in prompts.batch if name != KEYS], [], ragged_keys=[])

    def column(name: str, fill: float, dtype: torch.dtype) -> Tensor:
        return right_padded([list(chain(*(getattr(part, name) for part in parts))) for parts in samples], fill, dtype)

    rows = [[number for number, part in enumerate(parts) for _ in part.response] for parts in samples]
    row_ids = right_padded(rows, -1, torch.int64)
    responses, mask = column("response", pad_id, torch.int64), column("mask", False, torch.bool)
    batch = assemble(prompts, n, responses, mask, column("log_probs", 0.0, dtype), pad_id, row_ids >= 0)
    fields = {
        "turn_ids": column("turns", -1, torch.int64),
        "turn_rewards": column("rewards", 0.0, torch.float32),
        "episode_ids": batch["prompt_ids"] * n + batch["sample_ids"],
    }
    if has_versions:
        versions = fields["token_versions"] = column("versions", -1, torch.int64)
        oldest = [min(line[is_sampled].tolist(), default=-1) for line, is_sampled in zip(versions, mask, strict=True)]
        fields["policy_version"] = torch.tensor(oldest)
    if contexts is not None:
        fields |= {"row_ids": row_ids, "contexts": contexts}
    return batch.union(
        DataProto.from_dict(fields, non_tensors={"episode": list(records)}),
        DataProto() if media is None else media_fields(media, has_keys=True),
    )


def _with_contexts(
    prompts: DataProto, n: int, samples: Sequence[Sequence[EpisodeSample]], pad_id: int
) -> tuple[DataProto, Tensor]:
    """The prompts, padded to the longest context, and the contexts [E N P] of their episodes, -1 on padding."""
    tokens, mask, bare = prompts["prompts"], prompts["prompt_mask"], prompt_tokens(prompts)
    lines = [[part.prompt for part in parts] or [bare[number // n]] for number, parts in enumerate(samples)]
    longest = max(tokens.shape[1], max((len(line) for of_episode in lines for line in of_episode), default=0))
    contexts = torch.full((len(lines), max(map(len, lines), default=1), longest), -1, dtype=torch.int64)
    for number, of_episode in enumerate(lines):
        for row, line in enumerate(of_episode):
            contexts[number, row, longest - len(line) :] = torch.tensor(line)
    left = longest - tokens.shape[1]
    wider = {"prompts": pad(tokens, (left, 0), value=pad_id), "prompt_mask": pad(mask, (left, 0), value=False)}
    kept = with_media(["prompt_ids", "group_ids"], prompts)
    return prompts.select(kept, []).union(DataProto.from_dict(wider)), contexts


@dataclass(frozen=True)
class _RowIndex:
    """Positions of the tokens of episodes in their rows.

    Attributes:
        is_row: [E N], whether an episode has this row.
        episode: [R], index of each row's episode.
        first: [E], first row of each episode.
        in_episodes, in_rows: two [M] each, row and column of each token in the two layouts.
        width: T' of the rows.
    """

    is_row: Tensor
    episode: Tensor
    first: Tensor
    in_episodes: tuple[Tensor, Tensor]
    in_rows: tuple[Tensor, Tensor]
    width: int

    @classmethod
    def of(cls, episodes: DataProto) -> _RowIndex:
        is_row, row_ids = (episodes["contexts"] >= 0).any(dim=2), episodes["row_ids"]
        count = is_row.sum(dim=1)
        first = count.cumsum(0) - count
        episode, column = (row_ids >= 0).nonzero(as_tuple=True)
        row = first[episode] + row_ids[episode, column]
        lengths = row.bincount(minlength=int(count.sum()))
        begin = lengths.cumsum(0) - lengths  # tokens of all rows before
        in_rows = row, torch.arange(len(row)) - begin[row]
        width = int(lengths.max()) if len(lengths) else 0
        return cls(is_row, is_row.nonzero()[:, 0], first, (episode, column), in_rows, width)


def training_rows(episodes: DataProto) -> DataProto:
    """The rows [R S] of episodes [E S], consecutive for each episode; the episodes themselves if each is one row.

    Fields of episodes are repeated for their rows; `episode_tokens` [R] counts the masked tokens of the whole episode.
    """
    if "contexts" not in episodes:
        return episodes
    index = _RowIndex.of(episodes)
    pad_id = episodes.meta_info.get("pad_token_id", 0)
    shape = (len(index.episode), index.width)
    contexts, attended = episodes["contexts"][index.is_row], torch.zeros(shape, dtype=torch.bool)
    attended[index.in_rows] = True
    fields = {"episode_tokens": episodes["response_mask"].sum(dim=1)[index.episode]}
    for name, x in episodes.batch.items():
        dims = FIELDS[name].dims if name in FIELDS else ("B",) if x.dim() == 1 else ()
        if dims[:2] == ("B", "T"):
            fill = FIELDS[name].pad
            fields[name] = x.new_full((*shape, *x.shape[2:]), pad_id if isinstance(fill, str) else fill)
            fields[name][index.in_rows] = x[index.in_episodes]
        elif dims == ("B",):
            fields[name] = x[index.episode]
    mask = contexts >= 0
    of_prompts = {"prompts": contexts.masked_fill(~mask, pad_id), "prompt_mask": mask}
    fields |= {name: x for name, x in of_prompts.items() if name in episodes}
    fields |= sequence_fields(of_prompts["prompts"], mask, fields["responses"], attended)
    columns = {name: values[index.episode.numpy()] for name, values in episodes.non_tensor_batch.items()}
    ragged = {name: field.take(index.episode) for name, field in episodes.ragged.items()}
    return DataProto.from_dict(fields, non_tensors=columns, meta_info=episodes.meta_info, ragged=ragged)


def per_episode(values: DataProto, episodes: DataProto) -> DataProto:
    """Values per episode, [E T] and [E], from a role's results for `training_rows(episodes)`, [R T'] and [R]; of values
    per row, that of an episode's first row."""
    if "contexts" not in episodes:
        return values
    index, fields = _RowIndex.of(episodes), {}
    for name, x in values.batch.items():
        if x.dim() == 1:
            fields[name] = x[index.first]
            continue
        fields[name] = x.new_zeros((*episodes["response_mask"].shape, *x.shape[2:]))
        fields[name][index.in_episodes] = x[index.in_rows]
    return DataProto.from_dict(fields)


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
                "observation": _shown(turn.observation),
                "observed": turn.observed,
                "parse_errors": turn.parse_errors,
                "calls": [dict(vars(call)) for call in turn.calls],
            }
            for turn in episode.turns
        ],
        "calls": [dict(vars(call)) for call in episode.calls],
    }


def _shown(observation: Observation) -> Any:
    """An observation in JSON values, with small images."""
    messages = plain(observation)
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message["content"], list):
            message["content"] = [
                {**x, "image": thumbnail(x["image"])} if "image" in x else x for x in message["content"]
            ]
    return messages


STATE = (  # of an episode in a checkpoint, in addition to its turns and calls
    *("attempt", "tries", "crashes", "is_alone", "is_unwanted", "context", "opening", "end"),
    *("infra", "answers", "reads_journal", "needs_replay_of_actions", "reused", "replayed", "restarted", "seconds"),
)


def episode_state(episode: Episode) -> dict[str, Any]:
    """An episode in JSON values, for `load_episode`."""
    lists = {"turns": list(map(asdict, episode.turns)), "calls": list(map(asdict, episode.calls))}
    return {name: getattr(episode, name) for name in STATE} | lists | {"images": episode.images}


def load_episode(episode: Episode, state: Mapping[str, Any]) -> None:
    """Restore the state of an episode of the same prompt and sample; it gets no environment."""
    for name in STATE:
        setattr(episode, name, state[name])
    episode.turns = [Turn(**turn | {"calls": [CallRecord(**x) for x in turn["calls"]]}) for turn in state["turns"]]
    episode.calls = [CallRecord(**record) for record in state["calls"]]
    episode.begun_s, episode.media = time.monotonic(), episode.prompt_media


def response_texts(episodes: DataProto, tokenizer: Any) -> list[str]:
    """The text of each response, for rewards and sample tables; for an episode the text of the model's last turn."""
    records = episodes.non_tensor_batch.get("episode")
    if records is not None:
        return [record["turns"][-1]["text"] if record["turns"] else "" for record in records]
    tokens = masked_rows(episodes["responses"], episodes["response_mask"])
    return tokenizer.batch_decode(tokens, skip_special_tokens=True)


def without_dropped(episodes: DataProto) -> DataProto:
    """The episodes that were not dropped.

    Raises:
        RolloutError: all episodes were dropped.
    """
    if "episode" not in episodes.non_tensor_batch:
        return episodes
    remaining = [number for number, record in enumerate(episodes["episode"]) if record["end"] != "dropped"]
    if not remaining:
        raise RolloutError(
            "environment: every episode of this step failed for reasons outside of the model, and was left out "
            "(environment.on_infra). The last: " + "; ".join(episodes["episode"][-1]["infra"][-1:])
        )
    if len(remaining) == len(episodes):
        return episodes
    chosen = episodes[remaining]
    chosen["episode"][0]["left_out"] = len(episodes) - len(remaining)  # none of these has a turn
    return chosen
