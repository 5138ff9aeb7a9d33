"""Processes that share the tokens of the same rows learn what one process learns, to float64 rounding."""

import pytest
import torch
from equivalence.one_update import rows_with_holes, same_update
from random_models import save_random_model
from refusals import refusal
from trainer.runs import GRPO_ALGORITHM, ppo_run

from verl.engines.sharding import Parallel
from verl.model_paths.check import paths_for
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained
from verl.rollout.hf import HFRollout

pytestmark = [pytest.mark.xdist_group("two processes"), pytest.mark.slow]

STYLES = ("allgather", "ulysses")
SHARED = rows_with_holes([9, 3, 1], 4, [14, 3, 6, 1])  # shared prompts, uneven rows, a row of one token
LONG = rows_with_holes([30], 1, [33])
ALONE = rows_with_holes([2, 11, 5], 1, [9, 1])
SINGLE = rows_with_holes([1], 1, [2])  # a line of two tokens, of which one predicts


def made(path, family, **options):
    return Pretrained(path=str(save_random_model(path / family, family, torch.float64, **options)), dtype="float64")


@pytest.mark.exhaustive
@pytest.mark.parametrize("style", STYLES)
def test_loss_gradients_and_scores_are_those_of_one_process(style, two_processes, model64, tmp_path):
    sharding = Parallel(cp=2, cp_style=style)
    for rows in (SHARED, LONG, ALONE, SINGLE):
        same_update(two_processes, model64, rows, sharding)
    same_update(two_processes, model64, SHARED, sharding, tokens=10, lora=LoRA(rank=2))  # many micro-batches
    windows = made(
        tmp_path, "gemma3_text", sliding_window=5, num_key_value_heads=1, tie_word_embeddings=True, head_dim=8
    )  # fewer key-value heads than processes, windows in some layers, tied embeddings
    same_update(two_processes, windows, SHARED, sharding, 1e-6, checkpointing=True)  # its norms pass through float32


@pytest.mark.exhaustive
def test_processes_that_share_tokens_divide_the_rows_that_they_generate(four_processes, model64, tmp_path):
    rollout = HFRollout(max_new_tokens=5)
    run = ppo_run(model64, GRPO_ALGORITHM, rollout=rollout, group_size=2, sharding=Parallel(cp=4), n_gpus_per_node=4)
    assert four_processes.drawn(run, [0, 1, 2, 3, 4], tmp_path).result(timeout=120) == [[1], [1], [1], [2]]


def test_a_model_whose_tokens_meet_outside_of_attention_is_refused_by_name(tmp_path):
    """Convolutions mix neighbouring tokens; the refusal comes before its weights are divided."""
    model = made(tmp_path, "lfm2", layer_types=["conv", "full_attention"], conv_L_cache=3, block_multiple_of=8)
    with refusal("actor.model", value="(sharding.cp)"):
        paths_for(model.load_causal_lm("cpu"), 64, "actor.model", shares_tokens=True)
