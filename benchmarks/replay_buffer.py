"""The replay buffer with twenty times more data than its memory limit, against plain Arrow and NumPy.

    python benchmarks/replay_buffer.py                  2 GB on disk, some minutes; --small for a look

Prints one JSON line. Rows have 512 tokens. Resident memory is that of this process above what it was before the buffer,
mapped pages included, and its highest while batches of 512 rows are drawn. Sides take turns; medians with quartiles.
Appending is timed to the last file being synced; beside it stands plain pyarrow writing the same record batches, synced
too. Sampling from warm (page cache warm) is compared with a buffer whose rows are all in memory, with NumPy's gather
from padded arrays in memory, and with pyarrow's `take`. Of a checkpoint those files count that no earlier one shares.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import pyarrow as pa
import torch

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.save.async_writer import CheckpointWriter
from verl.checkpoint.save.save_request import ExistingFile, SaveRequest
from verl.checkpoint.save.snapshot import SavedComponent
from verl.protocol import DataProto
from verl.replay.arrow_rows import rows_to_arrow
from verl.replay.buffer import TieredBuffer
from verl.replay.config import COMPONENT, MIB, ReplayRequest, TieredReplay

TOKENS, ROWS = 512, 512


def rows(seed: int, count: int = ROWS) -> DataProto:
    """Rows with 64 tokens of prompt and 448 of response."""
    generator = torch.Generator().manual_seed(seed)
    p, t = 64, TOKENS - 64
    prompts, responses = (torch.randint(1, 30_000, (count, n), generator=generator) for n in (p, t))
    ones = torch.ones(count, t, dtype=torch.bool)
    tensors = {
        "prompts": prompts, "prompt_mask": torch.ones(count, p, dtype=torch.bool), "responses": responses,
        "prompt_ids": torch.arange(count), "group_ids": torch.arange(count) // 8, "sample_ids": torch.arange(count) % 8,
        "response_mask": ones, "attention_mask": torch.ones(count, TOKENS, dtype=torch.int64),
        "policy_version": torch.full((count,), seed), "rollout_log_probs": torch.randn(count, t, generator=generator),
        "token_level_scores": torch.rand(count, t, generator=generator),
        "advantages": torch.randn(count, t, generator=generator),
    }  # fmt: skip
    return DataProto.from_dict(tensors, {"score": [0.5] * count})


def resident_mib() -> float:
    """Of this process, mapped files included."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def gathered(arrays: list[np.ndarray], chosen: np.ndarray) -> list[torch.Tensor]:
    """Rows of padded arrays in memory."""
    return [torch.from_numpy(array[chosen]) for array in arrays]


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def quartiles(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 5), "quartiles": [round(low, 5), round(high, 5)]}


def appending(root: Path, count: int) -> dict[str, Any]:
    """MB/s of rows as they lie on disk, to the last sync, beside plain pyarrow."""
    batches = [rows(seed) for seed in range(8)]
    index = {name: np.zeros(ROWS) for name in ("group", "step", "score", "advantage")}
    records = [rows_to_arrow(batch, index) for batch in batches]
    num_bytes = sum(record.nbytes for record in records) * count / len(records)
    found: dict[str, list[float]] = {"ours": [], "pyarrow": []}

    def ours(directory: Path) -> None:
        buffer = TieredBuffer(TieredReplay(max_rows=10**7, memory_mib=512, shard_mib=64), directory)
        for number in range(count):
            buffer.append(batches[number % len(batches)], number)
        buffer.state_dict()
        buffer.close()

    def arrow(directory: Path) -> None:
        directory.mkdir()
        with open(directory / "rows.arrow", "wb") as file:
            with pa.ipc.new_file(file, records[0].schema) as writer:
                for number in range(count):
                    writer.write_batch(records[number % len(records)])
            file.flush()
            os.fsync(file.fileno())

    for turn in range(4):
        for name, work in (("ours", ours), ("pyarrow", arrow)):
            directory = root / f"{name}_{turn}"
            took = seconds(lambda work=work, directory=directory: work(directory))
            if turn:  # the first is a warm-up
                found[name].append(num_bytes / took / 1e6)
            shutil.rmtree(directory)
    return {f"{name}_mb_per_s": quartiles(values) for name, values in found.items()}


