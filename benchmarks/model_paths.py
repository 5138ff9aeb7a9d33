"""Seconds that a start spends on finding out how a model may be run, with a cold and a warm cache.

    python benchmarks/model_paths.py

Prints one JSON line after each leg. The models: the embedded one; one of the shape of Qwen2-0.5B with random weights; one
of the shape of Llama-3.1-8B without weights, since its twin is all that costs. Each round is a process of its own, in
which transformers was imported and the model loaded before: then the first call (cold) tries everything and keeps what
it finds, and a second model object reads that (warm). In the same rounds one forward pass of 512 tokens through the 0.5B
model is measured, and how long loading the weights took. Medians with the quartiles as spread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _progress import Progress
from _workload import spread

ROW_TOKENS = 32768  # what the rows of a run may have; more lengths are crossed than with shorter ones
TOKENS = 512  # of the forward pass
QWEN2_0_5B = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
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
NAMES = {
    "embedded": "the embedded model (0.5M parameters)",
    "0.5B": "the shape of Qwen2-0.5B",
    "8B": "the shape of Llama-3.1-8B",
}


def make(name: str, directory: Path) -> Any:
    """A model as a start has it."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from verl.models.tiny import TinyModel

    if name == "embedded":
        return TinyModel().load_causal_lm("cpu")
    if name == "0.5B":
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA_8B))


def save_0_5b(directory: Path) -> None:
    """Random weights, in the type that such models are published in."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen2Config(**QWEN2_0_5B), dtype=torch.bfloat16).save_pretrained(directory)


def measured(name: str, directory: Path) -> dict[str, float]:
    """Seconds of one round, in this process."""
    import torch

    from verl.model_paths.check import paths_for

    make("embedded", directory)  # brings transformers
    found, start = {}, time.perf_counter()
    model = make(name, directory)
    found["load_s"] = time.perf_counter() - start
    for cache in ("cold", "warm"):
        start = time.perf_counter()
        paths = paths_for(model, ROW_TOKENS)
        found[f"{cache}_s"] = time.perf_counter() - start
        assert paths.scoring == "packed", paths
        vars(model).pop("_verl_findings")
    if name == "0.5B":
        ids = torch.arange(TOKENS)[None]
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
            start = time.perf_counter()
            model(input_ids=ids, use_cache=False)
        found["forward_s"] = time.perf_counter() - start
    return found


def in_a_process(name: str, directory: Path) -> dict[str, float]:
    """The same in a process of its own with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, __file__, "--leg", name, "--directory", str(directory)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "VERL_CACHE": cache},
        )
    return json.loads(done.stdout.splitlines()[-1])


def row_of(name: str, found: dict[str, list[float]], forward_s: float) -> list[str]:
    """What the table of results says of a model."""
    (cold, cold_range), (warm, warm_range) = spread(found["cold_s"], 2), spread([1000 * x for x in found["warm_s"]], 0)
    against = f"{cold / forward_s:.1f}x of a forward pass of {TOKENS} tokens of the 0.5B ({forward_s:.2f} s)"
    if name != "8B":
        load = spread(found["load_s"], 2)[0]
        against += f", {cold / load:.1f}x of loading its own weights ({load:.2f} s)"
    figure = (
        f"{cold} {cold_range} s; what was kept is read in {warm:.0f} [{', '.join(f'{x:.0f}' for x in warm_range)}] ms"
    )
    return [f"start: finding out how to run {NAMES[name]}", figure, against]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=900)
    parser.add_argument("--leg", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.leg:
        print(json.dumps(measured(options.leg, options.directory)))
        return
    progress = Progress("model_paths", {"rounds": options.rounds, "row_tokens": ROW_TOKENS}, options.budget_s)
    found: dict[str, dict[str, list[float]]] = {}
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as directory:
        save_0_5b(Path(directory))
        legs = ("0.5B", "embedded", "8B")  # the first gives what the others are compared with
        for place, name in enumerate(legs):
            rounds: list[dict[str, float]] = []
            for number in progress.rounds(name, options.rounds, len(legs) - place):
                once = in_a_process(name, Path(directory))
                rounds += [once] if number else []
            found[name] = {key: [once[key] for once in rounds] for key in rounds[0]}
            rows.append(row_of(name, found[name], spread(found["0.5B"]["forward_s"])[0]))
            progress.publish(found, rows, is_complete=name == legs[-1])


if __name__ == "__main__":
    main()
