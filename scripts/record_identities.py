"""Record every shipped configuration: its identity in tests/golden/identities.json, and a digest of its values and
references in compositions.json, where two are written out.

    python scripts/record_identities.py

The tests compare with them, so that a change of how components are checked, or of where a value is written, changes no
run. Record anew where a field was added, renamed or given another default: the records differ then, and are meant to.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "compose"), str(ROOT / "tests")]

import test_options as options  # noqa: E402
from omegaconf import DictConfig  # noqa: E402

from verl.compose.compose import compose_root  # noqa: E402
from verl.compose.overrides import command_line  # noqa: E402
from verl.compose.schema import ROOTS, group_options  # noqa: E402
from verl.compose.validate import validate  # noqa: E402


def composed(root: str, words: str) -> DictConfig:
    arguments, _ = command_line(root, options.words_of(words))
    return compose_root(root, arguments)


def configurations() -> Iterator[tuple[str, DictConfig]]:
    """Root and options, and the configuration that they give."""
    for root in ROOTS:
        for option in options.OPTIONS:
            if options.applies(root, option):
                yield f"{root} {option}", composed(root, option)
    for combination in options.COMBINATIONS:
        yield f"ppo {combination}", composed("ppo", combination)
    groups = group_options()
    for experiment in (f"experiment={name}" for name in groups["experiment"]):
        root = options.roots_of(experiment)[0]
        for debug in groups["debug"]:
            config = compose_root(root, [experiment, f"debug={debug}", *options.NEEDED.get(experiment, [])])
            yield f"{root} {experiment} debug={debug}", config


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        options.write_users_files()
        found = dict(sorted(configurations(), key=lambda pair: pair[0]))
        identities = {key: validate(config).identity() for key, config in found.items()}
    digests: dict[str, Any] = {key: options.digest(config) for key, config in found.items()}
    digests |= {key: options.unresolved(found[key]) for key in options.WRITTEN_OUT}
    for name, records in (("identities", identities), ("compositions", digests)):
        (ROOT / f"tests/golden/{name}.json").write_text(json.dumps(records, indent=1) + "\n")
    print(f"{len(found)} configurations")


if __name__ == "__main__":
    main()
