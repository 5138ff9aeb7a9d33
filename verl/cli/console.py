"""Console output of commands: JSON, sizes, one line for an error, and the exit status.

0   done; everything is as it should be
1   the command ran and found a fault: damage, a difference, no checkpoint to resume from
2   it could not run: wrong arguments, a missing path, a file system error
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import typer

from verl.compose.schema import set_own_conf_dirs
from verl.errors import BadCheckpoint, ConfigError, VerlError
from verl.utils.external_input import plain, printable
from verl.utils.redact import redact
from verl.utils.signals import Terminated

FOUND, FAILED = 1, 2


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
        yield
    except BrokenPipeError:  # `verl runs | head`: the command line's library ends it without a word
        raise
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich has made an exit of it
            raise end.__context__ from None
        raise
    except Terminated as end:
        raise typer.Exit(128 + end.number) from end
    except BadCheckpoint as error:
        fail(str(error), FOUND)
    except (VerlError, OSError) as error:
        fail(str(error), FAILED)


@contextlib.contextmanager
def faults_reported() -> Iterator[None]:
    """Print errors of arguments and of saved files with all their lines, with status 2."""
    try:
        yield
    except BrokenPipeError:
        raise
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
    remaining, parts = int(seconds), []
    for unit in ("d", "h", "m", "s"):
        count, remaining = divmod(remaining, _UNITS_S[unit])
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
