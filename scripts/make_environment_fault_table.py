"""Play the planted faults of tests/environments/planted_faults.py, and write their table into docs/environments.md.

It takes a minute: two of the faults hang. `tests/environments/test_hosted.py` fails where the document says otherwise.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from make_results_table import ROOT, between

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from environments.planted_faults import made  # noqa: E402

DOCUMENT = ROOT / "docs/environments.md"


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        table, _, _ = made(Path(directory))
    DOCUMENT.write_text(between(DOCUMENT.read_text(), "planted faults", table))


if __name__ == "__main__":
    main()
