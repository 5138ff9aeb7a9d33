"""Episodes of several turns with a tool that takes half a second, against the bound and against TRL's loop of tools.

    python benchmarks/agents.py                       three to four minutes, most of it TRL's
    python benchmarks/agents.py --alone               without TRL
    python benchmarks/agents.py --episodes 4 --tool-s 0.05      to see that it runs

64 episodes of 4 turns; the tool sleeps. The bound is max(seconds of drawing alone, longest chain of calls): what could
not be less if drawing and waiting overlapped in full. `chain_of_an_episode_s` is that of the longest episode, its own
drawing included as it is alone: no order of work can be faster than it. `batches` draws the turns of all episodes, then
calls the tools one after another, as loops that are written turn by turn do; `batches_side_by_side` calls the tools of
a turn together; both are calculated from the seconds of drawing. TRL is measured: `GRPOTrainer._generate` with the same
tool, a turn ending by chance in both, under the same probability of its last token, and its parser told that every turn
but the last is a call. Beside that, tokens per second of a second turn on histories of 512 tokens: with keys and values
kept, without, and TRL's. All on a Qwen2 with random weights. Prints one JSON line after each part, the last one with
all.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import _workload as work
import torch

from verl.component import BuildContext, component
from verl.environments.base import EnvironmentDescription, EnvironmentFactory, StepResult
from verl.environments.episode_loop import EpisodeGenerator
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest, TurnLimits, TurnRequest
from verl.rollout.hf import HFRollout

TURN_TOKENS = 24  # of a turn, on average; of the second turn, exactly
HISTORY, ROWS = 512, 16
CONTEXT = 2048
RESULT = "result 12345\n"


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
        return StepResult(RESULT)


@component
class Sleeper(EnvironmentDescription):
    turns: int = 4
    tool_s: float = 0.5

    def factory(self, context: BuildContext) -> EnvironmentFactory:
        return EnvironmentFactory(lambda: Sleeping(self))


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


def loaded(directory: str, ends: bool) -> tuple[Any, Any]:
    """The model and its tokenizer.

    Args:
        ends: the last token of a turn comes with a probability of 1 in TURN_TOKENS; else never.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    size = model.config.vocab_size
    bias = math.log((size - 1) / (TURN_TOKENS - 1)) if ends else -math.inf  # over logits that are nearly equal

    def biased(module: Any, inputs: Any, logits: Any) -> Any:
        logits[..., work.END] += bias
        return logits

    model.lm_head.register_forward_hook(biased)
    return model, AutoTokenizer.from_pretrained(directory)


def wall_s(model: Any, tokenizer: Any, episodes: int, turns: int, tool_s: float, alone: bool = False) -> float:
    """Seconds of one call for episodes.

    Args:
        alone: of the longest episode, drawn by itself.
    """
    rollout = HFRollout(max_new_tokens=128)
    options = Sleeper(turns=turns, tool_s=tool_s, max_turns=turns, max_tokens=900, max_concurrent=episodes)
    engine = EpisodeGenerator(
        options, rollout.attach(model, tokenizer, 0), rollout, tokenizer, (work.END,), BuildContext()
    )
    try:
        prompts = prompts_of(tokenizer, episodes)
        engine.generate(prompts[:2], GenerationRequest(0, 1))
        request = GenerationRequest(1, 1)
        if alone:
            drawn = engine.generate(prompts, request)["response_mask"].sum(dim=1)
            prompts = prompts[[int(drawn.argmax())]]
        begin = time.perf_counter()
        engine.generate(prompts, request)
        return time.perf_counter() - begin
    finally:
        engine.close()


