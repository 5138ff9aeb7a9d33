"""Write addition problems into a directory: the rows that `data=arithmetic` makes in memory.

Example: python scripts/make_arithmetic.py data/arithmetic --digits 2
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verl.data.arithmetic import ArithmeticPrompts, Split
from verl.errors import ConfigError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {field.name: field.default for field in dataclasses.fields(ArithmeticPrompts)}
    parser.add_argument("directory", type=Path, help="where train and test files are written; made if absent")
    parser.add_argument("--digits", type=int, default=defaults["digits"], help="digits of the larger summands")
    parser.add_argument("--held-out", type=int, default=defaults["held_out"], help="rows of the test file")
    parser.add_argument("--train-size", type=int, help="rows of the training file; all that are left by default")
    parser.add_argument("--seed", type=int, default=defaults["seed"], help="order of the problems")
    parser.add_argument("--format", choices=("parquet", "jsonl"), default="parquet")
    options = parser.parse_args(arguments)
    try:
        problems = ArithmeticPrompts(
            digits=options.digits,
            held_out=options.held_out,
            train_size=options.train_size,
            seed=options.seed,
            max_prompt_length=max(16, 2 * options.digits + 2),
        )
    except ConfigError as error:
        parser.error(str(error))
    options.directory.mkdir(parents=True, exist_ok=True)
    splits: tuple[tuple[Split, str], ...] = (("train", "train"), ("eval", "test"))
    for split, name in splits:
        rows, path = problems.rows(split), options.directory / f"{name}.{options.format}"
        write(rows, path)
        print(f"{path}: {len(rows)} rows")
    print("For supervised fine-tuning on these files set data.completion_key=answer.")
    return 0


def write(rows: list[dict[str, str]], path: Path) -> None:
    """Write rows as parquet or JSONL, whichever the path ends in."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


if __name__ == "__main__":
    sys.exit(main())
