"""Small products and sums by several threads, alone and beside busy processes, for several GOMP_SPINCOUNT.

    python benchmarks/busy_machine.py [--busy N] [--counts default 20000 5000 2000 0] [--seconds 5]

A step is that of a feed-forward network of 30 layers, 64 rows of 576 in bfloat16: the decoding step of a small model.
Prints a JSON line: milliseconds of a step, median and 90th percentile, for each count, alone and beside busy processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

BUSY = "while True: pass"


def measure(seconds: float) -> list[float]:
    """Milliseconds of a step: median and 90th percentile."""
    import torch

    x = torch.randn(64, 576).bfloat16()
    layers = [(torch.randn(1536, 576).bfloat16(), torch.randn(576, 1536).bfloat16()) for _ in range(30)]

    def step() -> None:
        hidden = x
        for up, down in layers:
            gate = torch.mm(hidden, up.t())
            hidden = torch.mm(torch.nn.functional.silu(gate) * gate, down.t()) * 0.01 + x

    for _ in range(3):
        step()
    found, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        step()
        found.append(1e3 * (time.perf_counter() - start))
    return [round(statistics.median(found), 1), round(sorted(found)[int(0.9 * len(found))], 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=1)
    parser.add_argument("--counts", nargs="+", default=["default", "20000", "5000", "2000", "0"])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.seconds)))
        return
    found: dict[str, dict[str, list[float]]] = {"alone": {}, "busy": {}}
    for count in options.counts:
        environment = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"}
        environment |= {} if count == "default" else {"GOMP_SPINCOUNT": count}
        for kind, number in (("alone", 0), ("busy", options.busy)):
            others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(number)]
            try:
                command = [sys.executable, __file__, "--measure", "--seconds", str(options.seconds)]
                line = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            finally:
                for other in others:
                    other.kill()
                    other.wait()
            found[kind][count] = json.loads(line)
            print(f"{kind}, {count}: {found[kind][count]} ms", file=sys.stderr, flush=True)
    print(json.dumps({"benchmark": "busy_machine", "busy": options.busy, "step_ms": found}))


if __name__ == "__main__":
    main()
