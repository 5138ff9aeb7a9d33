"""The gradient of one update on the path that a model takes is that of rows which are run one by one."""

import pytest
import torch
from cases import exhaustive
from model_paths.families import prompts, save_family, start_family
from roles import gradients, with_experience

from verl.model_paths.families import PLAIN
from verl.rollout.base import GenerationRequest

FAMILIES = "phimoe", "deepseek_v3", "qwen3_next", "bart", "gemma3n_text", "mamba", "qwen2_moe", "hrm_text"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama4_text", *exhaustive(*FAMILIES)])
def test_an_update_has_the_gradient_of_rows_one_by_one(name, tmp_path):
    path = save_family(tmp_path / "model", name)
    found = []
    for scoring in (None, PLAIN.scoring):
        actor = start_family(path)
        if scoring is not None:
            actor.engine.limit(scoring)
            actor.engine.micro_batch_tokens = 1
        rows = with_experience(actor.generate(prompts(), GenerationRequest(0, 3)), actor)
        metrics = actor.update(rows)
        found.append((gradients(actor.model), metrics["grad_norm"]))
        assert actor.engine.paths(rows).scoring == (scoring or actor.engine.paths(rows).scoring)
    (chosen, norm), (plain, expected) = found
    assert norm == pytest.approx(expected, rel=1e-3)
    assert expected > 0
    assert chosen.keys() == plain.keys()
    whole = torch.cat([plain[key].flatten() for key in plain])
    off = torch.cat([(chosen[key] - plain[key]).flatten() for key in plain])
    assert float(off.norm() / whole.norm()) < 1e-3
