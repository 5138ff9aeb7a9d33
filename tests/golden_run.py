"""The run of the golden checkpoints, made anew: real directories for tests, with times that stand still."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from verl.checkpoint.core.manifest import commit_line

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests/golden"

_spec = importlib.util.spec_from_file_location("make_golden_checkpoint", ROOT / "scripts/make_golden_checkpoint.py")
assert _spec is not None
assert _spec.loader is not None
script = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(script)


def golden_run(directory: Path) -> Path:
    """A directory of checkpoints at the steps 100 and 200."""
    script.write_run(directory)
    return directory


def flip_bit(path: Path, at: int = -1) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def as_of_format(directory: Path, version: str) -> None:
    """Let a checkpoint say that it is of another format, and be consistent in that."""
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["format"]["version"] = version
    data = json.dumps(manifest).encode()
    (directory / "manifest.json").write_bytes(data)
    (directory / "COMMIT").write_bytes(commit_line(data))
