"""Turns of episodes by `rollout=hf`: keys and values of an episode stay in a slot from turn to turn.

    add ──> queue ── a slot each ──> prefill of the new tokens ──> decode, one token of every live turn ──> DrawnTurn
                        ^                                                                              |
                        └── slots of episodes that wait for their environment, oldest first ───────────┘

Rows in different slots may have different lengths, so turns start and end at any time. Before a token is decoded, slots
of live turns are moved to the front, so that attention reads keys and values where they lie. If there are more episodes
than slots, an episode that waits for its environment loses its slot and is computed again when it continues. Models for
which the slot check fails are decoded turn by turn from whole rows.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from verl.errors import ConfigError
from verl.model_paths.decode import Decoder, allowed, key_multiple
from verl.models.call import call_model
from verl.models.parallel_info import Autocast, compute_device, computing_in
from verl.rollout.base import DrawnTurn, TurnLimits, TurnQueue, TurnRequest
from verl.rollout.token_sampler import NOISE_TOKENS, TokenSampler, greedy_rows, noise_keys
from verl.utils.progress import report

log = logging.getLogger(__name__)

GIB = 1 << 30
PREFILL_TOKENS = 8192  # of one forward pass, padding included
FIRST_LENGTH = 64  # tokens of a slot; it grows by half


class SlotLayer(DynamicLayer):
    """Keys and values of one layer, a row of individual length per slot: [slots + 1, H, L, D]; the last slot is
    scratch.

    Attributes:
        slots, positions: [b q] where the tokens of the current call are written.
        rows: [b] the slots that attend; their number where they are the first ones, which are then not copied.
        width: number of keys that attention reads.
    """

    def __init__(self, num_slots: int):
        super().__init__()
        self.num_slots = num_slots
        self.slots = self.positions = torch.zeros(0, dtype=torch.int64)
        self.rows: Tensor | int = self.slots
        self.width = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            shape = (self.num_slots + 1, key_states.shape[1], self.width)
            self.keys = key_states.new_zeros(*shape, key_states.shape[3])
            self.values = value_states.new_zeros(*shape, value_states.shape[3])
        assert self.keys is not None
        assert self.values is not None
        if self.keys.shape[2] < self.width:
            longer = max(self.width, self.keys.shape[2] * 3 // 2)
            self.keys, self.values = (_longer(x, longer) for x in (self.keys, self.values))
        self.keys[self.slots, :, self.positions] = key_states.transpose(1, 2)
        self.values[self.slots, :, self.positions] = value_states.transpose(1, 2)
        chosen = slice(self.rows) if isinstance(self.rows, int) else self.rows
        return self.keys[chosen, :, : self.width], self.values[chosen, :, : self.width]

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy the first tokens of slots [m] to other slots [m], which may overlap."""
        for states in (self.keys, self.values):
            assert states is not None
            states[targets, :, :length] = states[sources, :, :length]

    def copy(self, source: int, targets: Tensor, length: int) -> None:
        """Copy the first tokens of one slot to other slots."""
        for states in (self.keys, self.values):
            assert states is not None
            states[targets, :, :length] = states[source, :, :length].clone()  # of the same memory


def _longer(states: Tensor, length: int) -> Tensor:
    made = states.new_zeros(*states.shape[:2], length, states.shape[3])
    made[:, :, : states.shape[2]] = states
    return made


class SlotCache(DynamicCache):
    """The layers of a model, each a `SlotLayer`."""

    def __init__(self, config: Any, num_slots: int):
        super().__init__(config=config)
        self.layers = [SlotLayer(num_slots) for _ in self.layers]
        self.num_slots = num_slots

    def place(self, rows: Tensor | int, slots: Tensor, positions: Tensor, width: int) -> None:
        """Set where the tokens of the next call are written."""
        for layer in self.layers:
            layer.rows, layer.slots, layer.positions, layer.width = rows, slots, positions, width  # type: ignore

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def copy(self, source: int, targets: Tensor, length: int) -> None:
        for layer in self.layers:
            layer.copy(source, targets, length)  # type: ignore[union-attr]

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        for layer in self.layers:
            layer.move(sources, targets, length)  # type: ignore[union-attr]


