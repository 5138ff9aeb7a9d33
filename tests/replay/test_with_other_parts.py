"""Old rows under every way of placing and sampling, through the main script; a resumed run draws what it would have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from verl.trainer.state.compare_runs import steps_of

ROOT = Path(__file__).resolve().parents[2]
OLD_ROWS = ["replay=tiered", "replay.memory_mib=8", "replay.shard_mib=1", "algorithm.replay_fraction=0.5"]
SIZES = ["trainer.prompts_per_step=4", "trainer.group_size=2", "rollout.max_new_tokens=6", "data.held_out=4"]
SIZES += ["trainer.eval_samples=0", "trainer.num_threads=1", "tracker.tensorboard=null"]
PARTS = {
    "fsdp": ["sharding=fsdp", "trainer.n_gpus_per_node=2"],
    "ray": ["trainer=ray"],
    "vllm": ["rollout=vllm"],
    "ahead": [
        "rollout=vllm",
        "trainer.rollout_ahead=1",
        "algorithm.correction={_target_:verl.algorithms.importance_sampling.TruncatedIS}",
    ],
}
STEPS, SAVED = 4, 2


def drawn(directory: Path, name: str, *overrides: str) -> dict[int, dict[str, float]]:
    """What the steps of a run took from the buffer, by step."""
    run = [sys.executable, ROOT / "main_ppo.py", *SIZES, *OLD_ROWS, *overrides]
    run += [f"trainer.total_steps={STEPS}", f"checkpoint.save_interval={SAVED}", "checkpoint.keep_last_n=null"]
    run += [f"checkpoint.save_dir={directory / 'checkpoints' / name}", f"hydra.run.dir={directory / name}"]
    done = subprocess.run(run, cwd=directory, timeout=580, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    told = ("replay/old_rows", "replay/staleness_mean", "replay/staleness_max", "replay/rows", "replay/lost_rows")
    return {
        step: {key: x for key, x in found.items() if key in told} for step, found in steps_of(directory / name).items()
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("parts", PARTS)
def test_a_run_takes_old_rows_and_goes_on_with_them(parts, tmp_path):
    whole = drawn(tmp_path, "whole", *PARTS[parts])
    assert [whole[step]["replay/rows"] for step in range(1, STEPS + 1)] == [8, 16, 24, 32]
    assert [whole[step]["replay/old_rows"] for step in range(1, STEPS + 1)] == [0, 8, 8, 8]
    point = tmp_path / f"checkpoints/whole/global_step_{SAVED}"
    resumed = drawn(tmp_path, "resumed", f"resume={point}", *PARTS[parts])
    assert resumed == {step: whole[step] for step in range(SAVED + 1, STEPS + 1)}
