"""A run with a curriculum: resumed it is the uninterrupted one bit by bit, and two processes train as one does."""

import json
from dataclasses import replace

import pytest
from cases import short_where
from same_training import ROUNDING, course, newest, same_training, saved
from trainer.runs import GRPO_ALGORITHM, PROMPTS, Echo, Prompts, fit

from verl.algorithms.dynamic_sampling import DynamicSampling
from verl.algorithms.importance_sampling import TruncatedIS
from verl.data.curriculum import PassRate
from verl.engines.sharding import DDP

DATA = Prompts(train=PROMPTS[:6], curriculum=PassRate(warmup_epochs=0, falloff=0.2, memory=0.5))
RUNS = {
    "plain": (GRPO_ALGORITHM, {}),
    "ahead": (replace(GRPO_ALGORITHM, correction=TruncatedIS()), {"mode": "async"}),
    "selection": (replace(GRPO_ALGORITHM, selection=DynamicSampling(max_rounds=2, on_none="skip")), {}),
}
OPTIONS = {"data": DATA, "reward": Echo(), "success_score": 0.1, "prompts_per_step": 2, "group_size": 3, "lr": 0.03}


def state(directory) -> dict:
    return json.loads((newest(directory).directory / "dataloader/state.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", short_where(RUNS, "ahead".__eq__))
def test_a_run_goes_on_from_any_step_with_the_prompts_that_it_would_have_had(name, model32, tmp_path):
    algorithm, more = RUNS[name]
    fit(course(model32, tmp_path / "whole", algorithm, **OPTIONS, **more), tmp_path / "whole/run")
    last = state(tmp_path / "whole")
    assert len(last["rates"]) > 2
    assert len({rate for _, rate in last["rates"]}) > 1
    for step in (1, 2, 3):
        point, own = tmp_path / f"whole/checkpoints/global_step_{step}", tmp_path / f"from_{step}"
        fit(course(model32, own, algorithm, resume=point, **OPTIONS, **more), own / "run")
        same_training(saved(own), saved(tmp_path / "whole"), after=step)
        assert state(own) == last


@pytest.mark.exhaustive
def test_two_processes_draw_what_one_draws(model64, tmp_path):
    made = {}
    for name, more in (("one", {}), ("two", {"sharding": DDP(timeout_s=60.0), "n_gpus_per_node": 2})):
        fit(course(model64, tmp_path / name, **OPTIONS, **more), tmp_path / name / "run")
        made[name] = replace(saved(tmp_path / name), digest="")
    assert state(tmp_path / "one") == state(tmp_path / "two")
    same_training(made["one"], made["two"], ROUNDING)
