"""Preference optimisation and reward models under each kind of parallelism: numbers and weights of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import short_where
from equivalence.one_update import Float64Alone
from random_models import save_random_model
from same_training import same_training
from trainer.preference_runs import preference_run, trained

from verl.algorithms.preference_losses import DPO, KTO, ORPO, BradleyTerry
from verl.engines.sharding import DDP, FSDP, TP, Parallel
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained

pytestmark = [pytest.mark.xdist_group("two processes"), pytest.mark.slow]

EXACT = 1e-12  # of float64, where only the order of sums differs
LAYOUTS = {
    "ddp": (2, DDP()),
    "fsdp": (2, FSDP()),
    "tp": (2, TP()),
    "pp": (2, Parallel(pp=2)),
    "cp": (2, Parallel(cp=2)),
    "cp ulysses": (2, Parallel(cp=2, cp_style="ulysses")),
    "ep": (2, Parallel(ep=2)),
    "tp pp": (4, Parallel(tp=2, pp=2)),
    "cp dp_shard": (4, Parallel(cp=2, dp_shard=2)),
}
IN_SHORT = ("tp", "pp")  # the others are exhaustive
CASES = {
    "dpo": (DPO(label_smoothing=0.1), None),
    "dpo, lora": (DPO(), LoRA(rank=2, target_modules=("q_proj", "v_proj"))),
    "reward model": (BradleyTerry(centre_coef=0.1), None),
    "reward model, lora": (BradleyTerry(), LoRA(rank=2, target_modules=("q_proj", "v_proj"))),
    "kto": (KTO(), None),
    "orpo": (ORPO(), None),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A float64 model without experts, and one with."""
    directory, found = tmp_path_factory.mktemp("models"), {}
    for family in ("starcoder2", "qwen3_moe"):
        path = save_random_model(directory / family, family, torch.float64)
        found[family] = Pretrained(path=str(path), dtype="float64")
    return found


@pytest.mark.parametrize("case", short_where(CASES, lambda case: case not in ("kto", "orpo")))
@pytest.mark.parametrize(
    "layout", [name if name in IN_SHORT else pytest.param(name, marks=pytest.mark.exhaustive) for name in LAYOUTS]
)
def test_a_layout_trains_as_one_process_does(layout, case, models, two_processes, four_processes, tmp_path):
    (count, sharding), (loss, lora) = LAYOUTS[layout], CASES[case]
    run = preference_run(models["qwen3_moe" if layout == "ep" else "starcoder2"], loss, lora)
    with Float64Alone():
        alone = trained(run, tmp_path / "one")
    spread = replace(run, sharding=sharding, trainer=replace(run.trainer, n_gpus_per_node=count))
    bench = two_processes if count == 2 else four_processes
    same_training(alone, bench.preferences(spread, tmp_path / "many").result(timeout=600), EXACT)
