"""Saving by four processes against one for the same bytes, and loading under another layout against the same one.

    python benchmarks/sharded_checkpoint.py               a few minutes; --small for a look

Prints one JSON line. Everything goes the way of a training run: the processes are those of `sharding=fsdp`, the driver
opens and commits, each process writes its own part. A save is timed from its beginning to its publication, all synced;
the sides take turns, and so does a raw write of as many bytes and a sync, which is what the disk allows. Loading is
into weights and optimizers that run, from files that are in the page cache: what four processes under fsdp wrote, and
what four under tp_fsdp wrote, each loaded by four under fsdp.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import torch

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.config import Checkpointing
from verl.checkpoint.save.async_writer import CheckpointWriter
from verl.checkpoint.save.save_request import SaveRequest
from verl.checkpoint.save.snapshot import SavedComponent
from verl.cluster.local_worker_group import LocalWorkerGroup
from verl.cluster.rpc import role_handles
from verl.component import BuildContext
from verl.engines.optimizer import AdamW
from verl.engines.sharding import FSDP, TPFSDP, Sharding
from verl.models.pretrained import Pretrained
from verl.models.tiny import character_tokenizer
from verl.protocol import DataProto
from verl.trainer.state.train_state import RankWriters
from verl.workers.actor import Actor
from verl.workers.colocated import SFTHost
from verl.workers.load_state import CheckpointSelection

CHUNK = 16 * 2**20


def save_model(directory: Path, width: int, layers: int) -> Pretrained:
    """A random Qwen2 with the character tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = character_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return Pretrained(path=str(directory))


class Crew:
    """Processes that hold a model and the state of its optimizer, and save them."""

    def __init__(self, model: Pretrained, sharding: Sharding, processes: int, directory: Path):
        actor = Actor(model=model, optimizer=AdamW(lr=1e-4))
        host = SFTHost(learner=actor, sharding=sharding, total_updates=100)
        self.cluster = LocalWorkerGroup(host, BuildContext(), processes, num_threads=1)
        self.learner: Any = role_handles(self.cluster, host)["learner"]
        self.store = CheckpointStore(directory)
        self.store.claim_directory()
        self.writer = CheckpointWriter(self.store)
        self.parts = RankWriters({"actor": self.learner}, Checkpointing())
        fault = self.parts.check_shared_directory(self.store)
        assert fault is None, fault
        self.update()
        self.step = 0

    def update(self) -> None:
        """An optimizer step, so that there is state."""
        ids = torch.arange(3, 11).repeat(4, 1)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": torch.ones_like(ids).bool()}
        batch["position_ids"] = torch.arange(8).expand(4, -1)
        self.learner.update(DataProto.from_dict(batch)).result()

    def save(self) -> Path:
        """Begin, and wait until it is published."""
        self.step += 1
        (told,) = self.parts.states().values()
        schedule = {"updates": {"actor": told.updates}}
        own = {"scheduler": SavedComponent(files={"state.json": json.dumps(schedule).encode()})}
        self.parts.save(self.writer, SaveRequest(step=self.step, components=own), told.num_bytes)
        self.parts.wait_copied()
        (outcome,) = self.writer.drain()
        assert outcome.directory is not None
        return outcome.directory

    def load(self, checkpoint: Path) -> None:
        self.learner.load("actor", CheckpointSelection(checkpoint, mmap=True)).result()

    def close(self) -> None:
        self.writer.close()
        self.cluster.close()


def raw_write(path: Path, num_bytes: int) -> None:
    """One file, in pieces of 16 MiB, and a sync."""
    piece = os.urandom(2**20) * (CHUNK // 2**20)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for begin in range(0, num_bytes, CHUNK):
        os.write(fd, piece[: num_bytes - begin])
    os.fsync(fd)
    os.close(fd)
    path.unlink()


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def spread(times: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return {"median_s": round(median, 4), "q1_s": round(low, 4), "q3_s": round(high, 4)}


def measure(ways: dict[str, Callable[[], object]], rounds: int, between: Callable[[], None]) -> dict[str, list[float]]:
    """The first round, in which memory is allocated, is not counted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, work in ways.items():
            between()
            took = seconds(work)
            if number:
                times[name].append(took)
    return times


def remove_saves(crews: list[Crew]) -> None:
    for crew in crews:
        for old in crew.store.directory.glob("global_step_*"):
            shutil.rmtree(old)
    os.sync()


def run(directory: Path, width: int, layers: int, rounds: int) -> dict[str, Any]:
    model = save_model(directory / "model", width, layers)
    with ExitStack() as ending:

        def crew(name: str, sharding: Sharding, processes: int) -> Crew:
            made = Crew(model, sharding, processes, directory / name)
            ending.callback(made.close)
            return made

        four, one = crew("four", FSDP(), 4), crew("one", FSDP(), 1)
        (told,) = four.parts.states().values()
        raw = {"raw": lambda: raw_write(directory / "raw", told.num_bytes)}
        ways = {"four": four.save, "one": one.save, **raw}
        saves = measure(ways, rounds, lambda: remove_saves([four, one]))
        one.close()
        other = crew("other", TPFSDP(), 4)
        same, another = four.save(), other.save()
        other.close()
        loads = measure({"same": lambda: four.load(same), "another": lambda: four.load(another)}, rounds, lambda: None)
    found = {name: statistics.median(times) for name, times in {**saves, **loads}.items()}
    return {
        "benchmark": "sharded_checkpoint",
        "bytes": told.num_bytes,
        "rounds": rounds,
        **{f"save_{name}": spread(times) for name, times in saves.items()},
        **{f"load_{name}": spread(times) for name, times in loads.items()},
        "save_four_to_one": round(found["four"] / found["one"], 3),
        "save_four_to_raw": round(found["four"] / found["raw"], 3),
        "load_another_to_same": round(found["another"] / found["same"], 3),
        "rows": _rows(told.num_bytes, found),
    }


def _rows(num_bytes: int, found: dict[str, float]) -> list[list[str]]:
    """Of the table in docs/results.md."""
    return [
        [
            f"{num_bytes / 1e9:.2f} GB saved by four processes under `sharding=fsdp`, each its own part",
            f"{found['four']:.2f} s",
            f"{found['four'] / found['one']:.2f}x of one process ({found['one']:.2f} s), "
            f"{found['four'] / found['raw']:.2f}x of a raw write; target: at most 1.2x",
        ],
        [
            "the same loaded by four under another layout (saved under `tp_fsdp`, loaded under `fsdp`)",
            f"{found['another']:.2f} s",
            f"{found['another'] / found['same']:.2f}x of the same layout ({found['same']:.2f} s); target: at most 1.5x",
        ],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a few megabytes, for a look")
    parser.add_argument("--directory", help="on the disk that is to be measured; a temporary one by default")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sharded_checkpoint_", dir=chosen.directory) as directory:
        size = {"width": 128, "layers": 2, "rounds": 2} if chosen.small else {"width": 1024, "layers": 4, "rounds": 7}
        print(json.dumps(run(Path(directory), **size)))


if __name__ == "__main__":
    main()
