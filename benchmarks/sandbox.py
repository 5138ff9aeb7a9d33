"""Programs in jails: start latency, time of a trivial program, and programs per second.

python benchmarks/sandbox.py [--small]

`start`: from the hand-over to the first line of the program, by the clock of the machine, which jails share; programs
come with a pause between them, so that a jail stands ready. `run`: to the result. `rate`: without pauses.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verl.component import BuildContext
from verl.sandbox.base import Program
from verl.sandbox.jail import Jail

PAUSE_S = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="few programs, to see that it runs")
    count = 5 if parser.parse_args().small else 100
    pool = Jail().build(BuildContext())
    starts, runs = [], []
    try:
        pool.run("pass")
        for _ in range(count):
            time.sleep(PAUSE_S)
            began = time.monotonic()
            result = pool.run("import time; print(time.monotonic())")
            runs.append(time.monotonic() - began)
            starts.append(float(result.stdout) - began)
        began = time.monotonic()
        results = pool.run_all([Program("print(1)")] * (3 * count))
        rate = len(results) / (time.monotonic() - began)
    finally:
        pool.close()
    assert {result.outcome for result in results} == {"ok"}
    found: dict[str, Any] = {
        "start_ms": {"median": 1e3 * median(starts), "worst": 1e3 * max(starts)},
        "run_ms": {"median": 1e3 * median(runs), "worst": 1e3 * max(runs)},
        "programs_per_s": rate,
        "programs": count,
        "load_average": os.getloadavg()[0],
        "cores": len(os.sched_getaffinity(0)),
    }
    start = f"{1e3 * median(starts):.1f} ms until it begins, at worst {1e3 * max(starts):.1f}"
    rows = [
        ["a program in a fresh jail of a warm pool", start, "target 20 ms"],
        [f"trivial programs in jails, {found['cores']} cores", f"{rate:.0f} a second", "target 50"],
    ]
    print(json.dumps(found | {"rows": rows}))


if __name__ == "__main__":
    main()
