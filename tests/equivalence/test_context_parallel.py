"""Processes that share the tokens of the same rows; what they learn is in test_every_layout.py."""

import pytest
import torch
from random_models import save_random_model
from refusals import refusal
from trainer.runs import GRPO_ALGORITHM, ppo_run

from verl.engines.sharding import Parallel
from verl.model_paths.check import paths_for
from verl.models.pretrained import Pretrained
from verl.rollout.hf import HFRollout

pytestmark = [pytest.mark.xdist_group("two processes"), pytest.mark.slow]


@pytest.mark.exhaustive
def test_processes_that_share_tokens_divide_the_rows_that_they_generate(four_processes, model64, tmp_path):
    rollout = HFRollout(max_new_tokens=5)
    run = ppo_run(model64, GRPO_ALGORITHM, rollout=rollout, group_size=2, sharding=Parallel(cp=4), n_gpus_per_node=4)
    assert four_processes.drawn(run, [0, 1, 2, 3, 4], tmp_path).result(timeout=120) == [[1], [1], [1], [2]]


def test_a_model_whose_tokens_meet_outside_of_attention_is_refused_by_name(tmp_path):
    """Convolutions mix neighbouring tokens; the refusal comes before its weights are divided."""
    options = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_multiple_of": 8}
    model = Pretrained(path=str(save_random_model(tmp_path, "lfm2", torch.float64, **options)), dtype="float64")
    with refusal("actor.model", value="(sharding.cp)"):
        paths_for(model.load_causal_lm("cpu"), 64, "actor.model", shares_tokens=True)
