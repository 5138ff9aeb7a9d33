"""Uploading one large file to an S3 server on loopback: ours, which hashes what it sends, beside s3fs's own put.

The server is moto's, in a process of its own, and it, not the network, sets the pace; the two take turns in one run,
each under a new key. Prints one JSON line. Needs requirements-storage.txt and moto.

python benchmarks/storage_upload.py [--mib 1024] [--rounds 5] [--part-mib 16] [--concurrency 8] [--limit-s 360]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.remote.transfer import checked_pieces
from verl.storage.config import S3Storage
from verl.storage.store import MIB

BUCKET = "benchmark"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "benchmark",
    "AWS_SECRET_ACCESS_KEY": "benchmark",
    "AWS_DEFAULT_REGION": "us-east-1",
}


def server() -> tuple[subprocess.Popen[str], str]:
    """An S3 server on a free port of this machine, with the bucket."""
    command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            url = found[0]
            break
    else:
        raise SystemExit("the S3 server did not start: pip install 'moto[server]'")
    subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)  # what it logs of each request
    urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT")).close()
    return process, url


def quartiles(values: list[float]) -> list[float]:
    """First, second and third."""
    if len(values) == 1:
        return [round(values[0], 3)] * 3
    return [round(value, 3) for value in statistics.quantiles(values, n=4, method="inclusive")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part-mib", type=int, default=S3Storage.part_mib, help="storage.part_mib")
    parser.add_argument("--concurrency", type=int, default=S3Storage.concurrency, help="storage.concurrency")
    parser.add_argument("--limit-s", type=float, default=360.0, help="begin no further round after so many seconds")
    chosen = parser.parse_args()
    end = time.perf_counter() + chosen.limit_s
    os.environ |= CREDENTIALS
    process, url = server()
    try:
        with tempfile.TemporaryDirectory() as place:
            storage = S3Storage(
                bucket=BUCKET, endpoint_url=url, part_mib=chosen.part_mib, concurrency=chosen.concurrency
            )
            times = measure(storage, Path(place), chosen.mib, chosen.rounds, end)
    finally:
        process.kill()
        process.wait()
    speeds = {side: [chosen.mib / 1024 / taken for taken in taken_s] for side, taken_s in times.items()}
    ratios = [theirs / ours for ours, theirs in zip(times["verl"], times["s3fs"])]
    speed, low_high = statistics.median(speeds["verl"]), quartiles(ratios)
    row = [
        f"{chosen.mib} MiB of a checkpoint uploaded to an S3 server on this machine, hashed on the way",
        f"{speed:.3f} GiB/s",
        f"{statistics.median(ratios):.2f}x {low_high} of s3fs's put, not hashed; target: at least 0.8x",
    ]
    print(
        json.dumps(
            {
                "rows": [row],
                "name": "storage_upload",
                "mib": chosen.mib,
                "rounds": len(ratios),
                "part_mib": chosen.part_mib,
                "concurrency": chosen.concurrency,
                "gib_per_s": {side: round(statistics.median(values), 3) for side, values in speeds.items()},
                "gib_per_s_quartiles": {side: quartiles(values) for side, values in speeds.items()},
                "speed_relative_to_s3fs": round(statistics.median(ratios), 3),
                "speed_relative_to_s3fs_quartiles": quartiles(ratios),
            }
        )
    )


def measure(storage: S3Storage, place: Path, mib: int, rounds: int, end: float) -> dict[str, list[float]]:
    """Seconds of each put, by side. The first round warms both up and is not counted; at least one more is made.

    Args:
        end: of the time for it, by `time.perf_counter`.
    """
    import s3fs

    with CheckpointStore(place / "checkpoints").begin(1) as transaction:
        block = os.urandom(MIB)
        transaction.main.write("actor/model.safetensors", [block * min(64, mib)] * max(1, mib // 64))
        checkpoint = transaction.commit()
    (entry,) = [one for one in checkpoint.manifest.files if one.path.startswith("actor/")]
    path, disk, theirs = checkpoint.path(entry.path), FileSystem(), s3fs.S3FileSystem(endpoint_url=storage.endpoint_url)
    with storage.connect() as store:
        length = store.part_bytes(entry.size)

        def ours(key: str) -> None:
            store.put_pieces(key, lambda: checked_pieces(disk, checkpoint, entry, length), entry.size)

        sides: dict[str, Callable[[str], None]] = {
            "verl": ours,
            "s3fs": lambda key: theirs.put_file(str(path), f"{BUCKET}/{key}"),
        }
        times: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds + 1):
            if number > 1 and time.perf_counter() > end:
                break
            for name in list(sides)[:: 1 if number % 2 else -1]:
                began = time.perf_counter()
                sides[name](f"{name}-{number}")
                if number:
                    times[name].append(time.perf_counter() - began)
                assert store.size(f"{name}-{number}") == entry.size
                store.delete(f"{name}-{number}")  # the server keeps objects in memory
    return times


if __name__ == "__main__":
    main()
