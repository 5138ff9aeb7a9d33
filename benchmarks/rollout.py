"""Rollout against `generate` of transformers, with log-probs of the sampled tokens on both sides.

    python benchmarks/rollout.py

Four cases on one model: many and few responses of equal length, responses of long-tailed lengths, several responses to
each long prompt. `generate` decodes every row to the longest length, as it must where rows end at different times.
Prints one JSON line: response tokens per second, medians with quartiles, both sides (ours also by MKL and without its
two savings, `generate` also with our matrix products) taking turns in one process.
"""

from __future__ import annotations

import argparse
import json
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

from verl.model_paths import packed_attention
from verl.models.pretrained import Pretrained
from verl.ops.cpu_matmul import chosen_library, use_library
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest
from verl.rollout.responses import ResponseGenerator

CASES = {
    "fixed": {"prompts": 256, "prompt_length": 8, "samples": 1, "lengths": "fixed", "target": 1.5},
    "few_rows": {"prompts": 16, "prompt_length": 8, "samples": 1, "lengths": "fixed", "target": 1.5},
    "longtail": {"prompts": 128, "prompt_length": 8, "samples": 1, "lengths": "longtail", "target": 3.3},
    "shared_prefix": {"prompts": 16, "prompt_length": 256, "samples": 8, "lengths": "fixed", "target": 5.0},
}


def random_prompts(number: int, length: int) -> DataProto:
    """Prompts of equal length."""
    generator = torch.Generator().manual_seed(0)
    return DataProto.from_dict(
        {
            "prompts": torch.randint(3, 40, (number, length), generator=generator),
            "prompt_mask": torch.ones(number, length, dtype=torch.bool),
            "prompt_ids": torch.arange(number),
            "group_ids": torch.arange(number),
        }
    )


def transformers_way(model: Any, prompts: DataProto, lengths: list[int], samples: int) -> Callable[[int], int]:
    """The same work by `generate`; gives the number of tokens that were asked for."""
    counted = torch.tensor(lengths)

    @torch.no_grad()
    def run(step: int) -> int:
        torch.manual_seed(step)
        found = model.generate(
            input_ids=prompts["prompts"],
            attention_mask=prompts["prompt_mask"].long(),
            do_sample=True,
            top_k=0,
            num_return_sequences=samples,
            max_new_tokens=max(lengths),
            min_new_tokens=max(lengths),
            pad_token_id=work.PAD,
            return_dict_in_generate=True,
            output_logits=True,
        )
        drawn = found.sequences[:, prompts["prompts"].shape[1] :]
        log_probs = [
            logits.float().log_softmax(-1).gather(-1, drawn[:, t : t + 1]) for t, logits in enumerate(found.logits)
        ]
        mask = torch.arange(max(lengths)) < counted[:, None]
        assert torch.cat(log_probs, dim=1).shape == mask.shape
        return int(mask.sum())

    return run


def verl_way(model: Any, prompts: DataProto, lengths: list[int], samples: int, **how: bool) -> Callable[[int], int]:
    """Our decode loop; gives the number of tokens drawn."""
    tokenizer = Pretrained(path=model.name_or_path).load_tokenizer()
    rollout = work.forced_rollout(lengths, len(set(lengths)) > 1, samples, **how)
    sampler = ResponseGenerator(rollout.attach(model, tokenizer, seed=0), rollout, work.PAD)
    return lambda step: int(sampler.generate(prompts, GenerationRequest(step, samples))["response_mask"].sum())


def measure(case: dict[str, Any], directory: str, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of each way, all ways taking turns after one warm-up."""
    prompts, samples = random_prompts(case["prompts"], case["prompt_length"]), case["samples"]
    lengths = work.response_lengths(case["lengths"], case["prompts"] * samples, options.new_tokens)
    plain, ours = (Pretrained(path=directory).load_causal_lm("cpu") for _ in range(2))
    assert packed_attention.enable(ours) is None
    generate, library = transformers_way(plain, prompts, lengths, samples), chosen_library("auto")
    decode = verl_way(ours, prompts, lengths, samples)
    ways = {
        "verl": (library, decode),
        "verl_mkl": ("mkl", decode),
        "without_savings": (
            library,
            verl_way(ours, prompts, lengths, samples, share_prefix=False, drop_finished=False),
        ),
        "transformers": ("mkl", generate),  # as PyTorch comes
        "transformers_same_products": (library, generate),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(options.rounds + 1):
        for name, (products, run) in ways.items():
            use_library(products)
            start = time.perf_counter()
            tokens = run(step)
            assert tokens == sum(lengths)
            if step:
                rates[name].append(tokens / (time.perf_counter() - start))
    use_library("mkl")
    found = {name: work.spread(values, 0) for name, values in rates.items()}

    def ratio(other: str) -> Any:
        return work.spread([a / b for a, b in zip(rates["verl"], rates[other], strict=True)], 2)

    return {
        **found,
        "products": library,
        "ratio": ratio("transformers"),
        "ratio_same_products": ratio("transformers_same_products"),
        "ratio_mkl": ratio("verl_mkl"),
        "target": case["target"],
    }


def table_row(name: str, found: dict[str, Any], options: argparse.Namespace) -> list[str]:
    case = CASES[name]
    tokens = f"{options.new_tokens} tokens" if case["lengths"] == "fixed" else "long-tailed lengths (4 to 128 tokens)"
    (rate, rates), (ratio, ratios) = found["verl"], found["ratio"]
    return [
        f"rollout with log-probs, {case['prompts']} prompts of {case['prompt_length']} x {case['samples']}, {tokens}",
        f"{rate:.0f} [{rates[0]:.0f}, {rates[1]:.0f}] tokens/s",
        f"{ratio}x {ratios} transformers `generate` ({found['transformers'][0]:.0f}), "
        f"{found['ratio_same_products'][0]}x with the same matrix products; target: {case['target']}x",
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="which to measure (default: all)")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens of a response of fixed length (default 64)")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model (default 256)")
    parser.add_argument("--layers", type=int, default=4, help="its depth (default 4)")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each way (default 5)")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default 2)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as directory:
        parameters = work.write_model(Path(directory), options.hidden, options.layers)
        found = {name: measure(CASES[name], directory, options) for name in options.cases.split(",")}
    rows = [table_row(name, case, options) for name, case in found.items()]
    print(json.dumps({"benchmark": "rollout", "parameters": parameters, **vars(options), "found": found, "rows": rows}))


if __name__ == "__main__":
    main()
