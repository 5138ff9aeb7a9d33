"""One step of sampling ahead: the order of weights and draws, and a resume that goes on with what was drawn."""

import os
import signal

import pytest
import torch
from rollout.engines import save_family
from same_training import course, numbers, same_training, saved
from trainer.runs import fit
from trainer.test_async_training import CORRECTED, noted_updates

from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.checkpoint.read.lazy_tensors import as_tensor
from verl.checkpoint.read.reader import CheckpointReader
from verl.rollout.responses import ResponseGenerator
from verl.rollout.vllm.config import VLLMRollout

pytestmark = pytest.mark.xdist_group("vllm")

STEPS = 3


def ahead(model, directory, **options):
    rollout = VLLMRollout(max_new_tokens=6, kv_cache_gib=0.05, max_num_seqs=16, num_threads=1)
    options = {"total_steps": STEPS, "mode": "async", "rollout": rollout, "prompts_per_step": 2, **options}
    return course(model, directory, CORRECTED, **options)


@pytest.mark.exhaustive
def test_each_step_trains_on_draws_of_the_weights_before_and_a_resume_goes_on_with_them(tmp_path, monkeypatch):
    model, trained_on = save_family(tmp_path / "model", "qwen2"), noted_updates(monkeypatch)
    fit(ahead(model, tmp_path / "whole"), tmp_path / "whole/run")
    assert trained_on == [[0], [0], [1]]  # from the second step on by the weights of the step before
    weights = [step["importance/weight_max"] for step in numbers(tmp_path / "whole/run").values()]
    assert weights[0] == pytest.approx(1, abs=1e-3)
    assert max(weights[1:]) > 1 + 1e-3
    resume = tmp_path / "whole/checkpoints/global_step_2"
    reader = CheckpointReader(CheckpointDirectory(resume.parent).open(resume.name))
    drawn = {t.name: as_tensor(reader.tensor("drawn_ahead", t.name), t) for t in reader.tensors("drawn_ahead")}
    assert drawn["policy_version"].tolist() == [1] * 4
    assert drawn["responses"].dtype == torch.int64
    fit(ahead(model, tmp_path, resume=str(resume)), tmp_path / "run")
    same_training(saved(tmp_path), saved(tmp_path / "whole"), after=2)


@pytest.mark.exhaustive
def test_rows_that_were_drawn_again_because_the_engine_died_carry_the_weights_that_drew_them(tmp_path, monkeypatch):
    trained_on, begin, begun = noted_updates(monkeypatch), ResponseGenerator.begin, []

    def dying(sampler, *asked):
        begun.append(asked)
        if len(begun) == 2:
            os.kill(sampler.engine.process_id, signal.SIGSTOP)  # or it might have drawn all before it is killed
        begin(sampler, *asked)
        if len(begun) == 2:
            os.kill(sampler.engine.process_id, signal.SIGKILL)

    monkeypatch.setattr(ResponseGenerator, "begin", dying)
    fit(ahead(save_family(tmp_path / "model", "qwen2"), tmp_path), tmp_path / "run")
    assert trained_on == [[0], [0], [2]]
