"""The comparison of drawn tokens with plain rows, under each kind of sharding: a fault stops the run before the first
update, and a sound run trains on."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from random_models import save_random_model
from trainer.runs import GRPO_ALGORITHM, JSONL, Prompts, fit, ppo_run, step_lines

from verl.component import component
from verl.engines.sharding import DDP, FSDP, TP, Parallel, Sharding
from verl.errors import LogProbGapError
from verl.models.pretrained import Pretrained
from verl.rollout.hf import HFEngine, HFRollout

pytestmark = [pytest.mark.xdist_group("two processes"), pytest.mark.exhaustive, pytest.mark.slow]
SHARDINGS: dict[str, Sharding] = {
    "ddp": DDP(timeout_s=60.0),
    "fsdp": FSDP(),
    "tp": TP(),
    "cp": Parallel(cp=2),
    "pp": Parallel(pp=2),
    "ep": Parallel(ep=2),
}


def run_of(directory, sharding: Sharding, rollout: HFRollout) -> Any:
    family = "qwen3_moe" if getattr(sharding, "ep", 1) > 1 else "llama"
    path = directory / family
    if not path.exists():
        save_random_model(path, family, torch.float32)
    options: dict[str, Any] = {"eval_before": False, "save_final": False, "data": Prompts(eval=()), "critic": None}
    return ppo_run(
        Pretrained(path=str(path)),
        GRPO_ALGORITHM,
        rollout=rollout,
        sharding=sharding,
        n_gpus_per_node=2,
        total_steps=2,
        tracker=JSONL,
        **options,
    )


@component
class HotRollout(HFRollout):
    """Draws by twice the temperature that it is configured with, and compares nothing by itself."""

    def attach(self, model: Any, tokenizer: Any, seed: int, autocast: Any = None, context: Any = None) -> HFEngine:
        engine = HFEngine(replace(self, temperature=2 * self.temperature), model, tokenizer, seed, autocast)
        engine.longest_compared = 10**6
        return engine


@pytest.mark.parametrize("name", SHARDINGS)
def test_a_sound_engine_trains_on_and_a_faulty_one_stops_before_the_first_update(name, tmp_path):
    fit(run_of(tmp_path, SHARDINGS[name], HFRollout(max_new_tokens=7)), tmp_path / "sound")
    gaps = [line["rollout/log_prob_gap_nats"] for line in step_lines(tmp_path / "sound")]
    assert len(gaps) == 2
    assert max(gaps) < 1e-5
    with pytest.raises(LogProbGapError, match="Step 1"):
        fit(run_of(tmp_path, SHARDINGS[name], HotRollout(max_new_tokens=7)), tmp_path / "faulty")
    assert not step_lines(tmp_path / "faulty")
