"""Turns in the vLLM process: requests that come and go, beside vLLM's cache of prefixes.

A turn is a request whose prompt is its episode so far; vLLM finds the blocks of keys and values that earlier turns, and
other samples of a prompt, left in its prefix cache. `PrefixCacheCheck` asserts that none of those outlive a change of
the weights.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from verl.errors import RolloutError
from verl.rollout.base import TurnRequest
from verl.rollout.token_sampler import TokenSampler
from verl.rollout.vllm.messages import NumberedTurn, TurnOutput
from verl.rollout.vllm.server.logits_processor import TURN


def sampling_worker(llm: Any) -> int:
    """Number of the worker whose samples vLLM takes: the first of the last pipeline stage."""
    parallel = llm.llm_engine.vllm_config.parallel_config
    return parallel.world_size - parallel.tensor_parallel_size


class EngineTurns:
    """Turns under way in an engine.

    Args:
        capacity: concurrent turns; further ones wait here.
        records_experts: the experts of each turn are part of the output.
    """

    def __init__(
        self,
        llm: Any,
        drawing: TokenSampler,
        capacity: int,
        lora_request: Any,
        check: PrefixCacheCheck,
        records_experts: bool = False,
    ):
        self.llm, self.drawing, self.lora_request, self.check = llm, drawing, lora_request, check
        self.records_experts = records_experts
        self._free = list(range(capacity - 1, -1, -1))
        self._waiting: deque[NumberedTurn] = deque()
        self._open: dict[str, tuple[NumberedTurn, int]] = {}  # request -> turn and its row of log-probs
        self._ids: dict[str, str] = {}  # request -> its name in vLLM

    def advance(self, new: Sequence[NumberedTurn], budget_s: float, until_all: bool) -> TurnOutput:
        """Add new turns, and generate until one has ended, or all of them, or the time has passed."""
        self._waiting.extend(new)
        engine, deadline = self.llm.llm_engine, time.monotonic() + budget_s
        output = TurnOutput(experts=[] if self.records_experts else None)
        self._admit()
        while self._open:
            if ended := [answer for answer in engine.step() if answer.finished]:
                self._collect(ended, output)
                self._admit()
            if (output.numbers and not until_all) or time.monotonic() > deadline:
                break
        return output

    def open(self) -> TurnOutput:
        """Turns that have begun and are not finished, as far as they have been drawn."""
        states, output = self.llm.llm_engine.output_processor.request_states, TurnOutput()
        drawn = {name: list(states[self._ids[name]].detokenizer.output_token_ids) for name in self._open}
        begun = [name for name, tokens in drawn.items() if tokens]
        self._read([self._open[name] for name in begun], [drawn[name] for name in begun], output)
        return output

    def close(self) -> None:
        """Give up what is under way."""
        self._waiting.clear()
        if self._open:
            self.llm.llm_engine.abort_request(list(self._open))
            self._open.clear()
            self._ids.clear()

    def _admit(self) -> None:
        while self._free and self._waiting:
            turn, row = self._waiting.popleft(), self._free.pop()
            request: TurnRequest = turn.request
            name = f"turn-{turn.number}"
            sampling_params = SamplingParams(  # greedy, since `CounterNoiseProcessor` leaves a single token
                temperature=0.0,
                max_tokens=request.max_new_tokens - request.position,
                ignore_eos=True,
                detokenize=False,
                stop_token_ids=list(self.drawing.stop_ids),
                extra_args={TURN: (row, int(request.greedy), *request.noise_key, request.position)},
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            self._ids[name] = self.llm.llm_engine.add_request(
                name, {"prompt_token_ids": request.tokens}, sampling_params, lora_request=self.lora_request
            )
            self._open[name] = turn, row

    def _collect(self, ended: Sequence[Any], output: TurnOutput) -> None:
        """Append the turns that have ended, and free their rows."""
        turns = [self._open.pop(answer.request_id) for answer in ended]
        tokens = [list(answer.outputs[0].token_ids) for answer in ended]
        self._read(turns, tokens, output)
        for answer, (turn, row), token_ids in zip(ended, turns, tokens, strict=True):
            del self._ids[answer.request_id]
            self._free.append(row)
            self.check.note(turn.request.tokens, token_ids)
        output.cached_tokens += sum(answer.num_cached_tokens or 0 for answer in ended)

    def _read(self, turns: Sequence[tuple[NumberedTurn, int]], tokens: Sequence[list[int]], output: TurnOutput) -> None:
        """Append turns with the log-probs of their tokens."""
        if not turns:
            return
        rows = [row for _, row in turns]
        of_workers = self.llm.collective_rpc("verl_rows", args=(rows, max(map(len, tokens))))
        log_probs, experts = of_workers[sampling_worker(self.llm)]
        for index, ((turn, _), token_ids) in enumerate(zip(turns, tokens, strict=True)):
            output.numbers.append(turn.number)
            output.tokens.append(token_ids)
            output.log_probs.append(log_probs[index, : len(token_ids)].tolist())
            if output.experts is not None and experts is not None:
                output.experts.append(experts[index, : len(token_ids)].clone())


class PrefixCacheCheck:
    """Ensures that the prefix cache is empty after a change of the weights.

    An earlier row is requested again: tokens of it that come from the cache belong to former weights.
    """

    def __init__(self, llm: Any):
        self.llm = llm
        self._block = int(llm.llm_engine.vllm_config.cache_config.block_size)
        self._row: list[int] = []  # the beginning of what was drawn last, longer than a block
        self._is_due = False

    def note(self, prompt: Sequence[int], response: Sequence[int]) -> None:
        """A row was drawn; its keys and values may be in the cache."""
        if len(prompt) + len(response) > self._block:
            self._row = [*prompt[: self._block + 1], *response[: max(0, self._block + 1 - len(prompt))]]

    def forget(self) -> None:
        """Have vLLM forget all keys and values.

        Raises:
            RolloutError: it says that it did not.
        """
        if not self.llm.reset_prefix_cache():
            raise RolloutError("vLLM did not forget the keys and values of the former weights")
        self._is_due = True

    def assert_forgotten(self, lora_request: Any) -> None:
        """After `forget`, before anything is drawn by the new weights.

        Raises:
            RolloutError: keys and values of former weights would be used.
        """
        is_due, self._is_due = self._is_due, False
        row, self._row = self._row, []
        if not is_due or not row:
            return
        (output,) = self.llm.generate(
            [{"prompt_token_ids": row}],
            SamplingParams(temperature=0.0, max_tokens=1, detokenize=False),
            use_tqdm=False,
            lora_request=lora_request,
        )
        if output.num_cached_tokens:
            raise RolloutError(
                "vLLM was told to forget the keys and values of the former weights, and took "
                f"{output.num_cached_tokens} of the {len(row)} tokens of an earlier row from its prefix cache. Set "
                "rollout.prefix_caching=false."
            )
