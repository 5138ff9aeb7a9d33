"""Loading 1.2 GB of training state: one component memory-mapped, and everything with hashing, against other tools.

    python benchmarks/checkpoint_load.py                  a minute or two; --small for a short run

Prints one JSON line. Methods alternate; medians with quartiles. Every method ends with reading one byte of each page,
so that mapped memory is loaded. Cold means that the files were dropped from the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from safetensors.torch import load_file

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.core.hashing import digest_of
from verl.checkpoint.manager import CheckpointManager
from verl.checkpoint.save.async_writer import CheckpointWriter
from verl.checkpoint.save.save_request import SaveRequest
from verl.checkpoint.save.snapshot import SavedComponent

COMPONENTS = ("actor", "exp_avg", "exp_avg_sq")
PAGE = 4096


def write(root: Path, num_tensors: int) -> Path:
    """Weights and both moments of Adam as a checkpoint, and the same in one file of torch.save."""
    state = {name: [torch.randn(1024, 1024) for _ in range(num_tensors)] for name in COMPONENTS}
    store = CheckpointStore(root / "checkpoints")
    components = {
        component: SavedComponent(tensors={f"w{n}": t for n, t in enumerate(tensors)})
        for component, tensors in state.items()
    }
    with CheckpointWriter(store, mode="sync") as writer:
        writer.save(SaveRequest(step=1, components=components))
        writer.drain()
    checkpoint = store.newest()
    torch.save({name: dict(enumerate(tensors)) for name, tensors in state.items()}, root / "state.pt")
    os.sync()
    return checkpoint.directory


def touched(tensors: Iterable[torch.Tensor]) -> int:
    """Read one byte of every page."""
    return sum(int(tensor.reshape(-1).view(torch.uint8)[::PAGE].sum()) for tensor in tensors)


def forget(root: Path) -> None:
    """Let the page cache drop the files."""
    for path in [path for path in root.rglob("*") if path.is_file()]:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def ways(root: Path, directory: Path) -> dict[str, Callable[[], object]]:
    """What is compared."""

    def ours(components: Iterable[str], verify: bool = True) -> int:
        manager = CheckpointManager(directory)
        return sum(touched(manager.load(name, verify=verify).values()) for name in components)

    files = [directory / name / "model.safetensors" for name in COMPONENTS]
    return {
        "one component": lambda: ours(["actor"]),
        "one component, not hashed": lambda: ours(["actor"], verify=False),
        "all": lambda: ours(COMPONENTS),
        "safetensors": lambda: [touched(load_file(path).values()) for path in files],
        "torch.load": lambda: [touched(part.values()) for part in torch.load(root / "state.pt").values()],
        "hash": lambda: [digest_of(FileSystem().map(path)) for path in files],
    }


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def shown(values: list[float]) -> str:
    """The median and the quartiles, in milliseconds."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{1e3 * middle:.0f} [{1e3 * low:.0f}, {1e3 * high:.0f}] ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="12 MB instead of 1.2 GB")
    parser.add_argument("--directory", help="on the disk to be measured; else where temporary files go")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="checkpoint_load_", dir=args.directory) as made:
        root = Path(made)
        compared = ways(root, write(root, 1 if args.small else 100))
        times: dict[str, list[float]] = {f"{name}, {kind}": [] for name in compared for kind in ("cold", "warm")}
        for _ in range(3 if args.small else 7):
            for name, work in compared.items():
                forget(root)
                times[f"{name}, cold"].append(seconds(work))
                times[f"{name}, warm"].append(seconds(work))
    middle = {name: statistics.median(values) for name, values in times.items()}
    one, bare, everything, peer, saved, hashed = (f"{name}, warm" for name in compared)
    gain, bare_gain = (middle[saved] / middle[name] for name in (one, bare))
    cold = middle["all, cold"] / middle["safetensors, cold"]
    warm = middle[everything] / (middle[peer] + middle[hashed])
    rows = [
        [
            "checkpoint: one component of three, mapped, page cache warm",
            f"{shown(times[one])} hashed, {shown(times[bare])} not",
            f"{gain:.1f}x and {bare_gain:.0f}x faster than `torch.load` of all ({shown(times[saved])}); target: 5x",
        ],
        [
            "checkpoint: all of it, hashed while read, page cache cold",
            shown(times["all, cold"]),
            f"{cold:.2f}x of safetensors, not hashed ({shown(times['safetensors, cold'])}); target: at most 1.2x",
        ],
        [
            "the same, page cache warm",
            shown(times[everything]),
            f"{warm:.2f}x of safetensors ({shown(times[peer])}) and the hash ({shown(times[hashed])}); target: 1x",
        ],
    ]
    print(json.dumps({"name": "checkpoint_load", "seconds": times, "rows": rows}))


if __name__ == "__main__":
    main()
