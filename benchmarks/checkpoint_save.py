"""Saving 1.2 GB of training state, against the limits of disk and memory and against other tools.

    python benchmarks/checkpoint_save.py                  about eight minutes; --small for a short run

Prints one JSON line. Methods alternate; medians with quartiles. Before each save the previous one is removed, the disk
is synced, and memory is touched and freed, since a virtual machine may have to get memory from its host. `durable`
includes a sync of every file and of the directory. In the loop a step multiplies matrices on all threads and then
writes every page of the state, like an optimizer; the cost of a save is the additional time of the steps during which
it runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import mmap
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
warnings.filterwarnings("ignore")

import torch  # noqa: E402

CHUNK = 16 * 2**20
SHARED = {
    "use_pinned_memory": False,
    "use_shared_memory": True,
    "use_async_staging": True,
    "use_non_blocking_copy": False,
}


class State:
    """100 million parameters in fp32 and both moments of Adam."""

    def __init__(self, num_layers: int, width: int = 768, vocabulary: int = 16384):
        shapes = {"model.embed_tokens.weight": (vocabulary, width), "model.norm.weight": (width,)}
        for number in range(num_layers):
            layer = f"model.layers.{number}."
            shapes |= {f"{layer}self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
            shapes |= {f"{layer}mlp.{name}_proj.weight": (4 * width, width) for name in ("gate", "up")}
            shapes |= {f"{layer}mlp.down_proj.weight": (width, 4 * width), f"{layer}norm.weight": (width,)}
        generator = torch.Generator().manual_seed(0)
        self.model = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        self.moments = {
            f"{name}.{moment}": torch.randn(shape, generator=generator)
            for name, shape in shapes.items()
            for moment in ("exp_avg", "exp_avg_sq")
        }
        self.all = {**self.model, **self.moments}
        self.nested = {"model": self.model, "optim": self.moments}
        self.num_bytes = sum(tensor.nbytes for tensor in self.all.values())


class Ground:
    """The directory in which is saved, made ready before each save."""

    def __init__(self, parent: str | None, settle_s: float, warm_bytes: int):
        self.root = Path(tempfile.mkdtemp(prefix="checkpoint_save_", dir=parent))
        self._settle_s, self._warm_bytes = settle_s, warm_bytes

    def fresh(self) -> Path:
        path = self.root / "save"
        for old in [path, *self.root.glob("ours/global_step_*")]:
            shutil.rmtree(old, ignore_errors=True)
        path.mkdir()
        os.sync()
        time.sleep(self._settle_s)
        torch.empty(self._warm_bytes, dtype=torch.uint8).fill_(1)
        return path


def sync_below(path: Path) -> None:
    """What a save that does not sync leaves to be done."""
    for target in [*path.rglob("*"), path]:
        fd = os.open(target, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def raw_write(path: Path, num_bytes: int, flag: int) -> None:
    """One file, in pieces of 16 MiB, and a sync."""
    with mmap.mmap(-1, CHUNK) as piece:
        piece.write(os.urandom(2**20) * (CHUNK // 2**20))
        fd = os.open(path / "raw", os.O_WRONLY | os.O_CREAT | flag)
        for _ in range(-(-num_bytes // CHUNK)):
            os.write(fd, piece)
        os.fsync(fd)
        os.close(fd)


class Copying:
    """The state into memory that is there already."""

    def __init__(self, state: State):
        pairs = [(torch.zeros_like(tensor), tensor) for tensor in state.all.values()]
        self._pairs = sorted(pairs, key=lambda pair: -pair[0].nbytes)

    def run(self, num_threads: int) -> None:
        def copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
            for target, source in pairs:
                target.copy_(source)

        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(copy, [self._pairs[n::num_threads] for n in range(num_threads)]))


class Ours:
    """verl's asynchronous writer."""

    name = "verl"

    def __init__(self, state: State):
        from verl.checkpoint.save.snapshot import SavedComponent

        self._components = {
            "actor": SavedComponent(tensors=state.model),
            "optimizer": SavedComponent(tensors=state.moments, file="optimizer.safetensors"),
        }
        self._writer: Any = None
        self._step = 0

    def open(self, path: Path) -> None:
        from verl.checkpoint.commit.store import CheckpointStore
        from verl.checkpoint.save.async_writer import CheckpointWriter

        if self._writer is None:
            self._writer = CheckpointWriter(CheckpointStore(path.parent / "ours"))

    def start(self) -> None:
        from verl.checkpoint.save.save_request import SaveRequest

        self._step += 1
        self._writer.save(SaveRequest(step=self._step, components=self._components))

    def wait_copied(self) -> None:
        self._writer.wait_copied()

    def is_done(self) -> bool:
        return not self._writer.num_under_way

    def finish(self) -> dict[str, float]:
        outcome = self._writer.drain()[-1]
        return {"copy_s": outcome.copied_s}

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class DCP:
    """torch.distributed.checkpoint with its stager in shared memory, which it keeps between saves."""

    def __init__(self, state: State, kind: str):
        self.name = f"DCP ({kind.lower()})"
        self._state, self._kind = state, kind
        self._stager: Any = None
        self._future: Any = None
        self._path = Path()
        self._number = 0

    def open(self, path: Path) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._path = path
        if self._stager is None:
            self._stager = DefaultStager(StagingOptions(**SHARED))

    def start(self) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self._number += 1
        self._future = dcp.async_save(
            self._state.nested,
            storage_writer=dcp.FileSystemWriter(self._path / f"dcp_{self._number}"),
            async_checkpointer_type=AsyncCheckpointerType[self._kind],
            async_stager=self._stager,
        )

    def wait_copied(self) -> None:
        if self._future is not None:
            self._future.staging_completion.result()

    def is_done(self) -> bool:
        return self._future is None or self._future.upload_completion.done()

    def finish(self) -> dict[str, float]:
        self._future.upload_completion.result()
        return {}

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()
        self._stager = self._future = None


