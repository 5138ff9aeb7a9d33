"""Turns that `rollout=hf` decodes beside each other: which are admitted, and where their keys and values are.

    queue ── admit: a slot each ──> prefill of the new tokens ──> advance, one token of every live turn ──> end
                ^                                                                                           |
                └──── slots of responses, and of episodes that wait for their environment, oldest first ────┘

`SlotRows`: rows in different slots may have different lengths, so turns start and end at any time. Before a token is
decoded, slots of live turns are moved to the front, so that attention reads keys and values where they lie. Rows of one
prompt share its keys and values (`SharedPrompt`) or have a copy. If there are more episodes than slots, an episode that
waits for its environment loses its slot and is computed again when it continues.

`BatchRows`: turns of whole rows in batches, each decoded to its end, for models whose cache has no slots.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from verl.errors import ConfigError
from verl.model_paths.decode import BatchReader, NextToken, SharedPrompt, Slot, SlotReader, to_device
from verl.rollout.base import TurnLimits, TurnRequest
from verl.rollout.prompt_rows import left_padded
from verl.rollout.token_sampler import NOISE_TOKENS

S = TypeVar("S", bound=Slot)
GIB = 1 << 30
PREFILL_TOKENS = 8192  # of one forward pass, padding included
WORTH_SHARING = 64  # tokens of a prompt, from which on reading it once per group saves more than it costs
WORTH_DROPPING = 0.875  # share of the rows of a batch that still run, from which down the others leave it
WORTH_REFILLING = 0.125  # share of the slots that are free, from which on responses that wait get them


@dataclass(eq=False)
class LiveTurn:
    """A turn that is being generated.

    Attributes:
        slot: where its row is.
        routed: experts [layers k] of the token before each token.
        noise: of `NOISE_TOKENS` positions.
    """

    request: TurnRequest
    slot: Slot
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    routed: list[Tensor] = field(default_factory=list)
    noise: list[float] = field(default_factory=lambda: [0.0] * NOISE_TOKENS)


class LiveRows:
    """Turns that are being generated.

    Attributes:
        live: the turns.
        next: what follows on the last token of each.
        keeps_episodes: keys and values of an episode stay for its next turn.
    """

    keeps_episodes = False

    def __init__(self) -> None:
        self.live: list[LiveTurn] = []
        self.next = NextToken(torch.zeros(0))

    def admit(self, queue: deque[TurnRequest]) -> None:
        """Take turns from a queue, and read what is before them."""
        raise NotImplementedError

    def end(self, turns: Sequence[LiveTurn]) -> None:
        """Take out turns that have ended."""
        ended = set(turns)
        self.live = [turn for turn in self.live if turn not in ended]

    def advance(self) -> None:
        """Read the last token of each turn; may change their order."""
        raise NotImplementedError

    def forget(self, episode: int) -> None:
        """Free the keys and values of an episode that has ended."""


class SlotRows(LiveRows):
    """Turns over slots; see the module.

    Args:
        is_single: each episode has one turn.
        reads_once: compute a prompt once for all of its samples.
    Attributes:
        evictions: episodes that gave up their slot and had to be computed again.
    """

    def __init__(self, reader: SlotReader, num_slots: int, *, is_single: bool = False, reads_once: bool = True):
        super().__init__()
        self.reader, self.num_slots, self.reads_once = reader, num_slots, reads_once
        self.keeps_episodes = not is_single
        self.evictions = 0
        self._free = [Slot(number) for number in range(num_slots - 1, -1, -1)]
        self._held: dict[int, tuple[Slot, list[int]]] = {}  # episode -> slot and its tokens, longest unused first
        self._prompts: dict[int, SharedPrompt] = {}  # by number of the prompt; some may be dropped

    def admit(self, queue: deque[TurnRequest]) -> None:
        if not self.keeps_episodes and self.live and len(self._free) < WORTH_REFILLING * self.num_slots:
            return
        fresh: list[LiveTurn] = []
        while queue and (slot := self._slot_for(queue[0])) is not None:
            fresh.append(LiveTurn(queue.popleft(), slot))
        if not fresh:
            return
        self.reader.num_slots = max(self.reader.num_slots, *(turn.slot.number + 1 for turn in fresh))
        if self.reader.shares:
            self._put_behind_prompts([turn for turn in fresh if not turn.slot.length], queue)
        first: dict[tuple[int, ...], LiveTurn] = {}  # whole rows -> who computes them
        same: dict[LiveTurn, list[LiveTurn]] = {}
        for turn in fresh:
            if turn.slot.length < len(turn.request.tokens):
                is_whole = self.reads_once and not turn.slot.length
                same.setdefault(first.setdefault(tuple(turn.request.tokens), turn) if is_whole else turn, []).append(
                    turn
                )
        found = self._read({turn.slot: turn.request.tokens for turn in same})
        for turn, others in same.items():
            if len(others) > 1:
                slots = [other.slot for other in others[1:]]
                self.reader.copy(turn.slot, slots)
                found |= dict.fromkeys(slots, found[turn.slot])
        following = [found[turn.slot] if turn.slot in found else _after_prompt(turn.slot) for turn in fresh]
        self.next = NextToken.concat([self.next, *following] if self.live else following)
        self.live += fresh

    def end(self, turns: Sequence[LiveTurn]) -> None:
        super().end(turns)
        for turn in turns:
            if self.keeps_episodes:
                self._held[turn.request.episode] = turn.slot, turn.request.tokens + turn.tokens[:-1]
            else:
                self._release(turn.slot)

    def advance(self) -> None:
        self._bring_to_front()
        self.live.sort(key=lambda turn: turn.slot.number)
        self.next = self.reader.read_one([turn.slot for turn in self.live], [turn.tokens[-1] for turn in self.live])

    def forget(self, episode: int) -> None:
        slot, _ = self._held.pop(episode, (None, None))
        if slot is not None:
            self._release(slot)

    def _release(self, slot: Slot) -> None:
        self.reader.clear(slot)
        self._free.append(slot)

    def _slot_for(self, turn: TurnRequest) -> Slot | None:
        """The slot of the turn's episode, or an empty one; None if all are in use."""
        if turn.episode in self._held:
            slot, tokens = self._held.pop(turn.episode)
            if len(turn.tokens) <= len(tokens) or turn.tokens[: len(tokens)] != tokens:
                self.reader.clear(slot)
            return slot
        if not self._free and self._held:
            self.evictions += 1
            self.forget(next(iter(self._held)))
        return self._free.pop() if self._free else None

    def _put_behind_prompts(self, turns: Sequence[LiveTurn], queue: deque[TurnRequest]) -> None:
        """Let turns stand behind the prompts that they begin with, those of other turns or of the next in the queue."""
        count = Counter(tuple(request.tokens) for request in (*(turn.request for turn in turns), *list(queue)[:1]))
        new, behind = {}, []
        for turn in turns:
            tokens, number = turn.request.tokens, turn.request.prompt_id
            prompt = self._prompts.get(number)
            if prompt not in self.reader.prompts or tokens[: len(prompt.tokens)] != prompt.tokens:
                if len(tokens) < WORTH_SHARING or count[tuple(tokens)] < 2:
                    continue
                prompt = self._prompts[number] = self.reader.add_prompt(tokens)
                new[prompt] = tokens
            behind.append((turn.slot, prompt))
        for prompt, following in self._read(new).items():
            prompt.next = following
        for slot, prompt in behind:
            self.reader.put_behind(slot, prompt)

    def _read(self, rows: Mapping[S, list[int]]) -> dict[S, NextToken]:
        """Read the further tokens of some rows, in parts for one forward pass each, longest first."""
        parts: list[list[S]] = []
        unread = {row: len(tokens) - row.length for row, tokens in rows.items()}
        for row in sorted(unread, key=lambda row: (bool(row.length), -unread[row])):
            head = parts[-1][0] if parts else None
            if (
                head is None
                or bool(head.length) != bool(row.length)
                or (len(parts[-1]) + 1) * unread[head] > PREFILL_TOKENS
            ):
                parts.append([])
            parts[-1].append(row)
        found = {}
        for part in parts:
            following = self.reader.read(part, [rows[row][row.length :] for row in part])
            found |= {row: following.select(slice(i, i + 1)) for i, row in enumerate(part)}
        return found

    def _bring_to_front(self) -> None:
        """Move live turns to the first slots; the episodes that were there get their slots."""
        count = len(self.live)
        behind = [turn.slot for turn in self.live if turn.slot.number >= count]
        if not behind or 2 * len(behind) > count + 1:  # copying what this token reads costs no more than moving slots
            return
        others = [slot for slot in (*self._free, *(slot for slot, _ in self._held.values())) if slot.number < count]
        pairs = list(zip(behind, others, strict=True))
        self.reader.move([*pairs, *((other, slot) for slot, other in pairs)])
        for slot, other in pairs:
            slot.number, other.number = other.number, slot.number


