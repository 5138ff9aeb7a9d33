"""How long weights that arrive in the middle of responses stop decoding, against a sync with nothing open.

    python benchmarks/async_pause.py              two minutes; --small for a look

The role `rollout` with 64 open responses of a model of 2.6 million parameters. The sync is what `load` takes with
nothing open: the weights and their proof. The pause is what the step under way and the three behind it take longer than
those around them, so that work put off by the update counts too. With `recompute` it has the forward pass of all open
rows; `vllm, keep` proves the weights by fingerprints alone. Prints one JSON line: milliseconds, medians with quartiles
over the updates.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import itertools

import _workload as work
import torch
from _progress import Progress
from weight_switch import SHAPES

from verl.component import BuildContext
from verl.engines.optimizer import AdamW
from verl.models.hf_state_dict import live_tensors
from verl.models.pretrained import Pretrained
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout
from verl.rollout.vllm.config import VLLMRollout
from verl.workers.actor import Actor
from verl.workers.rollout_worker import RolloutHost, RolloutWorker
from verl.workers.schedule import ScheduleOptions

PROMPT, RESPONSE, GROUP = 32, 200, 4
ENGINES = {"hf, keep": "keep", "hf, recompute": "recompute", "vllm, keep": "keep", "vllm, recompute": "recompute"}
STEPS_BETWEEN, AFFECTED = 12, 4  # steps


def sampler_of(path: Path, name: str, kv_cache: Any, num_threads: int) -> RolloutWorker:
    options: dict[str, Any] = {"max_new_tokens": RESPONSE, "min_new_tokens": RESPONSE, "kv_cache": kv_cache}
    kind = HFRollout
    if name.startswith("vllm"):
        kind = VLLMRollout
        options |= {"kv_cache_gib": 0.3, "max_model_len": PROMPT + RESPONSE + 1, "num_threads": num_threads}
    rollout, model = kind(weight_update="in_flight", **options), Pretrained(path=str(path))
    host = RolloutHost(
        actor=Actor(model=model, optimizer=AdamW(lr=1e-3)), rollout=rollout, schedule=ScheduleOptions("{}")
    )
    context = BuildContext(seed=0, tokenizer=model.load_tokenizer(), row_tokens=PROMPT + RESPONSE)
    return host.build(context).workers["rollout"]


def prompts(count: int) -> DataProto:
    ids = torch.randint(3, 40, (count, PROMPT), generator=torch.Generator().manual_seed(0))
    numbers = torch.arange(count)
    mask = torch.ones_like(ids, dtype=torch.bool)
    return DataProto.from_dict({"prompts": ids, "prompt_mask": mask, "prompt_ids": numbers, "group_ids": numbers})


def measured(sampler: RolloutWorker, rows: int, updates: int) -> dict[str, Any]:
    """Seconds of syncs with nothing open, of steps, and of pauses."""
    loop = sampler.loop
    assert loop is not None
    weights = {name: x.clone() for name, x in live_tensors(sampler.model).items()}
    alone: list[float] = []
    for version in range(updates + 1):
        began = time.perf_counter()
        sampler.load(version, weights)
        alone.append(time.perf_counter() - began)
    ends: list[float] = []
    marks: list[int] = []
    advance, take = loop._advance, sampler._take

    def step() -> None:
        advance()
        ends.append(time.perf_counter())

    def taken(weights: Any) -> None:
        marks.append(len(ends))
        take(weights)

    loop._advance, sampler._take = step, taken
    loop.begin(prompts(rows // GROUP), GenerationRequest(1, GROUP))
    for version in range(updates):
        wanted = len(ends) + STEPS_BETWEEN
        while len(ends) < wanted:
            time.sleep(0.001)
        sampler.load(100 + version, weights)
    while len(ends) < marks[-1] + STEPS_BETWEEN:
        time.sleep(0.001)
    loop.close()
    gaps = [later - before for before, later in itertools.pairwise(ends)]
    usual = [median(gaps[mark - 6 : mark - 1] + gaps[mark - 1 + AFFECTED : mark + 4 + AFFECTED]) for mark in marks]
    pauses = [sum(gaps[mark - 1 :][:AFFECTED]) - AFFECTED * step for mark, step in zip(marks, usual, strict=True)]
    sync = median(alone[1:])
    return {
        "sync_ms": work.spread([1000 * x for x in alone[1:]], 2),
        "step_ms": round(1000 * median(usual), 2),
        "pause_ms": work.spread([1000 * x for x in pauses], 2),
        "pause_to_sync": work.spread([pause / sync for pause in pauses], 2),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="few rows and updates: to see that it works")
    parser.add_argument(
        "--threads", type=int, default=1, help="of the engine (default 1, as beside a trainer on two cores)"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows, updates = (8, 3) if options.small else (64, 12)
    progress = Progress("async_pause", dict(vars(options)), 600)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        work.write_model(path, **SHAPES["2.6M"], context=512)
        for name, kv_cache in ENGINES.items():
            progress.say(name)
            sampler = sampler_of(path, name, kv_cache, options.threads)
            try:
                results[name] = measured(sampler, rows, updates)
            finally:
                sampler.close()
    table = [
        [
            f"weights in flight, {name}, {rows} open responses, 2.6M parameters",
            f"decoding stops for {result['pause_ms'][0]} {result['pause_ms'][1]} ms",
            f"{result['pause_to_sync'][0]}x the sync with nothing open ({result['sync_ms'][0]} ms); target: 1.5x",
        ]
        for name, result in results.items()
    ]
    progress.publish(results, table, is_complete=True)


if __name__ == "__main__":
    main()
