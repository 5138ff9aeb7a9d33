"""What saving and resuming cost a single process, as they are and the other way.

python benchmarks/save_alone.py [--small]

One process holds an actor with its optimizer. `driver`: its writer process writes everything from one copy. `part`: the
process takes part in a save of one rank, so that the role's tensors go to a writer process of the role, what the driver
holds to the driver's own, and both report to the one that publishes. The sides take turns, each in a run of its own.

Resuming builds an actor and its optimizer from the checkpoint (`built`); `loaded` builds them from the model that the
run names, and then loads the checkpoint into the live tensors.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verl.checkpoint.resolve import resolve
from verl.component import BuildContext
from verl.engines.parallel_dims import Parallelism
from verl.models.pretrained import Pretrained
from verl.trainer import build
from verl.trainer.state.train_state import RankWriters
from verl.workers.load_state import CheckpointSelection, RestoreSource, load_optimizer, load_weights

SIDES = ("driver", "part")


def described(hidden: int, mode: str, steps: int, directory: Path) -> Any:
    """A run that saves each step."""
    from verl.compose.compose import compose_root
    from verl.compose.validate import validate

    options = ["actor=tiny_scratch", "algorithm=grpo", "tracker=none", f"checkpoint={mode}", "replay=off"]
    options += [f"++actor.model.hidden_size={hidden}", "++actor.model.num_layers=8", "++trainer.prompts_per_step=2"]
    options += ["++trainer.group_size=2", "++trainer.device=cpu", "++trainer.num_threads=1", "++trainer.eval_samples=0"]
    options += ["++algorithm.mini_batches=1", "++trainer.eval_before=false"]
    options += [f"++trainer.total_steps={steps}", "++checkpoint.save_interval=1", "++checkpoint.keep_last_n=1"]
    options += [f"++checkpoint.save_dir={directory / 'checkpoints'}"]
    return validate(compose_root("ppo", options))


def saved(side: str, hidden: int, mode: str, saves: int, directory: Path) -> list[dict[str, float]]:
    """What each save of a run cost, the first one left out: memory is touched for the first time there."""
    run, before = described(hidden, mode, saves + 1, directory), build.rank_writers_of
    if side == "part":
        build.rank_writers_of = lambda cluster, trained, settings: RankWriters(trained, settings)
    try:
        with run.build(BuildContext(run_dir=directory / "run")) as trainer:
            return trainer.fit().saves[1:]
    finally:
        build.rank_writers_of = before


def resumed(hidden: int, rounds: int, directory: Path) -> dict[str, float]:
    """Seconds until an actor and its optimizer stand where a checkpoint left them; the sides take turns."""
    run = described(hidden, "sync", 1, directory)
    with run.build(BuildContext(run_dir=directory / "run")) as trainer:
        trainer.fit()
    point, parallel = resolve("latest", directory / "checkpoints"), Parallelism()
    assert point is not None
    role = replace(run.actor, model=Pretrained(path=str(directory / "run/actor")))
    source, context = RestoreSource(point.checkpoint.directory, verify=False), BuildContext()

    def built() -> None:
        model = role.load("causal_lm", "cpu", source, "actor", parallel)
        role.engine(model, context, parallel, 10, source, "actor")

    def loaded() -> None:
        model = role.load("causal_lm", "cpu", None, "actor", parallel)
        engine = role.engine(model, context, parallel, 10, None, "actor")
        selection = CheckpointSelection(point.checkpoint.directory)
        load_weights(model, "actor", selection, parallel)
        load_optimizer(engine, "actor", selection)

    took: dict[str, list[float]] = {"built": [], "loaded": []}
    for _ in range(rounds + 1):
        for side in (built, loaded):
            start = time.perf_counter()
            side()
            took[side.__name__].append(time.perf_counter() - start)
    return {side: median(seconds[1:]) for side, seconds in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small model, to see that it works")
    hidden, rounds, saves = (64, 1, 2) if parser.parse_args().small else (512, 3, 4)
    result: dict[str, Any] = {"hidden": hidden, "rows": []}
    for mode in ("sync", "async"):
        found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for _ in range(rounds):
            for side in SIDES:
                with tempfile.TemporaryDirectory() as directory:
                    found[side] += saved(side, hidden, mode, saves, Path(directory))
        told = {
            side: {key: median(one[key] for one in saves) for key in ("stall_s", "total_s", "bytes")}
            for side, saves in found.items()
        }
        result[mode] = told
        one, other = told["driver"], told["part"]
        result["rows"].append(
            [
                f"save of {one['bytes'] / 1e6:.0f} MB by one process, checkpoint={mode}: stall, time until durable",
                f"{1e3 * one['stall_s']:.0f} and {1e3 * one['total_s']:.0f} ms by the driver's writer; "
                f"{1e3 * other['stall_s']:.0f} and {1e3 * other['total_s']:.0f} ms as a part",
                "the cheaper one is used",
            ]
        )
    with tempfile.TemporaryDirectory() as directory:
        result["resume"] = resumed(hidden, 3 * rounds, Path(directory))
    took = result["resume"]
    result["rows"].append(
        [
            "resume of that actor and its optimizer in one process: until both stand where they were",
            f"{1e3 * took['built']:.0f} ms built from the checkpoint, {1e3 * took['loaded']:.0f} ms built, then loaded",
            "the cheaper one is used",
        ]
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
