"""Kills, errors, short writes and power cuts during a save: the outcome of a resume, with verl and other tools.

    python benchmarks/checkpoint_faults.py                  about twenty minutes; --small for a short run
    python benchmarks/checkpoint_faults.py --sample 30 --cuts 60        fewer of each kind

Prints one JSON line. Every tool saves three steps of a tiny training as documented, and faults are injected into the
last save at the level of system calls (tests/faults/interposer/) by fault_campaign/ beside this file. The counts depend
on the versions of the tools, not on the machine. docs/results.md says what the outcomes mean.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from faults.calls import build, environment, why_not

OURS = "verl, 2 kept"
PEERS = ["transformers.Trainer, 2 kept", "torch.distributed.checkpoint, 2 kept", "torch.save, 2 kept"]
MEASURED = {
    "faults in a save: kills, errors, short writes": ["kill", "error", "short write"],
    "faults in a save: power cut while it is under way": [
        "power cut posix, during it",
        "power cut journal, during it",
    ],
    "faults in a save: power cut after it has returned": [
        "power cut posix, after the save",
        "power cut journal, after the save",
    ],
}


def campaign(arguments: list[str]) -> list[dict[str, Any]]:
    """The rows of every tool, from a process that is interposed."""
    with tempfile.TemporaryDirectory() as made:
        command = [sys.executable, "-m", "peers.campaign", *arguments]
        done = subprocess.run(
            command, env=environment(build(Path(made))), stdout=subprocess.PIPE, text=True, check=True
        )
    return json.loads(done.stdout)


def harm(row: dict[str, Any], groups: Iterable[str]) -> tuple[int, int, int]:
    """Silent losses, resumes that stop or do not go on without a word, and cases of one tool."""
    counts = [row["counts"][group] for group in groups]
    silent = sum(row["silent"][group] for group in groups)
    cases = sum(sum(count.values()) for count in counts)
    return silent, cases - silent - sum(count.get("whole", 0) for count in counts), cases


def told(row: dict[str, Any], groups: Iterable[str]) -> str:
    """The same in words."""
    silent, stopped, cases = harm(row, groups)
    return f"{silent} silent losses, {stopped} stops in {cases} cases"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a few faults, and the tools of the rows only")
    parser.add_argument("--sample", type=int, help="strikes of each kind; all of them without it")
    parser.add_argument("--cuts", type=int, default=400, help="power cuts of each model")
    args = parser.parse_args()
    if reason := why_not():
        sys.exit(f"cannot be measured here: {reason}")
    if args.small:
        args.sample, args.cuts = 4, 8
    arguments = ["--cuts", str(args.cuts)]
    arguments += ["--sample", str(args.sample)] if args.sample else []
    arguments += ["--tools", "verl-2,trainer-2,dcp-2,torch-2"] if args.small else []
    tools = [{key: value for key, value in row.items() if key != "examples"} for row in campaign(arguments)]
    named = {row["name"]: row for row in tools}
    rows = [
        [measured, told(named[OURS], groups), "; ".join(f"{peer}: {told(named[peer], groups)}" for peer in PEERS)]
        for measured, groups in MEASURED.items()
    ]
    settings = {"sample": args.sample, "cuts": args.cuts}
    print(json.dumps({"name": "checkpoint_faults", "settings": settings, "tools": tools, "rows": rows}))


if __name__ == "__main__":
    main()
