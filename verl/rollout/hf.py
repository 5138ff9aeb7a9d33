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
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import PositiveInt
from torch import Tensor

from verl.component import BuildContext, component
from verl.errors import LogProbGapError
from verl.model_paths.check import decoding_name, paths_for, plainer_decoding
from verl.model_paths.decode import Choose, Decoder, allowed, key_multiple, padded_keys_distance
from verl.model_paths.expert_routing import routing_of
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
from verl.rollout.prompt_rows import left_padded
from verl.rollout.token_sampler import NOISE_TOKENS, TokenSampler, greedy_rows, noise_keys

if TYPE_CHECKING:
    from verl.rollout.hf_slots import SlotTurns

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
        parallel_info = getattr(model, "parallel_info", None)
        self.group = GenerationGroup() if parallel_info is None else SplitPrompts(parallel_info)
        self.key_multiple: int | None = None  # of lengths of keys, on another device than a CPU; found with the first
        self.keeps_slots: bool | None = None  # whether turns may keep keys and values; found with the first episode
        self.longest_compared = 0  # tokens of the longest row whose log-probs were compared
        self._open: set[TurnEngine] = set()
        self._wrong: set[str] = set()  # ways of decoding that gave other log-probs than a plain forward pass

    def turns(self, limits: TurnLimits) -> TurnEngine:
        """See `RolloutEngine.turns`; the draws depend on the noise keys of the turns and the positions alone. Until it
        is closed, this process has unsharded weights."""
        self.model.eval()
        with contextlib.ExitStack() as entered:
            entered.enter_context(weights_gathered(self.model))
            entered.enter_context(packed_weights(self.model))
            turns: SlotTurns | BatchTurns | None = None if limits.is_single else self._slot_turns(limits)
            if turns is None:
                turns = BatchTurns(self, limits)
            self._open.add(turns)
            entered.callback(self._open.discard, turns)
            turns.contexts = entered.pop_all()
        turns.dtype = torch.promote_types(self.model.dtype, torch.float32)
        return turns

    def sync(self) -> SyncResult:
        """See `RolloutEngine.sync`: nothing moves, but open turns have keys and values of the former weights."""
        if self._open:
            raise open_turns_error(sum(turns.num_pending for turns in self._open))
        return SAME_TENSORS

    def _slot_turns(self, limits: TurnLimits) -> SlotTurns | None:
        """Turns that keep keys and values from one to the next; None if the model cannot."""
        from verl.rollout.hf_slots import SlotModel, SlotTurns, num_slots, prove_slots  # brings transformers

        if self.keeps_slots is None:
            decoder = self.decoder(limits.row_tokens - self.options.max_new_tokens)
            self.keeps_slots = prove_slots(self.model, self.autocast, decoder)
        if not self.keeps_slots:
            return None
        slots = num_slots(self.model, limits, self.options.max_rows)
        return SlotTurns(self.sampler, SlotModel(self.model, self.autocast, slots))

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
        before = self.decoder(int(rows["prompt_mask"].sum(dim=1).max())).paths
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

    def proven_key_multiple(self, longest_prompt: int) -> int:
        """Key lengths are padded to a multiple of this: 64 on a GPU if verified for the model, else 1."""
        if self.key_multiple is None:
            self.key_multiple = key_multiple(self.device)
            if self.key_multiple > 1:
                decoder = replace(self.decoder(longest_prompt), key_multiple=self.key_multiple)
                longest = longest_prompt + self.options.max_new_tokens
                try:
                    with computing_in(self.autocast, self.model):
                        far = padded_keys_distance(decoder, self.device, longest)
                    fault = None if far <= allowed(self.model, self.autocast) else f"log-probs differ by {far:.3g} nats"
                except Exception as error:  # noqa: BLE001 - whatever a model's own code has against it
                    fault = f"{type(error).__name__}: {error}"
                if fault is not None:
                    log.warning("Each new token uses its exact length of keys, without padding: %s.", fault)
                    self.key_multiple = 1
        return self.key_multiple

    def decoder(self, longest_prompt: int) -> Decoder:
        """The decode loop for prompts of at most this many tokens, on paths checked for the model at this length."""
        options = self.options
        paths = paths_for(self.model, longest_prompt + options.max_new_tokens)
        while decoding_name(paths) in self._wrong and (plainer := plainer_decoding(paths)) is not None:
            paths = plainer
        return Decoder(
            model=self.model,
            paths=paths,
            stop_ids=self.stop_ids,
            pad_id=self.pad_id,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            is_exact=self.autocast is None and self.model.dtype in (torch.float32, torch.float64),
            shares=options.share_prefix,
            drops=options.drop_finished,
            routing=self.routing,
        )

    def chooser(self, turns: Sequence[TurnRequest]) -> Choose:
        """The function that samples the next tokens of these turns; a subclass can modify the logits first."""
        sampler, keys, is_greedy = self.sampler, noise_keys(turns).to(self.device), greedy_rows(turns)
        of_rows = None if isinstance(is_greedy, bool) else is_greedy.to(self.device)
        noise = torch.zeros(len(turns), NOISE_TOKENS, dtype=torch.float64, device=self.device)

        def choose(logits: Tensor, rows: Tensor, t: int) -> Tensor:
            nonlocal noise
            if t % NOISE_TOKENS == 0 and is_greedy is not True:
                noise = sampler.noise(keys[:, :, None], torch.arange(t, t + NOISE_TOKENS, device=self.device))
            greedy = is_greedy if of_rows is None else of_rows[rows]
            return sampler.pick(logits, noise[rows, t % NOISE_TOKENS], t, greedy)

        return choose