def second_turn_tokens_per_s(model: Any, tokenizer: Any, keeps: bool) -> float:
    """New tokens per second of a second turn of TURN_TOKENS, after a history of HISTORY tokens."""
    engine = HFRollout(max_new_tokens=TURN_TOKENS).attach(model, tokenizer, 0)
    if not keeps:
        engine.keeps_slots = False
    turns = engine.turns(TurnLimits(HISTORY + 4 * TURN_TOKENS, 2.0))
    texts = {row: history(row)[: HISTORY - TURN_TOKENS] for row in range(ROWS)}

    def play(turn: int) -> float:
        begin = time.perf_counter()
        for row, tokens in texts.items():
            turns.add(TurnRequest(row, list(tokens), row, 0, turn, TURN_TOKENS))
        while turns.num_pending:
            for drawn in turns.advance():
                texts[drawn.episode] += [*drawn.tokens, 10, 11, 12]
        return time.perf_counter() - begin

    play(0)
    return ROWS * TURN_TOKENS / play(1)


def history(row: int) -> list[int]:
    return [3 + (7 * i + row) % 40 for i in range(HISTORY)]


def trl_trainer(directory: str, model: Any, tokenizer: Any, max_turn_tokens: int, tools: list[Callable]) -> Any:
    """TRL's trainer with tools, of which only the generation is asked."""
    import trl
    from datasets import Dataset

    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{{ c.function.arguments }}{% endfor %}\n{% endfor %}"
    )
    tokenizer.response_schema = {"type": "object"}  # it asks for one; the parser is replaced
    arguments = trl.GRPOConfig(
        output_dir=directory + "/trl", use_cpu=True, bf16=False, fp16=False, per_device_train_batch_size=2,
        num_generations=2, max_completion_length=max_turn_tokens, temperature=1.0, top_p=1.0, top_k=0, use_vllm=False,
        report_to="none", disable_tqdm=True, save_strategy="no", gradient_checkpointing=False,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in ("0=", "1=")])
    return trl.GRPOTrainer(
        model=model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=arguments,
        processing_class=tokenizer, train_dataset=rows, tools=tools,
    )  # fmt: skip


def trl_wall_s(directory: str, episodes: int, turns: int, tool_s: float) -> float:
    """Seconds of TRL's loop: the same number of turns, of lengths by the same chance."""
    from trl.trainer import grpo_trainer

    model, tokenizer = loaded(directory, ends=True)

    def wait() -> str:
        """Wait."""
        time.sleep(tool_s)
        return RESULT

    trainer = trl_trainer(directory, model, tokenizer, 900, [wait])
    trainer.generation_config.max_new_tokens = 128
    call = {"type": "function", "function": {"name": "wait", "arguments": {}}}
    parsed: dict[int, int] = {}

    def parse(tokenizer: Any, ids: list[int], prefix: Any = None, tools: Any = None) -> dict[str, Any]:
        number = len(parsed)  # turns of all episodes come in rounds
        parsed[number] = len(ids)
        return {"role": "assistant", "content": "x", "tool_calls": [call] if number < episodes * (turns - 1) else []}

    grpo_trainer.parse_response = parse
    trainer._sync_tool_dicts = [{"wait": wait}] * episodes
    trainer._async_tool_dicts = [{}] * episodes
    prompts = [[{"role": "user", "content": f"question {i:04d} "}] for i in range(episodes)]
    begin = time.perf_counter()
    with torch.no_grad():
        trainer._generate(prompts)
    took = time.perf_counter() - begin
    assert len(parsed) == episodes * turns, f"TRL drew {len(parsed)} turns, not {episodes * turns}"
    return took


def trl_second_turn_tokens_per_s(directory: str) -> float:
    """The same of TRL, which reads a conversation anew for each of its turns."""
    model, tokenizer = loaded(directory, ends=False)

    def wait() -> str:
        """Wait."""
        return ""

    trainer = trl_trainer(directory, model, tokenizer, TURN_TOKENS, [wait])
    rows = [[*history(row), 10, 11, 12] for row in range(ROWS)]

    def play() -> float:
        begin = time.perf_counter()
        drawn, _ = trainer._generate_single_turn(rows, None, {}, 1)
        assert {len(ids) for ids in drawn} == {TURN_TOKENS}
        return time.perf_counter() - begin

    play()
    return ROWS * TURN_TOKENS / play()


