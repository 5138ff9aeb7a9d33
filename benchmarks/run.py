"""Run every benchmark, keep its JSON line in benchmarks/results/, and rewrite the tables made of them.

python benchmarks/run.py [name ...]
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


def hardware() -> dict[str, str | int]:
    """What the numbers were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
    }


def main() -> None:
    scripts = sorted(path.stem for path in HERE.glob("[a-z]*.py"))
    wanted = sys.argv[1:] or [name for name in scripts if name != "run"]
    RESULTS.mkdir(exist_ok=True)
    for name in wanted:
        print(f"{name} ...", flush=True)
        done = subprocess.run([sys.executable, HERE / f"{name}.py"], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
        result = {**json.loads(done.stdout.splitlines()[-1]), "hardware": hardware()}
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    for script in ("make_results_table.py", "make_fault_table.py"):
        subprocess.run([sys.executable, HERE.parent / "scripts" / script], check=True)


if __name__ == "__main__":
    main()
