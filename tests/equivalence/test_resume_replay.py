"""A resumed run with a replay buffer is the uninterrupted one, bit by bit, and on more processes to rounding."""

import dataclasses
from pathlib import Path

import pytest
from same_training import STEPS, course, digest, numbers
from trainer.runs import GRPO_ALGORITHM, PPO_ALGORITHM, fit

from verl.checkpoint.manager import CheckpointManager
from verl.engines.sharding import DDP
from verl.replay.config import TieredReplay
from verl.storage.config import LocalStorage

SMALL = TieredReplay(max_rows=16, memory_mib=8, shard_mib=1, hot_share=0.3, warm_share=0.3, cold_share=0.4)


def reusing(algorithm, model, directory: Path, save=None, **options):
    """A run whose batches are half old rows, which a store below the directory's parent keeps."""
    algorithm = dataclasses.replace(algorithm, replay_fraction=0.5)
    saving = {"save_async": True, **(save or {})}
    run = course(model, directory, algorithm, replay=SMALL, save=saving, **options)
    return dataclasses.replace(run, storage=LocalStorage(path=str(directory.parent / "store")))


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(PPO_ALGORITHM, id="ppo", marks=pytest.mark.exhaustive), pytest.param(GRPO_ALGORITHM, id="grpo")],
)
def test_a_run_with_old_rows_ends_as_the_uninterrupted_one(algorithm, model32, tmp_path):
    fit(reusing(algorithm, model32, tmp_path / "whole"), tmp_path / "whole/run")
    whole = numbers(tmp_path / "whole/run")
    assert whole[STEPS]["replay/old_rows"] == 6
    assert whole[STEPS]["replay/rows"] == 16
    for step in (1, 3):
        directory = tmp_path / f"from_{step}"
        point = tmp_path / f"whole/checkpoints/global_step_{step}"
        fit(reusing(algorithm, model32, directory, resume=point), directory / "run")
        mine = {k: _without_layers(v) for k, v in numbers(directory / "run").items()}
        assert mine == {k: _without_layers(v) for k, v in whole.items() if k > step}
        found = [CheckpointManager(tmp_path / at / "checkpoints") for at in ("whole", directory.name)]
        weights = [{name: x.tolist() for name, x in manager.load("actor").items()} for manager in found]
        assert weights[0] == weights[1]
        assert [manager.buffer_size() for manager in found] == [found[0].buffer_size()] * 2
        assert found[0].buffer_size() >= 16  # whole shards
    assert digest(tmp_path / "whole")


@pytest.mark.exhaustive
def test_a_buffer_that_is_left_behind_is_told_of(model32, tmp_path, caplog):
    run = reusing(GRPO_ALGORITHM, model32, tmp_path / "first", total_steps=2)
    run = dataclasses.replace(run, algorithm=GRPO_ALGORITHM)  # which keeps rows for others
    fit(run, tmp_path / "first/run")
    resume = str(tmp_path / "first/checkpoints/global_step_1")
    assert "is ignored" not in caplog.text
    fit(dataclasses.replace(run, replay=None, resume=resume), tmp_path / "second/run")
    assert "The replay buffer of global_step_1 is ignored: replay=off keeps no rows." in caplog.text


@pytest.mark.exhaustive
def test_a_run_with_old_rows_goes_on_with_more_processes(model32, tmp_path):
    fit(reusing(GRPO_ALGORITHM, model32, tmp_path / "whole"), tmp_path / "whole/run")
    directory, many = tmp_path / "from_2", {"sharding": DDP(), "n_gpus_per_node": 2, "num_threads": 2}
    point = tmp_path / "whole/checkpoints/global_step_2"
    fit(reusing(GRPO_ALGORITHM, model32, directory, resume=point, **many), directory / "run")
    whole, mine = numbers(tmp_path / "whole/run"), numbers(directory / "run")
    assert list(mine) == [3, 4]
    for step, found in mine.items():
        drawn = [key for key in found if key.startswith(("replay/staleness", "replay/old_rows"))]
        assert {key: found[key] for key in drawn} == {key: whole[step][key] for key in drawn}
        assert found["actor/loss"] == pytest.approx(whole[step]["actor/loss"], abs=1e-3)


def _without_layers(metrics: dict[str, float]) -> dict[str, float]:
    """Where rows lie depends on when threads were done; what is drawn does not."""
    places = ("replay/rows_", "replay/memory", "sync/", "checkpoint/")
    return {name: x for name, x in metrics.items() if not name.startswith(places)}
