"""Readers of parquet and JSONL files. Each row has its file and number; unusable rows stop the run or are skipped."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from verl.errors import ConfigError

logger = logging.getLogger(__name__)

OnBadRow = Literal["error", "skip"]
SHOWN = 5


class RowErrors:
    """Collects one sentence per unusable row of a data set, each with its file and number.

    Args:
        policy: `error` refuses the data set after all rows were checked; `skip` leaves the rows out and warns.
    Attributes:
        faults: the sentences, without their final full stop.
    """

    def __init__(self, policy: OnBadRow = "error"):
        self.policy = policy
        self.faults: list[str] = []

    def __len__(self) -> int:
        return len(self.faults)

    def add(self, fault: str) -> None:
        self.faults.append(fault.rstrip("."))

    def settle(self, num_rows: int) -> None:
        """Raise or warn if there are unusable rows.

        Args:
            num_rows: rows of the data set, including unusable ones.
        Raises:
            ConfigError: there are bad rows and the policy is `error`, or no other row is left.
        """
        if not self.faults:
            return
        shown, further = self.faults[:SHOWN], len(self.faults) - SHOWN
        more = [f"and {further} further rows"] if further > 0 else []
        if self.policy == "error":
            *before, last = [f"{fault}." for fault in shown]
            after = f" And {further} further rows of {num_rows}." if further > 0 else ""
            raise ConfigError([*before, f"{last}{after} Fix the data, or set on_bad_row to skip."])
        seen = f"on_bad_row is skip: {len(self.faults)} of {num_rows} rows are left out: {'; '.join(shown + more)}."
        if len(self.faults) >= num_rows:
            raise ConfigError(f"{seen} No row remains.")
        logger.warning("%s", seen)


FILE_TYPES = (".parquet", ".jsonl")


@dataclass(frozen=True)
class DataRows:
    """Rows of a data set.

    Attributes:
        values: one mapping of columns per row.
        locations: `(file, number)` per row: the line of a JSONL file, from 1, or the row of a parquet file, from 0.
            None for rows from memory.
        numbers: index of each row over all files, counting skipped rows; None if none was skipped.
        sources: index of each row's file in the list of files; None for rows from memory.
        images: images of each row, see `verl.data.images`; empty for none.
    """

    values: list[Mapping[str, Any]]
    locations: list[tuple[str, int]] | None = None
    numbers: list[int] | None = None
    sources: list[int] | None = None
    images: Sequence[tuple[Any, ...]] = ()

    def __post_init__(self):
        object.__setattr__(self, "images", self.images or [()] * len(self.values))

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]] | DataRows) -> DataRows:
        """Rows in memory, such as a list or a `datasets.Dataset`."""
        if isinstance(rows, DataRows):
            return rows
        each = rows if hasattr(rows, "__iter__") else map(rows.__getitem__, range(len(rows)))  # a data set of torch
        values = [from_arrow(row) if hasattr(rows, "features") or _is_of_pandas(row) else row for row in each]
        if (other := next((row for row in values if not isinstance(row, Mapping)), None)) is not None:
            raise ConfigError(
                f"rows is a {type(rows).__name__} of {type(other).__name__}: expected a list of mappings of columns, "
                "such as [{'prompt': ...}]; of a DataFrame give frame.to_dict('records')."
            )
        return cls(values)

    def __len__(self) -> int:
        return len(self.values)

    def location(self, index: int) -> str:
        """File and number of a row, for messages."""
        if self.locations is None:
            return f"row {index}"
        file, number = self.locations[index]
        return f"{'line' if file.endswith('.jsonl') else 'row'} {number} of {file}"

    def number(self, index: int) -> int:
        """The index of a row over all files, counting skipped rows."""
        return index if self.numbers is None else self.numbers[index]

    def only(self, kept: Sequence[int]) -> DataRows:
        """The rows at the indices `kept`, with their places and numbers."""
        if len(kept) == len(self):
            return self

        def chosen(items: Sequence[Any]) -> list[Any]:
            return [items[index] for index in kept]

        return DataRows(
            chosen(self.values),
            None if self.locations is None else chosen(self.locations),
            [self.number(index) for index in kept],
            None if self.sources is None else chosen(self.sources),
            chosen(self.images),
        )

    def directory(self, index: int) -> Path:
        """The directory that paths in a row begin at: that of its file or its local data set; without, the current
        one."""
        place = Path("" if self.locations is None else self.locations[index][0].partition(", split ")[0])
        return place if place.is_dir() else place.parent

    def column_fault(self, key: str, option: str, index: int) -> str | None:
        """A sentence about a column that a row lacks, with the columns that it has, or that is half a prompt (Alpaca's
        `instruction` beside an `input`); None if it has the column.

        Args:
            key: the column.
            option: the setting that names the column.
            index: of the row.
        Raises:
            ConfigError: no row has the column.
        """
        if key in (row := self.values[index]):
            if key != "instruction" or not row.get("input"):
                return None
            return f"{option} is {key!r}: the `input` of {self.location(index)} is a part of its prompt too. Join them"
        present = ", ".join(str(name) for name in self.values[index]) or "none"
        fault = f"{option} is {key!r}: no such column at {self.location(index)}. Its columns: {present}."
        if not any(key in row for row in self.values):
            raise ConfigError(fault)
        return fault


def file_faults(name: str, files: Sequence[str | Path]) -> Iterator[str]:
    """Yield a sentence for each path that is not a data file, beginning with `name[index]`."""
    for index, file in enumerate(files):
        path, seen = Path(file), f"{name}[{index}] is {str(file)!r}"
        if path.suffix not in FILE_TYPES:
            yield f"{seen}: expected a file ending in {' or '.join(FILE_TYPES)}."
        elif not path.exists():
            yield f"{seen}: no such file."
        elif not path.is_file():
            yield f"{seen}: not a file."


def read_rows(files: Sequence[str | Path], bad: RowErrors, name: str = "data_files") -> DataRows:
    """Read the rows of files, in order.

    Args:
        files: paths ending in `.parquet` or `.jsonl`.
        bad: receives lines that cannot be parsed; they are left out.
        name: name of the list of files in messages.
    Raises:
        ConfigError: a file is missing, is not parquet or JSONL, or is empty.
    """
    if faults := list(file_faults(name, files)) or ([] if files else [f"{name} is empty: name at least one file."]):
        raise ConfigError(faults)
    values, locations, numbers, sources, count = [], [], [], [], 0
    for index, file in enumerate(files):
        before, seen, path = count, f"{name}[{index}] is {str(file)!r}", Path(file)
        for number, row in _read_parquet(path, seen) if path.suffix == ".parquet" else _read_jsonl(path):
            if isinstance(row, dict):
                values.append(row)
                locations.append((str(file), number))
                numbers.append(count)
                sources.append(index)
            else:
                bad.add(f"{seen}: {row}")
            count += 1
        if count == before:
            raise ConfigError(f"{seen}: the data set is empty, it holds no rows.")
    return DataRows(values, locations, numbers, sources)


READ_AHEAD_BYTES = 16 << 20  # largest JSONL file that `columns_of` reads; its columns are known only from all lines


def columns_of(files: Sequence[str | Path]) -> frozenset[str] | None:
    """Columns of files, read cheaply: from the schema of parquet, and from JSONL of at most `READ_AHEAD_BYTES`.

    None if a file is larger or cannot be read, which `read_rows` reports.
    """
    names: set[str] = set()
    for path in map(Path, files):
        try:
            if path.suffix == ".parquet":
                import pyarrow.parquet

                names.update(pyarrow.parquet.read_schema(path).names)
            elif path.stat().st_size > READ_AHEAD_BYTES:
                return None
            else:
                names.update(key for _, row in _read_jsonl(path) if isinstance(row, dict) for key in row)
        except (OSError, ValueError):  # ArrowInvalid is a ValueError
            return None
    return frozenset(names)


def _read_parquet(path: Path, seen: str) -> Iterator[tuple[int, dict[str, Any] | str]]:
    import pyarrow
    import pyarrow.parquet

    try:
        # An open file: from a path, pyarrow would add columns for directories such as `split=train`.
        table = pyarrow.parquet.ParquetFile(path).read()
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{seen}: not a readable parquet file ({error}).") from error
    if repeated := [name for name, count in Counter(table.column_names).items() if count > 1]:
        raise ConfigError(
            f"{seen}: it has several columns named {', '.join(map(repr, repeated))}. Rename or drop them."
        )
    try:
        rows = table.to_pylist()
    except UnicodeDecodeError:  # row by row, to find the ones at fault
        rows = [_parquet_row(table, index) for index in range(table.num_rows)]
    yield from enumerate(row if isinstance(row, str) else from_arrow(row) for row in rows)


def from_arrow(value: Any, is_nested: bool = False) -> Any:
    """A row of an Arrow table without the nulls in its nested columns.

    Arrow gives every struct of a column the keys of all of them, with null where a row had none. A null of a column
    itself, or in a list, stays. Lists that pandas made arrays of are lists.
    """
    value = value.tolist() if hasattr(value, "dtype") else value
    if isinstance(value, Mapping):
        return {key: from_arrow(x, True) for key, x in value.items() if x is not None or not is_nested}
    return [from_arrow(x, True) for x in value] if isinstance(value, list) else value


def _is_of_pandas(row: Any) -> bool:
    """Whether a row of parquet was read by pandas, which makes arrays of lists."""
    return isinstance(row, Mapping) and any(str(getattr(x, "dtype", "")) == "object" for x in row.values())


def _parquet_row(table: Any, index: int) -> dict[str, Any] | str:
    try:
        return {name: table.column(name)[index].as_py() for name in table.column_names}
    except UnicodeDecodeError as error:
        return f"row {index} is not UTF-8 text ({error})"


def _read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield the number of every line that is not blank, with its row or its fault."""
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, _parsed(line, number)


def _parsed(line: bytes, number: int) -> dict[str, Any] | str:
    try:
        row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        return f"line {number} is not UTF-8 text ({error})"
    except json.JSONDecodeError as error:
        return f"line {number} is not valid JSON ({error.msg} at character {error.pos + 1})"
    except ValueError as error:  # an integer of thousands of digits
        return f"line {number} is not read ({error})"
    except RecursionError:
        return f"line {number} is nested too deeply"
    if isinstance(row, dict):
        return row
    return f"line {number} holds {line.decode('utf-8').strip()[:40]!r}, expected a JSON object"
