"""Cost of checking the execution paths of a model at the start of a run, with an empty and a full cache.

    python benchmarks/model_paths.py

Prints one JSON line. The built-in model is as `python main_ppo.py` has it; the others have the shapes of Qwen2-0.5B and
Llama-3-8B and no weights, since a twin is made from the configuration alone: the cost at 8B is measured, not scaled.
Beside them, in the same run, a forward pass of 512 tokens of the 0.5B model with random float32 weights. Medians of
`--repeats` with the quartiles as spread; all ways take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

QWEN_HALF_B = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
ROW_TOKENS = 4096


def models() -> dict[str, Any]:
    """A model of each size; the large ones without weights."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    from verl.models.tiny import TinyModel

    found: dict[str, Any] = {"embedded": TinyModel().load_causal_lm("cpu")}
    with torch.device("meta"):
        found["0.5B"] = Qwen2ForCausalLM(Qwen2Config(**QWEN_HALF_B))
        found["8B"] = LlamaForCausalLM(LlamaConfig(**LLAMA_8B))
    return found


def seconds_of(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def spread(samples: list[float]) -> tuple[float, list[float]]:
    low, median, high = statistics.quantiles(samples, n=4)
    return round(median, 4), [round(low, 4), round(high, 4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from verl.model_paths.check import forget, paths_for

    tried, plain = models(), Qwen2ForCausalLM(Qwen2Config(**QWEN_HALF_B)).eval()
    tokens = torch.arange(1, 513)[None]
    taken: dict[str, list[float]] = {}
    for _ in range(options.repeats):
        with torch.no_grad():
            taken.setdefault("forward", []).append(seconds_of(lambda: plain(input_ids=tokens)))
        for name, model in tried.items():
            with tempfile.TemporaryDirectory() as directory:
                os.environ["VERL_CACHE"] = directory
                for kind in ("cold", "warm"):
                    forget(model)
                    taken.setdefault(f"{name} {kind}", []).append(seconds_of(partial(paths_for, model, ROW_TOKENS)))
    forward = statistics.median(taken["forward"])
    found = {name: spread(samples) for name, samples in taken.items()}
    rows = []
    for name in tried:
        (cold, quartiles), (warm, _) = found[f"{name} cold"], found[f"{name} warm"]
        rows.append(
            [
                f"trying the ways of a model at the start, {name}",
                f"{cold:.2f} s [{quartiles[0]:.2f}, {quartiles[1]:.2f}]; {1000 * warm:.1f} ms where it is kept",
                f"{cold / forward:.1f}x of one forward pass of 512 tokens at 0.5B ({forward:.2f} s)",
            ]
        )
    print(json.dumps({"seconds": {name: value for name, (value, _) in found.items()}, "rows": rows}))


if __name__ == "__main__":
    main()
