"""Every fault against every way to save, and what a resume then does. Run with TEST_INTERPOSER set:

    python -m peers.campaign [--tools verl,torch] [--sample 20] [--cuts 20]

Prints one JSON line: a row for every tool, with the outcomes of `outcomes.py` counted.
"""

from __future__ import annotations

import argparse
import errno
import gc
import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from faults.calls import Strike, recorded
from faults.power_cut import Trace, fingerprint, materialise, snapshot
from faults.scenarios import fast_directory
from peers.cuts import sampled_cuts
from peers.held import Found, HeldTraining, resume
from peers.hf_trainer import HuggingFaceTrainer
from peers.outcomes import Known, Tally
from peers.tools import DistributedCheckpoint, Ours, Tool, TorchSave, TorchSaveLatest
from peers.training import LAST

TOOLS: dict[str, Callable[[], Tool]] = {
    "verl": Ours,
    "verl-2": lambda: Ours(keep=2),
    "trainer": HuggingFaceTrainer,
    "trainer-2": lambda: HuggingFaceTrainer(keep=2),
    "torch": TorchSave,
    "torch-2": lambda: TorchSave(keep=2),
    "torch-over": lambda: TorchSaveLatest("written over"),
    "torch-renamed": lambda: TorchSaveLatest("renamed"),
    "torch-synced": lambda: TorchSaveLatest("synced, renamed, synced"),
    "dcp": DistributedCheckpoint,
    "dcp-2": lambda: DistributedCheckpoint(keep=2),
}
FAILURES = [errno.ENOSPC, errno.EIO, errno.EINTR]


class Campaign:
    """All faults against one tool, in a directory of its own.

    Args:
        sample: how many strikes of each group; None tries all.
        cuts: how many disks after a power cut, of each model.
    """

    def __init__(self, tool: Tool, base: Path, sample: int | None, cuts: int, seed: int = 0):
        self.tool, self.sample, self.cuts, self.seed = tool, sample, cuts, seed
        self.base, self.log = base / "disk", base / "log"
        self.root, self.tally = self.base / "run", Tally()
        self._seen: dict[bytes, Found] = {}
        self.base.mkdir()
        self.held = HeldTraining(tool, self.root, base / "kept")

    def run(self) -> dict[str, Any]:
        """Try everything and give the row."""
        with self.held:
            trace, calls = self.record()
            known = self.known()
            for group, strike in self._strikes(calls):
                self._strike(group, strike, known)
        for model in ("posix", "journal"):
            for cut in sampled_cuts(trace, model, self.cuts, self.seed):
                shutil.rmtree(self.base)
                materialise(cut.disk, self.base)
                found = self._resumed()
                outcome = known.outcome(found, LAST if cut.is_after else LAST - 1)
                moment = "after the save" if cut.is_after else "during it"
                self.tally.add(f"power cut {model}, {moment}", str(cut), outcome, False, found, known)
        return self._row(trace, calls)

    def record(self) -> tuple[Trace, list[bool]]:
        """The last save without a fault, as effects, and its calls: whether each writes more than a byte.

        Raises:
            RuntimeError: what was recorded is not what happened.
        """
        self.held.put_back(LAST - 1)
        before = snapshot(self.base)
        ended = self.held.let_go(Strike(), self.log)
        operations = recorded(self.log)
        trace = Trace.of(self.base, before, operations)
        if fingerprint(trace.disk(trace.steps, set())) != fingerprint(snapshot(self.base)) or ended.how != "returned":
            raise RuntimeError(f"{self.tool.name} changed files in a way that was not recorded")
        return trace, [operation.name == "write_at" and len(operation.args[1]) > 1 for operation in operations]

    def known(self) -> Known:
        """Resumes without a fault.

        Raises:
            RuntimeError: a resume is not of the step that was saved, or some part is the same after two steps.
        """
        steps = {LAST: resume(self.tool, self.root)}
        for step in range(1, LAST):
            self.held.put_back(step)
            steps[step] = resume(self.tool, self.root)
        for step, found in steps.items():
            if found.resumed is None or found.resumed.step != step:
                raise RuntimeError(f"{self.tool.name} does not resume step {step}: {found}")
        for part in ("model", "optimizer", "scheduler", "step"):
            if len({found.resumed.parts[part] for found in steps.values() if found.resumed}) < LAST:
                raise RuntimeError(f"{self.tool.name} does not resume the {part}")
        return Known(dict(sorted(steps.items())))

    def _strikes(self, calls: list[bool]) -> Iterator[tuple[str, Strike]]:
        every = range(len(calls))
        writes = [at for at in every if calls[at]]
        kills = [Strike(at, kind) for kind in ("kill before", "kill after") for at in every]
        kills += [Strike(at, "kill within") for at in writes]
        errors = [Strike(at, "fail", code) for code in FAILURES for at in every]
        errors += [Strike(at, "fail from", errno.ENOSPC) for at in every]
        shorts = [Strike(at, "short") for at in writes]
        coin = random.Random(self.seed)
        for group, strikes in {"kill": kills, "error": errors, "short write": shorts}.items():
            wanted = len(strikes) if self.sample is None else min(self.sample, len(strikes))
            for strike in sorted(coin.sample(strikes, wanted), key=strikes.index):
                yield group, strike

    def _strike(self, group: str, strike: Strike, known: Known) -> None:
        ended = self.held.let_go(strike)
        if not ended.was_struck and strike.kind != "fail from":
            raise RuntimeError(f"{self.tool.name}: {strike} was not reached")
        found = self._resumed()
        has_returned = ended.how == "returned"
        outcome = known.outcome(found, LAST if has_returned else LAST - 1)
        self.tally.add(group, f"{strike}, {ended.how}", outcome, has_returned and ended.was_struck, found, known)

    def _resumed(self) -> Found:
        """What a resume finds; equal directories are asked once."""
        key = fingerprint(snapshot(self.base))
        if key not in self._seen:
            self._seen[key] = resume(self.tool, self.root) if self.root.exists() else Found(None)
        return self._seen[key]

    def _row(self, trace: Trace, calls: list[bool]) -> dict[str, Any]:
        tally = self.tally
        return {
            "name": self.tool.name,
            "how": self.tool.how,
            "calls": len(calls),
            "writes": sum(calls),
            "syncs": sum(isinstance(step, int) for step in trace.steps),
            "counts": {group: dict(counts) for group, counts in tally.counts.items()},
            "silent": tally.silent,
            "parts": dict(tally.parts),
            "examples": dict(tally.examples),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--sample", type=int, help="strikes of each group; all without it")
    parser.add_argument("--cuts", type=int, default=400, help="disks after a power cut, of each model")
    args = parser.parse_args()
    gc.disable()  # a collection in a forked process would copy all the memory that it looks at
    rows = []
    for name in args.tools.split(","):
        with fast_directory() as made:
            rows.append(Campaign(TOOLS[name](), made.resolve(), args.sample, args.cuts).run())
    sys.stdout.write(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
