"""Size of incremental checkpoints of a real training run with LoRA on about 100M parameters.

    python benchmarks/incremental_checkpoint.py           some minutes; --small for a look

Prints one JSON line. The training is GRPO with a reward for digits. Bytes are those of files that no earlier checkpoint
shares, beside those of a whole checkpoint of all weights of the same model, saved after one step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from benchmarks import _workload as workload
from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.describe import CheckpointSummary, summaries
from verl.trainer.api.trainer import Trainer

AFTER = (1, 3, 10)  # steps after the base
RANK = 8
ADAPTED = ("q_proj", "v_proj")
MI, GI = 2**20, 2**30


def trainer(model: Path, directory: Path, lr: float, lora: bool) -> Trainer:
    """A training that saves when it is asked to."""
    rows = [{"prompt": text} for text in workload.prompt_texts(16, 16)]
    return Trainer(
        model=str(model),
        reward_model=workload.digit_rewards,
        train_dataset=rows,
        algorithm="grpo",
        rollout_config={"max_new_tokens": 16, "n": 4},
        checkpoint_config={
            "save_dir": str(directory),
            "save_interval": None,
            "keep_last_n": None,
            "incremental_save": True,
        },
        train_config={"lr": lr, "prompts_per_step": 4, "total_steps": max(AFTER) + 1},
        lora={"rank": RANK, "target_modules": list(ADAPTED)} if lora else None,
        overrides=[
            "tracker.tensorboard=null",
            "tracker.console=null",
            "trainer.save_final=false",
        ],
    )


def trained(
    model: Path, directory: Path, lr: float, lora: bool, end: float
) -> tuple[list[CheckpointSummary], list[float]]:
    """Train, save after the first step and after some more; the checkpoints, and the seconds that each save took.

    Args:
        end: of the time for it, by `time.perf_counter`; at least one increment is saved.
    """
    took: list[float] = []
    with trainer(model, directory, lr, lora) as training:
        for step in range(1, 2 + max(AFTER)):
            if len(took) > 1 and time.perf_counter() > end:
                break
            training.step()
            if step - 1 in (0, *AFTER):
                began = time.perf_counter()
                training.save_checkpoint()
                took.append(time.perf_counter() - began)
    found = {
        summary.checkpoint.step: summary for summary in summaries(CheckpointStore(directory)) if summary.checkpoint
    }
    return [found[1 + n] for n in (0, *AFTER) if 1 + n in found], took


def component(checkpoint: Checkpoint, name: str) -> int:
    """Bytes of a component."""
    return sum(entry.size for entry in checkpoint.manifest.files if entry.path.startswith(f"{name}/"))


def of_8b() -> dict[str, float]:
    """Llama 3 8B, q and v adapted, float32 adapters and moments: computed, in bytes."""
    hidden, of_values, layers, weights = 4096, 1024, 32, 8.03e9
    adapter = 4 * layers * RANK * ((hidden + hidden) + (hidden + of_values))
    return {"adapter": adapter, "with_optimizer": 3 * adapter, "bf16_model": 2 * weights, "fp32_moments": 8 * weights}


def rows_of_lora(model: Path, root: Path, full_bytes: int, end: float) -> tuple[dict, list[list[str]]]:
    (_, *others), took = trained(model, root / "lora", 1e-4, True, end)
    found = []
    for summary in others:
        assert summary.checkpoint is not None
        payload = sum(component(summary.checkpoint, name) for name in ("actor", "optimizer"))
        tokenizer = sum(e.size for e in summary.checkpoint.manifest.contents.values() if "tokenizer" in e.path)
        found.append(
            {
                "added": summary.added_bytes,
                "payload": payload - tokenizer,
                "ratio": summary.added_bytes / (payload - tokenizer),
            }
        )
    added = statistics.median(one["added"] for one in found)
    worst = max(one["ratio"] for one in found)
    eight = of_8b()
    row = [
        f"incremental checkpoint, LoRA rank {RANK} (q, v) on 107M, with optimizer",
        f"{added / MI:.2f} MiB, {100 * added / full_bytes:.2f}% of a whole one ({full_bytes / GI:.2f} GiB)",
        f"{worst:.2f}x of adapter and optimizer state at most; target: 1.05x. For 8B, computed: "
        f"{eight['adapter'] / MI:.0f} MiB, with optimizer state {eight['with_optimizer'] / MI:.0f} MiB "
        f"(the model in bfloat16: {eight['bf16_model'] / GI:.1f} GiB)",
    ]
    return {"increments": found, "save_s": took, "8b": eight}, [row]


def whole_bytes(model: Path, root: Path) -> int:
    """Bytes of a checkpoint of all weights with their moments."""
    with trainer(model, root / "dense", 1e-6, False) as training:
        training.step()
        training.save_checkpoint()
    (summary,) = summaries(CheckpointStore(root / "dense"))
    return summary.added_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a model of 1M parameters")
    parser.add_argument("--directory", help="on a disk with 10 GB free; else where temporary files go")
    parser.add_argument("--limit-s", type=float, default=360.0, help="begin no further step after so many seconds")
    args = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="incremental_checkpoint_", dir=args.directory) as made:
        root = Path(made)
        workload.write_model(root / "model", *((128, 4) if args.small else (768, 12)))
        full_bytes = whole_bytes(root / "model", root)
        lora, rows = rows_of_lora(root / "model", root, full_bytes, began + args.limit_s)
    print(json.dumps({"name": "incremental_checkpoint", "lora": lora, "rows": rows}))


if __name__ == "__main__":
    main()