class SlotModel:
    """A model over a `SlotCache`: reads further tokens of some slots and gives the logits after the last of each."""

    def __init__(self, model: Any, autocast: Autocast, num_slots: int):
        self.model = model
        self.autocast: Autocast = autocast
        self.device = compute_device(model)
        self.cache = SlotCache(model.config, num_slots)

    def read(self, slots: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Logits [b V], float32 at least.

        Args:
            slots: of each row.
            starts: tokens that the slot holds already.
            tokens: new tokens, at least one per row.
        """
        lengths = [len(line) for line in tokens]
        longest = max(lengths)
        pad = torch.tensor([longest - length for length in lengths])
        place = torch.arange(longest)
        is_pad = place < pad[:, None]
        ids = torch.zeros(len(tokens), longest, dtype=torch.int64)
        for row, line in enumerate(tokens):
            ids[row, longest - len(line) :] = torch.tensor(line)
        rows = torch.tensor(slots)
        positions = (torch.tensor(starts)[:, None] + place - pad[:, None]).masked_fill(is_pad, 0)
        targets = rows[:, None].expand_as(ids).masked_fill(is_pad, self.cache.num_slots)
        width = max(start + length for start, length in zip(starts, lengths, strict=True))
        width = max(FIRST_LENGTH, width) if self.cache.layers[0].keys is None else width
        multiple = key_multiple(self.device)
        width = -(-width // multiple) * multiple
        rows, targets, positions, ids = _to_device([rows, targets, positions, ids], self.device)
        is_front = all(slot == place for place, slot in enumerate(slots))
        self.cache.place(len(slots) if is_front else rows, targets, positions, width)
        mask = (torch.arange(width, device=self.device) <= positions[:, :, None])[:, None]
        with computing_in(self.autocast, self.model):
            out = call_model(
                self.model,
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            )
        logits = out.logits[:, -1]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _to_device(columns: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy integer columns from main memory to the device in one asynchronous transfer."""
    flat = torch.cat([x.flatten() for x in columns]).to(device, non_blocking=True)
    return [x.view_as(like) for x, like in zip(flat.split([x.numel() for x in columns]), columns, strict=True)]


def slots_fault(model: Any, decoder: Decoder) -> str | None:
    """Why the keys and values of episodes cannot be kept in slots; None where they can."""
    if decoder.paths.cache != "in_place" or not decoder.paths.pads_prompts:
        return "its cache is not ours"
    layers = DynamicCache(config=model.config).layers
    if any(type(layer) is not DynamicLayer for layer in layers) or not layers:
        return "a layer keeps something else than all keys and values"
    return None


@torch.no_grad()
def slots_distance(model: Any, autocast: Autocast) -> float:
    """Largest distance, in nats, of log-probs over slots from those of a plain forward pass, on rows of two lengths."""
    size = model.config.get_text_config().vocab_size
    rows = [[(7 * i + 3 * row) % size for i in range(length)] for row, length in enumerate((11, 5))]
    slots = SlotModel(model, autocast, 3)
    device = compute_device(model)
    found = [
        slots.read([2, 0], [0, 0], [rows[0][:6], rows[1][:2]]),
        slots.read([0, 2], [2, 6], [rows[1][2:], rows[0][6:]]),
    ]
    found[1] = found[1].flip(0)
    worst = 0.0
    for step, cuts in enumerate(((6, 2), (11, 5))):
        for row, cut in enumerate(cuts):
            ids = torch.tensor([rows[row][:cut]], device=device)
            with computing_in(autocast, model):
                plain = call_model(model, input_ids=ids, use_cache=False).logits[0, -1]
            gap = plain.float().log_softmax(-1) - found[step][row].float().log_softmax(-1)
            worst = max(worst, float(gap.abs().max()))
    return worst


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
    each = slot_bytes(model, limits.row_tokens)
    fitting = int(limits.kv_cache_gib * GIB // each)
    if fitting < 1:
        raise ConfigError(
            f"environment.kv_cache_gib is {limits.kv_cache_gib:g}: keys and values of one episode of "
            f"{limits.row_tokens} tokens take {each / GIB:.3g} GiB. Raise it, or lower environment.max_tokens."
        )
    return min(fitting, max_rows)


@dataclass
class _LiveTurn:
    """A turn that is being generated."""

    request: TurnRequest
    slot: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)  # of `NOISE_TOKENS` positions


class SlotTurns(TurnQueue):
    """Turns over slots; see the module.

    Attributes:
        contexts: left when it is closed.
        evictions: episodes that gave up their slot and had to be computed again.
    """

    def __init__(self, sampler: TokenSampler, model: SlotModel):
        super().__init__()
        self.sampler, self.slots, self.contexts = sampler, model, contextlib.ExitStack()
        self.stops = set(sampler.stop_ids)
        self.evictions = 0
        self._live: list[_LiveTurn] = []
        self._logits = torch.zeros(0)
        self._free = list(range(model.cache.num_slots - 1, -1, -1))
        self._held: dict[int, tuple[int, list[int]]] = {}  # episode -> slot and the tokens in it, longest unused first

    @property
    def num_pending(self) -> int:
        return super().num_pending + len(self._live)

    def forget(self, episode: int) -> None:
        slot, _ = self._held.pop(episode, (None, None))
        if slot is not None:
            self._free.append(slot)

    @torch.no_grad()
    def advance(self) -> list[DrawnTurn]:
        report()
        self._admit()
        if not self._live:
            return []
        tokens, log_probs = self._choose()
        drawn = torch.stack([tokens.double(), log_probs.double()]).tolist()  # exact for both; one synchronisation
        going, ended = [], []
        for row, (live, token, log_prob) in enumerate(zip(self._live, map(int, drawn[0]), drawn[1], strict=True)):
            live.tokens.append(token)
            live.log_probs.append(log_prob)
            is_complete = token in self.stops
            if is_complete or len(live.tokens) >= live.request.max_new_tokens:
                self._held[live.request.episode] = (live.slot, live.request.tokens + live.tokens[:-1])
                ended.append(DrawnTurn(live.request.episode, live.tokens, live.log_probs, is_complete))
            else:
                going.append(row)
        self._live = [self._live[row] for row in going]
        if self._live:
            self._bring_to_front()
            self._live.sort(key=lambda live: live.slot)
            self._logits = self.slots.read(
                [live.slot for live in self._live],
                [len(live.request.tokens) + len(live.tokens) - 1 for live in self._live],
                [live.tokens[-1:] for live in self._live],
            )
        return ended

    def close(self) -> None:
        super().close()
        self._live, self._held = [], {}
        self.contexts.close()

    def _choose(self) -> tuple[Tensor, Tensor]:
        """The next token of each live turn, and its log-prob."""
        at = [len(live.tokens) for live in self._live]
        stale = [live for live, position in zip(self._live, at, strict=True) if position % NOISE_TOKENS == 0]
        if stale:
            keys, first = noise_keys([live.request for live in stale]), torch.tensor([len(x.tokens) for x in stale])
            noise = self.sampler.noise(keys[:, :, None], first[:, None] + torch.arange(NOISE_TOKENS))
            for live, numbers in zip(stale, noise.tolist(), strict=True):
                live.noise = numbers
        numbers = [live.noise[position % NOISE_TOKENS] for live, position in zip(self._live, at, strict=True)]
        bits = torch.tensor(numbers, dtype=torch.float64).view(torch.int64)
        is_greedy = greedy_rows([live.request for live in self._live])
        columns = [torch.tensor(at), bits, *([] if isinstance(is_greedy, bool) else [is_greedy.long()])]
        positions, bits, *of_rows = _to_device(columns, self.slots.device)
        greedy = is_greedy if isinstance(is_greedy, bool) else of_rows[0].bool()
        tokens = self.sampler.pick(self._logits, bits.view(torch.float64), positions, greedy)
        return tokens, self.sampler.log_probs(self._logits, tokens)

    def _slot_for(self, turn: TurnRequest) -> tuple[int, int] | None:
        """A slot and the number of the episode's tokens in it; None if all slots are in use."""
        if turn.episode in self._held:
            slot, tokens = self._held.pop(turn.episode)
            if turn.tokens[: len(tokens)] == tokens:
                return slot, len(tokens)
            return slot, 0
        if self._free:
            return self._free.pop(), 0
        if self._held:
            self.evictions += 1
            slot, _ = self._held.pop(next(iter(self._held)))
            return slot, 0
        return None

    def _bring_to_front(self) -> None:
        """Move live turns to the first slots, in the given order; the episodes that were there get their slots."""
        count = len(self._live)
        slots = {live.slot for live in self._live}
        behind = [live for live in self._live if live.slot >= count]
        if not behind or 2 * len(behind) > count + 1:  # copying what this token reads costs no more than moving slots
            return
        holders = {slot: episode for episode, (slot, _) in self._held.items()}
        places = iter([slot for slot in range(count) if slot not in slots])
        sources, targets, longest = [], [], 0
        for live in behind:
            source, target = live.slot, next(places)
            moves = [(source, target, len(live.request.tokens) + len(live.tokens) - 1)]
            live.slot = target
            if (episode := holders.get(target)) is None:
                self._free.remove(target)
                self._free.append(source)
            else:
                _, tokens = self._held[episode]
                self._held[episode] = source, tokens
                moves.append((target, source, len(tokens)))
            sources += [move[0] for move in moves]
            targets += [move[1] for move in moves]
            longest = max(longest, *(move[2] for move in moves))
        device = self.slots.device
        self.slots.cache.move(torch.tensor(sources, device=device), torch.tensor(targets, device=device), longest)

    def _admit(self) -> None:
        """Prefill the new tokens of turns that get a slot; a prompt shared by several episodes is computed once."""
        fresh: list[tuple[_LiveTurn, int]] = []
        while self.queue and (found := self._slot_for(self.queue[0])) is not None:
            fresh.append((_LiveTurn(self.queue.pop(0), found[0]), found[1]))
        if not fresh:
            return
        first: dict[tuple[int, ...], int] = {}  # whole prompts -> who computes them
        reading, same = [], {}
        for number, (live, start) in enumerate(fresh):
            key = tuple(live.request.tokens)
            if start == 0 and key in first:
                same[number] = first[key]
            else:
                reading.append(number)
                if start == 0:
                    first[key] = number
        logits: dict[int, Tensor] = {}
        for part in self._parts(reading, fresh):
            found = self.slots.read(
                [fresh[i][0].slot for i in part],
                [fresh[i][1] for i in part],
                [fresh[i][0].request.tokens[fresh[i][1] :] for i in part],
            )
            logits |= dict(zip(part, found, strict=True))
        for source in set(same.values()):
            copies = [number for number, other in same.items() if other == source]
            live = fresh[source][0]
            (targets,) = _to_device([torch.tensor([fresh[i][0].slot for i in copies])], self.slots.device)
            self.slots.cache.copy(live.slot, targets, len(live.request.tokens))
            logits |= dict.fromkeys(copies, logits[source])
        made = torch.stack([logits[number] for number in range(len(fresh))])
        self._logits = torch.cat([self._logits, made]) if self._live else made
        self._live += [live for live, _ in fresh]

    @staticmethod
    def _parts(numbers: list[int], fresh: list[tuple[_LiveTurn, int]]) -> list[list[int]]:
        """Rows for one forward pass each, longest first."""
        length = {i: len(fresh[i][0].request.tokens) - fresh[i][1] for i in numbers}
        parts: list[list[int]] = []
        for i in sorted(numbers, key=lambda i: -length[i]):
            if not parts or (len(parts[-1]) + 1) * length[parts[-1][0]] > PREFILL_TOKENS:
                parts.append([])
            parts[-1].append(i)
        return parts


def prove_slots(model: Any, autocast: Autocast, decoder: Decoder) -> bool:
    """Check whether keys and values may be kept in slots; logs the reason once if not."""
    fault = slots_fault(model, decoder)
    if fault is None:
        try:
            distance = slots_distance(model, autocast)
        except Exception as error:  # noqa: BLE001 - whatever a model's own code has against it
            fault = f"{type(error).__name__}: {error}"
        else:
            fault = None if distance <= allowed(model, autocast) else f"log-probs differ by {distance:.3g} nats"
    if fault is not None:
        log.warning("Each turn of an episode is computed from its whole row: %s.", fault)
    return fault is None
