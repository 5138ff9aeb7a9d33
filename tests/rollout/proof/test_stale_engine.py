"""A run whose engine no longer follows is stopped by the step that finds it, with the tensors named."""

import dataclasses

import pytest
import torch
from cases import exhaustive
from random_models import save_random_model
from rollout.proof.copied_engine import CopyRollout
from trainer.runs import GRPO_ALGORITHM, JSONL, ppo_run, step_lines

from verl.algorithms.importance_sampling import TruncatedIS
from verl.component import BuildContext
from verl.errors import WeightSyncError
from verl.models.pretrained import Pretrained

ONE_UPDATE = dataclasses.replace(GRPO_ALGORITHM, mini_batches=1)  # no log-probs before the update
CORRECTED = dataclasses.replace(ONE_UPDATE, correction=TruncatedIS())


@pytest.fixture(
    scope="module", params=[True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["tied", "untied"]
)
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    save_random_model(path, "qwen2", torch.float32, tie_word_embeddings=request.param)
    return Pretrained(path=str(path))


def fit(model, tmp_path, algorithm=ONE_UPDATE, **options):
    run = ppo_run(
        model, algorithm, lr=1e-5, total_steps=3, rollout=CopyRollout(max_new_tokens=5, **options), tracker=JSONL
    )
    with run.build(BuildContext(run_dir=tmp_path)) as trainer:
        trainer.fit()


def steps(tmp_path):
    return step_lines(tmp_path)


def test_an_engine_that_stops_following_stops_the_run(model, tmp_path):
    with pytest.raises(WeightSyncError) as caught:
        fit(model, tmp_path, syncs=2)  # the first comes before the first response
    assert len(steps(tmp_path)) == 1
    assert "model.layers.1.self_attn.q_proj.weight" in caught.value.names
    assert "it is stale: it holds what the sync before brought" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [GRPO_ALGORITHM, *exhaustive(ONE_UPDATE, CORRECTED)],
    ids=["several updates", "one update", "corrected"],
)
def test_an_engine_that_follows_runs_on_and_tells_how_far_it_is_off(model, tmp_path, algorithm):
    fit(model, tmp_path, algorithm)
    assert len(steps(tmp_path)) == 3
    for line in steps(tmp_path):
        assert float(line["sync/probe_gap_nats"]) < 1e-5
        assert float(line["rollout/log_prob_gap_nats"]) < 1e-4
