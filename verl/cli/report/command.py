"""`verl report`: one HTML page of a run, or of several to compare them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verl.cli.console import echo, one_line_errors, size
from verl.utils.external_input import write_text


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Directories of runs; several are compared.")],
    html: Annotated[Path, typer.Option(help="File to write.")] = Path("report.html"),
) -> None:
    """Write one HTML page that shows a run, or compares several. It needs no network and no other file.

    A run may be running, or have been killed. Runs that differ in their seed alone are drawn as one band.
    """
    from verl.cli.report.page import report as page_of

    with one_line_errors():
        text = page_of(runs)
        write_text(html, text)
        echo(f"{html}: {size(len(text.encode()))}")
