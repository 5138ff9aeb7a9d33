"""The simulation of asynchronous training: closed forms and its bound."""

import json
import random
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from verl.cli.main import app
from verl.compose.compose import compose_root
from verl.compose.validate import validate
from verl.trainer.plan.async_plan import AsyncSetting, AsyncTimes, plan_async, simulate, simulated_steps

GRPO = ["algorithm=grpo", "critic=none", "algorithm.proximal=behaviour"]
ASYNC_2 = ["trainer.mode=async", "trainer.max_staleness=2"]
TIMES = AsyncTimes(token_s=lambda rows: 1.0, slots=99, train_s=10.0)
EIGHT = f"trainer.placement.devices=[{','.join(f'cuda:{n}' for n in range(8))}]"


def run_of(*overrides):
    return validate(compose_root("ppo", [*GRPO, *overrides]))


def lengths(*tokens):
    return lambda chance: tokens


def drawn_lengths(chance):
    return [chance.randint(1, 60) for _ in range(4)]


@pytest.mark.parametrize(
    ("settings", "bound", "step_s", "trainer_idle", "engine_idle"),
    [
        ({}, 0, 20 + 10, 2 / 3, 1 / 3),  # in turn
        ({}, 1, 20, 1 / 2, 0),  # the slower side alone
        ({"train_s": 40.0}, 1, 40, 0, 1 / 2),
        ({"slots": 1}, 1, 25, 15 / 25, 0),  # one row after another
        ({"prompts_s": 5.0, "load_s": 3.0}, 2, 20 + 5 + 3, 18 / 28, 0),
        ({"sync_s": 7.0, "sync_waits": True}, 1, 20 + 7, 10 / 27, 7 / 27),  # the sync waits, and holds the engine up
        ({"devices": 2}, 1, 20, 0, 0),  # half of the devices train for twice as long
    ],
)
def test_the_seconds_of_a_step_are_those_of_a_closed_form(settings, bound, step_s, trainer_idle, engine_idle):
    simulated = simulate(AsyncSetting(bound, 1, 1), replace(TIMES, **settings), lengths(5, 20))
    assert 2 / simulated.samples_per_s == pytest.approx(step_s)
    assert (simulated.trainer_idle, simulated.engine_idle) == pytest.approx((trainer_idle, engine_idle))
    assert simulated.staleness == pytest.approx(bound)  # drained: every token is as old as it may be


def test_updates_in_flight_keep_the_bound_and_make_tokens_younger():
    for seed in range(200):
        chance = random.Random(seed)
        bound, drains = chance.randint(0, 4), chance.random() < 0.5
        times = replace(
            TIMES,
            token_s=lambda rows, fixed=seed % 7 / 7: fixed + 0.1 * rows,
            slots=chance.randint(1, 9),
            train_s=chance.uniform(0, 40),
            load_s=chance.uniform(0, 2),
            sync_s=chance.uniform(0, 2),
            drains=drains,
        )
        lags = simulated_steps(AsyncSetting(bound, 1, 1), times, drawn_lengths)[2]
        assert 0 <= min(lags) <= max(lags) <= bound
        assert not drains or set(lags) == {bound}
    drained, in_flight = (
        simulate(AsyncSetting(2, 1, 1), replace(TIMES, drains=drains), lengths(1, 2, 3, 90)) for drains in (True, False)
    )
    assert in_flight.samples_per_s > 1.5 * drained.samples_per_s  # the longest response holds only its own batch up
    assert in_flight.staleness < drained.staleness


def test_the_best_split_gives_both_sides_as_much_as_they_need():
    times = replace(TIMES, devices=8, token_s=lambda rows: 0.3 + 0.01 * rows, train_s=3.0)
    planned = plan_async(run_of(*ASYNC_2), times, lengths(*[10] * 16))
    assert {(setting.generate, setting.train) for setting in planned.settings[1:]} == {(2, 6)}  # 3.8 and 4 seconds
    assert [setting.max_staleness for setting in planned.settings] == [None, 0, 1, 2, 4]
    assert planned.best.max_staleness == 1
    planned = plan_async(run_of(*ASYNC_2), replace(times, per_engine=4), lengths(*[10] * 16))
    assert {(setting.generate, setting.train) for setting in planned.settings[1:]} == {(4, 4)}


@pytest.mark.slow
def test_the_devices_of_a_sampler_apart_are_divided_with_those_that_train_and_their_own_split_is_shown():
    mesh = ["trainer=mesh", "sharding=ddp", "trainer.placement.devices=[cuda:0,cuda:1,cuda:2,cuda:3,cuda:4,cuda:5]"]
    arguments = ["plan", *GRPO, *ASYNC_2, "--async", "--response-tokens", "2", "--json"]
    runs = {
        "placed": [*mesh, "+trainer.placement.sub_meshes={rollout:[cuda:6,cuda:7]}"],
        "within": [mesh[0], mesh[1], EIGHT, "+trainer.placement.sub_meshes={rollout:[cuda:6,cuda:7]}"],
        "free": ["sharding=ddp", "trainer.n_gpus_per_node=8", "trainer.device=cpu"],
    }
    planned = {}
    for name, overrides in runs.items():
        result = CliRunner().invoke(app, [*arguments, *overrides])
        assert result.exit_code == 0, result.output
        planned[name] = json.loads(result.stdout)["async"]["settings"]
    splits = {name: [(x["generate"], x["train"]) for x in settings[1:]] for name, settings in planned.items()}
    assert {sum(split) for split in splits["free"]} == {8}
    assert splits["placed"] == [*splits["free"], (2, 6)]
    assert splits["within"] == splits["free"] + [(2, 6)]


def test_a_staleness_without_end_is_planned():
    planned = plan_async(run_of(*ASYNC_2, "trainer.max_staleness=1000000000"), TIMES, lengths(2, 4))
    assert [setting.max_staleness for setting in planned.settings] == [None, 0, 1, 2, 4, 64]


@pytest.mark.slow
def test_the_command_prints_a_table_and_numbers():
    arguments = ["plan", *GRPO, *ASYNC_2, "--async", "--response-tokens", "6", "--device", "cpu"]
    text = CliRunner().invoke(app, arguments)
    assert text.exit_code == 0
    assert "asynchronous training" in text.output
    planned = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert [setting["max_staleness"] for setting in planned["async"]["settings"]] == [None, 0, 1, 2, 4]
    assert planned["async"]["best"] in planned["async"]["settings"]
    (sampler,) = (phase["parts"] for phase in planned["phases"] if phase["roles"] == ["rollout"])
    actor = next(phase["parts"] for phase in planned["phases"] if phase["name"] == "rest")
    assert sampler["weights"] == actor["actor weights"]  # the copy is in a row of its own, with its cache
    assert sampler["keys and values"] > 0
    assert actor["weights for rollout workers"] == 3 * actor["actor weights"]
    assert actor["copy for the writer"] == 3 * actor["actor weights"]  # of its moments too; the sampler saves nothing
    mesh = [
        "trainer=mesh",
        "trainer.placement.devices=[cuda:0]",
        "+trainer.placement.sub_meshes={rollout:[cuda:1,cuda:2]}",
    ]
    for device in ("cpu", "h100"):
        text = CliRunner().invoke(app, ["plan", *GRPO, *ASYNC_2, *mesh, "--device", device]).output
        assert text.startswith("3 processes, device")
