"""Reading rows token by token over a key-value cache, on the very tensors that train.

`SlotReader`: rows of individual lengths over a `SlotCache`, which begin and end at any time.
`BatchReader`: rows that begin together, for models whose cache is another: what of this a model allows is in its
`ModelPaths`; at the least each token is computed from its whole row.

Either gives the logits after the last token of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verl.model_paths import packed_attention
from verl.model_paths.expert_routing import ExpertRouting
from verl.model_paths.paths import ModelPaths
from verl.models.call import call_model, unwrapped
from verl.models.parallel_info import Autocast, compute_device, computing_in
from verl.ops.attention import PromptGroups

CACHES = ("past_key_values", "cache_params", "state")  # what an output names the cache, and what the next call takes
KEY_MULTIPLE = 64  # on a GPU: its kernels prepare themselves for each length of keys
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # nats between two ways of decoding; 0.3 in narrower types


@dataclass(frozen=True)
class NextToken:
    """What follows on the last token of each row.

    Attributes:
        logits: [r V], float32 at least.
        routed: [r layers k] int16, experts that routers chose for the last token; None if they are not recorded.
    """

    logits: Tensor
    routed: Tensor | None = None

    def select(self, rows: Any) -> NextToken:
        """Some of the rows."""
        return NextToken(self.logits[rows], None if self.routed is None else self.routed[rows])

    @staticmethod
    def concat(parts: Sequence[NextToken]) -> NextToken:
        """The rows of all parts."""
        routed = [part.routed for part in parts if part.routed is not None]
        return NextToken(torch.cat([part.logits for part in parts]), torch.cat(routed) if routed else None)


class _Reader:
    """Forward passes of a model that give what follows on the last token.

    Args:
        routing: whose choices are recorded; `ExpertRouting.recording` is entered by the caller.
    """

    def __init__(self, model: Any, autocast: Autocast = None, routing: ExpertRouting | None = None):
        self.model, self.routing, self.device = model, routing, compute_device(model)
        self.autocast: Autocast = autocast

    def _forward(self, **inputs: Any) -> tuple[Any, NextToken]:
        with computing_in(self.autocast, self.model):
            out = call_model(self.model, logits_to_keep=1, **inputs)
        logits = out.logits[:, -1]
        routed = None if self.routing is None else self.routing.last_chosen(len(logits))
        return out, NextToken(logits.to(torch.promote_types(logits.dtype, torch.float32)), routed)


@dataclass(eq=False)
class Slot:
    """A row of a `SlotCache`.

    Attributes:
        length: number of tokens that were read, those of its prompt included.
        prompt: whose keys and values stand before its own, for other slots too.
    """

    number: int
    length: int = 0
    prompt: SharedPrompt | None = None

    @property
    def prompt_length(self) -> int:
        return 0 if self.prompt is None else self.prompt.length

    @property
    def own_length(self) -> int:
        return self.length - self.prompt_length


@dataclass(eq=False)
class SharedPrompt(Slot):
    """A prompt that several slots stand behind.

    Attributes:
        next: what follows on it, of one row.
        users: number of slots behind it.
    """

    tokens: list[int] = field(default_factory=list)
    next: NextToken | None = None
    users: int = 0


_Rows = tuple[list[int], list[SharedPrompt | None]]  # numbers of slots, and their prompts


@dataclass
class _Step:
    """What `SlotReader.read_one` carries on from token to token while its slots stay the same.

    Attributes:
        lengths: of the slots.
        numbers, positions, own: [b 1] of the next token: its slot, its position, and its column there.
        slots, groups: see `CacheCall`.
    """

    rows: _Rows
    lengths: list[int]
    numbers: Tensor
    positions: Tensor
    own: Tensor
    slots: Tensor | int
    groups: PromptGroups | None


class SlotReader(_Reader):
    """Reads further tokens of some slots.

    Args:
        max_slots, max_length: of rows and their tokens; more room than that is not made in advance.
        key_multiple: attention of a single token reads a multiple of so many keys, the last of them masked.
        shares: slots may stand behind a `SharedPrompt`.
    Attributes:
        num_slots: that are used; raised before a slot is.
        prompts: that are stored, by their numbers.
    """

    def __init__(
        self,
        model: Any,
        autocast: Autocast,
        max_slots: int,
        max_length: int,
        key_multiple: int = 1,
        shares: bool = False,
        routing: ExpertRouting | None = None,
    ):
        from verl.model_paths.kv_cache import SlotCache  # brings transformers

        super().__init__(model, autocast, routing)
        self.key_multiple, self.shares = key_multiple, shares
        self.is_eager = model.config._attn_implementation == "eager"
        self.cache = SlotCache(model.config, max_slots, max_length)
        self.num_slots = 0
        self.prompts: list[SharedPrompt] = []
        self._step: _Step | None = None

    def read(self, rows: Sequence[Slot], tokens: Sequence[Sequence[int]]) -> NextToken:
        """Read new tokens of slots, or of prompts; at least one per row. Either all rows are empty or none."""
        from verl.model_paths.kv_cache import SCRATCH, CacheCall

        lengths = [len(line) for line in tokens]
        longest, is_new = max(lengths), not rows[0].length
        ids = torch.tensor([[0] * (longest - len(line)) + [*line] for line in tokens])
        columns = (
            [row.number for row in rows],
            [row.length for row in rows],
            [row.prompt_length for row in rows],
            lengths,
        )
        ids, numbers, starts, prompt_lengths, counts = to_device([ids, *map(torch.tensor, columns)], self.device)
        place = torch.arange(longest, device=self.device) - (longest - counts)[:, None]
        is_pad = place < 0
        positions = (starts[:, None] + place).clamp_min_(0)
        own = (positions - prompt_lengths[:, None]).clamp_min_(0)
        is_prompt = isinstance(rows[0], SharedPrompt)
        call = CacheCall(
            is_prompt=is_prompt,
            rows=numbers[:, None].masked_fill(is_pad, SCRATCH),
            columns=own,
            count=len(self.prompts) if is_prompt else self.num_slots,
            width=longest if is_new else max(row.own_length + n for row, n in zip(rows, lengths, strict=True)),
        )
        mask, keys = None, torch.arange(max(longest, call.width), device=self.device)
        if is_new and min(lengths) < longest:
            mask = (keys <= keys[:, None]) & ~is_pad[:, None, :] | (keys == keys[:, None])
        elif not is_new:
            call.slots, mask = numbers, keys[: call.width] <= own[:, :, None]
        if any(row.prompt is not None for row in rows):
            call.prompt_width = max(prompt.length for prompt in self.prompts)
            call.prompts = torch.tensor([-1 if row.prompt is None else row.prompt.number for row in rows]).to(
                self.device
            )
            first = torch.arange(call.prompt_width, device=self.device) < prompt_lengths[:, None, None]
            mask = torch.cat([first.expand(-1, longest, -1), mask], dim=2)
        found = self._read(call, ids, positions, mask)
        for row, count in zip(rows, lengths, strict=True):
            row.length += count
        return found

    def read_one(self, slots: Sequence[Slot], tokens: Sequence[int]) -> NextToken:
        """Read one further token of each slot, by attention that reads keys and values where they lie if these slots
        are the first ones."""
        from verl.model_paths.kv_cache import CacheCall

        numbers, lengths = [slot.number for slot in slots], [slot.length for slot in slots]
        rows = numbers, [slot.prompt for slot in slots]
        if self._step is None or self._step.rows != rows or self._step.lengths != lengths:
            self._step = self._first_step(rows, lengths, slots)
        step = self._step
        own = [slot.own_length for slot in slots]
        width = -(-(max(own) + 1) // self.key_multiple) * self.key_multiple
        call = CacheCall(False, step.numbers, step.own, self.num_slots, width, step.slots, groups=step.groups)
        if step.groups is not None:
            call.prompt_width = max(prompt.length for prompt in self.prompts)
        mask = None
        if isinstance(step.slots, int) and min(own) + 1 == width:  # every row sees all keys
            call.columns = min(own)
        else:
            mask = torch.arange(width, device=self.device) <= step.own[:, :, None]
        found = self._read(call, torch.tensor(tokens).to(self.device)[:, None], step.positions, mask)
        step.positions, step.own = step.positions + 1, step.own + 1
        for row, slot in enumerate(slots):
            slot.length = step.lengths[row] = lengths[row] + 1
        return found

    def _read(self, call: Any, ids: Tensor, positions: Tensor, mask: Tensor | None) -> NextToken:
        self.cache.prepare(call)
        if mask is not None:
            mask = mask[:, None]
            if self.is_eager:
                lowest = torch.finfo(self.model.dtype).min
                mask = torch.zeros(mask.shape, dtype=self.model.dtype, device=self.device).masked_fill(~mask, lowest)
        inputs: dict[str, Any] = {"prompts_of": self.cache} if packed_attention.is_enabled(self.model) else {}
        inputs |= {"position_ids": positions, "past_key_values": self.cache, "use_cache": True}
        return self._forward(input_ids=ids, attention_mask=mask, **inputs)[1]

    def copy(self, source: Slot, targets: Sequence[Slot]) -> None:
        """Copy what a slot without a prompt holds to empty ones."""
        numbers = [torch.tensor([slot.number for slot in slots]) for slots in ([source], targets)]
        self.cache.copy(*to_device(numbers, self.device), source.length)
        for slot in targets:
            slot.length = source.length

    def move(self, moves: Sequence[tuple[Slot, Slot]]) -> None:
        """Copy the own tokens of the first slot of each pair to the row of the second, all at once."""
        moves = [(source, target) for source, target in moves if source.own_length]
        if moves:
            numbers = [torch.tensor([pair[i].number for pair in moves]) for i in (0, 1)]
            self.cache.copy(*to_device(numbers, self.device), max(source.own_length for source, _ in moves))

    def add_prompt(self, tokens: list[int]) -> SharedPrompt:
        """A further prompt, to be read before the slots behind it are."""
        self._step = None
        self.prompts.append(SharedPrompt(len(self.prompts), tokens=tokens))
        return self.prompts[-1]

    def put_behind(self, slot: Slot, prompt: SharedPrompt) -> None:
        """Let an empty slot stand behind a prompt that was read."""
        slot.prompt, slot.length = prompt, prompt.length
        prompt.users += 1

    def clear(self, slot: Slot) -> None:
        """Empty a slot; a prompt that no slot stands behind is dropped."""
        prompt, slot.prompt, slot.length = slot.prompt, None, 0
        if prompt is None:
            return
        prompt.users -= 1
        if not prompt.users:
            self._step, last = None, self.prompts.pop()
            if last is not prompt:
                numbers = [torch.tensor([x.number]) for x in (last, prompt)]
                self.cache.copy(*to_device(numbers, self.device), last.length, prompts=True)
                self.prompts[prompt.number], last.number = last, prompt.number

    def _first_step(self, rows: _Rows, lengths: list[int], slots: Sequence[Slot]) -> _Step:
        columns = rows[0], lengths, [slot.own_length for slot in slots]
        numbers, positions, own = to_device([torch.tensor(x)[:, None] for x in columns], self.device)
        is_front = rows[0] == list(range(len(slots)))
        groups = self._prompt_groups(rows[1]) if any(rows[1]) else None
        return _Step(rows, lengths, numbers, positions, own, len(slots) if is_front else numbers[:, 0], groups)

    def _prompt_groups(self, prompts: Sequence[SharedPrompt | None]) -> PromptGroups:
        """Groups of rows with these prompts."""
        behind: dict[SharedPrompt, list[int]] = {prompt: [] for prompt in self.prompts}
        for row, prompt in enumerate(prompts):
            if prompt is not None:
                behind[prompt].append(row)
        n, lengths = max(map(len, behind.values())), [prompt.length for prompt in self.prompts]
        cells = {row: prompt.number * n + i for prompt, rows in behind.items() for i, row in enumerate(rows)}
        columns = [
            torch.tensor([rows + [0] * (n - len(rows)) for rows in behind.values()]),
            torch.tensor([cells.get(row, 0) for row in range(len(prompts))]),
            torch.tensor([prompt is not None for prompt in prompts]),
            torch.tensor(lengths),
        ]
        rows, places, has_prompt, widths = to_device(columns, self.device)
        mask = (torch.arange(max(lengths), device=self.device) < widths[:, None])[:, None, None]
        is_mixed, are_unequal = None in prompts, min(lengths) < max(lengths)
        return PromptGroups(rows, places, has_prompt.bool() if is_mixed else None, mask if are_unequal else None)


class BatchReader(_Reader):
    """Reads rows that begin together.

    Args:
        paths: what was shown to be right for the model.
        repeats: compute each prompt once for all of its samples, where that can be.
    """

    def __init__(
        self,
        model: Any,
        paths: ModelPaths,
        autocast: Autocast = None,
        repeats: bool = True,
        routing: ExpertRouting | None = None,
    ):
        super().__init__(model, autocast, routing)
        self.paths, self.repeats = paths, repeats and paths.repeats_rows
        self.cache: Any = None
        self.cache_name = CACHES[0]

    def begin(self, tokens: Tensor, mask: Tensor, n: int = 1) -> NextToken:
        """Read prompts [b P], padded on the left, for n rows each that stand side by side."""
        tokens, attention = tokens.to(self.device), mask.long().to(self.device)
        repeat = torch.arange(len(tokens), device=self.device).repeat_interleave(n)
        if not self.repeats:
            tokens, attention = tokens[repeat], attention[repeat]
        self.tokens, self.attention, self.is_padded = tokens, attention, not bool(attention.all())
        found = self._read(tokens, self._positions())
        if self.repeats and n > 1:
            found = found.select(repeat)
            self._select(repeat)
        self.position = self.attention.sum(dim=1)
        return found

    def read(self, token: Tensor) -> NextToken:
        """Read one further token [r] of each row."""
        self.attention = torch.cat([self.attention, self.attention.new_ones(len(token), 1)], dim=1)
        if self.paths.cache == "none":
            self.tokens = torch.cat([self.tokens, token[:, None]], dim=1)
            return self._read(self.tokens, self._positions())
        self.position = self.position + 1
        return self._read(token[:, None], self.position[:, None] - 1)

    def keep(self, rows: Tensor) -> None:
        """Leave some rows in the batch."""
        self.position = self.position[rows]
        self._select(rows)

    def _positions(self) -> Tensor:
        return (self.attention.cumsum(dim=1) - 1).clamp_min(0)

    def _select(self, rows: Tensor) -> None:
        self.tokens, self.attention = self.tokens[rows], self.attention[rows]
        if self.cache is not None:
            from verl.model_paths.kv_cache import select_rows

            select_rows(self.cache, rows)

    def _read(self, tokens: Tensor, positions: Tensor) -> NextToken:
        has_cache = self.paths.cache != "none"
        inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": has_cache}
        if self.cache is not None:
            inputs[self.cache_name] = self.cache
        if self.is_padded:
            inputs["attention_mask"] = self.attention
        if self.paths.pads_prompts:  # else the model counts by itself
            inputs["position_ids"] = positions
        out, found = self._forward(**inputs)
        if has_cache and self.cache is None:
            self.cache_name = next((name for name in CACHES if getattr(out, name, None) is not None), "")
            if not self.cache_name:
                raise NotImplementedError(f"{type(unwrapped(self.model)).__name__} gives no cache")
            self.cache = getattr(out, self.cache_name)
        return found


def to_device(columns: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy integer columns from main memory to the device in one asynchronous transfer."""
    flat = torch.cat([x.flatten() for x in columns]).to(device, non_blocking=True)
    return [x.view_as(like) for x, like in zip(flat.split([x.numel() for x in columns]), columns, strict=True)]


