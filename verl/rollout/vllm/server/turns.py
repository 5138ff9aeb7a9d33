"""Turns in the vLLM process: its requests, and its prefix cache.

A turn is a request whose prompt is its episode so far; vLLM finds the blocks of keys and values of earlier turns, and
of other samples of a prompt, in its prefix cache. The version of the weights is the `cache_salt` of a request, which
enters the hash of its first block and thereby of all others: a request finds only keys and values of its version.

Weights may change while turns are open. Turns that have sampled a token continue with their keys and values, and write
further blocks under their first version, which later requests do not match. Others start again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from verl.rollout.base import TurnRequest
from verl.rollout.engine_process.messages import TurnOutput
from verl.rollout.token_sampler import TokenSampler
from verl.rollout.vllm.server.images import multi_modal_prompt
from verl.rollout.vllm.server.logits_processor import TURN


def sampling_worker(llm: Any) -> int:
    """Number of the worker whose samples vLLM takes: the first of the last pipeline stage."""
    parallel = llm.llm_engine.vllm_config.parallel_config
    return parallel.world_size - parallel.tensor_parallel_size


class EngineTurns:
    """Open turns of an engine.

    Args:
        capacity: concurrent turns; further ones wait here.
        salt: version of the weights.
        records_experts: the experts of each turn are part of the output.
    """

    def __init__(
        self,
        llm: Any,
        drawing: TokenSampler,
        capacity: int,
        lora_request: Any,
        salt: str,
        records_experts: bool = False,
    ):
        self.llm, self.drawing, self.lora_request, self.salt = llm, drawing, lora_request, salt
        self.records_experts = records_experts
        self._free = list(range(capacity - 1, -1, -1))
        self._waiting: deque[TurnRequest] = deque()
        self._open: dict[str, tuple[TurnRequest, int]] = {}  # request -> turn and its row of log-probs
        self._ids: dict[str, str] = {}  # request -> its name in vLLM

    def advance(self, new: Sequence[TurnRequest], budget_s: float, until_all: bool) -> TurnOutput:
        """Add new turns, and generate until one has ended, or all of them, or the time has passed."""
        self._waiting.extend(new)
        engine, deadline = self.llm.llm_engine, time.monotonic() + budget_s
        output = TurnOutput(experts=[] if self.records_experts else None)
        self._admit()
        while self._open:
            if ended := [answer for answer in engine.step() if answer.finished]:
                self._collect(ended, output)
                self._admit()
            if (output.episodes and not until_all) or time.monotonic() > deadline:
                break
        return output

    def open(self) -> TurnOutput:
        """The unfinished turns, with the tokens sampled so far."""
        sampled_ids, output = self._sampled_tokens(), TurnOutput()
        begun = [name for name, tokens in sampled_ids.items() if tokens]
        self._read([self._open[name] for name in begun], [sampled_ids[name] for name in begun], output)
        return output

    def renew(self, salt: str) -> None:
        """Handle a change of the weights: turns without a sampled token restart, first in the queue, so that no prompt
        is processed by weights of two versions."""
        self.salt = salt
        for turn, row in reversed(self._abort([name for name, tokens in self._sampled_tokens().items() if not tokens])):
            self._waiting.appendleft(turn)
            self._free.append(row)

    def close(self) -> None:
        """Cancel all open turns."""
        self._waiting.clear()
        self._abort(list(self._open))

    def _sampled_tokens(self) -> dict[str, list[int]]:
        """The tokens so far of each request."""
        states = self.llm.llm_engine.output_processor.request_states
        return {name: list(states[self._ids[name]].detokenizer.output_token_ids) for name in self._open}

    def _abort(self, names: Sequence[str]) -> list[tuple[TurnRequest, int]]:
        self.llm.llm_engine.abort_request(list(names))
        return [self._remove(name) for name in names]

    def _remove(self, name: str) -> tuple[TurnRequest, int]:
        del self._ids[name]
        return self._open.pop(name)

    def _admit(self) -> None:
        while self._free and self._waiting:
            turn, row = self._waiting.popleft(), self._free.pop()
            name = f"episode-{turn.episode}"
            sampling_params = SamplingParams(  # greedy, since `CounterNoiseProcessor` leaves a single token
                temperature=0.0,
                max_tokens=turn.max_new_tokens - turn.position,
                ignore_eos=True,
                detokenize=False,
                stop_token_ids=list(self.drawing.stop_ids),
                extra_args={TURN: (row, int(turn.greedy), *turn.noise_key, turn.position)},
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt: Any = {"prompt_token_ids": turn.tokens, "cache_salt": self.salt}
            if turn.media is not None:
                config = self.llm.llm_engine.vllm_config.model_config.hf_config
                prompt = multi_modal_prompt(turn, self.salt, config)
            self._ids[name] = self.llm.llm_engine.add_request(
                name, prompt, sampling_params, lora_request=self.lora_request
            )
            self._open[name] = turn, row

    def _collect(self, ended: Sequence[Any], output: TurnOutput) -> None:
        """Append the turns that have ended, and free their rows."""
        turns = [self._remove(answer.request_id) for answer in ended]
        tokens = [list(answer.outputs[0].token_ids) for answer in ended]
        self._read(turns, tokens, output)
        self._free.extend(row for _, row in turns)
        output.cached_tokens += sum(answer.num_cached_tokens or 0 for answer in ended)

    def _read(self, turns: Sequence[tuple[TurnRequest, int]], tokens: Sequence[list[int]], output: TurnOutput) -> None:
        """Append turns with the log-probs of their tokens."""
        if not turns:
            return
        rows = [row for _, row in turns]
        of_workers = self.llm.collective_rpc("verl_rows", args=(rows, max(map(len, tokens))))
        log_probs, experts = of_workers[sampling_worker(self.llm)]
        for index, ((turn, _), token_ids) in enumerate(zip(turns, tokens, strict=True)):
            output.episodes.append(turn.episode)
            output.tokens.append(token_ids)
            output.log_probs.append(log_probs[index, : len(token_ids)].tolist())
            if output.experts is not None and experts is not None:
                output.experts.append(experts[index, : len(token_ids)].clone())
