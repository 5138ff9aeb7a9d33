"""Write the table of model families between the marks in docs/models.md, from `verl/model_paths/families.json`.

`--check` exits 1 if the document is not up to date.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from make_results_table import ROOT, between

from verl.model_paths.families import family_table, summaries

DOCUMENT = ROOT / "docs/models.md"
HEAD = "| family | | rows are scored | tokens are drawn | notes |\n|---|---|---|---|---|\n"


def table() -> str:
    """A line for each record, with the versions that it was tried with."""
    versions = " and ".join(f"{name} {version}" for name, version in family_table().versions.items())
    rows = summaries()
    lines = ["| " + " | ".join((x.name, x.status, x.scoring, x.decoding, x.note)) + " |\n" for x in rows]
    counts = Counter(row.status.partition(" up to")[0] for row in rows)
    words = ", ".join(f"{counts[status]} {status}" for status in ("fast", "plain", "refused", "not built"))
    return f"With {versions}:\n\n{HEAD}{''.join(lines)}\n{len(rows)} records: {words}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    old = DOCUMENT.read_text()
    new = between(old, "models", table())
    if args.check and new != old:
        sys.exit("docs/models.md is not up to date: run scripts/make_models_table.py")
    DOCUMENT.write_text(new)


if __name__ == "__main__":
    main()
