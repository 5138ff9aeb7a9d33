"""`rollout=hf`: generation on the tensors that train, by a decode loop over transformers' key-value cache.

The log-probs of drawn tokens are compared with a plain forward pass of their row, in the first call and whenever a row
is longer than those compared before. Where they differ, the rows are drawn again by a plainer way of decoding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

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
from verl.models.parallel_info import Autocast, compute_device, computing_in, meet, weights_gathered
from verl.ops.cpu_matmul import packed_weights
from verl.ops.logprobs import log_probs_of, response_positions
from verl.protocol import DataProto
from verl.rollout.base import (
    ALONE,
    GenerationRequest,
    PlayEpisodes,
    Rollout,
    RolloutEngine,
    TurnEngine,
    TurnLimits,
    assemble,
    stop_tokens,
)
from verl.rollout.token_sampler import TokenSampler

log = logging.getLogger(__name__)

NOISE_TOKENS = 64  # positions per call of the noise generator


@component
class HFRollout(Rollout):
    """Generate with the training model itself, through transformers. No weights are copied, so there is no sync.

    Args:
        max_rows: responses decoded concurrently, or those of one prompt if they are more.
        share_prefix: compute each prompt once for all of its samples, if the model supports it. Affects speed only.
        drop_finished: remove finished rows from the batch once they are an eighth of it, if the model supports it.
            Affects speed only.
    """

    may_change: ClassVar[bool] = True
    takes_stages: ClassVar[bool] = True
    takes_experts: ClassVar[bool] = True
    takes_modules: ClassVar[bool] = True
    draws_turns: ClassVar[bool] = True
    no_turns_under: ClassVar[tuple[str, ...]] = ("tp",)  # its ranks must decode the same rows in lockstep
    tells_experts: ClassVar[bool] = True

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
        self._stops = tuple(self.stop_ids.tolist())
        self.key_multiple: int | None = None  # of lengths of keys, on another device than a CPU; found with the first
        self.keeps_slots: bool | None = None  # whether turns may keep keys and values; found with the first episode
        self.longest_compared = 0  # tokens of the longest row whose log-probs were compared
        self._wrong: set[str] = set()  # ways of decoding that gave other log-probs than a plain forward pass

    @torch.no_grad()
    def generate(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        """See `RolloutEngine.generate`. The draws depend on (seed, stream, step, prompt, sample, position) alone."""
        return self._with_whole_weights(prompts, lambda part: self.generate_rows(part, request))

    @torch.no_grad()
    def play(self, prompts: DataProto, play: PlayEpisodes) -> DataProto:
        """See `RolloutEngine.play`; each process plays the episodes of its own share of the prompts."""

        def play_own(part: DataProto) -> DataProto:
            rows = play([part])[0]
            if (divided := getattr(self.model, "divided", None)) is not None and divided.generation_groups:
                meet(divided)  # environments of one process may take long, and its siblings wait for the rows
            return rows

        return self._with_whole_weights(prompts, play_own)

    def _with_whole_weights(self, prompts: DataProto, make_rows: Callable[[DataProto], DataProto]) -> DataProto:
        """Rows of all prompts, generated with unsharded weights; processes with the same prompts divide them."""
        self.model.eval()
        divided = getattr(self.model, "divided", None)
        groups = () if divided is None else divided.generation_groups
        with weights_gathered(self.model), packed_weights(self.model):
            for group in groups:
                count, place = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
                prompts = prompts[len(prompts) * place // count : len(prompts) * (place + 1) // count]
            found = make_rows(prompts)
        for group in reversed(groups):
            parts: list[Any] = [None] * torch.distributed.get_world_size(group)
            torch.distributed.all_gather_object(parts, found, group=group)
            found = DataProto.concat(parts)
        return found

    def generate_rows(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        """As `generate`, for the prompts of this process alone, with whole weights in the model.

        Raises:
            LogProbGapError: no way of decoding gives the log-probs of a plain forward pass.
        """
        rows = self._draw(prompts, request)
        if longest_row(rows) <= self.longest_compared:
            return rows
        while (gap := self._decoding_gap(rows)) > bound_of(self.model.dtype, self.autocast):
            self._fall_back(gap, rows)
            rows = self._draw(prompts, request)
        self.longest_compared = max(self.longest_compared, longest_row(rows))
        return rows

    def _decoding_gap(self, rows: DataProto) -> float:
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

    def _fall_back(self, gap: float, rows: DataProto) -> None:
        """From here on decode by the next plainer way."""
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

    def _draw(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        n, options = request.num_samples, self.options
        shape = (len(prompts) * n, options.max_new_tokens)
        responses = torch.full(shape, self.pad_id, dtype=torch.int64)
        mask = torch.zeros(shape, dtype=torch.bool)
        log_probs = torch.zeros(shape, dtype=torch.promote_types(self.model.dtype, torch.float32))
        lengths, routed = prompts.batch["prompt_mask"].sum(dim=1), None
        if self.routing is not None:
            routed = torch.full((*shape, self.routing.layers, self.routing.top_k), -1, dtype=torch.int16)
        longest = int(lengths.max()) if len(prompts) else 0
        decoder = replace(self.decoder(longest), key_multiple=self.proven_key_multiple(longest))
        for rows in decoder.batches(lengths, options.max_rows // n):
            part = prompts[rows].to(self.device)
            width = int(lengths[rows].max())
            tokens, attention = part.batch["prompts"][:, -width:], part.batch["prompt_mask"][:, -width:]
            with computing_in(self.autocast, self.model):
                out = decoder.decode(tokens, attention, n, self.chooser(part, request))
            target = (rows[:, None] * n + torch.arange(n)).flatten()
            pairs = [(responses, out.responses), (mask, out.mask), (log_probs, out.log_probs), (routed, out.routed)]
            for whole, made in pairs:
                if whole is not None:
                    whole[target] = made.to(whole.device)
        return assemble(prompts, n, responses, mask, log_probs, self.pad_id, routed=routed)

    def turns(self, request: GenerationRequest, limits: TurnLimits) -> TurnEngine:
        """See `RolloutEngine.turns`; the draws depend on (seed, stream, step, prompt, sample, turn, position) alone."""
        from verl.rollout.hf_slots import num_slots, prove_slots, turn_engine  # brings transformers

        self.model.eval()
        decoder = self.decoder(limits.row_tokens - self.options.max_new_tokens)
        if self.keeps_slots is None:
            self.keeps_slots = prove_slots(self.model, self.autocast, decoder)
        sampler = TokenSampler.of(self.options, request, self.seed, self._stops)
        slots = num_slots(self.model, limits, self.options.max_rows) if self.keeps_slots else 0
        return turn_engine(self.model, self.autocast, decoder, sampler, self.stop_ids, slots, self.keeps_slots)

    def proven_key_multiple(self, longest_prompt: int) -> int:
        """Of which lengths of keys are: on a GPU 64, where that was shown to be right for this model."""
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
        """The decoding loop for prompts of up to so many tokens, on paths checked for the model at this length."""
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

    def chooser(self, prompts: DataProto, request: GenerationRequest) -> Choose:
        """The function that samples the next tokens of these prompts' responses; a subclass can modify the logits
        first."""
        n = request.num_samples
        prompt_ids = prompts.batch["prompt_ids"].repeat_interleave(n)
        sample_ids = torch.arange(n, device=self.device).repeat(len(prompts))
        drawing = TokenSampler.of(self.options, request, self.seed, self._stops)

        noise = torch.empty(0)  # of NOISE_TOKENS positions of all rows: many small kernels at once

        def choose(logits: Tensor, rows: Tensor, t: int) -> Tensor:
            nonlocal noise
            if t % NOISE_TOKENS == 0 and not request.greedy:
                positions = torch.arange(t, t + NOISE_TOKENS, device=self.device)
                noise = drawing.noise(prompt_ids[:, None], sample_ids[:, None], positions)
            return drawing.pick(logits, noise if request.greedy else noise[rows, t % NOISE_TOKENS], t)

        return choose
