"""A run that an earlier version saved goes on to the numbers that it would have come to there."""

from __future__ import annotations

import json
import shutil

import pytest
from golden_run import GOLDEN
from safetensors.torch import load_file

from verl.checkpoint.core.manifest import FORMAT_VERSION
from verl.checkpoint.manager import CheckpointManager
from verl.component import BuildContext
from verl.compose.command_line import command_line
from verl.compose.compose import compose_root
from verl.compose.validate import validate
from verl.trainer.state.compare_runs import steps_of

RUNS = sorted(path.name for path in GOLDEN.glob("run_*"))
ROUNDING = 1e-4  # between machines


def test_the_format_of_this_version_has_a_golden_run():
    assert f"run_{'_'.join(FORMAT_VERSION.split('.')[:2])}" in RUNS


@pytest.mark.parametrize("name", RUNS)
def test_a_golden_run_is_whole_and_its_components_load(name):
    manager = CheckpointManager(GOLDEN / name / "checkpoints")
    assert manager.is_valid("full")
    assert {"actor", "critic", "optimizer", "scheduler", "dataloader", "rng"} <= set(manager.components())
    start, now = load_file(GOLDEN / name / "model/model.safetensors"), manager.load("actor")
    assert {key: tensor.shape for key, tensor in now.items()} == {key: tensor.shape for key, tensor in start.items()}
    assert any(not now[key].equal(tensor) for key, tensor in start.items())  # it had learned something
    assert [step for step, _ in manager.state["loss_history"]] == list(range(1, manager.step + 1))


@pytest.mark.parametrize("name", RUNS)
def test_a_golden_run_goes_on_to_the_recorded_metrics(name, tmp_path):
    shutil.copytree(GOLDEN / name, tmp_path, dirs_exist_ok=True)  # the working directory of this test
    expected = json.loads((tmp_path / "expected.json").read_text())
    arguments, assigned = command_line("ppo", [*expected["overrides"], "resume=latest"])
    run = validate(compose_root("ppo", arguments), assigned.faults)
    with run.build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        result = trainer.fit()
    assert (result.status, result.checkpoints) == ("finished", ["global_step_3", "global_step_4"])
    steps = {str(step): numbers for step, numbers in steps_of(tmp_path / "run").items()}
    assert steps.keys() == expected["steps"].keys()
    for step, numbers in expected["steps"].items():
        found = {name: steps[step][name] for name in numbers}  # later versions may tell more
        assert found == pytest.approx(numbers, rel=ROUNDING, abs=ROUNDING), f"step {step}"
