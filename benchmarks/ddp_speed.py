"""Two processes under `sharding=ddp`, each with a thread, against one process with one thread: seconds of a GRPO step.

python benchmarks/ddp_speed.py [--small]

Generation, scoring and update of the same prompts by the same model, large enough for computing to dominate. The sides
take turns; all are up all the time, and wait while one works.

The limit of the machine is measured by two independent processes: each runs the whole step (two cores share memory
bandwidth and often more), and each runs it for half of the prompts (with the constant costs: reading the weights for
each token, the optimizer). The latter is the time without any communication.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from verl.component import BuildContext
from verl.compose.compose import compose_root
from verl.compose.validate import validate

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
    run = validate(compose_root("ppo", overrides))
    return run.build(BuildContext(run_dir=directory))


def spread(values: list[float]) -> dict[str, float]:
    low, _, high = quantiles(values, n=4)
    return {"median": median(values), "q1": low, "q3": high}


class Stranger:
    """A process that makes steps of its own, with one thread, when it is told to."""

    def __init__(self, directory: Path, small: bool):
        command = [sys.executable, __file__, "--alone", str(directory), *(["--small"] if small else [])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.wait()

    def begin(self, step: int, prompts: range) -> None:
        """Have it make a step."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{step} {prompts.start} {prompts.stop}\n")
        self._process.stdin.flush()

    def wait(self) -> None:
        """Until it has done."""
        assert self._process.stdout is not None
        while (line := self._process.stdout.readline()) != "done\n":
            if not line:
                raise RuntimeError(f"the process ended with {self._process.wait()}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def alone(directory: Path, small: bool) -> None:
    """What a stranger does until nobody asks any more."""
    with started(directory, small, "++trainer.num_threads=1") as trainer:
        print("done", flush=True)
        for line in sys.stdin:
            step, first, end = map(int, line.split())
            trainer.step(trainer.train_data.collate(range(first, end)), step)
            print("done", flush=True)


def together(strangers: list[Stranger], step: int, prompts: list[range]) -> None:
    """A step of each at once."""
    for stranger, own in zip(strangers, prompts, strict=True):
        stranger.begin(step, own)
    for stranger in strangers:
        stranger.wait()


def measured(small: bool) -> dict[str, list[float]]:
    """Seconds of each step of each side; the first step of each is left out."""
    options = {"one": ["++trainer.num_threads=1"]}
    options["two"] = ["sharding=ddp", "++trainer.n_gpus_per_node=2", "++trainer.num_threads=2"]
    with tempfile.TemporaryDirectory() as place, ExitStack() as ending:
        trainers = {
            name: ending.enter_context(started(Path(place) / name, small, *chosen)) for name, chosen in options.items()
        }
        strangers = [Stranger(Path(place) / f"alone_{number}", small) for number in range(2)]
        for stranger in strangers:
            ending.callback(stranger.close)
        count = trainers["one"].settings.prompts_per_step
        whole, halves = [range(count)] * 2, [range(count // 2), range(count // 2, count)]

        def of(trainer: Any) -> Callable[[int], Any]:
            return lambda step: trainer.step(trainer.train_data.collate(range(count)), step)

        sides: dict[str, Callable[[int], Any]] = {name: of(trainer) for name, trainer in trainers.items()}
        sides["both_whole"] = lambda step: together(strangers, 2 * step - 1, whole)
        sides["both_half"] = lambda step: together(strangers, 2 * step, halves)
        took: dict[str, list[float]] = {name: [] for name in sides}
        for step in range(1, 4 if small else 8):
            for name, make_step in sides.items():
                torch.set_num_threads(1)  # the driver's own; a trainer that was built later has set it to its
                start = time.perf_counter()
                make_step(step)
                took[name].append(time.perf_counter() - start)
    return {name: seconds[1:] for name, seconds in took.items()}


def result_of(took: dict[str, list[float]]) -> dict[str, Any]:
    """What is kept of the seconds of each side."""
    rounds = [dict(zip(took, seconds, strict=True)) for seconds in zip(*took.values(), strict=True)]
    ratio = spread([one["one"] / one["two"] for one in rounds])
    machine = spread([2 * one["one"] / one["both_whole"] for one in rounds])
    limit = spread([one["one"] / one["both_half"] for one in rounds])
    share = spread([one["both_half"] / one["two"] for one in rounds])
    result: dict[str, Any] = {f"{name}_s": spread(seconds) for name, seconds in took.items()}
    result |= {"speedup": ratio, "two_whole_steps": machine, "two_halves": limit, "share_of_two_halves": share}
    result |= {"cores": os.cpu_count()}
    result["rows"] = [
        [
            "GRPO step, two processes under `sharding=ddp` against one process, a thread each",
            f"{ratio['median']:.2f}x ({ratio['q1']:.2f}-{ratio['q3']:.2f}): {median(took['two']):.2f} s, "
            f"{share['median']:.0%} of what two halves that exchange nothing come to",
            f"{median(took['one']):.2f} s; target: at least {TARGET}x. Without any exchange: {limit['median']:.2f}x "
            f"for half of the prompts each, {machine['median']:.2f}x for a whole step each",
        ]
    ]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small model, to see that it works")
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.alone is not None:
        alone(chosen.alone, chosen.small)
    else:
        print(json.dumps(result_of(measured(chosen.small))))


if __name__ == "__main__":
    main()
