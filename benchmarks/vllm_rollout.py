"""`rollout=vllm` beside vLLM alone, on the same requests in the same settings, and beside `rollout=hf`.

    python benchmarks/vllm_rollout.py                       a few minutes; --small for a look
    python benchmarks/vllm_rollout.py --models 100M         a larger model

Responses of equal and of long-tailed lengths. vLLM alone draws by its own generator, once with the log-probs of the
tokens and once without; ours has them, and its own noise, whose cost is also measured by itself. All take turns. Prints
a JSON line after each leg, the last one with all of them: response tokens per second, medians with quartiles.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import _workload as work
import torch
from _bare_vllm import BareEngine
from _progress import Progress

from verl.component import BuildContext
from verl.models.pretrained import Pretrained
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest
from verl.rollout.responses import ResponseGenerator
from verl.rollout.token_sampler import TokenSampler
from verl.rollout.vllm.engine_args import environment

SHAPES: dict[str, dict[str, int]] = {
    "2.6M": {"hidden": 256, "layers": 4, "mlp": 512, "kv_heads": 4},
    "100M": {"hidden": 768, "layers": 11},
}
SMALL = {"small": {"hidden": 128, "layers": 2}}
RULES = ("fixed", "longtail")
PROMPT_TOKENS, SAMPLES, CONTEXT, TARGET = 8, 8, 512, 0.9


def prompts_of(count: int) -> DataProto:
    """Prompts of equal length."""
    tokens = torch.randint(3, 40, (count, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    mask, numbers = torch.ones_like(tokens, dtype=torch.bool), torch.arange(count)
    return DataProto.from_dict({"prompts": tokens, "prompt_mask": mask, "prompt_ids": numbers, "group_ids": numbers})


def noise_us(vocabulary: int, rows: int) -> tuple[float, list[float]]:
    """Microseconds per token of drawing by our noise and recording the log-prob."""
    drawing, keys = TokenSampler(0, (1,)), torch.zeros(5, rows, dtype=torch.int64)
    keys[2] = torch.arange(rows)
    logits = torch.randn(rows, vocabulary)
    spent = []
    for position in range(50):
        start = time.perf_counter()
        tokens = drawing.pick(logits, drawing.noise(keys, position), position)
        drawing.log_probs(logits, tokens)
        spent.append((time.perf_counter() - start) / rows * 1e6)
    return work.spread(spent[10:], 2)


class Contest:
    """All ways to generate with one model.

    Args:
        directory: that the model is written to.
        shape: of the model.
    """

    def __init__(self, directory: Path, shape: dict[str, int], options: argparse.Namespace):
        self.options, rows = options, options.prompts * SAMPLES
        self.parameters = work.write_model(directory, **shape, context=CONTEXT)
        source = Pretrained(path=str(directory))
        self.model, self.tokenizer = source.load_causal_lm("cpu"), source.load_tokenizer()
        self.prompts = prompts_of(options.prompts)
        longest = max(options.new_tokens, 128)
        self.lengths = [longest]  # of each response, in the order of prompts and samples
        described = work.forced_vllm(self.lengths, SAMPLES, kv_cache_gib=1.0, max_num_seqs=rows)
        self.ours = described.attach(self.model, self.tokenizer, 0, None, BuildContext())
        self.sampler = ResponseGenerator(self.ours, described, work.PAD)
        variables = environment(described, BuildContext(), self.ours.setup.num_threads)
        self.bare = BareEngine(str(directory), self.ours.setup.setting.engine_arguments(), variables)

    def close(self) -> None:
        """End the engines."""
        self.ours.close()
        self.bare.close()

    def leg(self, rule: str, rounds: Iterable[int]) -> dict[str, Any]:
        """Each way in turn, round by round, of which the first one warms up."""
        lengths = work.response_lengths(rule, self.options.prompts * SAMPLES, self.options.new_tokens)
        ways = self._ways(lengths)
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for number in rounds:
            for name, run in ways.items():
                start = time.perf_counter()
                answer = run(number)
                seconds = time.perf_counter() - start
                tokens = answer["tokens"] if isinstance(answer, dict) else int(answer["response_mask"].sum())
                assert tokens == sum(lengths), (name, tokens, sum(lengths))
                if number:
                    rates[name].append(tokens / seconds)
        found: dict[str, Any] = {name: work.spread(values, 0) for name, values in rates.items()}
        for name in ("bare_with_log_probs", "bare", "hf"):
            ratios = [a / b for a, b in zip(rates["verl"], rates[name], strict=True)]
            found[f"to_{name}"] = work.spread(ratios, 2)
        return found | {"rounds": len(rates["verl"])}

    def _ways(self, lengths: list[int]) -> dict[str, Callable[[int], Any]]:
        self.lengths[:] = lengths
        asked = [row for row in self.prompts["prompts"].tolist() for _ in range(SAMPLES)]
        described = work.forced_rollout(lengths, len(set(lengths)) > 1, SAMPLES)
        loop = ResponseGenerator(described.attach(self.model, self.tokenizer, 0), described, work.PAD)
        plain = {"do": "generate", "prompts": asked, "lengths": lengths}
        return {
            "verl": lambda step: self.sampler.generate(self.prompts, GenerationRequest(step, SAMPLES)),
            "bare_with_log_probs": lambda step: self.bare.ask(**plain, log_probs=True),
            "bare": lambda step: self.bare.ask(**plain, log_probs=False),
            "hf": lambda step: loop.generate(self.prompts, GenerationRequest(step, SAMPLES)),
        }


def table_row(name: str, rule: str, found: dict[str, Any], options: argparse.Namespace) -> list[str]:
    case, lengths = found[rule], f"{options.new_tokens} tokens" if rule == "fixed" else "long-tailed lengths"
    (rate, rates), (ratio, ratios), (plain, plains) = case["verl"], case["to_bare_with_log_probs"], case["to_bare"]
    noise, noises = found["noise_us_per_token"]
    return [
        f"`rollout=vllm`, {name}, {options.prompts} prompts x {SAMPLES}, {lengths}",
        f"{rate:.0f} [{rates[0]:.0f}, {rates[1]:.0f}] tokens/s; noise {noise} {noises} us a token, "
        f"{noise * rate / 1e4:.1f}% of it",
        f"{ratio}x {ratios} vLLM alone with log-probs, {plain}x {plains} without, {case['to_hf'][0]}x `rollout=hf`; "
        f"target: {TARGET}x",
    ]


def measure(shapes: dict[str, dict[str, int]], options: argparse.Namespace) -> None:
    """All legs, one after another, each one printed with those before it."""
    progress = Progress("vllm_rollout", vars(options), options.budget_s)
    legs, rows, found = len(shapes) * len(RULES), [], {}
    for name, shape in shapes.items():
        with tempfile.TemporaryDirectory() as directory:
            progress.say(f"{name}: starting both engines")
            contest = Contest(Path(directory), shape, options)
            with contextlib.closing(contest):
                noise = noise_us(len(contest.tokenizer), options.prompts * SAMPLES)
                found[name] = {"parameters": contest.parameters, "noise_us_per_token": noise}
                for rule in RULES:
                    rounds = progress.rounds(f"{name}, {rule}", options.rounds, legs - len(rows))
                    found[name][rule] = contest.leg(rule, rounds)
                    rows.append(table_row(name, rule, found[name], options))
                    progress.publish(found, rows, is_complete=len(rows) == legs)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="2.6M", help=f"which to measure, of {', '.join(SHAPES)} (default 2.6M)")
    parser.add_argument("--small", action="store_true", help="one tiny model, few repeats: to see that it works")
    parser.add_argument("--prompts", type=int, default=32, help="each with 8 samples (default 32)")
    parser.add_argument("--new-tokens", type=int, default=64, help="of responses of fixed length (default 64)")
    parser.add_argument("--rounds", type=int, default=7, help="samples of each way (default 7)")
    parser.add_argument("--threads", type=int, default=2, help="of both engines (default 2)")
    parser.add_argument("--budget-s", type=float, default=360, help="after which rounds are left out (default 360)")
    options = parser.parse_args()
    shapes = SMALL if options.small else {name: SHAPES[name] for name in options.models.split(",")}
    if options.small:
        options.prompts, options.new_tokens, options.rounds = 2, 4, 3
    torch.set_num_threads(options.threads)
    measure(shapes, options)


if __name__ == "__main__":
    main()