def sampling(root: Path, count: int, repeats: int) -> dict[str, Any]:
    """Seconds for a batch of 512 rows."""
    hot_settings = TieredReplay(max_rows=count * ROWS, hot_share=1.0, warm_share=0.0, cold_share=0.0, memory_mib=8192)
    warm_settings = dataclasses.replace(hot_settings, hot_share=0.0, warm_share=1.0)
    sides = {"hot": TieredBuffer(hot_settings, root / "hot"), "warm": TieredBuffer(warm_settings, root / "warm")}
    names = ("prompts", "responses", "response_mask", "rollout_log_probs", "token_level_scores")
    padded: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for number in range(count):
        batch = rows(number)
        for buffer in sides.values():
            buffer.append(batch, number)
        for name in names:
            padded[name].append(batch[name].numpy())
    arrays = {name: np.concatenate(parts) for name, parts in padded.items()}
    for buffer in sides.values():
        buffer.state_dict()
    shards = sorted((root / "warm").glob("rows_*.arrow"))
    files = [pa.ipc.open_file(pa.memory_map(str(shard))) for shard in shards]
    table = pa.concat_tables([file.read_all() for file in files])
    generator = np.random.default_rng(0)
    found: dict[str, list[float]] = {name: [] for name in ("hot", "warm", "numpy", "pyarrow")}
    for turn in range(repeats + 2):
        chosen = np.sort(generator.choice(count * ROWS, ROWS, replace=False))
        took = {name: seconds(partial(buffer.rows, chosen)) for name, buffer in sides.items()}
        took["numpy"] = seconds(partial(gathered, list(arrays.values()), chosen))
        took["pyarrow"] = seconds(partial(table.select(list(names)).take, pa.array(chosen)))
        if turn >= 2:
            for name, value in took.items():
                found[name].append(value)
    draws = [
        seconds(lambda step=step: sides["warm"].sample(ReplayRequest(ROWS, step, count))) for step in range(repeats)
    ]
    for buffer in sides.values():
        buffer.close()
    result: dict[str, Any] = {f"{name}_s": quartiles(values) for name, values in found.items()}
    result["warm_speed_over_hot"] = round(statistics.median(found["hot"]) / statistics.median(found["warm"]), 3)
    return {**result, "warm_with_draw_s": quartiles(draws)}