class BatchTurns(TurnQueue):
    """Turns decoded as one batch, from whole rows: responses, and the turns of models without kept keys and values.

    The prompt that turns side by side have in common is computed once. Log-probs are compared with a plain forward pass
    whenever a row is longer than those before; see the module.

    Attributes:
        contexts: left when it is closed.
    """

    def __init__(self, engine: HFSampler, limits: TurnLimits):
        super().__init__()
        self.engine, self.limits, self.contexts = engine, limits, contextlib.ExitStack()
        routing = engine.routing
        self.experts = None if routing is None else (routing.layers, routing.top_k)
        self.stops = set(engine.stop_ids.tolist())

    def close(self) -> None:
        super().close()
        self.contexts.close()

    @torch.no_grad()
    def advance(self) -> list[DrawnTurn]:
        """See `TurnEngine.advance`; all turns with the largest limit are generated.

        Raises:
            LogProbGapError: no way of decoding gives the log-probs of a plain forward pass.
        """
        if not self.queue:
            return []
        engine, limit = self.engine, max(turn.max_new_tokens for turn in self.queue)
        turns = [turn for turn in self.queue if turn.max_new_tokens == limit]
        self.queue = [turn for turn in self.queue if turn.max_new_tokens != limit]
        drawn = self._decode(turns, limit)
        longest = max(len(turn.tokens) + len(made.tokens) for turn, made in zip(turns, drawn, strict=True))
        if longest > engine.longest_compared:
            rows = self._as_rows(turns, drawn)
            while (gap := engine.decoding_gap(rows)) > engine.gap_bound:
                engine.fall_back(gap, rows)
                drawn = self._decode(turns, limit)
                rows = self._as_rows(turns, drawn)
            engine.longest_compared = max(engine.longest_compared, longest_row(rows))
        return drawn

    def _decode(self, turns: Sequence[TurnRequest], limit: int) -> list[DrawnTurn]:
        engine = self.engine
        longest = max(len(turn.tokens) for turn in turns)
        if not self.limits.is_single:
            longest = max(longest, self.limits.row_tokens - engine.options.max_new_tokens)
        multiple = engine.proven_key_multiple(longest)
        decoder = replace(engine.decoder(longest), key_multiple=multiple, max_new_tokens=limit)
        by_size: dict[int, list[list[int]]] = {}
        for group in _same_prompts(turns):
            by_size.setdefault(len(group), []).append(group)
        drawn: dict[int, DrawnTurn] = {}
        for n, groups in by_size.items():
            lengths = torch.tensor([len(turns[group[0]].tokens) for group in groups])
            for chosen in decoder.batches(lengths, engine.options.max_rows // n):
                numbers = [number for place in chosen.tolist() for number in groups[place]]
                made = self._decode_batch(decoder, [turns[number] for number in numbers], n)
                drawn |= dict(zip(numbers, made, strict=True))
        return [drawn[number] for number in range(len(turns))]

    def _decode_batch(self, decoder: Decoder, turns: Sequence[TurnRequest], n: int) -> list[DrawnTurn]:
        """Decode the turns of groups of n, one group after another."""
        tokens, mask = left_padded([turn.tokens for turn in turns[::n]], self.engine.pad_id)
        device = self.engine.device
        with computing_in(self.engine.autocast, self.engine.model):
            out = decoder.decode(tokens.to(device), mask.to(device), n, self.engine.chooser(turns))
        lengths = out.mask.sum(dim=1).tolist()
        responses, log_probs = out.responses.tolist(), out.log_probs.tolist()
        routed = None if out.routed is None else out.routed.cpu()
        drawn = []
        for row, (turn, length) in enumerate(zip(turns, lengths, strict=True)):
            made = responses[row][:length]
            experts = None if routed is None else routed[row, :length]
            drawn.append(DrawnTurn(turn.episode, made, log_probs[row][:length], made[-1] in self.stops, experts))
        return drawn

    def _as_rows(self, turns: Sequence[TurnRequest], drawn: Sequence[DrawnTurn]) -> DataProto:
        """Each turn as a row, behind everything before it; see `assemble`."""
        tokens, mask = left_padded([turn.tokens for turn in turns], self.engine.pad_id)
        prompt_ids = torch.tensor([turn.prompt_id for turn in turns])
        fields = {"prompts": tokens, "prompt_mask": mask, "prompt_ids": prompt_ids}
        prompts = DataProto.from_dict(fields | {"group_ids": torch.arange(len(turns))})
        sample_ids = torch.tensor([turn.sample_id for turn in turns])
        return assemble_turns(prompts, drawn, self, self.engine.pad_id, sample_ids=sample_ids)


def _same_prompts(turns: Sequence[TurnRequest]) -> list[list[int]]:
    """Numbers of the turns that stand side by side and follow on the same tokens of the same prompt."""

    def key(number: int) -> tuple[Any, ...]:
        turn = turns[number]
        return turn.prompt_id, turn.turn, turn.tokens

    return [list(numbers) for _, numbers in itertools.groupby(range(len(turns)), key)]
