"""A run with all that a GPU adds, at once and where a run adds it, on stand-ins: fused norms, attention of packed rows,
graphs, compiled layers, scores in few passes, gradients that are handed over together."""

import dataclasses
import functools

import pytest
import torch
from devices.flash_kernel import flash_on_cpu
from model_paths.test_step_graph import Graphs
from torch._dynamo.utils import counters
from trainer.runs import JSONL, PPO_ALGORITHM, fit, ppo_run, step_lines

from verl.engines import chunked_logprobs
from verl.engines.layer_compile import compile_layers
from verl.models import parallel_info
from verl.models.fused_norms import fuse_rms_norms
from verl.ops.sampling import inverse_cdf_by_blocks
from verl.rollout import hf, hf_rows, token_sampler
from verl.rollout.hf import HFRollout
from verl.workers import base, first_batch_check


@pytest.fixture
def graphs(monkeypatch):
    made, load, gradients = Graphs(), base.load_unsharded, parallel_info._WideGradients
    monkeypatch.setattr(base, "load_unsharded", lambda *given, **of: fuse_rms_norms(x := load(*given, **of)) and x)
    monkeypatch.setattr(base, "is_worth_compiling", lambda *_: True)
    monkeypatch.setattr(base, "compile_layers", functools.partial(compile_layers, backend="eager"))
    monkeypatch.setattr(first_batch_check, "TRIAL_TOKENS", 256)
    monkeypatch.setattr(parallel_info, "_WideGradients", lambda device: gradients(torch.device("meta")))
    monkeypatch.setattr(chunked_logprobs, "uses_kernels", lambda logits: True)
    monkeypatch.setattr(hf, "key_multiple", lambda device: 32)
    monkeypatch.setattr(hf_rows, "graph_maker", lambda *_, **__: made)
    monkeypatch.setattr(token_sampler, "inverse_cdf", inverse_cdf_by_blocks)
    return made


def metrics(model, directory):
    run = ppo_run(model, PPO_ALGORITHM, tracker=JSONL, total_steps=3, rollout=HFRollout(max_new_tokens=12, sleep=False))
    fit(run, directory)
    names = ("reward/mean", "actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm", "rollout/entropy_nats")
    return [line[name] for line in step_lines(directory) for name in names]


@pytest.mark.slow
def test_a_run_is_that_of_a_cpu_and_uses_all_of_it(model32, tmp_path, request, monkeypatch):
    model = dataclasses.replace(model32, compile="auto")
    plain, graphs = metrics(model, tmp_path / "plain"), request.getfixturevalue("graphs")
    counters.clear()
    with flash_on_cpu(monkeypatch) as attention:
        assert metrics(model, tmp_path / "gpu") == pytest.approx(plain, rel=1e-3, abs=1e-5)
    assert graphs.repeated > 10 * graphs.made > 0
    assert attention.backward > 20
    assert 0 < counters["stats"]["unique_graphs"] <= 12  # programs of actor and critic are the same
