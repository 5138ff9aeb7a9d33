"""Write the results of benchmarks/results/ between the marks in docs/results.md.

Each result file holds `rows`: lists of what was measured, the figure with its spread, and what it is compared with.
`--check` exits 1 if the page is not up to date.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAD = "| measured | result | against |\n|---|---|---|\n"


def table() -> str:
    """The results, a table for each machine that they were measured on."""
    files = sorted((ROOT / "benchmarks/results").glob("*.json"))
    tables: dict[str, str] = {}
    for result in (
        json.loads(file.read_text()) for file in files if file.stem != "checkpoint_faults"
    ):  # a table of its own
        lines = "".join(f"| {' | '.join(row)} |\n" for row in result["rows"])
        tables[_machine(result["hardware"])] = tables.get(_machine(result["hardware"]), "") + lines
    parts = [f"On {machine}:\n\n{HEAD}{lines}" for machine, lines in tables.items()]
    return "\n".join(parts) + "\nMeasured with `make bench`. Medians, with quartiles in brackets.\n"


def between(text: str, mark: str, content: str) -> str:
    """`text` with `content` between <!-- mark --> and <!-- /mark -->."""
    start, end = f"<!-- {mark} -->\n", f"<!-- /{mark} -->"
    head, rest = text.split(start)
    return head + start + content + end + rest.split(end)[1]


def _machine(hardware: dict) -> str:
    gpu = "no GPU" if hardware["gpu"] == "none" else hardware["gpu"]
    return f"{hardware['cpu']}, {hardware['threads']} threads, {gpu}, torch {hardware['torch']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    page = ROOT / "docs/results.md"
    old = page.read_text()
    new = between(old, "results", table())
    if args.check and new != old:
        sys.exit("docs/results.md is not up to date: run scripts/make_results_table.py")
    page.write_text(new)


if __name__ == "__main__":
    main()
