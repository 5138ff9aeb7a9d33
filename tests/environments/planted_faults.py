"""An environment that does what it should not, and what becomes of its episodes; scripts/make_tables.py prints it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from environments.episodes import engine_of, prompts_of, tiny

from verl.environments.hosted import FunctionEnvironment
from verl.monitoring.ppo_metrics import episode_metrics
from verl.rollout.base import GenerationRequest

EACH = tuple(range(6, 100))  # every character ends a turn

WORLD = '''
import os, sys, time

class World:
    """Does what the row says with its second turn, once for each file that is named."""

    def reset(self, row, seed):
        self.row, self.turn = row, 0
        print("noise on stdout")

    def step(self, action):
        self.turn += 1
        fault = self.row["fault"]
        if self.turn == 2 and (self.row["always"] or not os.path.exists(self.row["mark"])):
            open(self.row["mark"], "w").close()
            if fault == "dies":
                os._exit(3)
            if fault == "hangs":
                time.sleep(60)
            if fault == "raises":
                raise ValueError("a bug of the environment")
            if fault == "bad json":
                os.write(replies.channel.fileno(), (9).to_bytes(8, "big") + b"{not json")
                time.sleep(60)
            if fault == "answers twice":
                import json
                wrong = {"observation": "twice", "reward": 9.0, "terminated": False, "truncated": False, "info": {}}
                replies.send({"id": replies.last + 100000, "value": wrong})
            if fault == "answers late":
                late = {"observation": "late", "reward": 9.0, "terminated": True, "truncated": False, "info": {}}
                replies.send({"id": 1, "value": late})  # the call of `reset`, which was answered
            if fault == "returns 100 MB":
                return "x" * 100_000_000, 1.0, False, False, {}
            if fault == "no tuple":
                return 5
        return "ok", 1.0, self.turn >= 3, False, {}

import gc
for found in gc.get_objects():
    if type(found).__name__ == "Replies":
        replies = found
        replies.last = 0
'''

# fault -> in words; how the episode ends where it happens once, and where it happens each time; what is written of it
FAULTS = {
    "none": ("none", "terminated", "terminated", ""),
    "dies": ("the process dies", "terminated", "dropped", "has ended"),
    "hangs": ("hangs in `step`", "terminated", "timeout", "no answer within 8 s, next to other episodes"),
    "raises": ("raises", "terminated", "dropped", "ValueError: a bug of the environment"),
    "bad json": ("a reply that is not JSON", "terminated", "dropped", "not JSON"),
    "answers twice": ("a second reply, to a call that was not made", "terminated", "terminated", ""),
    "answers late": ("a late reply, to a call that was answered", "terminated", "terminated", ""),
    "returns 100 MB": ("returns 100 MB", "terminated", "dropped", "the answer has 95 MiB, and 8 may pass"),
    "no tuple": ("returns no tuple", "terminated", "dropped", "step gave int"),
}
Outcome = tuple[dict[str, Any], dict[str, float]]  # record and metrics of an episode


def played(directory: Path, model: Any, always: bool, timeout_s: float = 8.0) -> dict[str, Outcome]:
    """An episode of three turns for each fault, which comes with the second turn, once or each time."""
    names = list(FAULTS)
    texts = [f"{place}=" for place in range(len(names))]
    marks = [str(directory / f"mark{place}") for place in range(len(names))]
    prompts = prompts_of(model[1], texts, fault=names, mark=marks, always=[always] * len(names))
    file = directory / "world.py"
    file.write_text(WORLD)
    environment = FunctionEnvironment(
        path=f"{file}:World", step_timeout_s=timeout_s, retries=1 if always else 2, processes=1
    )
    found = {}
    for place, name in enumerate(names):  # each alone, so that a process that dies takes no other with it
        engine = engine_of(environment, model=model, stop_token_ids=EACH)
        try:
            rows = engine.generate(prompts[[place]], GenerationRequest(1, 1))
        finally:
            engine.close()
        record = rows["episode"][0]
        assert not rows["turn_rewards"].any() or record["end"] != "dropped"
        found[name] = record, episode_metrics(rows)
    return found


def table(once: Mapping[str, Outcome], always: Mapping[str, Outcome]) -> str:
    """The lines of the document."""
    head = "| fault | once | each time | written of it | the model read | metrics, once; each time |"
    lines = [head, "|---|---|---|---|---|---|"]
    for name, (words, *_) in FAULTS.items():
        (first, metrics), (each, metrics_each) = once[name], always[name]
        reasons = [re.sub(r"/\S+/", "", reason.partition(" (")[0]) for reason in first["infra"][:1]]
        read = ", ".join(f"`{turn['observation']}`" for turn in first["turns"] if turn["observed"])
        told = "; ".join(map(_metrics, (metrics, metrics_each)))
        cells = (words, _end(first), _end(each), *([f"`{reasons[0]}`"] if reasons else [""]), read or "nothing", told)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _end(record: Mapping[str, Any]) -> str:
    if record["end"] == "dropped":
        return "left out, no reward"
    again = "begun anew, " if record["attempts"] > 1 else ""
    return f"{again}`{record['end']}`, reward {record['reward']:g}"


def _metrics(metrics: Mapping[str, float]) -> str:
    told = [name for name in metrics if name.startswith("episode/end_") and metrics[name]]
    told += ["episode/restarts"] if metrics["episode/restarts"] else []
    return ", ".join(f"`{name}`" for name in told if name != "episode/end_dropped")


def made(directory: Path) -> tuple[str, dict[str, Outcome], dict[str, Outcome]]:
    """The table, and what it was made of."""
    model, found = tiny(), []
    for always in (False, True):
        (directory / str(always)).mkdir()
        found.append(played(directory / str(always), model, always))
    return table(*found), found[0], found[1]
