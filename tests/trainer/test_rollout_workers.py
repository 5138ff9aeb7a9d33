"""The role `rollout` in several processes: each has an engine, a schedule, and every so many-th prompt of a batch."""

import dataclasses
import logging
import os
from typing import Any

import pytest
from cluster.ray_here import placed
from environments.waiting_game import WaitingGames
from same_training import ROUNDING, compared, same_training, saved
from trainer.runs import Prompts, fit
from trainer.test_async_rewards import Waiting, ahead, engine_of
from trainer.test_async_training import asynchronous, in_flight

from verl.cluster.placement import DeviceMesh
from verl.data.sampler import DataSampler
from verl.utils.seeding import derive_seed
from verl.workers.schedule import read_lines, schedule_path

RAY, TWO = pytest.mark.xdist_group("ray"), pytest.mark.xdist_group("two processes")
needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
ENGINES = ("cpu:0", "cpu:1")


def mesh(*engines):
    return DeviceMesh(devices=("cpu:0",), sub_meshes={"rollout": engines})


def schedules(run_dir):
    return [schedule_path(run_dir, engine).read_bytes() for engine in range(2)]


def where_options(where, request):
    if where == "mesh":
        return {"placement": mesh(*ENGINES)}
    request.getfixturevalue("ray_here")
    return {"placement": placed(workers={"rollout": 2})}


ANYWHERE = [
    pytest.param("mesh", marks=[TWO, needs_two_cores]),
    pytest.param("ray", marks=[RAY, pytest.mark.exhaustive]),
]


@pytest.mark.slow
@TWO
@needs_two_cores
def test_two_engines_that_drain_train_what_one_does(model64, tmp_path):
    for name, engines in (("one", ENGINES[1:]), ("two", ENGINES)):
        run = asynchronous(model64, tmp_path / name, placement=mesh(*engines), prompts_per_step=3)
        fit(run, tmp_path / name / "run")
    same_training(compared(tmp_path / "two"), compared(tmp_path / "one"), ROUNDING)
    logs = tmp_path / "two/run/workers/rollout"
    assert sorted(path.name for path in logs.iterdir()) == ["rank_0.log", "rank_1.log"]


@pytest.mark.slow
@pytest.mark.parametrize("where", ANYWHERE)
def test_replayed_and_resumed_runs_of_two_engines_have_the_bits_of_the_first(where, model32, tmp_path, request, caplog):
    caplog.set_level(logging.INFO)
    options: dict[str, Any] = {"prompts_per_step": 3, **where_options(where, request)}
    fit(in_flight(model32, tmp_path / "first", **options), tmp_path / "first/run")
    first, lines = saved(tmp_path / "first"), schedules(tmp_path / "first/run")
    for schedule in lines:
        _, events = read_lines(schedule.decode().splitlines())
        assert [event.number for event in events if event.event == "begin"] == [1, 2, 3, 4, 5, 6]
    options["replay_schedule"] = str(tmp_path / "first/run")
    fit(in_flight(model32, tmp_path / "again", **options), tmp_path / "again/run")
    assert schedules(tmp_path / "again/run") == lines
    same_training(saved(tmp_path / "again"), first)
    resume = tmp_path / "first/checkpoints/global_step_3"
    fit(in_flight(model32, tmp_path / "cut", resume=resume, **options), tmp_path / "cut/run")
    assert schedules(tmp_path / "cut/run") == lines
    same_training(saved(tmp_path / "cut"), first, after=3)
    assert "random generators" not in caplog.text  # they are those of the actor's one process


@TWO
@needs_two_cores
def test_a_group_of_one_engine_is_rated_while_another_has_none(model32, tmp_path):
    slow, awaited = [1 + row for row in DataSampler(8, 2, seed=derive_seed(0, "data order")).next_batch().tolist()]
    games = WaitingGames(slow=slow, awaited=awaited, directory=str(tmp_path), max_tokens=20, max_turns=2)
    data = Prompts(train=tuple("1" * length for length in range(1, 9)), eval=())
    options: dict[str, Any] = {"rollout": engine_of("in_flight"), "data": data, "eval_samples": 0, "total_steps": 1}
    run = ahead(model32, tmp_path, Waiting(fails_on=(str(tmp_path),)), placement=mesh(*ENGINES), **options)
    fit(dataclasses.replace(run, environment=games), tmp_path / "run")
    assert [path.name for path in tmp_path.glob("waited_*")] == ["waited_for_it"]
