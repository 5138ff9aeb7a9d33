"""Write the table of model families between the marks in docs/models.md, by trying each; takes minutes.

`--check` exits 1 if the document is not up to date; with FAMILY, only their lines are made and compared.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version

import torch
from make_results_table import ROOT, between

from verl.model_paths.families import FamilyStatus, examine_family, families
from verl.model_paths.report import decoding_of, scoring_of, status_of

DOCUMENT = ROOT / "docs/models.md"
HEAD = "| family | | rows are scored | tokens are drawn | what is not used, and why |\n|---|---|---|---|---|\n"
LONGEST = 110  # characters of a reason


def table(found: Sequence[FamilyStatus]) -> str:
    """A line for each family, with the versions that it holds for."""
    versions = f"With transformers {version('transformers')} and torch {version('torch').partition('+')[0]}:\n\n"
    counts = {word: sum(line_of(one).split(" | ")[1].startswith(word) for one in found) for word in WORDS}
    told = ", ".join(f"{count} {word}" for word, count in counts.items())
    return versions + HEAD + "".join(line_of(one) for one in found) + f"\n{len(found)} families: {told}.\n"


WORDS = ("fast", "plain", "refused", "not built")


def line_of(one: FamilyStatus) -> str:
    """One line of the table."""
    finding = one.finding
    if finding is None:
        return _line(one.family, "not built", "", "", f"transformers: {one.fault}")
    status = str(status_of(finding))
    if finding.refusal is not None:
        return _line(one.family, status, "", "", finding.refusal)
    reasons = [_without_figures(reason) for reason in finding.paths.reasons]
    if one.tokens is not None and one.longer is not None:
        status += f" up to {one.tokens} tokens"
        reasons.insert(0, f"longer rows: refused, {one.longer.partition(', so that')[0]}")
    return _line(one.family, status, scoring_of(finding.paths), decoding_of(finding.paths), "; ".join(reasons))


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _without_figures(reason: str) -> str:
    """Differences depend on the processor."""
    text = re.sub(r"its numbers differ by [\d.e+-]+ nats", "other numbers", " ".join(reason.split()))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("family", nargs="*", help="with --check: which families (default: all)")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    old = DOCUMENT.read_text()
    if args.family:
        missing = [name for name in args.family if line_of(examine_family(name)) not in old]
        if missing:
            sys.exit(f"docs/models.md is not up to date for {', '.join(missing)}: run scripts/make_models_table.py")
        return
    new = between(old, "models", table([examine_family(name) for name in families()]))
    if args.check and new != old:
        sys.exit("docs/models.md is not up to date: run scripts/make_models_table.py")
    DOCUMENT.write_text(new)


if __name__ == "__main__":
    main()