class BatchRows(LiveRows):
    """Turns in batches, each decoded to its end; see the module.

    Args:
        new_reader: makes the reader of a batch.
        drops: let finished rows leave the batch once they are an eighth of it.
    """

    def __init__(self, new_reader: Callable[[], BatchReader], pad_id: int, max_rows: int, *, drops: bool):
        super().__init__()
        self.new_reader, self.pad_id, self.max_rows, self.drops = new_reader, pad_id, max_rows, drops
        self._num_rows = 0  # of the batch, those that have ended included

    def admit(self, queue: deque[TurnRequest]) -> None:
        if self.live or not queue:
            return
        self.reader = self.new_reader()
        batch, n = self._next_batch(queue)
        self.live = [LiveTurn(turn, Slot(row)) for row, turn in enumerate(batch)]
        self._num_rows = len(batch)
        self.next = self.reader.begin(*left_padded([turn.tokens for turn in batch[::n]], self.pad_id), n)

    def advance(self) -> None:
        rows = torch.tensor([turn.slot.number for turn in self.live])
        if self.drops and len(rows) <= WORTH_DROPPING * self._num_rows:
            self.reader.keep(rows.to(self.reader.device))
            self._num_rows, rows = len(rows), torch.arange(len(rows))
            for row, turn in enumerate(self.live):
                turn.slot.number = row
        tokens = torch.zeros(self._num_rows, dtype=torch.int64)
        tokens[rows] = torch.tensor([turn.tokens[-1] for turn in self.live])
        rows, tokens = to_device([rows, tokens], self.reader.device)
        self.next = self.reader.read(tokens).select(rows)

    def _next_batch(self, queue: deque[TurnRequest]) -> tuple[list[TurnRequest], int]:
        """Turns that may be decoded together, longest first, n side by side of each prompt; taken from the queue."""
        by_prompt = itertools.groupby(queue, key=lambda turn: (turn.prompt_id, turn.turn, turn.tokens))
        groups = sorted((list(turns) for _, turns in by_prompt), key=lambda turns: -len(turns[0].tokens))
        n, length = len(groups[0]), len(groups[0][0].tokens)
        if not self.reader.paths.pads_prompts:
            groups = [turns for turns in groups if len(turns[0].tokens) == length]
        groups = [turns for turns in groups if len(turns) == n][: max(1, self.max_rows // n)]
        batch = [turn for turns in groups for turn in turns]
        chosen = set(map(id, batch))
        others = [turn for turn in queue if id(turn) not in chosen]
        queue.clear()
        queue.extend(others)
        return batch, n


def _after_prompt(slot: Slot) -> NextToken:
    assert slot.prompt is not None
    assert slot.prompt.next is not None
    return slot.prompt.next


def slot_bytes(model: Any, tokens: int) -> int:
    """Bytes of the keys and values of one episode with this many tokens."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * size * tokens * model.dtype.itemsize


def num_slots(model: Any, limits: TurnLimits, max_rows: int) -> int:
    """Number of episodes whose keys and values fit.

    Raises:
        ConfigError: not even one fits.
    """
    if limits.is_single:
        return max_rows
    each = slot_bytes(model, limits.row_tokens)
    fitting = int(limits.kv_cache_gib * GIB // each)
    if fitting < 1:
        raise ConfigError(
            f"environment.kv_cache_gib is {limits.kv_cache_gib:g}: keys and values of one episode of "
            f"{limits.row_tokens} tokens take {each / GIB:.3g} GiB. Raise it, or lower environment.max_tokens."
        )
    return min(fitting, max_rows)
