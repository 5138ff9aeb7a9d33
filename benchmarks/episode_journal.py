"""Share of a training step that the journal of episodes and typed calls of environments take.

python benchmarks/episode_journal.py [--small]

Steps of 256 episodes, drawn by `rollout=hf`, and their update: the game of `environment=guess_number` with random
weights, whose turns of a token or two are the cheapest there are, and `experiment=calculator_grpo`, whose warm start
is made first. Time is processor time, so that a busy machine changes little: of the methods of the journal and of
`CallRunner` in the thread that draws (the environment's own code is in the latter), and of all of the thread in which
calls of other environments run, as shares of the processor time of the process in the same step. Reading the clock
takes as long as such a method, so what it takes is measured on an empty method and left out. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from verl.component import BuildContext  # noqa: E402
from verl.compose.compose import compose_root  # noqa: E402
from verl.compose.validate import validate  # noqa: E402
from verl.environments.calls import CallRunner  # noqa: E402
from verl.environments.journal import EpisodeJournal, PrefixHash  # noqa: E402
from verl.trainer.ppo import PPOTrainer  # noqa: E402

METHODS = {
    "journal": [
        (EpisodeJournal, ("open", "prefix", "answer", "write_turn", "write_answer", "write_end", "has_ended", "flush")),
        (PrefixHash, ("append", "key")),
    ],
    "calls": [(CallRunner, ("begin_play", "reset", "step", "take", "end", "hand_over"))],
}
STOPS = f"[{','.join(map(str, range(20, 60)))}]"  # an untrained model ends its turns by chance
SETTINGS = {
    "guessing games": [
        "environment=guess_number", "data=guess_number", "reward=environment", "algorithm=grpo", "critic=none",
        "actor=tiny_scratch", "actor.model.context_length=160", f"rollout.stop_token_ids={STOPS}",
    ],
    "calculator episodes": ["experiment=calculator_grpo"],
}  # fmt: skip


def timed(spent: Counter[str]) -> None:
    """Add up the processor seconds of what the loop asks of the journal and of the calls."""
    for name, kinds in METHODS.items():
        for kind, methods in kinds:
            for method in methods:
                setattr(kind, method, _timed(getattr(kind, method), name, spent))


running: list[str] = []  # methods that were called and have not returned: the outermost one is counted
num_calls: Counter[str] = Counter()


def _timed(method: Any, name: str, spent: Counter[str]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if running:
            return method(*args, **kwargs)
        running.append(name)
        num_calls[name] += 1
        began = time.thread_time()
        try:
            return method(*args, **kwargs)
        finally:
            spent[name] += time.thread_time() - began
            running.clear()

    return call


def clock_s(calls: int = 20_000) -> tuple[float, float]:
    """Seconds that the clock adds to a method's time, and to the step's, for each call."""
    spent: Counter[str] = Counter()
    empty = _timed(lambda: None, "clock", spent)
    began = time.process_time()
    for _ in range(calls):
        empty()
    return spent["clock"] / calls, (time.process_time() - began) / calls


def thread_s() -> float:
    """Processor seconds of the thread in which calls of environments run."""
    idents = [thread.ident for thread in threading.enumerate() if thread.name == "environments"]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents if ident is not None)


def measured(name: str, small: bool, spent: Counter[str]) -> dict[str, Any]:
    """Shares of a step, medians over some steps."""
    from rich.console import Console

    from verl.compose.warm_start import resolve_warm_starts

    groups, steps = (2, 2) if small else (16, 7)
    overrides = [
        *SETTINGS[name], "trainer.group_size=16", "trainer.device=cpu", f"trainer.prompts_per_step={groups}",
        "trainer.eval_samples=0", "tracker=none", "trainer.num_threads=1", "trainer.save_final=false",
        "trainer.total_steps=1000",
    ]  # fmt: skip
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        run = validate(compose_root("ppo", [*overrides, f"checkpoint.save_dir={directory}/checkpoints"]))
        run = resolve_warm_starts(run, Console(stderr=True))
        with PPOTrainer(run, BuildContext(run_dir=Path(directory))) as trainer:
            for step in range(1, steps + 1):
                batch = trainer.train_data.collate(trainer.sampler.next_batch())
                spent.clear()
                num_calls.clear()
                began, calls = time.process_time(), thread_s()
                trainer.step(batch, step)
                whole, thread = time.process_time() - began, thread_s() - calls
                of_method, of_step = clock_s()
                own = {name: spent[name] - num_calls[name] * of_method for name in METHODS}
                counted = sum(num_calls[name] for name in METHODS)
                rows.append({**own, "thread": thread, "step": whole - counted * of_step})
    rows = rows[1:]
    episodes = groups * run.trainer.group_size
    shares = {name: [row[name] / row["step"] for row in rows] for name in ("journal", "calls", "thread")}
    return {
        "share_of_step": {name: round(median(values), 4) for name, values in shares.items()},
        "share_of_step_in_all": round(median(map(sum, zip(*shares.values(), strict=True))), 4),
        "journal_ms_per_episode": round(1e3 * median(row["journal"] for row in rows) / episodes, 3),
        "step_cpu_s": round(median(row["step"] for row in rows), 3),
        "episodes": episodes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="few guessing games, to see that it runs")
    small = parser.parse_args().small
    spent: Counter[str] = Counter()
    timed(spent)
    found = {name: measured(name, small, spent) for name in list(SETTINGS)[: 1 if small else None]}
    rows = []
    for name, figures in found.items():
        share = figures["share_of_step"]
        told = f"{100 * share['journal']:.1f} %, {100 * (share['calls'] + share['thread']):.1f} %"
        what = f"journal, and typed calls, of a step of {figures['episodes']} {name}, processor time"
        rows.append([what, told, "target 2 % in all"])
    print(json.dumps({**found, "load": round(os.getloadavg()[0], 1), "rows": rows}))


if __name__ == "__main__":
    main()
