"""`rollout=vllm` beside vLLM alone, on the same requests in the same settings, and beside `rollout=hf`.

    python benchmarks/vllm_rollout.py               some minutes; --small for a look

Two models, responses of equal and of long-tailed lengths. vLLM alone draws by its own generator, once with the
log-probs of the tokens and once without; ours has them, and its own noise, whose cost is also measured by itself. All
take turns. Prints one JSON line: response tokens per second, medians with quartiles.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import _workload as work
import torch
from _bare_vllm import BareEngine

from verl.description import BuildContext
from verl.models.pretrained import Pretrained
from verl.protocol import DataProto
from verl.rollout.base import Request
from verl.rollout.drawing import Drawing
from verl.rollout.vllm.engine import VLLMEngine
from verl.rollout.vllm.options import VLLMRollout
from verl.rollout.vllm.setting import environment

SHAPES = {"2.6M": (256, 4), "100M": (768, 11)}  # hidden, layers
PROMPT_TOKENS, SAMPLES, CONTEXT, TARGET = 8, 8, 512, 0.9


class PrescribedEngine(VLLMEngine):
    """Our engine with responses of given lengths."""

    lengths: list[int]

    def _limits(self, prompt_ids: list[int], num_samples: int) -> list[int]:
        return self.lengths


def prompts_of(count: int) -> DataProto:
    """Prompts of equal length."""
    tokens = torch.randint(3, 40, (count, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    mask, numbers = torch.ones_like(tokens, dtype=torch.bool), torch.arange(count)
    return DataProto.from_dict({"prompts": tokens, "prompt_mask": mask, "prompt_ids": numbers, "group_ids": numbers})


def noise_us(vocabulary: int, rows: int) -> float:
    """Microseconds per token of drawing by our noise and recording the log-prob."""
    drawing, numbers = Drawing(Request(0), 0, (1,)), torch.arange(rows)
    logits = torch.randn(rows, vocabulary)
    spent = []
    for position in range(20):
        start = time.perf_counter()
        tokens = drawing.choose(logits, numbers, numbers, torch.full_like(numbers, position))
        drawing.log_probs(logits, tokens)
        spent.append((time.perf_counter() - start) / rows * 1e6)
    return round(sorted(spent)[len(spent) // 2], 2)


def measure(directory: Path, shape: tuple[int, int], options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of each way, by rule of lengths."""
    parameters = work.write_model(directory, *shape, context=CONTEXT)
    source = Pretrained(path=str(directory))
    model, tokenizer = source.load_causal_lm("cpu"), source.load_tokenizer()
    rows = options.prompts * SAMPLES
    longest = max(options.new_tokens, 128)
    described = VLLMRollout(max_new_tokens=longest, min_new_tokens=longest, kv_cache_gib=1.0, max_num_seqs=rows)
    prompts = prompts_of(options.prompts)
    ours = PrescribedEngine(described, model, tokenizer, 0, None, BuildContext())
    variables = environment(described, BuildContext(), ours.setting.num_threads)
    bare = BareEngine(str(directory), ours.setting.engine_arguments(), variables)
    found: dict[str, Any] = {"parameters": parameters, "noise_us_per_token": noise_us(len(tokenizer), rows)}
    try:
        for rule in ("fixed", "longtail"):
            lengths = work.response_lengths(rule, rows, options.new_tokens)
            found[rule] = turns(ours, bare, model, tokenizer, prompts, lengths, options)
    finally:
        ours.close()
        bare.close()
    return found


def turns(
    ours: PrescribedEngine,
    bare: BareEngine,
    model: Any,
    tokenizer: Any,
    prompts: DataProto,
    lengths: list[int],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Each way in turn, after one round to warm up."""
    ours.lengths = lengths
    asked = [row for row in prompts["prompts"].tolist() for _ in range(SAMPLES)]
    described = work.forced_rollout(lengths, len(set(lengths)) > 1, SAMPLES)
    loop = described.attach(model, tokenizer, 0)
    ways = {
        "verl": lambda step: ours.generate(prompts, Request(step, SAMPLES)),
        "bare_with_log_probs": lambda step: bare.ask(do="generate", prompts=asked, lengths=lengths, log_probs=True),
        "bare": lambda step: bare.ask(do="generate", prompts=asked, lengths=lengths, log_probs=False),
        "hf": lambda step: loop.generate(prompts, Request(step, SAMPLES)),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(options.rounds + 1):
        for name, run in ways.items():
            start = time.perf_counter()
            answer = run(step)
            seconds = time.perf_counter() - start
            tokens = answer["tokens"] if isinstance(answer, dict) else int(answer["response_mask"].sum())
            assert tokens == sum(lengths), (name, tokens, sum(lengths))
            if step:
                rates[name].append(tokens / seconds)
    found: dict[str, Any] = {name: work.spread(values, 0) for name, values in rates.items()}
    for name in ("bare_with_log_probs", "bare", "hf"):
        ratios = [a / b for a, b in zip(rates["verl"], rates[name], strict=True)]
        found[f"to_{name}"] = work.spread(ratios, 2)
    return found


def table_row(name: str, rule: str, found: dict[str, Any], options: argparse.Namespace) -> list[str]:
    case, lengths = found[rule], f"{options.new_tokens} tokens" if rule == "fixed" else "long-tailed lengths"
    (rate, rates), (ratio, ratios), (plain, _) = case["verl"], case["to_bare_with_log_probs"], case["to_bare"]
    return [
        f"`rollout=vllm`, {name}, {options.prompts} prompts x {SAMPLES}, {lengths}",
        f"{rate:.0f} [{rates[0]:.0f}, {rates[1]:.0f}] tokens/s; noise {found['noise_us_per_token']} us a token",
        f"{ratio}x {ratios} vLLM alone with log-probs, {plain}x without, {case['to_hf'][0]}x `rollout=hf`; "
        f"target: {TARGET}x",
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SHAPES), help="which to measure (default: all)")
    parser.add_argument("--small", action="store_true", help="one tiny model, few repeats: to see that it works")
    parser.add_argument("--prompts", type=int, default=32, help="each with 8 samples (default 32)")
    parser.add_argument("--new-tokens", type=int, default=64, help="of responses of fixed length (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each way (default 5)")
    parser.add_argument("--threads", type=int, default=2, help="of both engines (default 2)")
    options = parser.parse_args()
    shapes = {name: SHAPES[name] for name in options.models.split(",")}
    if options.small:
        shapes, options.prompts, options.new_tokens, options.rounds = {"small": (128, 2)}, 2, 4, 2
    torch.set_num_threads(options.threads)
    found = {}
    for name, shape in shapes.items():
        with tempfile.TemporaryDirectory() as directory:
            found[name] = measure(Path(directory), shape, options)
    rows = [table_row(name, rule, case, options) for name, case in found.items() for rule in ("fixed", "longtail")]
    print(json.dumps({"benchmark": "vllm_rollout", **vars(options), "found": found, "rows": rows}))


if __name__ == "__main__":
    main()
