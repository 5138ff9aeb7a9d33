"""Share of a training step that the journal of episodes and typed calls of environments take.

python benchmarks/episode_journal.py [--small]

Steps of the game of `environment=guess_number` with random weights: 256 games of several turns, drawn by `rollout=hf`,
and their update. Time is processor time, so that a busy machine changes little: of the methods of the journal and of
`CallRunner` in the thread that draws, and of all of the thread in which calls run (the environment's own code is in
it), as shares of the processor time of the process in the same step. Prints one JSON line.
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
from verl.environments.journal import EpisodeJournal  # noqa: E402
from verl.trainer.ppo import PPOTrainer  # noqa: E402

METHODS = {
    "journal": (EpisodeJournal, ("open", "key", "answer", "write_turn", "write_answer", "write_end", "has_ended")),
    "calls": (CallRunner, ("reset", "step", "take", "end")),
}
STOPS = f"[{','.join(map(str, range(20, 60)))}]"  # an untrained model ends its turns by chance


def timed(spent: Counter[str]) -> None:
    """Add up the processor seconds of what the loop asks of the journal and of the calls."""
    for name, (kind, methods) in METHODS.items():
        for method in methods:
            setattr(kind, method, _timed(getattr(kind, method), name, spent))


def _timed(method: Any, name: str, spent: Counter[str]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.thread_time()
        try:
            return method(*args, **kwargs)
        finally:
            spent[name] += time.thread_time() - began

    return call


def thread_s() -> float:
    """Processor seconds of the thread in which calls of environments run."""
    idents = [thread.ident for thread in threading.enumerate() if thread.name == "environments"]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents if ident is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="few episodes, to see that it runs")
    small = parser.parse_args().small
    groups, steps = (2, 2) if small else (16, 7)
    overrides = [
        "environment=guess_number", "data=guess_number", "reward=environment", "algorithm=grpo", "critic=none",
        "actor=tiny_scratch", "actor.model.context_length=160", "trainer.group_size=16",
        f"rollout.stop_token_ids={STOPS}", "trainer.device=cpu",
        f"trainer.prompts_per_step={groups}", "trainer.eval_samples=0", "tracker=none", "trainer.num_threads=1",
        "trainer.save_final=false", "trainer.total_steps=1000",
    ]  # fmt: skip
    spent: Counter[str] = Counter()
    timed(spent)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        run = validate(compose_root("ppo", [*overrides, f"checkpoint.save_dir={directory}/checkpoints"]))
        with PPOTrainer(run, BuildContext(run_dir=Path(directory))) as trainer:
            for step in range(1, steps + 1):
                batch = trainer.train_data.collate(trainer.sampler.next_batch())
                spent.clear()
                began, calls = time.process_time(), thread_s()
                trainer.step(batch, step)
                whole = time.process_time() - began
                rows.append({**spent, "thread": thread_s() - calls, "step": whole})
    rows = rows[1:]
    episodes = groups * run.trainer.group_size
    shares = {name: [row[name] / row["step"] for row in rows] for name in ("journal", "calls", "thread")}
    found: dict[str, Any] = {
        "share_of_step": {name: round(median(values), 4) for name, values in shares.items()},
        "share_of_step_in_all": round(median(map(sum, zip(*shares.values(), strict=True))), 4),
        "journal_ms_per_episode": round(1e3 * median(row["journal"] for row in rows) / episodes, 3),
        "step_cpu_s": round(median(row["step"] for row in rows), 3),
        "episodes": episodes,
        "load": round(os.getloadavg()[0], 1),
    }
    share = found["share_of_step"]
    told = f"{100 * share['journal']:.1f} %, {100 * share['calls']:.1f} %"
    what = f"journal, and typed calls, of a step of {episodes} guessing games, processor time"
    print(json.dumps(found | {"rows": [[what, told, "target 2 % in all"]]}))


if __name__ == "__main__":
    main()