def init_process_group() -> None:
    import torch.distributed as dist

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **rank})
    dist.init_process_group("gloo")


def measure_limits(state: State, ground: Ground, rounds: int, found: dict[str, list[float]]) -> None:
    """What memory and disk allow."""
    copying = Copying(state)
    copying.run(1)  # touches the memory
    for _ in range(rounds):
        for threads in (1, 2):
            note(found, f"memcpy_{threads}", seconds(partial(copying.run, threads)))
    copying = None  # gives it back
    for _ in range(rounds):
        for name, flag in (("raw_buffered", 0), ("raw_direct", os.O_DIRECT)):
            path = ground.fresh()
            note(found, name, seconds(lambda path=path, flag=flag: raw_write(path, state.num_bytes, flag)))


def measure_blocking(state: State, ground: Ground, rounds: int, found: dict[str, list[float]]) -> None:
    """Saves that stop training until they are durable."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    ways = {
        "torch_save": lambda path: torch.save(state.nested, path / "state.pt"),
        "safetensors": lambda path: save_file(state.all, path / "state.safetensors"),
        "dcp_save": lambda path: dcp.save(state.nested, storage_writer=dcp.FileSystemWriter(path)),
    }
    for _ in range(rounds):
        for name, save in ways.items():
            path = ground.fresh()
            note(found, name, seconds(lambda path=path, save=save: (save(path), sync_below(path))))


def measure_asynchronous(savers: list[Any], ground: Ground, is_first: bool, found: dict[str, list[float]]) -> None:
    """Until the call returns, until the optimizer may write, until durable; nothing else is running."""
    for is_counted in (False, True) if is_first else (True,):
        for saver in savers:
            saver.open(ground.fresh())
            began = time.perf_counter()
            saver.start()
            stall = time.perf_counter() - began
            saver.wait_copied()
            copied = time.perf_counter() - began
            parts = saver.finish()
            durable = time.perf_counter() - began
            if is_counted:  # the first allocates
                for key, value in {"stall": stall, "copied": copied, "durable": durable, **parts}.items():
                    note(found, f"{saver.name}.{key}", value)


def note(found: dict[str, list[float]], name: str, value: float) -> None:
    found.setdefault(name, []).append(value)
    print(f"{name} {value:.4f}", file=sys.stderr, flush=True)


class Loop:
    """Training that keeps all threads busy, saving every so many steps."""

    def __init__(self, state: State, num_threads: int, step_s: float, num_steps: int, every: int):
        torch.set_num_threads(num_threads)
        self._large = [tensor for tensor in state.all.values() if tensor.numel() > 1]
        self._matrices = [torch.randn(1536, 1536) for _ in range(3)]
        self._steps, self._every = num_steps, every
        self._repeats = 20
        self._multiply()
        self._repeats = max(1, round(20 * step_s / seconds(self._multiply)))

    def _multiply(self) -> None:
        a, b, c = self._matrices
        for _ in range(self._repeats):
            torch.mm(a, b, out=c)

    def run(self, saver: Any, ground: Ground) -> dict[str, float]:
        """Seconds that one save costs, seconds of a step otherwise, and the steps that a save touches."""
        saver.open(ground.fresh())
        saver.start()  # allocates, outside of the measurement
        saver.wait_copied()
        saver.finish()
        touched: list[float] = []
        others: list[float] = []
        saves, step = 0, 0
        while step < self._steps or not saver.is_done():
            step += 1
            is_touched = not saver.is_done()
            took = seconds(lambda: self._step(saver))
            if step % self._every == 0 and step <= self._steps:
                took += seconds(saver.start)
                is_touched, saves = True, saves + 1
            (touched if is_touched else others).append(took)
        saver.finish()
        usual = statistics.median(others)
        return {
            "extra_s": sum(touched) / saves - usual * len(touched) / saves,
            "step_s": usual,
            "touched": len(touched),
        }

    def _step(self, saver: Any) -> None:
        self._multiply()  # forward and backward, during which the state may be copied
        saver.wait_copied()
        torch._foreach_mul_(self._large, 1.0)  # the optimizer


def measure_loops(
    state: State, savers: list[Any], ground: Ground, options: argparse.Namespace, found: dict[str, list[float]]
) -> None:
    for threads, others in ((2, savers), (1, savers[-1:])):
        loop = Loop(state, threads, options.step_s, options.steps, options.every)
        for _ in range(options.rounds):
            for saver in others:
                for key, value in loop.run(saver, ground).items():
                    note(found, f"{saver.name}.loop_{threads}.{key}", value)


def shown(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.3f} s"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} [{low:.3f}, {high:.3f}] s"


def rows_of(found: dict[str, list[float]], state: State) -> list[list[str]]:
    """For the table of results."""
    middle = {name: statistics.median(values) for name, values in found.items()}
    size = f"{state.num_bytes / 1e9:.2f} GB"
    best_raw = min(middle["raw_buffered"], middle["raw_direct"])
    copy = min(middle["memcpy_1"], middle["memcpy_2"])
    rows = [
        [f"{size} saved asynchronously: the call returns", shown(found["verl.stall"]), "target: at most 0.05 s"],
        [
            "the optimizer may write again",
            shown(found["verl.copied"]),
            f"{middle['verl.copied'] / copy:.2f}x of one copy in memory ({copy:.3f} s); target: at most 1.2x",
        ],
        [
            "published, durable",
            shown(found["verl.durable"]),
            f"{middle['verl.durable'] / best_raw:.2f}x of the better raw write ({best_raw:.3f} s), target: at most "
            f"1.3x; torch.save {middle['torch_save']:.2f}, safetensors {middle['safetensors']:.2f}, "
            f"dcp.save {middle['dcp_save']:.2f} s",
        ],
    ]
    if "verl.loop_2.extra_s" in found:
        peers = [middle[name] for name in found if name.startswith("DCP") and name.endswith("loop_2.extra_s")]
        cost, step = middle["verl.loop_2.extra_s"], middle["verl.loop_2.step_s"]
        alone = middle["verl.loop_1.extra_s"] / (100 * middle["verl.loop_1.step_s"])
        rows.append(
            [
                "training lost to one save, both cores busy",
                shown(found["verl.loop_2.extra_s"]),
                f"{cost / min(peers):.2f}x of DCP's best ({min(peers):.2f} s), target: at most 0.35x; at a save every "
                f"100 steps {100 * cost / (100 * step):.2f}% (one core idle: {100 * alone:.2f}%)",
            ]
        )
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", help="on the disk to be measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--step-s", type=float, default=0.3)
    parser.add_argument("--parts", nargs="*", default=["limits", "blocking", "asynchronous", "loops"])
    parser.add_argument("--small", action="store_true", help="a few megabytes and one round, to see that it runs")
    options = parser.parse_args()
    if options.small:
        options.rounds, options.layers, options.steps, options.every, options.step_s = 1, 0, 4, 2, 0.01
    logging.disable(logging.WARNING)
    torch.set_num_threads(2)
    init_process_group()
    state = State(options.layers, *((16, 64) if options.small else ()))
    ground = Ground(options.directory, 0.0 if options.small else 1.0, 0 if options.small else int(2.5 * 2**30))
    savers = [DCP(state, "THREAD"), DCP(state, "PROCESS"), Ours(state)]
    found: dict[str, list[float]] = {}
    try:
        for number in range(options.rounds):
            if "limits" in options.parts:
                measure_limits(state, ground, 1, found)
            if "blocking" in options.parts:
                measure_blocking(state, ground, 1, found)
            if "asynchronous" in options.parts:
                measure_asynchronous(savers, ground, number == 0, found)
        if "loops" in options.parts:
            measure_loops(state, savers, ground, options, found)
    finally:
        for saver in savers:
            saver.close()
        shutil.rmtree(ground.root, ignore_errors=True)
        torch.distributed.destroy_process_group()
    medians = {name: round(statistics.median(values), 4) for name, values in found.items()}
    complete = all(part in options.parts for part in ("limits", "blocking", "asynchronous"))
    rows = rows_of(found, state) if complete else []
    result = {"benchmark": "checkpoint_save", **vars(options), "state_bytes": state.num_bytes, "medians": medians}
    print(json.dumps({**result, "values": found, "rows": rows}))


if __name__ == "__main__":
    main()
