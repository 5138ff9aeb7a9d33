"""Compare the size of the project with `budget.toml`: lines of each package of verl/, of tests/ and conf/, KB of docs/.

python scripts/check_budget.py            exit status 1, and a line for each part, where one is above its budget
python scripts/check_budget.py --lower    write today's numbers where they are below the budget
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "budget.toml"


def sizes(root: Path = ROOT) -> dict[str, dict[str, int]]:
    """The numbers of `budget.toml`, counted: lines of files by package (modules of verl/ itself under `verl`), KB."""
    packages: dict[str, int] = {}
    for file in sorted((root / "verl").rglob("*.py")):
        parts = file.relative_to(root / "verl").parts
        name = parts[0] if len(parts) > 1 else "verl"
        packages[name] = packages.get(name, 0) + file.read_bytes().count(b"\n")
    pages = [*(root / "docs").rglob("*.md")]
    whole = {
        "verl": sum(packages.values()),
        "tests": sum(file.read_bytes().count(b"\n") for file in (root / "tests").rglob("*.py")),
        "conf": sum(file.read_bytes().count(b"\n") for file in (root / "conf").rglob("*.yaml")),
        "docs_kb": -(-sum(file.stat().st_size for file in pages) // 1024),
        "docs_pages": len(pages),
    }
    return {"whole": whole, "packages": dict(sorted(packages.items(), key=lambda item: (-item[1], item[0])))}


def above(counted: dict[str, dict[str, int]], budget: dict[str, dict[str, int]]) -> list[str]:
    """A line for each number that is above its budget, or has none."""
    faults = []
    for table, numbers in counted.items():
        for name, number in numbers.items():
            allowed = budget.get(table, {}).get(name)
            if allowed is None or number > allowed:
                faults.append(f"budget.toml, {table}.{name}: {number}, and the budget is {allowed or 'not set'}.")
    return faults


def written(numbers: dict[str, dict[str, int]]) -> str:
    """The text of `budget.toml`, its head kept."""
    head = FILE.read_text().partition("[whole]")[0]
    tables = ("\n".join([f"[{table}]", *(f"{name} = {x}" for name, x in of.items())]) for table, of in numbers.items())
    return head + "\n\n".join(tables) + "\n"


def main() -> None:
    counted, budget = sizes(), tomllib.loads(FILE.read_text())
    if "--lower" in sys.argv:
        lowest = {
            table: {name: min(x, budget.get(table, {}).get(name, x)) for name, x in of.items()}
            for table, of in counted.items()
        }
        FILE.write_text(written(lowest))
    elif faults := above(counted, budget):
        sys.exit("\n".join([*faults, "Remove lines, or raise the budget in a commit of its own that says why."]))


if __name__ == "__main__":
    main()
