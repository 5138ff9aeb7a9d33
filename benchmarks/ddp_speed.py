"""Two processes under `sharding=ddp`, each with a thread, against one process with one thread: seconds of a GRPO step.

python benchmarks/ddp_speed.py [--small]

Generation, scoring and update of the same prompts by the same model, large enough for computing to dominate. The sides
take turns; both are up all the time, and one waits while the other works.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from verl.compose.check import check
from verl.compose.composition import compose_root
from verl.description import BuildContext

TARGET = 1.7


def started(directory: Path, small: bool, *options: str) -> Any:
    """A trainer of its own."""
    prompts, new_tokens = (4, 8) if small else (8, 96)
    shape = {"hidden_size": 512, "intermediate_size": 1408, "num_layers": 8, "num_heads": 8, "context_length": 256}
    overrides = ["algorithm=grpo", "actor=tiny_scratch", "critic=none", "checkpoint=off"]
    overrides += [f"++actor.model.{name}={value}" for name, value in ({} if small else shape).items()]
    overrides += [f"++trainer.prompts_per_step={prompts}", "++trainer.group_size=4", "++trainer.eval_before=false"]
    overrides += [f"++rollout.max_new_tokens={new_tokens}", f"++rollout.min_new_tokens={new_tokens}"]
    overrides += ["++trainer.device=cpu", "tracker=none", *options]
    run = check(compose_root("ppo", overrides))
    return run.build(BuildContext(run_dir=directory))


def spread(values: list[float]) -> dict[str, float]:
    low, _, high = quantiles(values, n=4)
    return {"median": median(values), "q1": low, "q3": high}


def measured(small: bool) -> dict[str, list[float]]:
    """Seconds of each step of each side; the first step of each is left out."""
    sides = {"one": ["++trainer.num_threads=1"]}
    sides["two"] = ["sharding=ddp", "++trainer.n_gpus_per_node=2", "++trainer.num_threads=2"]
    with tempfile.TemporaryDirectory() as place, ExitStack() as ending:
        trainers = {
            name: ending.enter_context(started(Path(place) / name, small, *options)) for name, options in sides.items()
        }
        took: dict[str, list[float]] = {name: [] for name in sides}
        for step in range(1, 4 if small else 8):
            for name, trainer in trainers.items():
                torch.set_num_threads(1)  # the driver's own; a trainer that was built later has set it to its
                batch = trainer.train_data.collate(range(trainer.settings.prompts_per_step))
                start = time.perf_counter()
                trainer.step(batch, step)
                took[name].append(time.perf_counter() - start)
    return {name: seconds[1:] for name, seconds in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small model, to see that it works")
    took = measured(parser.parse_args().small)
    pairs = [one / two for one, two in zip(took["one"], took["two"], strict=True)]
    ratio = spread(pairs)
    result: dict[str, Any] = {f"{name}_s": spread(seconds) for name, seconds in took.items()}
    result |= {"speedup": ratio, "cores": os.cpu_count()}
    result["rows"] = [
        [
            "GRPO step, two processes under `sharding=ddp` against one process, a thread each",
            f"{ratio['median']:.2f}x ({ratio['q1']:.2f}-{ratio['q3']:.2f}): {median(took['two']):.2f} s",
            f"{median(took['one']):.2f} s; target: at least {TARGET}x",
        ]
    ]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
