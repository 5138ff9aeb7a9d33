"""Episodes of several turns with a tool that takes half a second, against the bound and against batches turn by turn.

    python benchmarks/agents.py

64 episodes of 4 turns; the tool sleeps. The bound is max(seconds of drawing alone, longest chain of calls): what could
not be less if drawing and waiting overlapped in full. `batches` draws the turns of all episodes, then calls the tools
one after another, as loops that are written turn by turn do; `batches_side_by_side` calls the tools of a turn together.
Beside that, tokens per second of a second turn on histories of 512 tokens, with keys and values kept and without.
Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from verl.component import BuildContext, component
from verl.environments.base import EnvironmentDescription, EnvironmentFactory, StepResult
from verl.environments.episode_loop import EpisodeEngine
from verl.models.tiny import TinyModel
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest, TurnLimits, TurnRequest
from verl.rollout.hf import HFRollout

TURN_TOKENS = 24


class Sleeping:
    """Every turn but the last takes the tool's time."""

    def __init__(self, options: Sleeper):
        self.options, self.turn = options, 0

    async def reset(self, row: Any, seed: int) -> None:
        self.turn = 0

    async def step(self, action: Any) -> StepResult:
        self.turn += 1
        if self.turn >= self.options.turns:
            return StepResult(terminated=True)
        await asyncio.sleep(self.options.tool_s)
        return StepResult("result 12345\n")


class SleepingFactory(EnvironmentFactory):
    def __init__(self, options: Sleeper):
        self.options = options

    def make(self) -> Sleeping:
        return Sleeping(self.options)


@component
class Sleeper(EnvironmentDescription):
    turns: int = 4
    tool_s: float = 0.5

    def factory(self, context: BuildContext) -> EnvironmentFactory:
        return SleepingFactory(self)


def prompts_of(tokenizer: Any, number: int) -> DataProto:
    ids = [tokenizer(f"question {i:04d} ").input_ids for i in range(number)]
    return DataProto.from_dict(
        {
            "prompts": torch.tensor(ids),
            "prompt_mask": torch.ones(number, len(ids[0]), dtype=torch.bool),
            "prompt_ids": torch.arange(number),
            "group_ids": torch.arange(number),
        }
    )


def wall_s(model: Any, tokenizer: Any, episodes: int, turns: int, tool_s: float) -> float:
    """Seconds of one call for episodes; every token may end a turn, drawn by chance of about one in 24."""
    stops = tuple(range(6, 10))  # of 100 tokens that an untrained model draws alike
    rollout = HFRollout(max_new_tokens=128, stop_token_ids=stops)
    options = Sleeper(turns=turns, tool_s=tool_s, max_turns=turns, max_tokens=900, max_concurrent=episodes)
    engine = EpisodeEngine(
        options, rollout.attach(model, tokenizer, 0), rollout, tokenizer, (1, *stops), BuildContext()
    )
    try:
        prompts = prompts_of(tokenizer, episodes)
        engine.generate(prompts[:2], GenerationRequest(0, 1))
        begin = time.perf_counter()
        engine.generate(prompts, GenerationRequest(1, 1))
        return time.perf_counter() - begin
    finally:
        engine.close()


def second_turn_tokens_per_s(model: Any, tokenizer: Any, rows: int, history: int, keeps: bool) -> float:
    """New tokens per second of a second turn of TURN_TOKENS, after a history of so many tokens."""
    engine = HFRollout(max_new_tokens=TURN_TOKENS).attach(model, tokenizer, 0)
    if not keeps:
        engine._keeps_slots = False
    engine.stop_ids = torch.tensor([0])
    turns = engine.turns(GenerationRequest(0), TurnLimits(history + 4 * TURN_TOKENS, 2.0))
    texts = {row: [6 + (7 * i + row) % 90 for i in range(history - TURN_TOKENS)] for row in range(rows)}

    def play(turn: int) -> float:
        begin = time.perf_counter()
        for row, tokens in texts.items():
            turns.add(TurnRequest(row, list(tokens), row, 0, turn, TURN_TOKENS))
        while turns.num_pending:
            for drawn in turns.advance():
                texts[drawn.episode] += [*drawn.tokens, 10, 11, 12]
        return time.perf_counter() - begin

    play(0)
    return rows * TURN_TOKENS / play(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tool-s", type=float, default=0.5)
    given = parser.parse_args()
    source = TinyModel(context_length=1024)
    model, tokenizer = source.load_causal_lm("cpu"), source.load_tokenizer()
    decode_s = wall_s(model, tokenizer, given.episodes, given.turns, 0.0)
    ours_s = wall_s(model, tokenizer, given.episodes, given.turns, given.tool_s)
    chain_s = (given.turns - 1) * given.tool_s
    bound_s = max(decode_s, chain_s)
    kept, whole = (second_turn_tokens_per_s(model, tokenizer, 16, 512, keeps) for keeps in (True, False))
    found = {
        "episodes": given.episodes,
        "turns": given.turns,
        "tool_s": given.tool_s,
        "decode_s": round(decode_s, 3),
        "chain_s": chain_s,
        "bound_s": round(bound_s, 3),
        "ours_s": round(ours_s, 3),
        "ours_to_bound": round(ours_s / bound_s, 3),
        "batches_side_by_side_to_bound": round((decode_s + chain_s) / bound_s, 3),
        "batches_to_bound": round((decode_s + chain_s * given.episodes) / bound_s, 3),
        "second_turn_tokens_per_s": {
            "kept": round(kept, 1),
            "whole_rows": round(whole, 1),
            "ratio": round(kept / whole, 2),
        },
        "load": [round(x, 1) for x in os.getloadavg()],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
