"""The switch from training to generation: new weights become usable for sampling.

    python benchmarks/weight_switch.py               some minutes; --small for a look

`hf` samples from the very tensors that train; `vllm` is sent them, in two chunks of shared memory, and proves that it
holds them, once put into their places and once read by vLLM's `reload_weights`, in turns. Beside it, with the same
settings in a process without a trainer: building the engine again, and `reload_weights` from tensors that are there
already. Prints one JSON line: seconds, medians with quartiles, and memory.
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
from _bare_vllm import BareEngine, resident_mib

from verl.component import BuildContext
from verl.models.pretrained import Pretrained
from verl.rollout.hf import HFRollout
from verl.rollout.vllm.config import VLLMRollout
from verl.rollout.vllm.engine import VLLMEngine
from verl.rollout.vllm.engine_args import environment

SHAPES: dict[str, dict[str, int]] = {
    "2.6M": {"hidden": 256, "layers": 4, "mlp": 512, "kv_heads": 4},
    "100M": {"hidden": 768, "layers": 11},
}
TARGETS = {"2.6M": 100, "100M": 10, "small": 1}  # times faster than building the engine again
CONTEXT = 256


def seconds_of(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def one_copy(model: torch.nn.Module) -> float:
    """Seconds of one copy of all weights into memory that is there."""
    weights = [p.detach() for p in model.parameters()]
    copies = [torch.empty_like(w) for w in weights]
    found = [seconds_of(lambda: torch._foreach_copy_(copies, weights)) for _ in range(5)]
    return sorted(found)[2]


def shared(model: Any, tokenizer: Any, repeats: int) -> dict[str, Any]:
    """Our own loop: the sync, and the model out of training and back into it."""
    engine = HFRollout(max_new_tokens=8).attach(model, tokenizer, 0)
    before = resident_mib()

    def switch() -> None:
        engine.sync()
        model.eval()
        model.train()

    found = [seconds_of(switch) for _ in range(repeats)]
    return {"seconds": work.spread(found, 6), "mib": round(resident_mib() - before, 1)}


def streamed(engine: VLLMEngine, repeats: int) -> dict[str, Any]:
    """vLLM: the whole sync, its parts, and the memory that trainer and engine hold more than before it."""
    pids = ("self", engine.process_id)
    memory, taken, parts = [sum(map(resident_mib, pids))], [], []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        parts.append(engine.sync().metrics)
        taken.append(time.perf_counter() - start)
        memory.append(sum(map(resident_mib, pids)))
    found: dict[str, Any] = {"seconds": work.spread(taken[1:], 4), "first_s": round(taken[0], 4)}
    for name in ("copy_s", "load_s", "proof_s"):
        found[name] = work.spread([part[f"sync/{name}"] for part in parts[1:]], 4)
    found["mib_first"], found["mib_later"] = round(memory[1] - memory[0], 1), round(memory[-1] - memory[1], 1)
    return found


def in_place_or_anew(engine: VLLMEngine, repeats: int) -> dict[str, Any]:
    """The same sync, put into place and by vLLM's `reload_weights` from the same stream, in turns."""
    taken: dict[str, list[tuple[float, float]]] = {"in_place": [], "anew": []}
    for number in range(2 * repeats + 2):
        way = ("in_place", "anew")[number % 2]
        engine.weights.in_place = way == "in_place"
        start = time.perf_counter()
        load_s = engine.sync().metrics["sync/load_s"]
        taken[way].append((time.perf_counter() - start, load_s))
    engine.weights.in_place = True
    found = {way: list(zip(*pairs[1:], strict=True)) for way, pairs in taken.items()}
    return {
        way: {"seconds": work.spread(whole, 4), "load_s": work.spread(load, 4)} for way, (whole, load) in found.items()
    }


