"""Uploading one large file to a server on loopback that discards it: ours, which hashes what it sends, beside obstore's
own put.

The server speaks as much of S3 as this takes, in a process of its own. The two take turns in one run. Prints one JSON
line. Needs the extra s3.

python benchmarks/storage_upload.py [--mib 1024] [--rounds 5] [--part-mib 16] [--concurrency 8] [--limit-s 360]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.read.reader import checked_file
from verl.storage.config import S3Storage
from verl.storage.store import MIB

BUCKET = "benchmark"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "benchmark",
    "AWS_SECRET_ACCESS_KEY": "benchmark",
    "AWS_DEFAULT_REGION": "us-east-1",
}


class Discard(BaseHTTPRequestHandler):
    """Reads bodies, and remembers only how long each object is."""

    protocol_version = "HTTP/1.1"
    parts: ClassVar[dict[str, list[int]]] = {}

    def do_POST(self) -> None:
        path, _, query = self.path.partition("?")
        if query.startswith("uploads"):
            self.parts[path] = []
        self._read()
        kind = "Initiate" if query.startswith("uploads") else "Complete"
        fields = "<Bucket>b</Bucket><Key>k</Key><UploadId>1</UploadId><Location>l</Location><ETag>1</ETag>"
        self._answer(f"<{kind}MultipartUploadResult>{fields}</{kind}MultipartUploadResult>".encode())

    def do_PUT(self) -> None:
        self.parts.setdefault(self.path.partition("?")[0], []).append(self._read())
        self._answer()

    def do_HEAD(self) -> None:
        self._answer(size=sum(self.parts[self.path]))

    def _read(self) -> int:
        size, buffer = int(self.headers["Content-Length"]), memoryview(bytearray(MIB))
        left = size
        while left:
            left -= self.rfile.readinto(buffer[: min(left, MIB)])  # type: ignore[attr-defined]
        return size

    def _answer(self, body: bytes = b"", size: int | None = None) -> None:
        self.send_response(200)
        length = len(body) if size is None else size
        headers = {"ETag": "1", "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", "Content-Length": str(length)}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def serve(address: Connection) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Discard) as server:
        address.send(f"http://127.0.0.1:{server.server_address[1]}")
        server.serve_forever()


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
    receiver, sender = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(sender,), daemon=True)
    process.start()
    url = receiver.recv()
    try:
        with tempfile.TemporaryDirectory() as place:
            storage = S3Storage(
                bucket=BUCKET, endpoint_url=url, part_mib=chosen.part_mib, concurrency=chosen.concurrency
            )
            times = measure(storage, Path(place), chosen.mib, chosen.rounds, end)
    finally:
        process.kill()
        process.join()
    speeds = {side: [chosen.mib / 1024 / taken for taken in taken_s] for side, taken_s in times.items()}
    ratios = [theirs / ours for ours, theirs in zip(times["verl"], times["obstore"])]
    speed, low_high = statistics.median(speeds["verl"]), quartiles(ratios)
    row = [
        f"{chosen.mib} MiB of a checkpoint uploaded to a server on this machine that discards it, hashed on the way",
        f"{speed:.3f} GiB/s",
        f"{statistics.median(ratios):.2f}x {low_high} of obstore's put, not hashed; target: at least 0.8x",
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
                "speed_relative_to_obstore": round(statistics.median(ratios), 3),
                "speed_relative_to_obstore_quartiles": quartiles(ratios),
            }
        )
    )


def measure(storage: S3Storage, place: Path, mib: int, rounds: int, end: float) -> dict[str, list[float]]:
    """Seconds of each put, by side. The first round warms both up and is not counted; at least one more is made.

    Args:
        end: of the time for it, by `time.perf_counter`.
    """
    from obstore.store import S3Store

    with CheckpointStore(place / "checkpoints").begin(1) as transaction:
        block = os.urandom(MIB)
        transaction.main.write("actor/model.safetensors", [block * min(64, mib)] * max(1, mib // 64))
        checkpoint = transaction.commit()
    (entry,) = [one for one in checkpoint.manifest.files if one.path.startswith("actor/")]
    path, disk = checkpoint.path(entry.path), FileSystem()
    theirs = S3Store(BUCKET, endpoint=storage.endpoint_url or "", client_options={"allow_http": True})
    parts: dict[str, Any] = {"chunk_size": storage.part_mib * MIB, "max_concurrency": storage.concurrency}
    with storage.connect() as store:

        def ours(key: str) -> None:
            store.put_pieces(key, lambda: checked_file(disk, checkpoint, entry), entry.size)

        sides: dict[str, Callable[[str], object]] = {
            "verl": ours,
            "obstore": lambda key: theirs.put(key, path, **parts),
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
    return times


if __name__ == "__main__":
    main()
