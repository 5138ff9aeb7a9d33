"""`rollout=hf`: generation on the tensors that train, by a decode loop over transformers' key-value cache.

The log-probs of sampled tokens are compared with a plain forward pass of their row, in the first call and whenever a
row is longer than all compared before. If they differ, the rows are sampled again with a simpler decoding path.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor

from verl.component import BuildContext, component
from verl.errors import ConfigError, LogProbGapError
from verl.model_paths.check import (
    beyond_noise,
    bound_of,
    chosen_rows,
    decoding_name,
    longest_row,
    paths_for,
    plainer_decoding,
    row_gaps,
    tail_for,
)
from verl.model_paths.decode import BatchReader, NextToken, allowed, key_multiple
from verl.model_paths.expert_routing import routing_of
from verl.model_paths.families import ModelPaths
from verl.model_paths.images import ImageRows, has_images, row_media
from verl.models.parallel_info import KEPT_COPIES, Autocast, compute_device, computing_in, weights_gathered
from verl.models.structure import call_model, unwrapped
from verl.ops.cpu_matmul import packed_weights
from verl.ops.logprobs import log_probs_of, response_positions
from verl.protocol import DataProto
from verl.rollout.base import (
    ALONE,
    SAME_TENSORS,
    Capability,
    Rollout,
    RolloutEngine,
    SyncResult,
    TurnEngine,
    TurnLimits,
    TurnQueue,
    TurnRequest,
    TurnResult,
    open_turns_error,
    stop_tokens,
)
from verl.rollout.generation_group import GenerationGroup, SplitPrompts
from verl.rollout.hf_rows import (
    WORTH_SHARING,
    BatchRows,
    DecodeMemory,
    Pick,
    SlotRows,
    slots_distance,
    slots_fault,
)
from verl.rollout.rows import assemble_turns, left_padded, media_fields
from verl.rollout.token_sampler import NOISE_TOKENS, TokenSampler, greedy_rows, noise_keys
from verl.utils.memory import keep_cached
from verl.utils.progress import report

log = logging.getLogger(__name__)

GIB = 1 << 30
WEIGHTS = "weights"  # column of rows: the adapter of each


@component
class HFRollout(Rollout):
    """Generate with the training model itself, through transformers. No weights are copied, so there is no sync.

    Args:
        max_rows: responses decoded concurrently; without slots at least those of one prompt.
        share_prefix: compute each prompt once for all of its samples, if the model supports it. Affects speed only.
        drop_finished: let finished rows leave the batch of a model without slots, if the model supports it; otherwise
            they stay until all have ended. Affects speed only.
        sleep: free the memory of keys, values and CUDA graphs during training, so that graphs are made anew in each
            step. `auto`: only where the plan of the run finds that they do not fit beside training.
    """

    supports: ClassVar[frozenset[Capability]] = frozenset(
        {"stages", "experts", "modules", "turns", "router_replay", "rollout_worker", "images"}
    )
    may_change: ClassVar[bool] = True

    max_rows: PositiveInt = 512
    share_prefix: bool = True
    drop_finished: bool = True
    sleep: bool | Literal["auto"] = "auto"

    def attach(
        self, model: Any, tokenizer: Any, seed: int, autocast: Autocast = None, context: BuildContext = ALONE
    ) -> HFEngine:
        keep_cached(compute_device(model).type == "cuda" and not self.sleep and not context.shares_device)
        return HFEngine(self, model, tokenizer, seed, autocast)


class HFEngine(RolloutEngine):
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
        self.key_multiple = key_multiple(self.device)
        if self.key_multiple > 1 and parallel_info is None:
            KEPT_COPIES[model] = {}
        self.keeps_slots: bool | None = None  # whether keys and values may be kept in slots
        self.memory: DecodeMemory | None = None  # of the turns that were closed last
        self.longest_compared = 0  # tokens of the longest row whose log-probs were compared
        self.open: set[HFTurns] = set()
        self._wrong: set[str] = set()  # decoding paths whose log-probs differ from a plain forward pass

    def turns(self, limits: TurnLimits) -> TurnEngine:
        """See `RolloutEngine.turns`; samples depend only on noise keys and positions. Until the turns are closed, this
        process has unsharded weights."""
        self.model.eval()
        dtype = torch.promote_types(self.model.dtype, torch.float32)
        with self.computing() as contexts:
            turns = HFTurns(self, limits, dtype)
            turns.contexts = contexts.pop_all()
        self.open.add(turns)
        return turns

    def computing(self) -> contextlib.ExitStack:
        """Enter the contexts of forward passes of turns; the weights must not change until they are closed."""
        with contextlib.ExitStack() as entered:
            entered.enter_context(weights_gathered(self.model))
            if self.routing is not None:
                entered.enter_context(self.routing.recording())
            entered.enter_context(computing_in(self.autocast, self.model))
            entered.enter_context(packed_weights(self.model))
            return entered.pop_all()

    def sync(self) -> SyncResult:
        """See `RolloutEngine.sync`: no transfer, but open turns have keys and values of the previous weights."""
        if self.open:
            raise open_turns_error(sum(turns.num_pending for turns in self.open))
        return SAME_TENSORS

    def offload(self) -> None:
        """See `RolloutEngine.offload`."""
        if self.options.sleep:
            self.memory = None

    def keep(self, rows: SlotRows | BatchRows) -> None:
        """Keep the memory of rows that have ended for the next ones, on a device with graphs."""
        if isinstance(rows, SlotRows) and self.key_multiple > 1:
            self.memory = rows.memory

    def rows(self, limits: TurnLimits) -> SlotRows | BatchRows:
        """Rows in slots if the model supports it, or in batches; on paths checked for rows of this length."""
        options, paths = self.options, self.paths(limits.row_tokens)
        if paths.cache == "in_place" and self.keeps_slots:
            return self._slot_rows(paths, num_slots(self.model, limits, options.max_rows), limits)

        def new_reader() -> BatchReader:
            return BatchReader(self.decoded_model, paths, repeats=options.share_prefix, routing=self.routing)

        drops = options.drop_finished and paths.drops_rows
        return BatchRows(new_reader, self.device, self.pad_id, options.max_rows, drops)

    def paths(self, row_tokens: int) -> ModelPaths:
        """The fastest paths of the model for rows of this length whose log-probs were right so far."""
        paths = paths_for(self.model, row_tokens)
        if paths.cache == "in_place":
            if self.keeps_slots is None:
                self.keeps_slots = self._prove_slots(paths)
            if not self.keeps_slots:
                paths = replace(paths, shares_prefix=False)
        while decoding_name(paths) in self._wrong and (plainer := plainer_decoding(paths)) is not None:
            paths = plainer
        return paths

    def _slot_rows(
        self, paths: ModelPaths, count: int, limits: TurnLimits, shares_from: int = WORTH_SHARING
    ) -> SlotRows:
        """Rows in slots; prompts are shared if that is correct and rounds like separate rows, and steps are no graphs,
        which would be those of one group of prompts."""
        is_exact = self.autocast is None and self.model.dtype in (torch.float32, torch.float64)
        shares = self.options.share_prefix and paths.shares_prefix and is_exact and self.key_multiple == 1
        memory, self.memory = self.memory, None  # of these rows alone, until they have ended
        return SlotRows(
            self.decoded_model,
            count,
            limits.row_tokens,
            is_single=limits.is_single,
            key_multiple=self.key_multiple,
            reads_once=self.options.share_prefix,
            shares_from=shares_from if shares else None,
            routing=self.routing,
            images=lambda: self.images,
            memory=memory,
        )

    @functools.cached_property
    def images(self) -> ImageRows:
        """Placement of images in rows.

        Raises:
            ConfigError: it does not.
        """
        return ImageRows(self.decoded_model)

    def _prove_slots(self, paths: ModelPaths) -> bool:
        """Check whether keys and values may be kept in slots, and padded to a multiple of keys; logs why if not."""
        fault = slots_fault(self.model.config, paths)
        while fault is None:
            try:
                distance = 0.0
                for is_single in (False, True):
                    rows = self._slot_rows(paths, 4, TurnLimits(16, is_single=is_single), shares_from=4)
                    distance = max(distance, slots_distance(rows))
                    self.keep(rows)
                if distance <= allowed(self.model, self.autocast):
                    return True
                fault = f"log-probs differ by {distance:.3g} nats"
            except Exception as error:  # noqa: BLE001 - a model's code may raise anything
                fault = f"{type(error).__name__}: {error}"
            if self.key_multiple > 1:
                log.warning("Each new token uses its exact length of keys, without padding: %s.", fault)
                self.key_multiple, fault = 1, None
        log.warning("Rows are decoded in batches, and each turn of an episode from its whole row: %s.", fault)
        return False

    def decoding_gap(self, rows: DataProto) -> float:
        """Distance of the log-probs of some rows from a plain forward pass of each row alone, without a cache. If one
        exceeds `gap_bound`, rows whose plain passes differ as much among themselves are left out."""
        chosen = rows[chosen_rows(rows)]
        expected, mask = self._plain_log_probs(chosen), chosen["response_mask"]
        gaps = row_gaps(chosen["rollout_log_probs"], expected, mask)
        if float(gaps.max()) > self.gap_bound:
            tail = tail_for(self.model, longest_row(chosen))
            gaps = beyond_noise(gaps, row_gaps(self._plain_log_probs(chosen, tail), expected, mask))
        return float(gaps.max())

    @torch.no_grad()
    def _plain_log_probs(self, chosen: DataProto, tail: int = 0) -> Tensor:
        """Log-probs [B T] by a forward pass of each row alone, with `tail` tokens appended."""
        x, expected = chosen.batch, torch.zeros_like(chosen["rollout_log_probs"])
        width = x["input_ids"].shape[1] - expected.shape[1]
        for row, is_read in enumerate(x["attention_mask"].bool()):
            count = int(is_read[width:].sum())
            if not count:
                continue
            tokens = x["input_ids"][row, is_read][None].to(self.device)
            read = torch.cat([tokens, tokens[:, -1:].expand(-1, tail)], dim=1)
            images = None
            if has_images(chosen):
                whole = self.images.of_media(row_media(chosen[row]), tokens.cpu(), torch.ones_like(tokens).cpu())
                images = None if whole is None else whole.to(self.device).alone(tail)
            inputs: dict[str, Any] = {"input_ids": read, "use_cache": False, "logits_to_keep": count + 1 + tail}
            if WEIGHTS in chosen:
                inputs["adapter_names"] = [chosen[WEIGHTS][row]]
            with computing_in(self.autocast, self.model):
                out = call_model(self.model, images, **inputs)
            states = response_positions(out.logits[:, : out.logits.shape[1] - tail], count)
            expected[row, :count] = log_probs_of(states, tokens[:, -count:], self.options.temperature)[0].to(expected)
        return expected

    def fall_back(self, gap: float, rows: DataProto) -> None:
        """Use the next simpler decoding path from now on.

        Raises:
            LogProbGapError: there is none.
        """
        before = self.paths(longest_row(rows))
        self._wrong.add(decoding_name(before))
        after = plainer_decoding(before)
        problem = (
            f"rollout=hf draws from a {type(unwrapped(self.model)).__name__} by {decoding_name(before)}: log-probs of "
            f"drawn tokens differ by {gap:.2g} nats from those of a plain forward pass of their row, in rows of up to "
            f"{longest_row(rows)} tokens"
        )
        if after is None:
            raise LogProbGapError(f"{problem}. Choose another attention implementation or another model.", gap, 0.0)
        log.warning("%s. They are drawn again, from here on by %s.", problem, decoding_name(after))

    @property
    def token_sampler(self) -> TokenSampler:
        """The sampling rule of the current options."""
        return TokenSampler.of(self.options, self.seed, tuple(self.stop_ids.tolist()))

    @property
    def gap_bound(self) -> float:
        """The largest `decoding_gap` that rounding explains, in nats."""
        return bound_of(self.model.dtype, self.autocast)

    @property
    def decoded_model(self) -> Any:
        """The model that turns are decoded with; a subclass can have another."""
        return self.model

    def sampling_logits(self, logits: Tensor, turns: Sequence[LiveTurn], num_sampled: int) -> Tensor:
        """The logits [b V] that tokens are sampled from; a subclass can modify them. Log-probs are those of `logits`.

        Args:
            turns: of the rows; the same list until one starts or ends.
            num_sampled: number of sampled tokens of each turn, plus its `start`.
        """
        return logits


@dataclass(eq=False)
class LiveTurn:
    """A turn that is being generated.

    Attributes:
        start: number of the step that samples its first token.
        tokens, log_probs, routed: up to the last step at which a turn started or ended.
    """

    request: TurnRequest
    start: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    routed: list[Tensor] = field(default_factory=list)  # [k layers top_k], experts of the token before each token

    @property
    def limit(self) -> int:
        """Number of the step before which it ends."""
        return self.start + self.request.max_new_tokens

    def result(self, stop_ids: Sequence[int]) -> TurnResult:
        """The turn up to its stop token, if any."""
        end = next((place for place, token in enumerate(self.tokens, 1) if token in stop_ids), None)
        routed = torch.cat(self.routed)[:end].cpu() if self.routed else None
        episode, tokens = self.request.episode, self.tokens[:end]
        return TurnResult(episode, tokens, self.log_probs[:end], end is not None, routed)


class HFTurns(TurnQueue):
    """The decode loop: each step samples a token of every live turn and runs the model on it.

    Turns of episodes over slots are returned as they finish. Others are decoded to their end, and their log-probs
    compared with a plain forward pass whenever a row is longer than those before; see the module.

    Attributes:
        contexts: closed with it, or while it is paused.
        live: turns that are being generated; a new list whenever one starts or ends.
    """

    lookahead = 1

    def __init__(self, engine: HFEngine, limits: TurnLimits, dtype: torch.dtype):
        super().__init__()
        self.engine, self.limits, self.dtype, self.contexts = engine, limits, dtype, contextlib.ExitStack()
        self.token_sampler, self.rows = engine.token_sampler, engine.rows(limits)
        self._stopping = replace(self.token_sampler, seed=0, stop_ids=(), min_new_tokens=0)  # for rows that may stop
        self.experts = None if engine.routing is None else (engine.routing.layers, engine.routing.top_k)
        self.live: list[LiveTurn] = []
        self._next = NextToken(torch.zeros(0))
        self._sampled: list[tuple[Tensor, ...]] = []  # tokens, log-probs and experts since `live` is the same
        self._step = self._first_noise = self._next_limit = 0  # numbers of steps
        self._noise = torch.zeros(0)
        self._greedy: Tensor | bool = False
        self._is_over = torch.zeros(0, dtype=torch.bool)  # [b] has sampled a stop token, and stays until `_end`

    @property
    def num_pending(self) -> int:
        return len(self.queue) + len(self.live)

    def forget(self, episode: int) -> None:
        self.rows.forget(episode)

    def open_turns(self) -> list[TurnResult]:
        self._collect()
        return [turn.result(self.token_sampler.stop_ids) for turn in self.live]

    def end(self, episode: int) -> None:
        for turn in self.live:
            if turn.request.episode == episode:  # its limit is its next token
                turn.request = replace(turn.request, max_new_tokens=self._step + 1 - turn.start)
        self._set_live(self.live)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.contexts.close()
        yield
        self.contexts = self.engine.computing()
        self.rows.follow_weights()

    def close(self) -> None:
        super().close()
        self.live = []
        if self in self.engine.open:
            self.engine.open.discard(self)
            self.engine.keep(self.rows)
        self.contexts.close()

    @torch.no_grad()
    def advance(self) -> list[TurnResult]:
        """See `TurnEngine.advance`.

        Raises:
            LogProbGapError: no decoding path gives the log-probs of a plain forward pass.
        """
        if self.rows.keeps_episodes:
            self._add_late()
            return self._advance()
        if not self.queue:
            return []
        engine, turns = self.engine, list(self.queue)
        sampled = self._decode(turns)
        longest = max(len(turn.tokens) + len(made.tokens) for turn, made in zip(turns, sampled, strict=True))
        if longest > engine.longest_compared:
            rows = self._as_rows(turns, sampled)
            while (gap := engine.decoding_gap(rows)) > engine.gap_bound:
                engine.fall_back(gap, rows)
                self.rows = engine.rows(self.limits)
                self.queue.extend(turns)
                sampled = self._decode(turns)
                rows = self._as_rows(turns, sampled)
            engine.longest_compared = max(engine.longest_compared, longest_row(rows))
        return sampled

    def _decode(self, turns: list[TurnRequest]) -> list[TurnResult]:
        """Decode all turns of the queue, in its order. Late ones are appended, until a turn ends: they would hold up
        its result."""
        sampled: dict[int, TurnResult] = {}
        while self.num_pending:
            sampled |= {turn.episode: turn for turn in self._advance()}
            if not sampled and isinstance(self.rows, SlotRows):
                turns += self._add_late()
        return [sampled[turn.episode] for turn in turns]

    def _add_late(self) -> Sequence[TurnRequest]:
        if late := self.late():
            self.engine.paths(max(len(turn.tokens) + turn.max_new_tokens for turn in late))  # rows may be too long
            self.queue += late
        return late

    def _advance(self) -> list[TurnResult]:
        """Sample one token of every live turn; returns the turns that end."""
        report()
        if self.queue:
            self._admit()
        if not self.live:
            return []
        logits = self._next.logits
        if (picked := self._next.picked) is None:
            sampled_from = self.engine.sampling_logits(logits, self.live, self._step)
            tokens = self.token_sampler.pick(sampled_from, self._noise_now(), self._positions(), self._greedy)
            picked = tokens, self.token_sampler.log_probs(logits, tokens)
        tokens = picked[0]
        self._sampled.append((*picked, *([] if self._next.routed is None else [self._next.routed])))
        self._step += 1
        self._is_over |= torch.isin(tokens, self.engine.stop_ids)
        if self._step == self._next_limit or int(self._is_over.sum()) >= self.rows.fewest_ended(len(self.live)):
            return self._end(tokens)
        self._next = self.rows.read(tokens, self._pick())
        return []

    def _pick(self) -> Pick | None:
        """Sampling as a part of the step that reads the last tokens; None if rows are not padded, or if it needs values
        of the host."""
        if self.engine.key_multiple == 1:
            return None
        sampler, positions, is_greedy = self.token_sampler, self._positions(), self._greedy
        is_plain = type(self.engine).sampling_logits is HFEngine.sampling_logits and sampler.top_p == 1
        if not is_plain or isinstance(positions, Tensor) or isinstance(is_greedy, Tensor):
            return None
        return (self._stopping, is_greedy, self._noise_now()) if positions == sampler.min_new_tokens else None

    def _noise_now(self) -> Tensor:
        """Noise [b] of the next token."""
        if self._step == self._first_noise + NOISE_TOKENS:
            self._first_noise = self._step
            self._noise = self._noise_of(self.live)
        return self._noise[:, self._step - self._first_noise]

    def _admit(self) -> None:
        requests, following = self.rows.admit(self.queue)
        if following is None:
            return
        self._collect()
        turns = [LiveTurn(request, self._step - request.position) for request in requests]
        is_over = torch.zeros(len(turns), dtype=torch.bool, device=self.engine.device)
        if not self.live:
            self._next, self._first_noise = following, self._step
            self._noise, self._is_over = self._noise_of(turns), is_over
        else:
            self._next = NextToken.concat([self._next, following])
            self._noise = torch.cat([self._noise, self._noise_of(turns)])
            self._is_over = torch.cat([self._is_over, is_over])
        self._set_live([*self.live, *turns])

    def _end(self, tokens: Tensor) -> list[TurnResult]:
        """Remove turns that have ended, and run the model on the tokens [b] of the others."""
        self._collect()
        rows = enumerate(zip(self.live, self._is_over.tolist(), strict=True))
        ended = {row: turn for row, (turn, is_over) in rows if is_over or turn.limit == self._step}
        sampled = [turn.result(self.token_sampler.stop_ids) for turn in ended.values()]
        read = [turn.request.tokens + made.tokens[:-1] for turn, made in zip(ended.values(), sampled, strict=True)]
        order = self.rows.end(dict(zip(ended, read, strict=True)))
        self._set_live([self.live[row] for row in order])
        if order:
            going = torch.tensor(order, device=tokens.device)
            self._noise, self._is_over = self._noise[going], self._is_over[going]
            self._next = self.rows.read(tokens[going], self._pick())
        return sampled

    def _collect(self) -> None:
        """Append the tokens sampled since the last call to each live turn."""
        if not self._sampled:
            return
        tokens, log_probs, *routed = (torch.stack(columns, dim=1) for columns in zip(*self._sampled, strict=True))
        self._sampled = []
        for row, (turn, *lines) in enumerate(zip(self.live, tokens.tolist(), log_probs.tolist(), strict=True)):
            turn.tokens += lines[0]
            turn.log_probs += lines[1]
            turn.routed += [experts[row] for experts in routed]

    def _set_live(self, turns: list[LiveTurn]) -> None:
        self.live = turns
        self._next_limit = min((turn.limit for turn in turns), default=0)
        is_greedy = greedy_rows([turn.request for turn in turns]) if turns else False
        self._greedy = is_greedy if isinstance(is_greedy, bool) else is_greedy.to(self.engine.device)

    def _noise_of(self, turns: Sequence[LiveTurn]) -> Tensor:
        """Noise [b NOISE_TOKENS] of turns, the first column for the step `_first_noise`."""
        device, keys = self.engine.device, noise_keys([turn.request for turn in turns])
        if all(turn.request.greedy for turn in turns):
            return torch.zeros(len(turns), NOISE_TOKENS, dtype=torch.float64, device=device)
        first = torch.tensor([self._first_noise - turn.start for turn in turns], device=device)
        positions = first[:, None] + torch.arange(NOISE_TOKENS, device=device)
        return self.token_sampler.noise(keys.to(device)[:, :, None], positions.clamp_min(0))

    def _positions(self) -> Tensor | int:
        """Number of tokens of each turn so far, at most `min_new_tokens`; one number for all if they are equal."""
        least = self.token_sampler.min_new_tokens
        counts = [min(least, self._step - x.start) for x in (self.live if least else self.live[:1])]
        return counts[0] if len(set(counts)) == 1 else torch.tensor(counts, device=self.engine.device)

    def _as_rows(self, turns: Sequence[TurnRequest], sampled: Sequence[TurnResult]) -> DataProto:
        """Each turn as the response of a row whose prompt is everything before it; see `assemble`."""
        tokens, mask = left_padded([turn.tokens for turn in turns], self.engine.pad_id)
        prompt_ids = torch.tensor([turn.prompt_id for turn in turns])
        fields = {"prompts": tokens, "prompt_mask": mask, "prompt_ids": prompt_ids}
        prompts = DataProto.from_dict(fields | {"group_ids": torch.arange(len(turns))})
        sample_ids = torch.tensor([turn.sample_id for turn in turns])
        rows = assemble_turns(prompts, sampled, self, self.engine.pad_id, sample_ids=sample_ids)
        if any(turn.weights for turn in turns):
            rows = rows.union(DataProto.from_dict(non_tensors={WEIGHTS: [turn.weights for turn in turns]}))
        return rows.union(media_fields([(turn.media_key, turn.media) for turn in turns]))


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
    if limits.is_single or not limits.kv_cache_gib:
        return max_rows
    each = slot_bytes(model, limits.row_tokens)
    fitting = int(limits.kv_cache_gib * GIB // each)
    if fitting < 1:
        raise ConfigError(
            f"environment.kv_cache_gib is {limits.kv_cache_gib:g}: keys and values of one episode of "
            f"{limits.row_tokens} tokens take {each / GIB:.3g} GiB. Raise it, or lower environment.max_tokens."
        )
    return min(fitting, max_rows)
