"""Run every benchmark, store its JSON line in benchmarks/results/, and rewrite the tables made of them.

    python benchmarks/run.py [name ...]
    python benchmarks/run.py grpo_step:longtail_vllm      one case of a benchmark, kept beside its other ones

A benchmark that overruns its time, or is interrupted, keeps the legs that it has finished.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
CASES = ("grpo_step:longtail_vllm",)  # beside what the benchmarks measure by themselves
END_TIMEOUT_S = 60


def hardware() -> dict[str, str | int]:
    """What the numbers were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    named = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    kind = f" (family {named['cpu family']}, model {named['model']})" if "cpu family" in named else ""
    return {
        "cpu": named.get("model name", platform.processor()) + kind,  # processors of one name differ in their kernels
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
    }


def measured(name: str, limit_s: float) -> dict[str, Any] | None:
    """The last JSON line of a benchmark, or of as much of it as ran; None if there is none."""
    script, _, case = name.partition(":")
    command = [sys.executable, str(HERE / f"{script}.py"), *(["--cases", case] if case else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=_heeding_interrupts)
    clock = threading.Timer(limit_s, process.send_signal, (signal.SIGINT,))
    clock.start()
    last = None
    try:
        assert process.stdout is not None
        for line in process.stdout:
            last = line if line.startswith("{") else last
    except KeyboardInterrupt:  # which the benchmark has heard too
        print(f"{name}: interrupted", flush=True)
    finally:
        clock.cancel()
        _end(process)
    if last is None:
        return None
    if not process.returncode:
        return json.loads(last)
    print(f"{name}: cut short; what it had finished is kept", flush=True)
    return {**json.loads(last), "is_complete": False}


def _heeding_interrupts() -> None:
    """Whoever started us in the background may have told us to ignore them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(END_TIMEOUT_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of benchmarks (default: all)")
    parser.add_argument("--limit-s", type=float, default=1800, help="after which one is cut short (default 1800)")
    options = parser.parse_args()
    scripts = sorted(path.stem for path in HERE.glob("[a-z]*.py") if path.stem != "run")
    RESULTS.mkdir(exist_ok=True)
    failed = []
    for name in options.names or [*scripts, *CASES]:
        print(f"{name} ...", flush=True)
        result = measured(name, options.limit_s)
        if result is None:
            failed.append(name)
        else:
            file = RESULTS / f"{name.replace(':', '_')}.json"
            file.write_text(json.dumps({**result, "hardware": hardware()}, indent=2) + "\n")
    for script in ("make_results_table.py", "make_fault_table.py"):
        subprocess.run([sys.executable, HERE.parent / "scripts" / script], check=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
