"""Try every execution path of families on their small models, and write the fastest right one to the family table.

    python scripts/try_model_families.py llama mistral  # after an upgrade of transformers, or for a new family

A path is right if sampling and scoring by the actor of a run give the log-probs of a plain forward pass of each row.
What else a record says (`when`, `longest`, `stages`, ...) is kept. Ends with the families whose paths have changed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from model_paths.families import families, largest_gaps, save_family, start_family

from verl.model_paths.families import PLAIN, TABLE, FamilyRecord, ModelPaths, family_table

TOLERANCE = 1e-4  # nats
OWN = replace(PLAIN, own_attention=True)
SCORING = (
    replace(OWN, scoring="packed", shares_prompts=True),
    replace(OWN, scoring="packed"),
    replace(OWN, scoring="padded"),
    replace(PLAIN, scoring="padded"),
    replace(PLAIN, scoring="right_padded"),
    PLAIN,
)


DECODING = (  # from the fastest to the plainest: cache; prompts padded; rows repeated and dropped; prefix shared
    ("in_place", True, True, True),
    ("in_place", True, True, False),
    ("in_place", False, True, False),
    ("own", True, True, False),
    ("own", False, True, False),
    ("own", True, False, False),
    ("own", False, False, False),
    ("none", True, True, False),
    ("none", False, True, False),
    ("none", False, False, False),
)


def is_right(path: Path, paths: ModelPaths, field: str) -> bool:
    """Whether a model has the log-probs of a plain forward pass in one field of its rows."""
    family = json.loads((path / "config.json").read_text())["model_type"]
    table = family_table()
    before = table.families.get(family, ())
    table.paths["on trial"], table.families[family] = paths, (FamilyRecord("on trial"),)  # type: ignore[index]
    try:
        actor = start_family(path)
        gap = largest_gaps(actor, path)[field]
    except Exception as error:  # noqa: BLE001 - whatever a model's own code has against it
        print(f"    {type(error).__name__}: {str(error)[:100]}")
        return False
    finally:
        table.families[family] = before  # type: ignore[index]
    return gap < TOLERANCE and not actor.generator.engine._wrong and actor.engine._limit is None


def decodings(paths: ModelPaths) -> Iterator[ModelPaths]:
    """These paths with every way of decoding, from the fastest to the plainest."""
    for cache, pads, rows, prefix in DECODING:
        if paths.own_attention or not prefix:
            options = {"pads_prompts": pads, "repeats_rows": rows, "drops_rows": rows, "shares_prefix": prefix}
            yield replace(paths, cache=cache, **options)  # type: ignore[arg-type]


def fastest(path: Path) -> ModelPaths:
    """The fastest paths that are right for a model."""
    scoring = next((x for x in SCORING if is_right(path, x, "old_log_probs")), PLAIN)
    return next((x for x in decodings(scoring) if is_right(path, x, "rollout_log_probs")), scoring)


def main(names: list[str]) -> None:
    table, changed = json.loads(TABLE.read_text()), []
    known = {ModelPaths(**paths): name for name, paths in table["paths"].items()}
    for family in names or families():
        with tempfile.TemporaryDirectory() as directory:
            paths = fastest(save_family(Path(directory), family))
        if paths not in known:
            print(f"{family}: add these paths to {TABLE}, with a name: {asdict(paths)}")
            continue
        records = table["families"].setdefault(family, [{}])
        if records[0].get("paths") != known[paths]:
            changed.append(f"{family}: {records[0].get('paths')} -> {known[paths]}")
            records[0]["paths"] = known[paths]
    lines = [f"  {json.dumps(family)}: {json.dumps(table['families'][family])}" for family in sorted(table["families"])]
    paths = [f"  {json.dumps(name)}: {json.dumps(table['paths'][name])}" for name in sorted(table["paths"])]
    versions = json.dumps({name: version(name).partition("+")[0] for name in table["versions"]})
    body = ',\n "paths": {\n' + ",\n".join(paths) + '\n },\n "families": {\n' + ",\n".join(lines) + "\n }\n}\n"
    TABLE.write_text('{\n "versions": ' + versions + body)
    print("\n".join(changed) or "no change")


if __name__ == "__main__":
    main(sys.argv[1:])