def table_rows(found: dict[str, Any]) -> list[list[str]]:
    """Lines of the table of results, of what has been measured."""
    work_done = f"{found['episodes']} episodes of {found['turns']} turns with a tool of {found['tool_s']:g} s"
    rows = []
    if "ours_s" in found:
        ratio = f"{found['ours_s']:.2f} s, {found['ours_to_bound']:.2f}x"
        bound = f"max(drawing {found['decode_s']:.2f} s, calls of an episode {found['chain_s']:g} s); target 1.3x"
        rows.append([work_done, ratio, bound])
        one_by_one, together = found["batches_to_ours"], found["batches_side_by_side_to_ours"]
        against = "batches turn by turn, calculated"
        rows.append([work_done, f"{one_by_one:.1f}x as fast", f"{against}: calls one after another; target 3x"])
        rows.append([work_done, f"{together:.2f}x as fast", f"{against}: all calls of a turn together"])
    if "trl_s" in found:
        rows.append([work_done, f"{found['trl_to_ours']:.1f}x as fast", f"TRL's loop of tools, {found['trl_s']:.1f} s"])
    if "second_turn_to_trl" in found:
        speed = f"{found['second_turn_tokens_per_s']:.0f} tokens/s, {found['second_turn_to_trl']:.2f}x"
        theirs = f"TRL, {found['trl_second_turn_tokens_per_s']:.0f} tokens/s; target 2x"
        rows.append([f"second turn of {ROWS} episodes after {HISTORY} tokens", speed, theirs])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tool-s", type=float, default=0.5)
    parser.add_argument("--alone", action="store_true", help="without TRL")
    given = parser.parse_args()
    os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    found: dict[str, Any] = {"episodes": given.episodes, "turns": given.turns, "tool_s": given.tool_s}

    def tell(**facts: Any) -> None:
        found.update({name: round(x, 3) if isinstance(x, float) else x for name, x in facts.items()})
        print(json.dumps(found | {"load": round(os.getloadavg()[0], 1), "rows": table_rows(found)}), flush=True)

    with tempfile.TemporaryDirectory() as directory:
        found["parameters"] = work.write_model(Path(directory), 128, 2, CONTEXT)
        model, tokenizer = loaded(directory, ends=True)
        seconds = functools.partial(wall_s, model, tokenizer, given.episodes, given.turns)
        decode_s, ours_s = seconds(0.0), seconds(given.tool_s)
        chain_s = (given.turns - 1) * given.tool_s
        bound_s = max(decode_s, chain_s)
        tell(
            decode_s=decode_s,
            chain_s=chain_s,
            chain_of_an_episode_s=seconds(given.tool_s, alone=True),
            bound_s=bound_s,
            ours_s=ours_s,
            ours_to_bound=ours_s / bound_s,
            batches_side_by_side_to_ours=(decode_s + chain_s) / ours_s,
            batches_to_ours=(decode_s + chain_s * given.episodes) / ours_s,
        )
        model, tokenizer = loaded(directory, ends=False)
        kept, whole = (second_turn_tokens_per_s(model, tokenizer, keeps) for keeps in (True, False))
        tell(second_turn_tokens_per_s=kept, second_turn_of_whole_rows_tokens_per_s=whole, kept_to_whole=kept / whole)
        if not given.alone:
            theirs = trl_second_turn_tokens_per_s(directory)
            tell(trl_second_turn_tokens_per_s=theirs, second_turn_to_trl=kept / theirs)
            trl_s = trl_wall_s(directory, given.episodes, given.turns, given.tool_s)
            tell(trl_s=trl_s, trl_to_ours=trl_s / ours_s)


if __name__ == "__main__":
    main()
