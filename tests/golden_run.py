"""A small run with two checkpoints, the same bytes on every machine: real directories for tests, with times that stand
still.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from checkpoint.rank_tensors import RankTensor, write_model, write_tensors

import verl
from verl.checkpoint.commit import store as commit_store
from verl.checkpoint.commit.rank_writer import RankWriter
from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.core.manifest import commit_line

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests/golden"

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


def golden_run(directory: Path) -> Path:
    """A directory of checkpoints at the steps 100 and 200."""
    write_run(directory)
    return directory


def flip_bit(path: Path, at: int = -1) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def as_of_format(directory: Path, version: str) -> None:
    """Let a checkpoint say that it is of another format, and be consistent in that."""
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["format"]["version"] = version
    data = json.dumps(manifest).encode()
    (directory / "manifest.json").write_bytes(data)
    (directory / "COMMIT").write_bytes(commit_line(data))


def write_run(directory: Path) -> CheckpointStore:
    """A directory of checkpoints, at the steps 100 and 200; times stand still."""
    store = CheckpointStore(directory, run_id="golden")
    for minute, step in enumerate(LOSSES):
        with time_stands_still(f"2026-01-01T00:0{minute}:00Z"):
            save(store, step)
    return store


def save(store: CheckpointStore, step: int) -> Checkpoint:
    """An actor in bfloat16 in two shards, an optimizer cut by two writers, and small files."""
    earlier = store.complete()
    with store.begin(step, rank_names=["rank_0", "rank_1"]) as opened:
        main = opened.main
        if earlier:
            main.add_existing("actor/config.json", earlier[-1])
        else:
            main.write("actor/config.json", [json.dumps(CONFIG, indent=2).encode()])
        write_model(main, [actor_tensor(name, step) for name in SHAPES], max_shard_bytes=800)
        main.write("scheduler/scheduler.json", [json.dumps({"last_epoch": step}).encode()])
        generator = RankTensor(component="rng", name="torch", dtype="U8", shape=(16,), data=bytes([step] * 16))
        write_tensors(main, "rng/rank_0.safetensors", [generator])
        reports = []
        for rank in (0, 1):
            writer = RankWriter(opened.directory, f"rank_{rank}")
            write_tensors(writer, f"optimizer/optim_state_rank_{rank}.safetensors", optimizer_part(rank, step))
            reports.append(writer.report())
        metrics = {"reward/mean": step / 400, "eval/accuracy": step / 250}
        return opened.commit(reports, state=trainer_state(step), metrics=metrics)


def actor_tensor(name: str, step: int) -> RankTensor:
    """Small multiples of 1/64, which bfloat16 holds exactly; the norms do not change from step to step."""
    count = int(np.prod(SHAPES[name]))
    numbers = np.ones(count) if "norm" in name else (np.arange(count) * 7 % 23 - 11 + step // 100) / 64
    data = (numbers.astype("<f4").view("<u4") >> 16).astype("<u2")
    return RankTensor(component="actor", name=name, dtype="BF16", shape=SHAPES[name], data=data)


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
    clock = commit_store.utc_now
    commit_store.utc_now = lambda: at
    try:
        yield
    finally:
        commit_store.utc_now = clock
