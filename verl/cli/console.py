"""Console output of commands: tables, JSON, sizes, one line for an error, and the exit status.

0   done; everything is as it should be
1   the command ran and found a fault: damage, a difference, no checkpoint to resume from
2   it could not run: wrong arguments, a missing path, a file system error
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import typer

from verl.compose.schema import set_own_conf_dirs
from verl.errors import BadCheckpoint, ConfigError, VerlError, end_cut
from verl.tracking.console import equal_share, fitting_columns
from verl.tracking.jsonl import plain
from verl.utils.external_input import printable
from verl.utils.memory import out_of_memory_message, refuse_small_address_space
from verl.utils.redact import redact

FOUND, FAILED = 1, 2
SHORTEST_CUT = 16  # characters of a cell that is truncated; in less room columns are left out


def _use_groups(context: typer.Context, directory: Path | None) -> Path | None:
    """Add the groups of a directory to all compositions until the command ends."""
    if directory is not None:
        set_own_conf_dirs([directory])
        context.call_on_close(lambda: set_own_conf_dirs([]))
    return directory


CONFIG_DIR = typer.Option(
    "--config-dir",
    "-cd",
    exists=True,
    file_okay=False,
    resolve_path=True,
    callback=_use_groups,
    help="A directory with option groups of your own, as for `verl ppo`.",
)
_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Print errors as one line: status 1 for a bad checkpoint, 2 if the command could not run."""
    try:
        refuse_small_address_space()
        yield
    except BadCheckpoint as error:
        fail(str(error), FOUND)
    except (VerlError, OSError) as error:
        fail(str(error), FAILED)
    except (MemoryError, RuntimeError) as error:
        if (message := out_of_memory_message(error)) is None:
            raise
        fail(message, FAILED)


@contextlib.contextmanager
def faults_reported() -> Iterator[None]:
    """Print errors of arguments and of saved files with all their lines, with status 2."""
    try:
        yield
    except (VerlError, OSError) as error:
        echo(redact(str(error)), err=True)
        raise typer.Exit(FAILED) from error


def echo(text: object, err: bool = False, nl: bool = True) -> None:
    """Print a text without control characters that a terminal would interpret."""
    typer.echo(printable(str(text), keep="\n\t"), err=err, nl=nl)


def fail(message: str, status: int = FAILED) -> NoReturn:
    """Say what is wrong on standard error, on one line, and end."""
    echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(status)


def print_json(value: Any) -> None:
    """Print JSON for scripts. Numbers that JSON does not know become texts."""
    echo(json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False))


def output_width() -> int | None:
    """Width of the terminal, or of COLUMNS; None for a pipe or a file."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return shutil.get_terminal_size().columns
    return None


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    right: Sequence[str] = (),
    width: int = 10_000,
    drop: Sequence[str] = (),
    cut: Sequence[str] = (),
) -> None:
    """Print a table with a header.

    Args:
        columns: header.
        rows: cells.
        right: names of right-aligned columns.
        width: width at which cells are folded if the output has none of its own.
        drop: columns to leave out, first one first, if the output is too narrow; they are listed below the table, and
            no cell is folded.
        cut: columns whose cells are truncated to fit before any column is left out.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    columns, right, drop, cut = ([*map(printable, names)] for names in (columns, right, drop, cut))
    cells = [["" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else width
    left_out: list[str] = []
    if drop:
        room = (output_width() or width) + 2  # each column has 2 characters behind it
        sizes = [max(cell_len(row[i]) for row in (columns, *cells)) + 2 for i in range(len(columns))]
        least = [
            min(size, SHORTEST_CUT + 2) if name in cut else size for name, size in zip(columns, sizes, strict=True)
        ]
        shown = fitting_columns(least, room, [columns.index(column) for column in drop])
        left_out = [column for index, column in enumerate(columns) if index not in shown]
        columns, cells = [columns[i] for i in shown], [[row[i] for i in shown] for row in cells]
        texts = [sizes[i] - 2 for i, name in zip(shown, columns, strict=True) if name in cut]
        others = sum(sizes[i] for i, name in zip(shown, columns, strict=True) if name not in cut)
        most = equal_share(texts, room - others - 2 * len(texts), SHORTEST_CUT)
        cells = [
            [end_cut(x, most) if name in cut else x for name, x in zip(columns, row, strict=True)] for row in cells
        ]
        width = 10_000
    table = Table(box=None, pad_edge=False, header_style="bold" if is_terminal else "")
    for column in columns:
        table.add_column(Text(column), justify="right" if column in right else "left", overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    drawn = io.StringIO()
    Console(file=drawn, force_terminal=is_terminal, width=width).print(table)
    for line in drawn.getvalue().split("\n")[:-1]:
        typer.echo(line.rstrip())  # cells are printable, and rich styles the header
    if left_out:
        echo(f"not shown, the terminal is too narrow: {', '.join(left_out)}")


def size(num_bytes: int) -> str:
    """A number of bytes with a unit."""
    number, unit = float(num_bytes), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if number < 1024:
            break
        number, unit = number / 1024, bigger
    return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"


def duration(seconds: float) -> str:
    """Seconds in the two largest units."""
    rest, parts = int(seconds), []
    for unit in ("d", "h", "m", "s"):
        count, rest = divmod(rest, _UNITS_S[unit])
        if count or (unit == "s" and not parts):
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])


def parse_duration(text: str, where: str) -> float:
    """`90`, `90s`, `30m`, `2h` or `1d` in seconds.

    Raises:
        ConfigError: it is none of these.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{where} is {text!r}: expected a duration such as 90s, 30m, 2h or 1d.")
    return float(match[1]) * _UNITS_S[match[2]]


def counted(number: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
