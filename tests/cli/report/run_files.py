"""Directories of runs as the trackers write them, made without training."""

import json
import math
import os
from pathlib import Path
from typing import Any

import yaml

from verl.tracking.jsonl import json_line

HOSTILE = "</script><b id=x>&amp;\u2028\"'\u202eabc\u202c\x1b[31m"


def write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"".join(map(json_line, rows)))


def metrics(first: int, last: int, lift: float = 0.0) -> list[dict[str, Any]]:
    rows = []
    if first == 1:
        rows.append({"step": 0, "time_s": 0.5, "eval/accuracy": 0.5})
    for step in range(first, last + 1):
        wave = math.sin(step * 1.7) / 20
        row = {
            "step": step, "time_s": 1.0 + step - first, "reward/mean": 0.4 + step / 100 + wave + lift,
            "perf/samples": 8.0,
            "kl/reference_nats": step / 500, "actor/grad_norm": 1 + wave, "timing/gen_s": 0.5 + wave,
            "timing/update_actor_s": 0.4, "timing/step_s": 1.0, "perf/peak_memory_mib": 300.0 + step,
        }  # fmt: skip
        rows.append(row)
        if step % 10 == 0:
            accuracy = 0.5 + step / 100 + lift
            rows.append({"step": step, "time_s": 1.2 + step - first, "eval/accuracy": accuracy})
    return rows


def evals(step: int, learned: int, num_prompts: int = 20) -> list[dict[str, Any]]:
    return [
        {
            "kind": "greedy", "prompt_id": prompt, "sample_id": 0, "score": float(prompt < learned), "tokens": 4,
            "success": prompt < learned,
        }
        for prompt in range(num_prompts)
    ]  # fmt: skip


def token_row(texts: list[str], prompt: str = "1+1=") -> dict[str, Any]:
    count = len(texts)
    return {
        "prompt_id": 3, "sample_id": 1, "score": 1.0, "prompt": prompt, "ids": list(range(count)), "texts": texts,
        "rollout_log_probs": [-0.1 * n for n in range(count)], "old_log_probs": [-0.1 * n - 0.01 for n in range(count)],
        "entropies": [0.2 * n for n in range(count)], "advantages": [0.5 - 0.2 * n for n in range(count)],
        "mask": [1] * (count - 1) + [0], "versions": [n // 3 for n in range(count)],
    }  # fmt: skip


def run_directory(directory: Path, rows: list[dict[str, Any]] | None = None, **config: Any) -> Path:
    """A finished run of 30 steps with all files; `config` sets settings of its trainer."""
    rows = metrics(1, 30) if rows is None else rows
    write_lines(directory / "metrics.jsonl", rows)
    trainer = {"total_steps": 30, "seed": 0, **config}
    tree = {"_target_": "verl.trainer.ppo_config.PPORun", "trainer": trainer, "rollout": {"max_new_tokens": 8}}
    (directory / "config.yaml").write_text(yaml.safe_dump(tree))
    (directory / "overrides.yaml").write_text(yaml.safe_dump(["trainer.total_steps=30", "data.note=a b"]))
    start = {"name": "verl/small", "differences": {"trainer.total_steps": [30, 300]}}
    (directory / "start.json").write_text(json.dumps(start))
    summary = {"status": "finished", "error": None, "data": {"train_rows": 5}}
    (directory / "summary.json").write_text(json.dumps(summary))
    for step, learned in ((0, 8), (10, 12), (30, 16)):
        write_lines(directory / f"evals/step_{step}.jsonl", evals(step, learned))
        samples = [
            {"table": "eval", "prompt_text": f"{n}+1=", "response_text": f"the answer is {n + step}", "score": 1.0}
            for n in range(3)
        ]
        write_lines(directory / f"samples/step_{step}.jsonl", samples)
    write_lines(directory / "tokens/step_1.jsonl", [token_row(["The", " answer", "\n", " is", " 2", "<eos>"])])
    return directory


def add_lineage(
    save_dir: Path, run_id: str, directory: Path, parent: tuple[str, int] | None, status: str | None
) -> None:
    """Record a start, and its end unless it was killed, as the trainer does."""
    save_dir.mkdir(parents=True, exist_ok=True)
    time = f"2026-01-01T00:00:{sum(1 for _ in save_dir.parent.rglob('checkpoints.json')):02d}.000000Z"
    came_from = None
    if parent is not None:
        checkpoint = str(save_dir / f"global_step_{parent[1]}")
        came_from = {"run_id": parent[0], "checkpoint": checkpoint, "step": parent[1], "differences": {"a": [1, 2]}}
    code = {"verl": "0.3.0", "commit": "0123456789abcdef", "modified": True}
    identity = {"actor.model.path": {"blake3": "f00d" * 16}}
    start = {
        "event": "run", "run_id": run_id, "time": time, "parent": came_from, "run_dir": str(directory), "code": code,
        "identity": identity,
    }  # fmt: skip
    events = [start] + (
        [{"event": "end", "run_id": run_id, "time": time, "status": status, "step": 0}] if status else []
    )
    with (save_dir / "lineage.jsonl").open("ab") as file:
        file.writelines(map(json_line, events))
    saved = {"save_dir": str(save_dir), "run_id": run_id, "relative": os.path.relpath(save_dir, directory)}
    (directory / "checkpoints.json").write_text(json.dumps(saved))
