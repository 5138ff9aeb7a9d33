"""`verl env --models`: execution paths (packed rows, key-value cache) of model families, and which are refused."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence

from verl.cli.console import echo, print_table
from verl.errors import ConfigError
from verl.model_paths.families import family_table, summaries

WIDTH = 80


def print_summary() -> None:
    """Print how many families of models run on fast paths, on plain ones, and are refused."""
    counts = Counter(summary.status.partition(" up to")[0] for summary in summaries())
    words = ", ".join(f"{counts[status]} {status}" for status in ("fast", "plain", "refused", "not built"))
    echo(f"    model families: {words}; see verl env --models")


def print_families(names: Sequence[str] = ()) -> None:
    """Print the execution paths of some families, or of all.

    Raises:
        ConfigError: a family is not in the table.
    """
    known = family_table().families
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            raise ConfigError(
                f"family is {name!r}: no model of this model_type was tried, so it takes plain paths."
                + (f" Did you mean {' or '.join(near)}?" if near else "")
            )
    chosen = [summary for summary in summaries() if not names or summary.family in names]
    rows = [(summary.name, summary.status, summary.scoring or summary.note, summary.decoding) for summary in chosen]
    print_table(("model", "", "scoring", "decoding"), rows, width=WIDTH)