def memory(root: Path, memory_mib: int, repeats: int) -> dict[str, Any]:
    """Resident memory of a buffer that holds twenty times its limit."""
    settings = TieredReplay(max_rows=10**7, memory_mib=memory_mib, shard_mib=max(1, memory_mib // 16))
    batch = rows(0)
    used = TieredBuffer(TieredReplay(memory_mib=8, shard_mib=1), root / "first")  # code and allocators in use
    for step in range(4):
        used.append(batch, step)
        used.state_dict()
        used.sample(ReplayRequest(ROWS, step, 1))
    used.close()
    del used
    gc.collect()
    before = resident_mib()
    buffer = TieredBuffer(settings, root / "large")
    size = most = 0.0
    while size < 20 * memory_mib * MIB:
        buffer.append(batch, len(buffer.index) // ROWS)
        size = sum(shard.file.size for shard in buffer.index.shards if shard.file)
        most = max(most, resident_mib() - before)
    buffer.state_dict()
    took = []
    for step in range(repeats):
        began = time.perf_counter()
        found = buffer.sample(ReplayRequest(ROWS, step, 1))
        took.append(time.perf_counter() - began)
        most = max(most, resident_mib() - before)
    assert found is not None
    working = sum(tensor.nbytes for tensor in found.batch.values()) / MIB
    buffer.close()
    return {
        "limit_mib": memory_mib, "buffer_mib": round(size / MIB), "num_rows": len(buffer),
        "batch_mib": round(working, 1),
        "resident_mib": round(most, 1), "resident_over_limit": round(most / memory_mib, 3),
        "sample_s": quartiles(took),
    }  # fmt: skip


def saving(root: Path, num_bytes: int) -> dict[str, Any]:
    """Bytes that a second checkpoint adds, over those of the rows that came between."""
    buffer = TieredBuffer(TieredReplay(max_rows=10**7, memory_mib=512, shard_mib=64), root / "saved_buffer")
    batch, new = rows(0), 16
    store = CheckpointStore(root / "checkpoints")

    def request(step: int) -> SaveRequest:
        state = buffer.state_dict()
        links = [item for item in state.values() if isinstance(item, ExistingFile)]
        small = {name: item for name, item in state.items() if isinstance(item, bytes)}
        return SaveRequest(step=step, components={COMPONENT: SavedComponent(files=small)}, existing_files=links)

    with CheckpointWriter(store, mode="sync") as writer:
        while sum(shard.file.size for shard in buffer.index.shards if shard.file) < num_bytes:
            buffer.append(batch, 0)
        writer.save(request(1))
        for _ in range(new):
            buffer.append(batch, 1)
        took = seconds(lambda: writer.save(request(2)))
    of_rows = (
        new * rows_to_arrow(batch, {name: np.zeros(ROWS) for name in ("group", "step", "score", "advantage")}).nbytes
    )
    first = {file.stat().st_ino for file in (root / "checkpoints/global_step_1").rglob("*") if file.is_file()}
    files = [file for file in (root / "checkpoints/global_step_2").rglob("*") if file.is_file()]
    adds = sum(file.stat().st_size for file in files if file.stat().st_ino not in first)
    buffer.close()
    total = sum(file.stat().st_size for file in files)
    return {"buffer_mb": round(total / 1e6), "adds_over_new_rows": round(adds / of_rows, 4), "save_s": round(took, 3)}


def rows_of_table(result: dict[str, Any]) -> list[list[str]]:
    """Of the table in docs/results.md."""
    held, put, drawn, saved = (result[name] for name in ("memory", "append", "sample", "checkpoint"))
    return [
        [
            f"replay buffer of {held['buffer_mib']} MiB: resident memory, limit {held['limit_mib']} MiB",
            f"{held['resident_mib']:.0f} MiB",
            f"{held['resident_over_limit']:.2f}x of the limit; target: at most 1.1x",
        ],
        [
            f"{ROWS} rows of {TOKENS} tokens drawn from files, page cache warm",
            f"{1e3 * drawn['warm_s']['median']:.1f} ms",
            f"{drawn['warm_speed_over_hot']:.2f}x the speed of rows in memory, target: 0.5x; pyarrow's take "
            f"{1e3 * drawn['pyarrow_s']['median']:.1f} ms, NumPy from padded arrays "
            f"{1e3 * drawn['numpy_s']['median']:.1f} ms; from a buffer at its memory's limit "
            f"{1e3 * held['sample_s']['median']:.0f} ms",
        ],
        [
            "rows appended, to the last sync",
            f"{put['ours_mb_per_s']['median']:.0f} MB/s",
            f"target: 400 MB/s; plain pyarrow {put['pyarrow_mb_per_s']['median']:.0f} MB/s",
        ],
        [
            f"a checkpoint with a buffer of {saved['buffer_mb']} MB adds",
            f"{saved['adds_over_new_rows']:.4f}x of the new rows' bytes",
            f"target: at most 1.05x; {saved['save_s']:.2f} s",
        ],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a look, in seconds")
    parser.add_argument("--dir", help="where to write; the default is a directory of its own below /tmp")
    options = parser.parse_args()
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="replay_buffer_", dir=options.dir))
    small = options.small
    try:
        result = {
            "benchmark": "replay_buffer",
            "memory": memory(root, 32 if small else 128, 5 if small else 30),
            "append": appending(root, 32 if small else 200),
            "sample": sampling(root, 8 if small else 64, 5 if small else 30),
            "checkpoint": saving(root, 100 * MIB if small else 2 * 10**9),
            "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        }
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(json.dumps({**result, "rows": rows_of_table(result)}))


if __name__ == "__main__":
    main()
