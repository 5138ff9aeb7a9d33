"""Run the notebooks of `examples/notebooks/` and keep what they print and draw.

    python scripts/run_notebooks.py              all of them
    python scripts/run_notebooks.py first_run    one

Needs `pip install ".[docs]"`. What goes to standard error (warnings, with paths of this
machine) is not kept.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples/notebooks"


def executed(path: Path, timeout_s: int = 300) -> Any:
    """The notebook with the outputs of a run in a new process.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=timeout_s, kernel_name="python3").execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [path.stem for path in sorted(FOLDER.glob("*.ipynb"))]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(names)}; default: all")
    chosen = parser.parse_args().names or names
    if unknown := sorted(set(chosen) - set(names)):
        print(f"no notebook is called {', '.join(unknown)}: choose from {', '.join(names)}", file=sys.stderr)
        return 2

    import nbformat

    for name in chosen:
        path = FOLDER / f"{name}.ipynb"
        nbformat.write(executed(path), path)
        print(f"{path.relative_to(ROOT)} was run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
