"""What the journal of episodes takes of the time in which they are drawn.

python benchmarks/episode_journal.py [--small]

Episodes of guess_number with the embedded model, random weights, and `rollout=hf`. The journal's calls are timed inside
of the call that draws, in CPU seconds of the thread that does both: on a busy machine any call may wait.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from environments.episodes import engine_of, prompts_of, tiny  # noqa: E402

from verl.environments.guess_number import GuessNumber  # noqa: E402
from verl.environments.journal import EpisodeJournal  # noqa: E402
from verl.rollout.base import GenerationRequest  # noqa: E402


def timed(journal: EpisodeJournal, spent: list[float]) -> None:
    """Add up the seconds of what the loop asks of a journal."""
    for name in ("open", "key", "answer", "write_turn", "write_answer", "write_end", "has_ended"):
        method = getattr(journal, name)

        def call(*args: Any, method: Any = method, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                spent[-1] += time.thread_time() - began

        setattr(journal, name, call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="few episodes, to see that it runs")
    groups, rounds = (2, 2) if parser.parse_args().small else (16, 6)
    torch.set_num_threads(1)
    model = tiny()
    engine = engine_of(
        GuessNumber(max_turns=4, max_tokens=128), model=model, max_new_tokens=16, stop_token_ids=tuple(range(20, 60))
    )
    prompts = prompts_of(model[1], [f"{number}+1=" for number in range(groups)], secret=[7] * groups)
    spent, whole = [], []
    with tempfile.TemporaryDirectory() as directory:
        engine.journal = EpisodeJournal(Path(directory) / "episode_journal", "benchmark", 0)
        spent.append(0.0)
        timed(engine.journal, spent)
        for step in range(rounds + 1):
            spent.append(0.0)
            began = time.thread_time()
            engine.generate(prompts, GenerationRequest(step, 8))
            whole.append(time.thread_time() - began)
        engine.close()
    shares = [part / all_of_it for part, all_of_it in zip(spent[2:], whole[1:], strict=True)]
    found = {
        "share_of_drawing": {"median": median(shares), "worst": max(shares)},
        "journal_ms_per_episode": 1e3 * median(spent[2:]) / (8 * groups),
        "drawing_s": median(whole[1:]),
        "episodes": 8 * groups,
        "load_average": os.getloadavg()[0],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