def measure(directory: Path, shape: dict[str, int], repeats: int) -> dict[str, Any]:
    """All ways, one after another, on one model."""
    parameters = work.write_model(directory, **shape, context=CONTEXT)
    source = Pretrained(path=str(directory))
    model, tokenizer = source.load_causal_lm("cpu"), source.load_tokenizer()
    described = VLLMRollout(max_new_tokens=8, kv_cache_gib=0.25, max_num_seqs=64)
    found: dict[str, Any] = {"parameters": parameters, "weights_mib": round(parameters * 4 / 2**20, 1)}
    found |= {"one_copy_s": round(one_copy(model), 5), "hf": shared(model, tokenizer, 4 * repeats)}
    engine = described.attach(model, tokenizer, 0, None, BuildContext())
    assert isinstance(engine, VLLMEngine)
    try:
        found["vllm"] = streamed(engine, repeats)
        found["loading"] = in_place_or_anew(engine, repeats)
        arguments, threads = engine.setup.setting.engine_arguments(), engine.setup.num_threads
    finally:
        engine.close()
    bare = BareEngine(str(directory), arguments, environment(described, BuildContext(), threads))
    try:
        reloads = [bare.ask(do="reload")["seconds"] for _ in range(repeats + 1)][1:]
        again = [bare.ask(do="again")["seconds"] for _ in range(max(2, repeats // 2))]
    finally:
        bare.close()
    return found | {"reload_weights": work.spread(reloads, 4), "new_engine": work.spread(again, 2)}


def table_rows(name: str, found: dict[str, Any]) -> list[list[str]]:
    vllm, (seconds, quartiles) = found["vllm"], found["vllm"]["seconds"]
    shares = ", ".join(
        f"{part.removesuffix('_s')} {vllm[part][0] * 1e3:.1f} ms" for part in ("copy_s", "load_s", "proof_s")
    )
    times = found["new_engine"][0] / seconds
    return [
        [
            f"switch from training to generation, {name}, `rollout=hf`",
            f"{found['hf']['seconds'][0] * 1e3:.3f} ms, {found['hf']['mib']} MiB",
            "target: 1 ms, no memory",
        ],
        [
            f"switch from training to generation, {name} ({found['weights_mib']} MiB), `rollout=vllm`",
            f"{seconds * 1e3:.1f} ms [{quartiles[0] * 1e3:.1f}, {quartiles[1] * 1e3:.1f}] ({shares}); memory "
            f"{vllm['mib_first']} MiB with the first, {vllm['mib_later']} MiB with all later ones",
            f"{times:.0f}x faster than a new engine ({found['new_engine'][0]} s); `reload_weights` alone "
            f"{found['reload_weights'][0] * 1e3:.1f} ms, one copy {found['one_copy_s'] * 1e3:.1f} ms; "
            f"target: {TARGETS[name]}x",
        ],
        [
            f"weights put into their places, against `reload_weights` from the same stream, {name}",
            f"switch {found['loading']['in_place']['seconds'][0] * 1e3:.1f} against "
            f"{found['loading']['anew']['seconds'][0] * 1e3:.1f} ms",
            f"the engine's part {found['loading']['in_place']['load_s'][0] * 1e3:.1f} against "
            f"{found['loading']['anew']['load_s'][0] * 1e3:.1f} ms",
        ],
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SHAPES), help="which to measure (default: all)")
    parser.add_argument("--small", action="store_true", help="one tiny model, few repeats: to see that it works")
    parser.add_argument("--repeats", type=int, default=9, help="samples of each switch (default 9)")
    parser.add_argument("--threads", type=int, default=2, help="of trainer and engine (default 2)")
    options = parser.parse_args()
    shapes = {name: SHAPES[name] for name in options.models.split(",")}
    if options.small:
        shapes, options.repeats = {"small": {"hidden": 128, "layers": 2}}, 2
    torch.set_num_threads(options.threads)
    found = {}
    for name, shape in shapes.items():
        with tempfile.TemporaryDirectory() as directory:
            found[name] = measure(Path(directory), shape, options.repeats)
    rows = [row for name, case in found.items() for row in table_rows(name, case)]
    print(json.dumps({"benchmark": "weight_switch", **vars(options), "found": found, "rows": rows}))


if __name__ == "__main__":
    main()
