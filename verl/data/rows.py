"""Rows read from parquet and JSONL files, each of which knows where it came from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.errors import ConfigError

FILE_TYPES = (".parquet", ".jsonl")


@dataclass(frozen=True)
class Rows:
    """Rows in order.

    Attributes:
        values: one mapping of columns per row.
        places: `(file, number)` per row, the number being the line of a JSONL file or the row of a parquet file,
            counted from 1 and from 0 as editors and data frames do; None for rows that came from memory.
    """

    values: list[Mapping[str, Any]]
    places: list[tuple[str, int]] | None = None

    def __len__(self) -> int:
        return len(self.values)

    def place(self, index: int) -> str:
        """Where a row came from, in words."""
        if self.places is None:
            return f"row {index}"
        file, number = self.places[index]
        return f"{'line' if file.endswith('.jsonl') else 'row'} {number} of {file}"

    def column(self, key: str, option: str) -> list[Any]:
        """One column of all rows.

        Args:
            option: the setting that chose `key`, for the message.
        Raises:
            ConfigError: a row lacks the column; names those it has.
        """
        for index, row in enumerate(self.values):
            if key not in row:
                present = ", ".join(str(name) for name in row) or "none"
                raise ConfigError(
                    f"{option} is {key!r}: no such column at {self.place(index)}. Its columns: {present}."
                )
        return [row[key] for row in self.values]


def file_faults(name: str, files: Sequence[str | Path]) -> Iterator[str]:
    """Yield one sentence per path that cannot be read as data, opening with `name[index]`."""
    for index, file in enumerate(files):
        path, seen = Path(file), f"{name}[{index}] is {str(file)!r}"
        if path.suffix not in FILE_TYPES:
            yield f"{seen}: expected a file ending in {' or '.join(FILE_TYPES)}."
        elif not path.exists():
            yield f"{seen}: no such file."
        elif not path.is_file():
            yield f"{seen}: not a file."


def read_rows(files: Sequence[str | Path], name: str = "data_files") -> Rows:
    """Read files one after another.

    Args:
        files: paths ending in `.parquet` or `.jsonl`.
        name: what messages call this list.
    Raises:
        ConfigError: a file is missing, is no parquet or JSONL, or holds no row.
    """
    if faults := list(file_faults(name, files)) or ([] if files else [f"{name} is empty: name at least one file."]):
        raise ConfigError(faults)
    values, places = [], []
    for index, file in enumerate(files):
        read = _read_parquet if Path(file).suffix == ".parquet" else _read_jsonl
        rows = list(read(Path(file), f"{name}[{index}] is {str(file)!r}"))
        if not rows:
            raise ConfigError(f"{name}[{index}] is {str(file)!r}: the data set is empty, it holds no rows.")
        places.extend((str(file), number) for number, _ in rows)
        values.extend(row for _, row in rows)
    return Rows(values, places)


def _read_parquet(path: Path, seen: str) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        # The file alone: given a path, pyarrow would make columns of directories such as `split=train`.
        table = pyarrow.parquet.ParquetFile(path).read()
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{seen}: not a readable parquet file ({error}).") from error
    yield from enumerate(table.to_pylist())


def _read_jsonl(path: Path, seen: str) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in _decoded(lines, seen):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{seen}: line {number} is no JSON ({error}).") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{seen}: line {number} holds {line.strip()[:40]!r}, expected a JSON object.")
            yield number, row


def _decoded(lines: Iterator[str], seen: str) -> Iterator[tuple[int, str]]:
    try:
        yield from enumerate(lines, start=1)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{seen}: not UTF-8 text ({error}).") from error
