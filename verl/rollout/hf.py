"""`rollout=hf`: generation on the tensors that train, by a decode loop over transformers' key-value cache.

The log-probs of drawn tokens are compared with a plain forward pass of their row, in the first call and whenever a row
is longer than those compared before. Where they differ, the rows are drawn again by a plainer way of decoding.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import PositiveInt
from torch import Tensor

from verl.component import BuildContext, component
from verl.errors import LogProbGapError
from verl.model_paths import packed_attention
from verl.model_paths.check import decoding_name, paths_for, plainer_decoding
from verl.model_paths.decode import (
    BatchReader,
    SlotReader,
    allowed,
    key_multiple,
    slots_distance,
    slots_fault,
    to_device,
)
from verl.model_paths.expert_routing import routing_of
from verl.model_paths.paths import ModelPaths
from verl.model_paths.row_check import WINDOW, bound_of, chosen_rows, longest_row, row_gaps
from verl.models.call import call_model, unwrapped
from verl.models.parallel_info import Autocast, compute_device, computing_in, weights_gathered
from verl.ops.cpu_matmul import packed_weights
from verl.ops.logprobs import log_probs_of, response_positions
from verl.protocol import DataProto
from verl.rollout.base import (
    ALONE,
    SAME_TENSORS,
    Capability,
    DrawnTurn,
    Rollout,
    RolloutEngine,
    SyncResult,
    TurnEngine,
    TurnLimits,
    TurnQueue,
    TurnRequest,
    assemble_turns,
    open_turns_error,
    stop_tokens,
)
from verl.rollout.generation_group import GenerationGroup, SplitPrompts
from verl.rollout.hf_rows import BatchRows, LiveRows, LiveTurn, SlotRows, num_slots
from verl.rollout.prompt_rows import left_padded
from verl.rollout.token_sampler import NOISE_TOKENS, TokenSampler, greedy_rows, noise_keys
from verl.utils.progress import report

log = logging.getLogger(__name__)


@component
class HFRollout(Rollout):
    """Generate with the training model itself, through transformers. No weights are copied, so there is no sync.

    Args:
        max_rows: responses decoded concurrently, or those of one prompt if they are more.
        share_prefix: compute each prompt once for all of its samples, if the model supports it. Affects speed only.
        drop_finished: remove finished rows from the batch once they are an eighth of it, if the model supports it.
            Affects speed only.
    """

    supports: ClassVar[frozenset[Capability]] = frozenset({"stages", "experts", "modules", "turns", "router_replay"})
    may_change: ClassVar[bool] = True

    max_rows: PositiveInt = 512
    share_prefix: bool = True
    drop_finished: bool = True

    def attach(
        self, model: Any, tokenizer: Any, seed: int, autocast: Autocast = None, context: BuildContext = ALONE
    ) -> HFSampler:
        return HFSampler(self, model, tokenizer, seed, autocast)


class HFSampler(RolloutEngine):
    """The running engine of `HFRollout`."""

    def __init__(self, options: HFRollout, model: Any, tokenizer: Any, seed: int, autocast: Autocast = None):
        self.options, self.model, self.seed = options, model, seed
        self.autocast: Autocast = autocast
        self.pad_id = tokenizer.pad_token_id
        self.device = compute_device(model)
        self.routing = routing_of(model) if options.router_replay else None
        self.stop_ids = stop_tokens(model, tokenizer, options.stop_token_ids).to(self.device)
        divided = getattr(model, "divided", None)
        self.group = GenerationGroup() if divided is None else SplitPrompts(divided)
        self.key_multiple = key_multiple(self.device)  # of the lengths of keys that a single token attends to
        self.keeps_slots: bool | None = None  # whether keys and values may be kept in slots; found with the first turns
        self.longest_compared = 0  # tokens of the longest row whose log-probs were compared
        self._open: set[HFTurns] = set()
        self._wrong: set[str] = set()  # ways of decoding that gave other log-probs than a plain forward pass

    def turns(self, limits: TurnLimits) -> TurnEngine:
        """See `RolloutEngine.turns`; the draws depend on the noise keys of the turns and the positions alone. Until it
        is closed, this process has unsharded weights."""
        self.model.eval()
        with contextlib.ExitStack() as entered:
            entered.enter_context(weights_gathered(self.model))
            entered.enter_context(packed_weights(self.model))
            if self.routing is not None:
                entered.enter_context(self.routing.recording())
            turns = HFTurns(self, limits)
            self._open.add(turns)
            entered.callback(self._open.discard, turns)
            turns.contexts = entered.pop_all()
        return turns

    def sync(self) -> SyncResult:
        """See `RolloutEngine.sync`: nothing moves, but open turns have keys and values of the former weights."""
        if self._open:
            raise open_turns_error(sum(turns.num_pending for turns in self._open))
        return SAME_TENSORS

    def rows(self, limits: TurnLimits) -> LiveRows:
        """Turns in slots where the model allows it, or in batches; on paths checked for rows of this length."""
        options, paths = self.options, self.paths(limits.row_tokens)
        reads_once = options.share_prefix and paths.repeats_rows
        if paths.cache == "in_place":
            count = num_slots(self.model, limits, options.max_rows)
            reader = self.slot_reader(paths, count, limits.row_tokens)
            return SlotRows(reader, count, is_single=limits.is_single, reads_once=reads_once)

        def new_reader() -> BatchReader:
            return BatchReader(self.decoded_model, paths, self.autocast, reads_once, self.routing)

        return BatchRows(new_reader, self.pad_id, options.max_rows, drops=options.drop_finished and paths.drops_rows)

    def paths(self, row_tokens: int) -> ModelPaths:
        """The fastest paths of the model for rows up to a length by which log-probs were right so far; `in_place` where
        slots were verified for the model."""
        paths = paths_for(self.model, row_tokens)
        if paths.cache == "in_place":
            if self.keeps_slots is None:
                self.keeps_slots = self._prove_slots(paths)
            if not self.keeps_slots:
                paths = replace(paths, cache="own", shares_prefix=False)
        while decoding_name(paths) in self._wrong and (plainer := plainer_decoding(paths)) is not None:
            paths = plainer
        return paths

    def slot_reader(self, paths: ModelPaths, count: int, row_tokens: int) -> SlotReader:
        """The model over slots; prompts are shared where that is correct and rounds as separate rows do."""
        is_exact = self.autocast is None and self.model.dtype in (torch.float32, torch.float64)
        shares = (
            self.options.share_prefix and paths.shares_prefix and is_exact and packed_attention.is_enabled(self.model)
        )
        args = self.decoded_model, self.autocast, count, row_tokens, self.key_multiple
        return SlotReader(*args, shares=shares, routing=self.routing)

    def _prove_slots(self, paths: ModelPaths) -> bool:
        """Check whether keys and values may be kept in slots, and padded to a multiple of keys; logs why if not."""
        fault = slots_fault(self.model, paths)
        while fault is None:
            try:
                distance = slots_distance(self.slot_reader(paths, 4, 16))
            except Exception as error:  # noqa: BLE001 - whatever a model's own code has against it
                fault = f"{type(error).__name__}: {error}"
            else:
                fault = (
                    None
                    if distance <= allowed(self.model, self.autocast)
                    else f"log-probs differ by {distance:.3g} nats"
                )
            if fault is None:
                return True
            if self.key_multiple > 1:
                log.warning("Each new token uses its exact length of keys, without padding: %s.", fault)
                self.key_multiple, fault = 1, None
        log.warning("Rows are decoded in batches, and each turn of an episode from its whole row: %s.", fault)
        return False

    def decoding_gap(self, rows: DataProto) -> float:
        """Distance of the log-probs of some rows from a plain forward pass of each: no other row, no cache."""
        chosen = rows[chosen_rows(rows)]
        x, wanted = chosen.batch, torch.zeros_like(chosen["rollout_log_probs"])
        width = x["input_ids"].shape[1] - wanted.shape[1]
        for row, is_read in enumerate(x["attention_mask"].bool()):
            count = int(is_read[width:].sum())
            if not count:
                continue
            tokens = x["input_ids"][row, is_read][None].to(self.device)
            with computing_in(self.autocast, self.model):
                out = call_model(self.model, input_ids=tokens, use_cache=False, logits_to_keep=count + 1)
            states = response_positions(out.logits, count)
            wanted[row, :count] = log_probs_of(states, tokens[:, -count:], self.options.temperature)[0].to(wanted)
        return float(row_gaps(x["rollout_log_probs"], wanted, x["response_mask"], WINDOW).max())

    def fall_back(self, gap: float, rows: DataProto) -> None:
        """Decode by the next plainer way from here on.

        Raises:
            LogProbGapError: there is none.
        """
        before = self.paths(longest_row(rows))
        self._wrong.add(decoding_name(before))
        after = plainer_decoding(before)
        found = (
            f"rollout=hf draws from a {type(unwrapped(self.model)).__name__} by {decoding_name(before)}: log-probs of "
            f"drawn tokens differ by {gap:.2g} nats from those of a plain forward pass of their row, in rows of up to "
            f"{longest_row(rows)} tokens"
        )
        if after is None:
            raise LogProbGapError(f"{found}. Choose another attention implementation or another model.", gap, 0.0)
        log.warning("%s. They are drawn again, from here on by %s.", found, decoding_name(after))

    @property
    def sampler(self) -> TokenSampler:
        """The sampling rule of the present options."""
        return TokenSampler.of(self.options, self.seed, tuple(self.stop_ids.tolist()))

    @property
    def gap_bound(self) -> float:
        """The largest `decoding_gap` that rounding explains, in nats."""
        return bound_of(self.model.dtype, self.autocast)

    @property
    def decoded_model(self) -> Any:
        """The model that turns are decoded with; a subclass can have another."""
        return self.model

    def sampling_logits(self, logits: Tensor, turns: Sequence[LiveTurn]) -> Tensor:
        """The logits [b V] that tokens are drawn from; a subclass can modify them. Log-probs are those of `logits`."""
        return logits


class HFTurns(TurnQueue):
    """The decode loop: each step draws a token of every live turn and reads it.

    Turns of episodes over slots are returned as they finish. Others are decoded to their end, and their log-probs
    compared with a plain forward pass whenever a row is longer than those before; see the module.

    Attributes:
        contexts: left when it is closed.
    """

    def __init__(self, engine: HFSampler, limits: TurnLimits):
        super().__init__()
        self.engine, self.limits, self.contexts = engine, limits, contextlib.ExitStack()
        self.sampler, self.stops = engine.sampler, set(engine.stop_ids.tolist())
        self.dtype = torch.promote_types(engine.model.dtype, torch.float32)
        self.experts = None if engine.routing is None else (engine.routing.layers, engine.routing.top_k)
        self.rows = engine.rows(limits)

    @property
    def num_pending(self) -> int:
        return len(self.queue) + len(self.rows.live)

    def forget(self, episode: int) -> None:
        self.rows.forget(episode)

    def close(self) -> None:
        super().close()
        self.rows.live = []
        self.contexts.close()

    @torch.no_grad()
    def advance(self) -> list[DrawnTurn]:
        """See `TurnEngine.advance`.

        Raises:
            LogProbGapError: no way of decoding gives the log-probs of a plain forward pass.
        """
        if self.rows.keeps_episodes:
            return self._step()
        if not self.queue:
            return []
        engine, turns = self.engine, list(self.queue)
        drawn = self._decode()
        longest = max(len(turn.tokens) + len(made.tokens) for turn, made in zip(turns, drawn, strict=True))
        if longest > engine.longest_compared:
            rows = self._as_rows(turns, drawn)
            while (gap := engine.decoding_gap(rows)) > engine.gap_bound:
                engine.fall_back(gap, rows)
                self.rows = engine.rows(self.limits)
                self.queue.extend(turns)
                drawn = self._decode()
                rows = self._as_rows(turns, drawn)
            engine.longest_compared = max(engine.longest_compared, longest_row(rows))
        return drawn

    def _decode(self) -> list[DrawnTurn]:
        """All turns of the queue, in its order."""
        order = [turn.episode for turn in self.queue]
        drawn: dict[int, DrawnTurn] = {}
        while self.num_pending:
            drawn |= {turn.episode: turn for turn in self._step()}
        return [drawn[episode] for episode in order]

    def _step(self) -> list[DrawnTurn]:
        """One token of every live turn; returns the turns that it ends."""
        report()
        rows = self.rows
        rows.admit(self.queue)
        if not rows.live:
            return []
        tokens, log_probs = self._choose()
        drawn = torch.stack([tokens.double(), log_probs.double()]).tolist()  # exact for both; one synchronisation
        routed = itertools.repeat(None) if rows.next.routed is None else rows.next.routed.unbind()
        ended = []
        for turn, token, log_prob, experts in zip(rows.live, map(int, drawn[0]), drawn[1], routed):
            turn.tokens.append(token)
            turn.log_probs.append(log_prob)
            if experts is not None:
                turn.routed.append(experts)
            if token in self.stops or len(turn.tokens) >= turn.request.max_new_tokens:
                ended.append(turn)
        rows.end(ended)
        if rows.live:
            rows.advance()
        return [self._drawn(turn) for turn in ended]

    def _choose(self) -> tuple[Tensor, Tensor]:
        """The next token of each live turn, and its log-prob."""
        live, logits = self.rows.live, self.rows.next.logits
        positions = [len(turn.tokens) for turn in live]
        stale = [
            turn for turn, t in zip(live, positions, strict=True) if t % NOISE_TOKENS == 0 and not turn.request.greedy
        ]
        if stale:
            keys, first = (
                noise_keys([turn.request for turn in stale]),
                torch.tensor([len(turn.tokens) for turn in stale]),
            )
            noise = self.sampler.noise(keys[:, :, None], first[:, None] + torch.arange(NOISE_TOKENS))
            for turn, numbers in zip(stale, noise.tolist(), strict=True):
                turn.noise = numbers
        noise = [turn.noise[t % NOISE_TOKENS] for turn, t in zip(live, positions, strict=True)]
        bits = torch.tensor(noise, dtype=torch.float64).view(torch.int64)
        is_greedy = greedy_rows([turn.request for turn in live])
        of_rows = [] if isinstance(is_greedy, bool) else [is_greedy.long()]
        at, bits, *of_rows = to_device([torch.tensor(positions), bits, *of_rows], logits.device)
        greedy = of_rows[0].bool() if of_rows else is_greedy
        tokens = self.sampler.pick(self.engine.sampling_logits(logits, live), bits.view(torch.float64), at, greedy)
        return tokens, self.sampler.log_probs(logits, tokens)

    def _drawn(self, turn: LiveTurn) -> DrawnTurn:
        routed = torch.stack(turn.routed).cpu() if turn.routed else None
        is_complete = turn.tokens[-1] in self.stops
        return DrawnTurn(turn.request.episode, turn.tokens, turn.log_probs, is_complete, routed)

    def _as_rows(self, turns: Sequence[TurnRequest], drawn: Sequence[DrawnTurn]) -> DataProto:
        """Each turn as a row, behind everything before it; see `assemble`."""
        tokens, mask = left_padded([turn.tokens for turn in turns], self.engine.pad_id)
        prompt_ids = torch.tensor([turn.prompt_id for turn in turns])
        fields = {"prompts": tokens, "prompt_mask": mask, "prompt_ids": prompt_ids}
        prompts = DataProto.from_dict(fields | {"group_ids": torch.arange(len(turns))})
        sample_ids = torch.tensor([turn.sample_id for turn in turns])
        return assemble_turns(prompts, drawn, self, self.engine.pad_id, sample_ids=sample_ids)
