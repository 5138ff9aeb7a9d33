"""Generate, train, generate: the switch on one set of weights, against writing the weights and loading them again.

    python benchmarks/hybrid_switch.py                    a minute or two; --small for a look

Prints one JSON line. Models of 2.6 and about 100 million parameters, in float32, gradients waiting for their step.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from verl.hybrid.actor import HybridActor
from verl.hybrid.benchmark import measure_switch_overhead
from verl.models.tiny import TinyModel

MODELS = {
    "2.6M": {"hidden_size": 256, "intermediate_size": 1344, "num_layers": 2, "num_heads": 4},
    "100M": {"hidden_size": 1024, "intermediate_size": 2816, "num_layers": 8, "num_heads": 16},
}
SMALL = {"tiny": {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2}}


def measured(name: str, shape: dict[str, int], repeats: int) -> dict[str, object]:
    """The numbers of one model."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = TinyModel(**shape)
    actor = HybridActor(source.load_causal_lm(device), source.load_tokenizer())
    ids = torch.arange(3, 19, device=device).repeat(4, 1)
    actor.generate(ids, max_new_tokens=8)
    actor.train()(input_ids=ids, labels=ids).loss.backward()
    switch = measure_switch_overhead(actor, "round_trip", repeats)
    reload = measure_switch_overhead(actor, "reload", max(3, repeats // 10))
    return {
        "model": name,
        "parameters": sum(p.numel() for p in actor.parameters()),
        "switch_ms": switch["latency_ms"],
        "switch_ms_quartiles": switch["latency_ms_quartiles"],
        "switch_mib": switch["mem_increase_mb"],
        "reload_ms": reload["latency_ms"],
        "reload_ms_quartiles": reload["latency_ms_quartiles"],
        "reload_mib": reload["mem_increase_mb"],
    }


def row(found: dict) -> list[str]:
    """One line of the table."""
    millions = found["parameters"] / 1e6

    def shown(name: str, digits: int) -> str:
        low, high = found[f"{name}_ms_quartiles"]
        return f"{found[f'{name}_ms']:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}] ms"

    return [
        f"HybridActor: generate, train and back, {millions:.1f}M parameters, float32",
        f"{shown('switch', 3)}, {found['switch_mib']:.1f} MiB more",
        f"{found['reload_ms'] / found['switch_ms']:.0f}x faster than writing and loading the weights "
        f"({shown('reload', 0)}, {found['reload_mib']:.0f} MiB more); target: at most 1 ms and no memory",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one model that takes no time")
    args = parser.parse_args()
    models, repeats = (SMALL, 3) if args.small else (MODELS, 100)
    found = [measured(name, shape, repeats) for name, shape in models.items()]
    print(json.dumps({"name": "hybrid_switch", "models": found, "rows": [row(each) for each in found]}))


if __name__ == "__main__":
    main()
