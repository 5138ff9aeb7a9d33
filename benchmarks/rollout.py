"""Speed of the decode loop: sharing the prefill, dropping finished rows, and transformers' own `generate` beside them.

    python benchmarks/rollout.py --prompt-length 256 --samples 8

Prints one JSON line. Numbers are response tokens per second, medians with the quartiles as spread, all ways measured
in turns within one run on the embedded model with random weights. Responses end at random, about 25 tokens long on
average, so that rows finish at different times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from verl.models.tiny import TinyModel
from verl.protocol import DataProto
from verl.rollout.base import Request
from verl.rollout.hf import HFRollout

STOPS = (20, 40, 60, 80)  # with the end of text, five in a hundred of the near-uniform draws of random weights
WAYS = {
    "verl": {},
    "without_shared_prefix": {"share_prefix": False},
    "without_dropping": {"drop_finished": False},
    "without_both": {"share_prefix": False, "drop_finished": False},
}


def random_prompts(number: int, length: int) -> DataProto:
    """Prompts of equal length."""
    generator = torch.Generator().manual_seed(0)
    return DataProto.from_dict(
        {
            "prompts": torch.randint(6, 100, (number, length), generator=generator),
            "prompt_mask": torch.ones(number, length, dtype=torch.bool),
            "prompt_ids": torch.arange(number),
            "group_ids": torch.arange(number),
        }
    )


def transformers_way(model: Any, prompts: DataProto, samples: int, new_tokens: int) -> Callable[[int], int]:
    """The same work by `generate`; gives the number of tokens drawn."""

    def run(step: int) -> int:
        torch.manual_seed(step)
        out = model.generate(
            input_ids=prompts["prompts"],
            attention_mask=prompts["prompt_mask"].long(),
            do_sample=True,
            top_k=0,
            num_return_sequences=samples,
            max_new_tokens=new_tokens,
            eos_token_id=[1, *STOPS],
            pad_token_id=0,
        )[:, prompts["prompts"].shape[1] :]
        is_stop = torch.isin(out, torch.tensor([1, *STOPS]))
        return int((is_stop.cumsum(dim=1) - is_stop.int() == 0).sum())

    return run


def verl_way(model: Any, prompts: DataProto, samples: int, rollout: HFRollout) -> Callable[[int], int]:
    """Our decode loop; gives the number of tokens drawn."""
    engine = rollout.attach(model, TinyModel().load_tokenizer(), seed=0)
    return lambda step: int(engine.generate(prompts, Request(step, samples))["response_mask"].sum())


def measure(ways: dict[str, Callable[[int], int]], rounds: int) -> dict[str, list[float]]:
    """Tokens per second, `rounds` samples each, all ways taking turns after one warm-up."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(rounds + 1):
        for name, run in ways.items():
            start = time.perf_counter()
            tokens = run(step)
            if step:
                rates[name].append(tokens / (time.perf_counter() - start))
    return rates


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16, help="prompts per call (default 16)")
    parser.add_argument("--prompt-length", type=int, default=256, help="tokens of each prompt (default 256)")
    parser.add_argument("--samples", type=int, default=8, help="responses per prompt (default 8)")
    parser.add_argument("--new-tokens", type=int, default=64, help="longest response (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each way (default 5)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)

    source = TinyModel(context_length=options.prompt_length + options.new_tokens)
    model, prompts = source.load_causal_lm("cpu"), random_prompts(options.prompts, options.prompt_length)
    ways = {
        name: verl_way(
            model,
            prompts,
            options.samples,
            HFRollout(max_new_tokens=options.new_tokens, stop_token_ids=STOPS, **how),
        )
        for name, how in WAYS.items()
    }
    ways["transformers"] = transformers_way(model, prompts, options.samples, options.new_tokens)
    result: dict[str, Any] = {"benchmark": "rollout", **vars(options)}
    for name, rates in measure(ways, options.rounds).items():
        low, median, high = statistics.quantiles(rates, n=4)
        result |= {f"{name}_tokens_per_s": round(median), f"{name}_spread": [round(low), round(high)]}
    ratio = {name: result["verl_tokens_per_s"] / result[f"{name}_tokens_per_s"] for name in ways}
    work = f"{options.prompts} prompts of {options.prompt_length} tokens x {options.samples} responses"
    result["rows"] = [
        [
            f"rollout with log-probs, {work}",
            f"{result['verl_tokens_per_s']} {result['verl_spread']} tokens/s",
            f"{ratio['transformers']:.1f}x transformers `generate` without log-probs",
        ],
        [
            "the same without sharing prompts among samples, and without dropping finished rows",
            f"{result['without_both_tokens_per_s']} {result['without_both_spread']} tokens/s",
            f"{1 / ratio['without_both']:.2f}x of it with both",
        ],
    ]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
