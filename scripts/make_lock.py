"""Write requirements-dev.lock: the versions that pip chooses for requirements.txt and the extras of development.

python scripts/make_lock.py     minutes, with network; nothing is installed
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements-dev.lock"
BY_DEVICE = {"torch", "triton"}  # their versions differ between CPUs and GPUs
OTHERS = {"setuptools", "verl"}


def resolved() -> dict[str, str]:
    """Versions by name."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--no-build-isolation", "--report", report, "-r", "requirements.txt", ".[dev,docs,bench,gguf]"]
        subprocess.run(command, cwd=ROOT, check=True)
        found = [one["metadata"] for one in json.loads(report.read_text())["install"]]
    versions = {one["name"].lower().replace("_", "-"): one["version"] for one in found}
    return {name: version for name, version in versions.items() if name not in BY_DEVICE | OTHERS}


def main() -> None:
    head = "".join(line for line in LOCK.read_text().splitlines(keepends=True) if line.startswith("#"))
    LOCK.write_text(head + "".join(f"{name}=={version}\n" for name, version in sorted(resolved().items())))


if __name__ == "__main__":
    main()
