"""Batched rows of `rollout=hf`: admission of turns, and the location of their keys and values.

    queue ── admit: a slot each ──> prefill of the new tokens ──> read, one token of every live row ──> end
                ^                                                                                       |
                └──── slots of responses, and of episodes that wait for their environment, oldest first ┘

`SlotRows`: rows may have different lengths, so turns start and end at any time. Live rows are in the first slots, so
that attention reads keys and values without a copy; a slot moves only when a row starts or ends. Responses to one
prompt share its keys and values (`StoredPrompt`), episodes have a copy each. If there are more episodes than slots, one
that waits for its environment loses its slot and is computed again when it continues.

On a GPU each step is a CUDA graph (`verl.model_paths.decode`), sampling included. Rows and keys are padded to a few
numbers then: rows that are none are written to the next column of the slot at their place, which is empty. Keys, values
and graphs stay in `DecodeMemory` from one call for responses to the next.

`BatchRows`: turns of whole rows in batches, each decoded to its end, for models whose cache has no slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verl.model_paths import packed_attention
from verl.model_paths.decode import BatchReader, NextToken, StepGraphs, graph_maker, model_state, padded
from verl.model_paths.expert_routing import ExpertRouting
from verl.model_paths.families import ModelPaths
from verl.model_paths.images import ImageRows, RowImages, RowMedia, sees_ahead
from verl.models.parallel_info import compute_device
from verl.models.structure import call_model
from verl.ops.attention import PromptGroups
from verl.rollout.base import TurnRequest
from verl.rollout.rows import left_padded
from verl.rollout.token_sampler import TokenSampler

PREFILL_TOKENS = 8192  # of one forward pass, padding included
WORTH_SHARING = 64  # minimum tokens of a prompt for which one prefill per group saves more than it costs
WORTH_REFILLING = 0.125  # fraction of free slots at which waiting responses are admitted
WORTH_ENDING = 0.125  # fraction of finished rows at which they are removed
ROW_MULTIPLE = 8  # of rows, where they are padded
Pick = tuple[TokenSampler, bool, Tensor]  # of rows that may all stop; whether all are greedy; noise [r]
HEIGHTS, WIDTHS = 2, 4  # numbers of rows and of keys between two powers of two, where they are padded


@dataclass(eq=False)
class Slot:
    """A row of a `SlotCache`.

    Attributes:
        length: number of processed tokens, including the prompt.
        shift: of the position of the next token from `length`, by images before it.
        prompt: its shared prompt, whose keys and values precede its own.
        episode, weights, media_key: the episode of its tokens, the name of their adapter, and the digest of the images
            that were read; see `TurnRequest`.
        tokens: processed tokens, of an episode that waits for its environment.
    """

    number: int
    length: int = 0
    shift: int = 0
    prompt: StoredPrompt | None = None
    episode: int = -1
    weights: str = ""
    media_key: int = 0
    tokens: list[int] = field(default_factory=list)

    @property
    def own_length(self) -> int:
        return self.length - (0 if self.prompt is None else self.prompt.length)


@dataclass(eq=False)
class StoredPrompt(Slot):
    """A prompt that is shared by slots.

    Attributes:
        next: outputs after its last token, for one row.
        users: number of slots that use it.
    """

    next: NextToken | None = None
    users: int = 0


@dataclass
class _Step:
    """Properties of the live rows between two changes of these.

    Attributes:
        positions, own: [b 1] of the next token: its position, and its column in the slot.
        is_live: [b 1], 1, or 0 for rows that are padding.
        shortest, longest: own tokens of the rows at first.
        groups, prompt_width: see `CacheCall`.
        count: number of tokens processed since, of each row.
    """

    positions: Tensor
    own: Tensor
    is_live: Tensor
    shortest: int
    longest: int
    groups: PromptGroups | None
    prompt_width: int
    count: int = 0


class DecodeMemory:
    """Memory of decoding from one call for responses to the next: keys and values, graphs, and the tensors that graphs
    read and write.

    Attributes:
        inputs: [4 rows 1] int64: positions, columns of the next token in the slots, 1 for a row and 0 for padding, and
            tokens.
        noise: [rows] float64, for picking the next token.
        outputs: `logits` [rows V], `tokens` and `log_probs` [rows].
    """

    def __init__(self, model: Any, device: torch.device, *, records_experts: bool):
        from verl.model_paths.kv_cache import SlotCache  # brings transformers

        self.graphs = StepGraphs(graph_maker(model, device, records_experts=records_experts))
        self.cache = SlotCache(model.config, 0, 0, shrinks=self.graphs.new_graph is None)
        self.inputs = torch.zeros(4, 0, 1, dtype=torch.int64, device=device)
        self.noise = torch.zeros(0, dtype=torch.float64, device=device)
        self.outputs: dict[str, Tensor] = {}

    def reserve(self, rows: int) -> None:
        """Have inputs and outputs for so many rows."""
        if rows > len(self.noise):
            self.inputs, self.noise = self.inputs.new_zeros(4, rows, 1), self.noise.new_zeros(rows)
            self.outputs = {}

    def put(self, name: str, values: Tensor) -> None:
        """Write an output; its memory is taken the first time."""
        if name not in self.outputs:
            self.outputs[name] = values.new_zeros(len(self.noise), *values.shape[1:])
        self.outputs[name][: len(values)] = values


class SlotRows:
    """Rows over a `SlotCache`; see the module. Their order changes when a row starts or ends.

    Args:
        max_slots, max_length: number of rows, and of tokens of each.
        is_single: each episode has one turn.
        key_multiple: attention of a single token reads a multiple of this many keys, padded and masked.
        reads_once: compute a prompt once for all of its samples.
        shares_from: minimum tokens of a prompt for rows to share a `StoredPrompt`, if they are single turns and two of
            the first queue have the prompt; None: never.
        routing: router whose choices are recorded; the caller enters `ExpertRouting.recording`.
        images: how the model reads images, made when there are some.
        memory: of other rows that have ended; the weights lie where they will be read.
    Attributes:
        keeps_episodes: keys and values of an episode are kept for its next turn.
    """

    def __init__(
        self,
        model: Any,
        max_slots: int,
        max_length: int,
        *,
        is_single: bool = False,
        key_multiple: int = 1,
        reads_once: bool = True,
        shares_from: int | None = None,
        routing: ExpertRouting | None = None,
        images: Callable[[], ImageRows] | None = None,
        memory: DecodeMemory | None = None,
    ):
        self.model, self.max_slots, self.keeps_episodes, self.images = model, max_slots, not is_single, images
        self.key_multiple, self.reads_once, self.routing = key_multiple, reads_once, routing
        self.spare = int(key_multiple > 1)  # padding is written to the column after the tokens of a slot
        self.shares_from = shares_from if is_single and packed_attention.is_enabled(model) else None
        self.device, self.is_eager = compute_device(model), model.config._attn_implementation == "eager"
        self.memory = memory or DecodeMemory(model, self.device, records_experts=routing is not None)
        self.cache = self.memory.cache
        self.cache.begin(max_slots, max_length)
        self.num_live = 0
        self._slots: list[Slot] = []  # by index, live rows first
        self._free: list[Slot] = []
        self._held: dict[int, Slot] = {}  # slots of waiting episodes, least recently used first
        self._prompts: dict[tuple[Any, ...], StoredPrompt] = {}  # by `TurnRequest.prefix`
        self._shares: bool | None = None  # whether rows share stored prompts
        self._step: _Step | None = None
        self.follow_weights()

    def admit(self, queue: list[TurnRequest]) -> tuple[list[TurnRequest], NextToken | None]:
        """Take turns from a queue; their rows follow the live ones. Returns them, and their next-token outputs."""
        is_full = self.max_slots - self.num_live < max(1, WORTH_REFILLING * self.max_slots)
        if is_full and self.num_live and not self.keeps_episodes:
            return [], None
        if self._shares is None:
            pairs, least = itertools.pairwise(queue), self.shares_from
            self._shares = least is not None and any(len(a.tokens) >= least and a.prefix == b.prefix for a, b in pairs)
        rows: list[tuple[TurnRequest, Slot]] = []
        while queue and (slot := self._slot_for(queue[0])) is not None:
            rows.append((queue.pop(0), slot))
        if not rows:
            return [], None
        self._settle()
        following = self._put_behind_prompts(rows) if self._shares else self._read_rows(rows)
        self.num_live += len(rows)
        return [turn for turn, _ in rows], following

    def _put_behind_prompts(self, rows: Sequence[tuple[TurnRequest, Slot]]) -> NextToken:
        """Compute and store each prompt once, to be shared by its rows."""
        lines = [turn.prefix for turn, _ in rows]
        first = {line: turn for line, (turn, _) in zip(reversed(lines), reversed(rows), strict=True)}
        new = [line for line in dict.fromkeys(lines) if line not in self._prompts]
        for line in sorted(new, key=lambda line: -len(line[-1])):
            self._prompts[line] = StoredPrompt(len(self._prompts), weights=first[line].weights)
        reading = [(prompt, first[line]) for line, prompt in self._prompts.items() if not prompt.length]
        for (prompt, _), following in zip(reading, self._read(reading), strict=True):
            prompt.next = following
        for line, (_, slot) in zip(lines, rows, strict=True):
            slot.prompt = self._prompts[line]
            slot.length, slot.shift = slot.prompt.length, slot.prompt.shift
            slot.prompt.users += 1
        self._set_slots(enumerate((slot for _, slot in rows), self.num_live))
        return NextToken.concat([prompt.next for line in lines if (prompt := self._prompts[line]).next is not None])

    def _read_rows(self, rows: list[tuple[TurnRequest, Slot]]) -> NextToken:
        """Process the new tokens of rows, which are sorted; rows with the same tokens are computed once."""
        first: dict[tuple[Any, ...], Slot] = {}  # whole rows -> who computes them
        copied = {}
        for turn, slot in rows:
            source = first.setdefault(turn.prefix, slot) if self.reads_once and not slot.length else slot
            if source is not slot:
                copied[slot] = source
        rows.sort(key=lambda row: (row[1] in copied, bool(row[1].length), row[1].length - len(row[0].tokens)))
        slots = [slot for _, slot in rows]
        self._set_slots(enumerate(slots, self.num_live))
        following = NextToken.concat([*self._read([(x, turn) for turn, x in rows if x not in copied])])
        if copied:
            sources, targets = [copied[slot] for slot in slots if slot in copied], slots[-len(copied) :]
            longest = max(slot.length for slot in sources)
            self.cache.copy([slot.number for slot in sources], [slot.number for slot in targets], longest)
            for source, slot in zip(sources, targets, strict=True):
                slot.length, slot.shift = source.length, source.shift
            number = {slot: row for row, slot in enumerate(slots)}
            chosen = [number[copied.get(slot, slot)] for slot in slots]
            following = following.select(torch.tensor(chosen, device=self.device))
        return following

    def read(self, tokens: Tensor, pick: Pick | None = None) -> NextToken:
        """Process one new token [r] of each row; attention reads keys and values without a copy.

        Args:
            pick: to pick the next tokens too, where rows are padded.
        Returns:
            Logits that are valid until the next call.
        """
        step = self._step = self._step or self._first_step()
        longest = step.longest + step.count + 1
        if self.key_multiple == 1:
            following = self._read_one(step, longest, tokens[:, None])
        else:
            following = self._read_padded(step, padded(longest, self.key_multiple, WIDTHS), tokens, pick)
        step.count += 1
        return following

    def _read_padded(self, step: _Step, width: int, tokens: Tensor, pick: Pick | None) -> NextToken:
        """Process a token [r] of each row in the tensors of `memory`, by a graph if there is one."""
        memory, rows, routed, live = self.memory, len(step.own), None, slice(self.num_live)
        memory.inputs[3, live, 0] = tokens
        if pick is not None:
            memory.noise[live] = pick[2]

        def work() -> None:
            nonlocal routed
            following = self._read_one(step, width, memory.inputs[3, :rows])
            memory.put("logits", logits := following.logits)
            routed = following.routed
            if pick is not None:
                tokens = pick[0].pick(logits, memory.noise[:rows], 0, pick[1])
                memory.put("tokens", tokens)
                memory.put("log_probs", pick[0].log_probs(logits, tokens))

        memory.graphs.valid_for((self._model_state, self.cache.num_grown, len(memory.noise)))
        has_adapters = any(row.weights for row in self._slots[live])  # peft gathers the rows of each
        memory.graphs.run(None if has_adapters else (rows, width, pick and pick[:2]), work)
        out = {name: x[live] for name, x in memory.outputs.items()}
        picked = None if pick is None else (out["tokens"].clone(), out["log_probs"].clone())
        return NextToken(out["logits"], routed if routed is None else routed[live], picked)

    def _read_one(self, step: _Step, width: int, tokens: Tensor) -> NextToken:
        """Process a token [r 1] of each row, kernel by kernel; values that change per step are in tensors of `step`."""
        from verl.model_paths.kv_cache import CacheCall

        longest, is_even = step.longest + step.count, self.key_multiple == 1 and step.shortest == step.longest
        mask = None
        if not is_even:
            mask = torch.arange(width, device=self.device) <= step.own[:, :, None]
        columns = slice(longest, longest + 1) if is_even else step.own
        count = max(len(self._slots) if self.keeps_episodes else self.num_live, len(tokens))
        length = width + self.spare
        call = CacheCall(0, columns, count, length, width, prompt_width=step.prompt_width, groups=step.groups)
        live = self._slots[: self.num_live]
        following = self._forward(call, live + live[-1:] * (len(tokens) - len(live)), tokens, step.positions, mask)
        step.positions += step.is_live
        step.own += step.is_live
        return following

    def follow_weights(self) -> None:
        """The weights may be in other memory now."""
        self._settle()
        self._model_state = None if self.memory.graphs.new_graph is None else model_state(self.model)

    def fewest_ended(self, num_live: int) -> int:
        """Number of finished rows at which removing them pays off; until then they stay in the batch."""
        return 1 if self.keeps_episodes else max(1, int(WORTH_ENDING * num_live))

    def end(self, rows: Mapping[int, list[int]]) -> list[int]:
        """Remove finished rows.

        Args:
            rows: processed tokens of each finished row.
        Returns:
            The previous indices of the remaining rows, in their new order.
        """
        self._settle()
        order = list(range(self.num_live - len(rows)))
        last = [row for row in range(len(order), self.num_live) if row not in rows]
        for row, tokens in rows.items():
            slot = self._slots[row]
            if self.keeps_episodes:
                slot.tokens = tokens
                self._held[slot.episode] = slot
            else:
                self._release(slot)
        for hole, row in zip([row for row in rows if row < len(order)], last, strict=True):
            order[hole] = row
        self._set_slots([(hole, self._slots[row]) for hole, row in enumerate(order) if hole != row])
        self.num_live = len(order)
        return order

    def forget(self, episode: int) -> None:
        """Free the keys and values of an episode that has ended."""
        if (slot := self._held.pop(episode, None)) is not None:
            self._release(slot)

    def _slot_for(self, turn: TurnRequest) -> Slot | None:
        """The slot of the turn's episode, or an empty one; None if all are in use."""
        if (slot := self._held.pop(turn.episode, None)) is not None:
            is_same = turn.media_key == slot.media_key and turn.tokens[: slot.length] == slot.tokens
            if len(turn.tokens) <= slot.length or not is_same:
                self._clear(slot)
            slot.media_key = turn.media_key
            return slot
        if not self._free and len(self._slots) < self.max_slots:
            self._slots.append(Slot(len(self._slots)))
            self._free.append(self._slots[-1])
        if not self._free and self._held:
            self.forget(next(iter(self._held)))
        if not self._free:
            return None
        slot = self._free.pop()
        slot.episode, slot.weights, slot.media_key = turn.episode, turn.weights, turn.media_key
        return slot

    def _settle(self) -> None:
        """Update the lengths of live rows; before a row starts or ends."""
        if self._step is not None:
            for slot in self._slots[: self.num_live]:
                slot.length += self._step.count
            self._step = None

    def _set_slots(self, slot_of_row: Iterable[tuple[int, Slot]]) -> None:
        """Swap slots to new indices."""
        former: dict[Slot, int] = {}
        for number, slot in slot_of_row:
            other = self._slots[number]
            former |= {x: former.get(x, x.number) for x in (slot, other)}
            self._slots[number], self._slots[slot.number] = slot, other
            slot.number, other.number = number, slot.number
        moved = [slot for slot, number in former.items() if slot.own_length and slot.number != number]
        if moved:
            targets = [slot.number for slot in moved]
            self.cache.copy([former[slot] for slot in moved], targets, max(slot.own_length for slot in moved))

    def _release(self, slot: Slot) -> None:
        self._clear(slot)
        self._free.append(slot)

    def _clear(self, slot: Slot) -> None:
        """Empty a slot; a prompt without users is dropped."""
        prompt, slot.prompt, slot.length, slot.shift = slot.prompt, None, 0, 0
        if prompt is None:
            return
        prompt.users -= 1
        if not prompt.users:
            self._settle()
            self._prompts = {key: stored for key, stored in self._prompts.items() if stored is not prompt}
            last = next((stored for stored in self._prompts.values() if stored.number == len(self._prompts)), None)
            if last is not None:
                self.cache.copy([last.number], [prompt.number], last.length, prompts=True)
                last.number = prompt.number

    def _read(self, rows: Sequence[tuple[Slot, TurnRequest]]) -> Iterator[NextToken]:
        """Process the new tokens of rows in batches, longest first and empty rows before others; returns the next-token
        outputs of each row."""
        start = 0
        while start < len(rows):
            head, turn = rows[start]
            most = start + max(1, PREFILL_TOKENS // (len(turn.tokens) - head.length))
            part = [row for row in rows[start:most] if bool(row[0].length) == bool(head.length)]
            start += len(part)
            images = [(x.media_key, x.media) for slot, x in part if not slot.length]  # else they were read before
            found = self._prefill([slot for slot, _ in part], [x.tokens[slot.length :] for slot, x in part], images)
            yield from (found.select(slice(row, row + 1)) for row in range(len(part)))

    def _prefill(
        self, rows: Sequence[Slot], tokens: Sequence[Sequence[int]], media: Sequence[RowMedia] = ()
    ) -> NextToken:
        """Process new tokens of slots or prompts as a batch, padded on the left; either all rows are empty or none."""
        from verl.model_paths.kv_cache import CacheCall

        is_prompt, is_new = isinstance(rows[0], StoredPrompt), not rows[0].length
        longest = max(map(len, tokens))
        width = longest + max(row.length for row in rows)
        ids = torch.tensor([[0] * (longest - len(line)) + [*line] for line in tokens], device=self.device)
        numbers = [(row.length, len(line)) for row, line in zip(rows, tokens, strict=True)]
        starts, counts = torch.tensor(numbers, device=self.device).T[:, :, None]
        offset = torch.arange(longest, device=self.device) - longest + counts
        columns = starts + offset % longest  # padding goes after the row, where it is overwritten before it is read
        count = len(self._prompts) if is_prompt else len(self._slots)
        is_even = is_new and min(map(len, tokens)) == longest
        written = slice(0, longest) if is_even else columns
        length = width + self.spare
        call = CacheCall(rows[0].number, written, count, length, 0 if is_new else width, is_prompt)
        mask, keys = None, torch.arange(width, device=self.device)
        if not is_new:
            mask = keys <= columns[:, :, None]
        elif not is_even:
            mask = (keys <= keys[:, None]) & (offset >= 0)[:, None, :] | (keys == keys[:, None])
        images, positions = None, (starts + offset).clamp_min(0)
        if self.images is not None and any(key for key, _ in media):
            images = self.images().of_media(media, ids.cpu(), (offset >= 0).cpu())
            assert images is not None
            for row, shift in zip(rows, images.shifts, strict=True):
                row.shift = shift
            images = images.to(self.device)
        elif any(row.shift for row in rows):
            positions = positions + torch.tensor([row.shift for row in rows], device=self.device)[:, None]
        following = self._forward(call, rows, ids, positions, mask, images)
        for row, line in zip(rows, tokens, strict=True):
            row.length += len(line)
        return following

    def _forward(
        self,
        call: Any,
        rows: Sequence[Slot],
        ids: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        images: RowImages | None = None,
    ) -> NextToken:
        self.cache.prepare(call)
        if mask is not None:
            mask = mask[:, None]
            if self.is_eager:
                lowest = torch.finfo(self.model.dtype).min
                mask = torch.zeros(mask.shape, dtype=self.model.dtype, device=self.device).masked_fill(~mask, lowest)
        inputs: dict[str, Any] = {} if call.groups is None else {"prompts_of": self.cache}
        inputs |= {"position_ids": positions, "past_key_values": self.cache, "use_cache": True, "logits_to_keep": 1}
        if any(row.weights for row in rows):
            inputs["adapter_names"] = [row.weights for row in rows]  # of peft
        out = call_model(self.model, images, input_ids=ids, attention_mask=mask, **inputs)
        return NextToken.of(out, self.routing)

    def _first_step(self) -> _Step:
        live, lengths = self._slots[: self.num_live], [slot.own_length for slot in self._slots]
        numbers = [(x.length + x.shift, length, 1) for x, length in zip(live, lengths, strict=False)]
        if self.key_multiple > 1:
            rows = padded(len(live), ROW_MULTIPLE, HEIGHTS)
            numbers += [(length, length, 0) for length in [*lengths, *[0] * rows][len(live) : rows]]
            self.memory.reserve(rows)
            inputs = self.memory.inputs[:3, :rows]
            inputs[:, :, 0] = torch.tensor(numbers, device=self.device).T
        else:
            inputs = torch.tensor(numbers, device=self.device).T[:, :, None]
        own = lengths[: len(live)]
        groups = self._prompt_groups(live) if any(slot.prompt for slot in live) else None
        width = max((prompt.length for prompt in self._prompts.values()), default=0)
        return _Step(inputs[0], inputs[1], inputs[2], min(own), max(own), groups, width)

    def _prompt_groups(self, live: Sequence[Slot]) -> PromptGroups:
        """Groups of the live rows with their prompts."""
        prompts = sorted(self._prompts.values(), key=lambda prompt: prompt.number)
        behind: list[list[int]] = [[] for _ in prompts]
        for row, slot in enumerate(live):
            if slot.prompt is not None:
                behind[slot.prompt.number].append(row)
        n, lengths = max(map(len, behind)), [prompt.length for prompt in prompts]
        cells = {row: number * n + place for number, rows in enumerate(behind) for place, row in enumerate(rows)}
        padded = torch.tensor([rows + [0] * (n - len(rows)) for rows in behind], device=self.device)
        slot_of_row, mask = torch.tensor([cells[row] for row in range(len(live))], device=self.device), None
        if min(lengths) < max(lengths):
            widths = torch.tensor(lengths, device=self.device)[:, None]
            mask = (torch.arange(max(lengths), device=self.device) < widths)[:, None, None]
        return PromptGroups(padded, slot_of_row, mask)


class BatchRows:
    """Rows in batches, each decoded to its end, with the methods of `SlotRows`; see the module.

    Args:
        new_reader: makes the reader of a batch.
        drops: rows may leave a batch before all have ended.
    """

    keeps_episodes = False

    def __init__(
        self, new_reader: Callable[[], BatchReader], device: torch.device, pad_id: int, max_rows: int, drops: bool
    ):
        self.new_reader, self.device, self.pad_id = new_reader, device, pad_id
        self.max_rows, self.drops, self.num_live = max_rows, drops, 0

    def admit(self, queue: list[TurnRequest]) -> tuple[list[TurnRequest], NextToken | None]:
        if self.num_live:
            return [], None
        self.reader = self.new_reader()
        batch, n = self._next_batch(queue)
        self.num_live = len(batch)
        tokens, mask = left_padded([turn.tokens for turn in batch[::n]], self.pad_id)
        media = [(turn.media_key, turn.media) for turn in batch[::n]]
        return batch, self.reader.begin(tokens.to(self.device), mask.to(self.device), n, media)

    def read(self, tokens: Tensor, pick: Pick | None = None) -> NextToken:
        return self.reader.read(tokens)

    def fewest_ended(self, num_live: int) -> int:
        return max(1, int(WORTH_ENDING * num_live)) if self.drops else num_live

    def end(self, rows: Mapping[int, list[int]]) -> list[int]:
        order = [row for row in range(self.num_live) if row not in rows]
        self.num_live = len(order)
        if order:
            self.reader.keep(torch.tensor(order, device=self.device))
        return order

    def forget(self, episode: int) -> None:
        """Nothing to free."""

    def follow_weights(self) -> None:
        """Nothing depends on their memory."""

    def _next_batch(self, queue: list[TurnRequest]) -> tuple[list[TurnRequest], int]:
        """Take turns from the queue that can be decoded together: longest first, n consecutive turns of each prompt."""
        by_prompt = itertools.groupby(queue, key=lambda turn: (turn.prompt_id, turn.turn, turn.media_key, turn.tokens))
        groups = sorted((list(turns) for _, turns in by_prompt), key=lambda turns: -len(turns[0].tokens))
        n, length = len(groups[0]), len(groups[0][0].tokens)
        if not self.reader.paths.pads_prompts:
            groups = [turns for turns in groups if len(turns[0].tokens) == length]
        batch = [turn for turns in [x for x in groups if len(x) == n][: max(1, self.max_rows // n)] for turn in turns]
        chosen = set(map(id, batch))
        queue[:] = [turn for turn in queue if id(turn) not in chosen]
        return batch, n


def slots_fault(config: Any, paths: ModelPaths) -> str | None:
    """Why keys and values cannot be kept in slots; None if they can, provided that `slots_distance` is small."""
    from verl.model_paths.kv_cache import keeps_all_tokens

    if paths.cache != "in_place" or not paths.pads_prompts:
        return "its cache is not ours"
    if sees_ahead(config):
        return "tokens of an image see later ones of it"
    return None if keeps_all_tokens(config) else "a layer keeps something else than all keys and values"


@torch.no_grad()
def slots_distance(rows: SlotRows) -> float:
    """Largest distance, in nats, of log-probs over four slots from those of a plain forward pass, for rows that start,
    move to the slot of a finished row, and continue. Mean over the vocabulary: with tens of thousands of tokens the
    maximum is rounding."""
    size = rows.model.config.get_text_config().vocab_size
    texts = [[(7 * i + 3 * line) % size for i in range(length)] for line, length in ((0, 6), (1, 2), (2, 7), (2, 7))]
    live: list[int] = []
    found: list[tuple[int, int, Tensor]] = []  # row, number of its tokens, logits after them

    def admit(numbers: Sequence[int]) -> None:
        turns, following = rows.admit([TurnRequest(row, texts[row], row, 0, 0, 1) for row in numbers])
        assert following is not None
        live.extend(turn.episode for turn in turns)
        found.extend((turn.episode, len(turn.tokens), x) for turn, x in zip(turns, following.logits, strict=True))

    def read() -> None:
        tokens = [(5 * row + len(texts[row])) % size for row in live]
        for row, token in zip(live, tokens, strict=True):
            texts[row] = [*texts[row], token]
        following = rows.read(torch.tensor(tokens, device=rows.device))
        found.extend((row, len(texts[row]), logits) for row, logits in zip(live, following.logits.clone(), strict=True))

    admit(range(4))
    read()
    ended = live[0]
    live[:] = [live[row] for row in rows.end({0: texts[ended]})]
    read()
    if rows.keeps_episodes:
        texts[ended] = [*texts[ended], 1, 2, 3]
        admit([ended])
        read()
    plain, worst = {}, 0.0
    for row in {row for row, _, _ in found}:
        ids = torch.tensor([texts[row]], device=rows.device)
        plain[row] = call_model(rows.model, input_ids=ids, use_cache=False).logits[0].double().log_softmax(-1)
    for row, length, logits in found:
        worst = max(worst, float((plain[row][length - 1] - logits.double().log_softmax(-1)).abs().mean()))
    return worst
