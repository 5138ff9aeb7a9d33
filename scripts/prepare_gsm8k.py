"""Write GSM8K, or files of its format, as the prompt and answer files that `data=files` reads.

From the hub, which needs a network and `pip install datasets`:
    python scripts/prepare_gsm8k.py data/gsm8k
From local parquet or JSONL files with the columns `question` and `answer`, where an answer ends with `#### 42`:
    python scripts/prepare_gsm8k.py data/gsm8k --from train.jsonl --eval-from test.jsonl

Each row has `prompt` (chat messages), `answer` (the number) and `solution` (the worked answer, for fine-tuning with
data=sft_files data.completion_key=solution).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verl.data.readers import DataRows, RowErrors, read_rows
from verl.errors import ConfigError
from verl.rewards.math_rules import MARK, decimal_text, number_of

INSTRUCTION = f"Think step by step. Write the final number alone on the last line, after {MARK}."
CALCULATIONS = re.compile(r"<<[^<>]*>>")  # GSM8K marks its sums: 48/2 = <<48/2=24>>24
HUB_NAME = "openai/gsm8k"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where train and test files are written; made if absent")
    parser.add_argument("--from", dest="train", metavar="FILE", help="local file of training questions, not the hub")
    parser.add_argument("--eval-from", metavar="FILE", help="local file of test questions; goes with --from")
    parser.add_argument("--instruction", default=INSTRUCTION, help="follows each question; default: %(default)r")
    parser.add_argument("--style", choices=("chat", "text"), default="chat", help="prompts as messages or as texts")
    parser.add_argument("--on-bad-row", choices=("error", "skip"), default="error", help="of a row without an answer")
    parser.add_argument("--format", choices=("parquet", "jsonl"), default="parquet", help="of the files written")
    options = parser.parse_args(arguments)
    if options.eval_from and not options.train:
        parser.error("--eval-from goes with --from")
    try:
        for name, rows, bad in _splits(options):
            made = converted(rows, bad, options.instruction, options.style)
            path = options.directory / f"{name}.{options.format}"
            write(made, path)
            print(f"{path}: {len(made)} rows" + (f", {len(bad)} left out" if len(bad) else ""))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _splits(options: argparse.Namespace) -> list[tuple[str, DataRows, RowErrors]]:
    """Name, rows and bad rows of each file to write."""
    if options.train is None:
        splits = _from_hub()
        return [(name, DataRows(rows), RowErrors(options.on_bad_row)) for name, rows in splits.items()]
    found = []
    for name, flag, file in (("train", "--from", options.train), ("test", "--eval-from", options.eval_from)):
        if file:
            bad = RowErrors(options.on_bad_row)
            found.append((name, read_rows([file], bad, flag), bad))
    return found


def _from_hub() -> dict[str, list[Mapping[str, Any]]]:
    try:
        import datasets  # type: ignore[import-not-found]
    except ImportError as error:
        raise ConfigError(
            "datasets is not installed: pip install datasets, or give local files with --from and --eval-from."
        ) from error
    try:
        loaded = datasets.load_dataset(HUB_NAME, "main")
    except Exception as error:
        raise ConfigError(f"{HUB_NAME} cannot be loaded ({error}). Give local files with --from.") from error
    return {name: list(loaded[name]) for name in ("train", "test")}


def converted(rows: DataRows, bad: RowErrors, instruction: str, style: str) -> list[dict[str, Any]]:
    """Questions and worked answers as prompts, numbers and solutions.

    Raises:
        ConfigError: a row has no question or no number after the mark, unless `bad` skips such rows.
    """
    made, num_rows = [], len(rows) + len(bad)
    for index, row in enumerate(rows.values):
        question, answer = row.get("question"), row.get("answer")
        if not isinstance(question, str) or not question.strip():
            bad.add(f"question is {question!r:.80} at {rows.location(index)}: expected a text that is not empty")
            continue
        solution, mark, last = answer.rpartition(MARK) if isinstance(answer, str) else ("", "", "")
        if not mark or (number := number_of(last)) is None:
            bad.add(f"answer is {answer!r:.80} at {rows.location(index)}: expected a text that ends with {MARK} 42")
            continue
        text = f"{question.strip()}\n{instruction}" if instruction else question.strip()
        made.append(
            {
                "prompt": [{"role": "user", "content": text}] if style == "chat" else text,
                "answer": decimal_text(number),
                "solution": f"{CALCULATIONS.sub('', solution).strip()}\n{MARK} {decimal_text(number)}",
            }
        )
    bad.settle(num_rows)
    return made


def write(rows: list[dict[str, Any]], path: Path) -> None:
    """Write rows as parquet or JSONL, whichever the path ends in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


if __name__ == "__main__":
    sys.exit(main())
