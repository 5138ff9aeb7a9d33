"""Record the identity of every shipped configuration in tests/golden/identities.json.

    python scripts/record_identities.py

The tests compare with it, so that a change of how components are checked changes no identity. Record anew where a
field was added, renamed or given another default: identities differ then, and are meant to.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "compose"), str(ROOT / "tests")]

import test_options as options  # noqa: E402

from verl.compose.command_line import command_line  # noqa: E402
from verl.compose.compose import compose_root  # noqa: E402
from verl.compose.schema import ROOTS, group_options  # noqa: E402
from verl.compose.validate import validate  # noqa: E402


def identity(root: str, words: str) -> str:
    arguments, _ = command_line(root, options.words_of(words))
    return validate(compose_root(root, arguments)).identity()


def identities() -> Iterator[tuple[str, str]]:
    """Root and options, and the identity of the run that they give."""
    for root in ROOTS:
        for option in options.OPTIONS:
            client = options.CLIENTS.get(option)
            if options.applies(root, option) and (client is None or importlib.util.find_spec(client)):
                yield f"{root} {option}", identity(root, option)
    for combination in options.COMBINATIONS:
        yield f"ppo {combination}", identity("ppo", combination)
    groups = group_options()
    for experiment in (f"experiment={name}" for name in groups["experiment"]):
        root = options.roots_of(experiment)[0]
        for debug in groups["debug"]:
            run = validate(compose_root(root, [experiment, f"debug={debug}", *options.NEEDED.get(experiment, [])]))
            yield f"{root} {experiment} debug={debug}", run.identity()


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        options.write_users_files()
        found = dict(sorted(identities()))
    (ROOT / "tests/golden/identities.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(found)} identities")


if __name__ == "__main__":
    main()