def key_multiple(device: torch.device) -> int:
    """Multiple to which key lengths are padded while decoding on a device; 1 on a CPU."""
    return 1 if device.type == "cpu" else KEY_MULTIPLE


def allowed(model: Any, autocast: str | None) -> float:
    """Nats that two right ways of decoding may differ by, for the type that a model computes in."""
    return 0.3 if autocast is not None else TOLERANCE.get(model.dtype, 0.3)


def slots_fault(model: Any, paths: ModelPaths) -> str | None:
    """Why keys and values cannot be kept in slots; None where they can, if `slots_distance` is small."""
    from verl.model_paths.kv_cache import keeps_all_tokens

    if paths.cache != "in_place" or not paths.pads_prompts:
        return "its cache is not ours"
    if not keeps_all_tokens(model.config):
        return "a layer keeps something else than all keys and values"
    return None


@torch.no_grad()
def slots_distance(reader: SlotReader) -> float:
    """Largest distance, in nats, of log-probs over slots from those of a plain forward pass, on rows of several
    lengths: two of slots alone, and two behind a prompt where prompts are shared."""
    size = reader.model.config.get_text_config().vocab_size
    rows = [[(7 * i + 3 * row) % size for i in range(length)] for row, length in enumerate((11, 5))]
    slots, read = [Slot(2), Slot(0)], [rows[0][:6], rows[1][:2]]
    reader.num_slots = 4
    found = list(zip(read, reader.read(slots, read).logits, strict=True))
    if reader.shares:
        prompt = reader.add_prompt(rows[0][:7])
        found += [(prompt.tokens, reader.read([prompt], [prompt.tokens]).logits[0])]
        for number, tail in ((1, rows[1]), (3, rows[1][:3])):
            slots.append(Slot(number))
            rows.append(prompt.tokens + tail)
            reader.put_behind(slots[-1], prompt)
    steps = reader.read_one(slots, [row[slot.length] for row, slot in zip(rows, slots, strict=True)])
    found += [(row[: slot.length], x) for row, slot, x in zip(rows, slots, steps.logits, strict=True)]
    logits = reader.read_one([slots[1]], [rows[1][slots[1].length]]).logits[0]  # the first slot, read where it lies
    found.append((rows[1][: slots[1].length], logits))
    found += zip(rows, reader.read(slots, [row[slot.length :] for row, slot in zip(rows, slots)]).logits, strict=True)
    worst = 0.0
    for row, logits in found:
        with computing_in(reader.autocast, reader.model):
            ids = torch.tensor([row], device=reader.device)
            plain = call_model(reader.model, input_ids=ids, use_cache=False).logits[0, -1]
        worst = max(worst, float((plain.double().log_softmax(-1) - logits.double().log_softmax(-1)).abs().max()))
    return worst
