"""`verl env --models`: execution paths (packed rows, key-value cache) used for a model, and why others are not."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from verl.cli.console import echo, print_table
from verl.errors import ConfigError
from verl.model_paths import finding_cache
from verl.model_paths.report import CachedFinding, cached_findings, decoding_of, scoring_of, status_of
from verl.utils.env_check import installed

WIDTH = 80
MOST_LINES = 8


def print_summary() -> None:
    """Print the number of models checked on this machine, and a line for each without fast paths."""
    kept = cached_findings()
    found = Counter(one.status for one in kept)
    counts = ", ".join(f"{found[status]} {status}" for status in ("fast", "plain", "refused") if found[status])
    echo(f"    models checked here: {counts or 'none yet'}; see verl env --models")
    slow = [one for one in kept if one.status != "fast"]
    for one in slow[:MOST_LINES]:
        echo(_shortened(f"        {_name(one)}: {_in_words(one)}"))
    if len(slow) > MOST_LINES:
        echo(f"        and {len(slow) - MOST_LINES} more")


def print_cached() -> None:
    """Print the table of all models checked on this machine."""
    kept = cached_findings()
    if not kept:
        echo("No model has been checked on this machine with the installed libraries. A run checks its own at its")
        echo("start; `verl env --models FAMILY`, such as llama, checks the default model of a family now.")
        return
    rows = [(_name(one), *_cells(one)) for one in kept]
    print_table(("model", "scoring", "decoding"), rows, width=WIDTH)


def print_families(names: Sequence[str]) -> None:
    """Check the default models of some families now, with random weights, and print the results.

    Raises:
        ConfigError: transformers has no such family, or is not installed.
    """
    if lacking := [name for name in finding_cache.LIBRARIES if installed(name) is None]:
        raise ConfigError(f"Models cannot be checked without {', '.join(lacking)}: see verl env.")
    from verl.model_paths.families import examine_family  # imports torch and transformers

    for name in names:
        found = examine_family(name)
        if found.finding is None:
            echo(f"{name}: transformers cannot build its default model")
            _print_part("because", found.fault or "")
            continue
        limit = "" if found.tokens is None else f", rows of up to {found.tokens} tokens"
        echo(f"{name} ({found.model}): {status_of(found.finding)}{limit}, {found.seconds:.1f} s")
        if found.finding.refusal is not None:
            _print_part("because", found.finding.refusal)
            continue
        _print_part("scoring", scoring_of(found.finding.paths))
        _print_part("decoding", decoding_of(found.finding.paths))
        if found.longer is not None:
            _print_part("longer", f"refused: {found.longer.partition(' Rows of this run')[0]}")
        for reason in found.finding.paths.reasons:
            _print_part("not used", reason)


def _name(one: CachedFinding) -> str:
    crossed = f", rows > {one.crossed[-1]}" if one.crossed else ""
    return one.family + f" ({one.role})" * (one.role != "policy") + crossed


def _cells(one: CachedFinding) -> tuple[str, str]:
    if one.finding.refusal is not None:
        return "refused", one.finding.refusal.partition(" Rows of this run")[0]
    return scoring_of(one.finding.paths), decoding_of(one.finding.paths) if one.role == "policy" else ""


def _in_words(one: CachedFinding) -> str:
    return f"{one.status}: " + ", ".join(cell for cell in _cells(one) if cell not in ("", one.status))


def _shortened(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."


def _print_part(name: str, text: str) -> None:
    start = f"    {name:<9}"
    echo(textwrap.fill(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start)))
