"""Write the golden checkpoints of the current format: two of a tiny run, byte for byte the same on every machine.

With --incremental the second one is stored as what changed since the first.

Every later version of verl must read those of every earlier format, so a written directory is never written again:
a new format version gets a directory of its own, tests/golden/format_MAJOR_MINOR.

Example: python scripts/make_golden_checkpoint.py tests/golden/format_1_0
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import verl
from verl.checkpoint.commit import transaction
from verl.checkpoint.commit.rank_writer import RankTensor
from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.checkpoint import Checkpoint, read_state
from verl.checkpoint.core.direct_io import FileImage, ImageSource
from verl.checkpoint.core.manifest import STATE
from verl.checkpoint.core.safetensors_format import TensorBytes
from verl.checkpoint.read.reader import CheckpointReader
from verl.checkpoint.save import save_executor
from verl.checkpoint.save.save_plan import IncrementalSettings

HIDDEN, FEED_FORWARD, VOCABULARY = 8, 16, 12
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN, "intermediate_size": FEED_FORWARD, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip
SHAPES = {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    **{f"model.layers.0.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"},
    **{f"model.layers.0.mlp.{name}_proj.weight": (FEED_FORWARD, HIDDEN) for name in ("gate", "up")},
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, FEED_FORWARD),
    "model.layers.0.input_layernorm.weight": (HIDDEN,),
    "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "model.norm.weight": (HIDDEN,),
}
LOSSES = {100: [(50, 1.25), (100, 0.75)], 200: [(50, 1.25), (100, 0.75), (150, 0.5), (200, 0.375)]}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the checkpoints are written; must not exist")
    parser.add_argument("--incremental", action="store_true", help="write the second one as an increment")
    options = parser.parse_args(arguments)
    if options.directory.exists():
        parser.error(f"{options.directory} exists: what was written there once is to be read for ever")
    with tempfile.TemporaryDirectory() as made:
        write_run(Path(made) / "checkpoints")
        if options.incremental:
            as_increment(Path(made) / "checkpoints")
        for step in LOSSES:
            name = f"global_step_{step}"
            shutil.copytree(Path(made) / "checkpoints" / name, options.directory / name)
    print(f"{options.directory}: {', '.join(f'step {step}' for step in LOSSES)}")
    return 0


def write_run(directory: Path) -> CheckpointStore:
    """A directory of checkpoints, at the steps 100 and 200; times stand still."""
    store = CheckpointStore(directory, run_id="golden")
    for minute, step in enumerate(LOSSES):
        with time_stands_still(f"2026-01-01T00:0{minute}:00Z"):
            save(store, step)
    return store


def as_increment(directory: Path) -> None:
    """Save the newest checkpoint of a directory once more, in its own place, as what changed since the one before."""
    store = CheckpointStore(directory, run_id="golden")
    before, whole = store.complete()
    shutil.move(whole.directory, directory.parent / "whole")
    whole = Checkpoint(directory.parent / "whole", whole.manifest)
    reader = CheckpointReader(whole)
    least, save_executor.FEWEST_BYTES = save_executor.FEWEST_BYTES, 1  # else all of these files are too small
    with time_stands_still(whole.manifest.saved_at), store.begin(whole.step) as opened:
        settings = IncrementalSettings(pays_below=2)
        made = save_executor.DeltaPolicy(settings, before, None, whole.manifest.tensors, store.disk)
        opened.main.record(*whole.manifest.tensors)
        for entry in reader.files():
            content = bytes(reader.read(entry.path))
            image = FileImage(path=entry.path, begin=0, sizes=tuple(leaf.size for leaf in entry.leaves))
            prospect = made.prospect(image, ImageSource(memoryview(content)))
            if prospect is not None:
                opened.main.write_delta(entry, prospect.buffers(), prospect.base)
            elif entry.path != STATE:
                opened.main.write(entry.path, [content], deduplicate=entry.path == "actor/config.json")
        opened.commit(state=read_state(store.disk, whole), metrics=whole.manifest.metrics)
    save_executor.FEWEST_BYTES = least


def save(store: CheckpointStore, step: int) -> Checkpoint:
    """An actor in bfloat16 in two shards, an optimizer cut by two writers, and small files."""
    with store.begin(step, participants=["rank_0", "rank_1"]) as opened:
        main = opened.main
        main.write("actor/config.json", [json.dumps(CONFIG, indent=2).encode()], deduplicate=True)
        main.write_model("actor", [actor_tensor(name, step) for name in SHAPES], max_shard_bytes=800)
        main.write("scheduler/scheduler.json", [json.dumps({"last_epoch": step}).encode()])
        generator = RankTensor(component="rng", name="torch", dtype="U8", shape=(16,), data=bytes([step] * 16))
        main.write_tensors("rng/rank_0.safetensors", [generator])
        reports = []
        for rank in (0, 1):
            writer = opened.participant(f"rank_{rank}")
            writer.write_tensors(f"optimizer/optim_state_rank_{rank}.safetensors", optimizer_part(rank, step))
            reports.append(writer.report())
        metrics = {"reward/mean": step / 400, "eval/accuracy": step / 250}
        return opened.commit(reports, state=trainer_state(step), metrics=metrics)


def actor_tensor(name: str, step: int) -> TensorBytes:
    """Small multiples of 1/64, which bfloat16 holds exactly; the norms do not change from step to step."""
    count = int(np.prod(SHAPES[name]))
    numbers = np.ones(count) if "norm" in name else (np.arange(count) * 7 % 23 - 11 + step // 100) / 64
    return TensorBytes(name, "BF16", SHAPES[name], (numbers.astype("<f4").view("<u4") >> 16).astype("<u2"))


def optimizer_part(rank: int, step: int) -> list[RankTensor]:
    """What one of two writers holds of the moments: half of the rows; the first one has the step too."""
    name, rows = "model.embed_tokens.weight", VOCABULARY // 2
    parts = []
    for moment, scale in (("exp_avg", 1 / 1024), ("exp_avg_sq", 1 / 2**20)):
        values = (np.arange(VOCABULARY * HIDDEN).reshape(VOCABULARY, HIDDEN) + step) * scale
        own = np.ascontiguousarray(values[rank * rows : (rank + 1) * rows], "<f4")
        whole = {"component": "optimizer", "dtype": "F32", "shape": values.shape}
        parts.append(RankTensor(**whole, name=f"{name}.{moment}", start=(rank * rows, 0), extent=own.shape, data=own))
    if rank == 0:
        done = np.array(step, "<f4")
        parts.append(RankTensor(component="optimizer", name=f"{name}.step", dtype="F32", shape=(), data=done))
    return parts


def trainer_state(step: int) -> dict:
    """What a trainer records."""
    lineage = {"run_id": "golden", "parent_run": None, "parent_checkpoint": None}
    return {
        "epoch": step // 100,
        "loss_history": [{"step": at, "loss": loss} for at, loss in LOSSES[step]],
        "learning_rate": 1e-5,
        "rng_states": {"torch": "rng/rank_0.safetensors"},
        "versions": {"verl": verl.__version__, "torch": "2.13.0"},
        "lineage": lineage,
        "wall_clock": {"training_s": 1.5 * step},
        "config_digest": "3f" * 16,
        "data_hashes": {"train.parquet": "a7" * 16},
        "code_commit": "0123456789abcdef0123456789abcdef01234567",
    }


@contextlib.contextmanager
def time_stands_still(at: str) -> Iterator[None]:
    """Saves made inside carry this time stamp."""
    clock = transaction._now
    transaction._now = lambda: at
    try:
        yield
    finally:
        transaction._now = clock


if __name__ == "__main__":
    sys.exit(main())
