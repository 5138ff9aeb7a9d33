"""Format versions: which version of verl reads which checkpoints, and what a change of version would break."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

import verl
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.core.manifest import (
    DELTAS,
    FORMAT_NAME,
    FORMAT_VERSION,
    MANIFEST,
    MANIFEST_LIMIT_BYTES,
    OLDEST_FORMAT,
    is_older,
    is_readable,
)
from verl.errors import ConfigError
from verl.utils.external_input import parse_mapping


class FormatOf(NamedTuple):
    """The format written by verl from this version on, and the oldest format that it reads."""

    verl: str
    writes: str
    reads_from: str


# A row for every version of verl that changed one of the two.
FORMATS = (
    FormatOf("0.1.0", writes="0.9.0", reads_from="0.9.0"),
    FormatOf("0.2.0", writes="1.0.0", reads_from="0.9.0"),
    FormatOf("0.3.0", writes=FORMAT_VERSION, reads_from=OLDEST_FORMAT),
)
OLDEST_WRITER = Version("0.3.0")  # whose checkpoints this version reads


@dataclass(frozen=True, kw_only=True)
class FormatFinding:
    """Compatibility of one checkpoint.

    Args:
        format_version, verl_version: as recorded; None if the manifest cannot be read.
        breaks: why the target version cannot read it; None if it can.
        note: further information.
    """

    name: str
    format_version: str | None = None
    verl_version: str | None = None
    breaks: str | None = None
    note: str | None = None


def parse_version(text: str, where: str) -> Version:
    """`0.3.5` or `v0.3.5`.

    Raises:
        ConfigError: it is not a version.
    """
    try:
        return Version(text)
    except InvalidVersion as error:
        raise ConfigError(f"{where} is {text!r}: it must be a version, such as v0.3.5.") from error


def format_of(version: Version) -> FormatOf | None:
    """The formats that a version of verl writes and reads; None if it has no such checkpoints.

    A version later than this one is treated like this one, because it must read everything that this one reads.
    """
    known = [row for row in FORMATS if Version(row.verl) <= version]
    return known[-1] if known else None


def is_ahead(version: Version) -> bool:
    """Whether that version is newer, so that its format is not known here."""
    return version > Version(verl.__version__)


def findings(
    directories: list[Path], moving_from: Version, moving_to: Version, disk: FileSystem | None = None
) -> list[FormatFinding]:
    """Compatibility of each checkpoint when a run moves from one version of verl to another."""
    return [_finding(disk or FileSystem(), directory, moving_from, moving_to) for directory in directories]


def _finding(disk: FileSystem, directory: Path, moving_from: Version, moving_to: Version) -> FormatFinding:
    try:
        written, by, has_deltas = _recorded(disk, directory)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return FormatFinding(name=directory.name, breaks=f"{MANIFEST} cannot be read; see verl checkpoint verify")
    return FormatFinding(
        name=directory.name,
        format_version=written,
        verl_version=by,
        breaks=next(_reasons(written, Version(by), has_deltas, moving_to), None),
        note=None if Version(by) == moving_from else f"written by verl {by}, not {moving_from}",
    )


def _recorded(disk: FileSystem, directory: Path) -> tuple[str, str, bool]:
    """Recorded format, version of verl, and whether files are stored as deltas, also for unknown formats."""
    raw = parse_mapping(disk.read(directory / MANIFEST, MANIFEST_LIMIT_BYTES))
    form = raw.get("format")
    if not isinstance(form, dict) or form.get("name") != FORMAT_NAME:
        raise ValueError("it is not a manifest of a checkpoint")
    written, by = form.get("version"), raw.get("verl_version")
    return str(Version(str(written))), str(Version(str(by))), bool(raw.get("deltas"))


def _reasons(written: str, by: Version, has_deltas: bool, moving_to: Version) -> Iterator[str]:
    """Why a version cannot read a checkpoint."""
    row = format_of(moving_to)
    if row is None:
        yield f"verl {moving_to} has no checkpoints of this kind; the first version that has is {FORMATS[0].verl}"
        return
    if moving_to >= OLDEST_WRITER and by < OLDEST_WRITER and not is_older(written):
        yield f"verl {by} wrote it, and verl {moving_to} reads those of {OLDEST_WRITER} and later"
    elif moving_to >= OLDEST_WRITER and has_deltas:
        yield f"{DELTAS}, which verl {moving_to} does not read"
    elif is_older(written, than=row.reads_from):
        yield f"format {written} is older than {row.reads_from}, the oldest that verl {moving_to} reads"
    elif not is_readable(written, by=row.writes):
        newer = "major version" if Version(written).major > Version(row.writes).major else "version"
        of = f"verl {verl.__version__} knows of verl {moving_to}" if is_ahead(moving_to) else f"verl {moving_to} reads"
        yield f"format {written} is of a newer {newer} than {row.writes}, the newest that {of}"
