"""Write the table of faults, from benchmarks/results/checkpoint_faults.json, between the marks in docs/results.md.

`--check` exits 1 if the document is not up to date.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from make_results_table import ROOT, between

DOCUMENT, RESULT = ROOT / "docs/results.md", ROOT / "benchmarks/results/checkpoint_faults.json"
COLUMNS = {
    "killed": ["kill"],
    "refused, or cut short": ["error", "short write"],
    "power cut, saving": ["power cut posix, during it", "power cut journal, during it"],
    "power cut, saved; POSIX": ["power cut posix, after the save"],
    "power cut, saved; journal": ["power cut journal, after the save"],
}


def table(result: dict[str, Any]) -> str:
    """A line for every tool: silent losses, and resumes that stop, of the cases of each column."""
    head = f"| saved with | calls, syncs | {' | '.join(COLUMNS)} |\n|---|---|{'---|' * len(COLUMNS)}\n"
    lines = [
        f"| {row['name']} | {row['calls']}, {row['syncs']} | {' | '.join(_cell(row, c) for c in COLUMNS.values())} |\n"
        for row in result["tools"]
    ]
    sample, cuts = result["settings"]["sample"], result["settings"]["cuts"]
    struck = f"A seeded sample of {sample} strikes of each kind" if sample else "Every call in every way"
    return f"{head}{''.join(lines)}\n{struck}, and {cuts} power cuts of each model, half of them after the save.\n"


def _cell(row: dict[str, Any], groups: list[str]) -> str:
    counts = [row["counts"][group] for group in groups]
    cases = sum(sum(count.values()) for count in counts)
    silent = sum(row["silent"][group] for group in groups)
    stops = cases - silent - sum(count.get("whole", 0) for count in counts)
    return f"**{silent}** + {stops} of {cases}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    old = DOCUMENT.read_text()
    new = between(old, "faults", table(json.loads(RESULT.read_text())))
    if args.check and new != old:
        sys.exit("docs/results.md is not up to date: run scripts/make_fault_table.py")
    DOCUMENT.write_text(new)


if __name__ == "__main__":
    main()
