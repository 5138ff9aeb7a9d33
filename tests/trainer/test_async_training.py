"""Asynchronous training: equal to the synchronous one at staleness 0, resumable, and strict in order and age."""

import dataclasses
import functools
import itertools
import json
import os
import signal
from typing import Any

import pytest
import torch
from cluster.ray_here import placed
from same_training import ROUNDING, compared, course, numbers, same_training, saved
from trainer.runs import GRPO_ALGORITHM, PPO_ALGORITHM, fit, weights
from trainer.runs import read_lines as lines_of

from verl.algorithms.advantages import GRPO
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.importance_sampling import TruncatedIS
from verl.algorithms.losses import PPOClip
from verl.cluster.placement import DeviceMesh
from verl.cluster.ray.ray_worker_group import RayWorkerGroup
from verl.component import BuildContext
from verl.errors import WorkerDied, WorkerHung
from verl.models.lora import LoRA
from verl.ops.masking import masked_mean
from verl.replay.config import TieredReplay
from verl.rollout.hf import HFRollout
from verl.trainer.api.load_checkpoint import load_checkpoint
from verl.trainer.ppo import SEQUENCE_FIELDS, PPOTrainer
from verl.trainer.train_loop import TrainLoop
from verl.workers.actor import ActorWorker
from verl.workers.schedule import FILE, read_lines

RAY, TWO = pytest.mark.xdist_group("ray"), pytest.mark.xdist_group("two processes")
CORRECTED = dataclasses.replace(GRPO_ALGORITHM, correction=TruncatedIS(), mini_batches=1)


def asynchronous(model, directory, staleness=1, algorithm=CORRECTED, **options):
    settings = {"mode": "async", "max_staleness": staleness, "prompts_per_step": 2, **options}
    return course(model, directory, algorithm, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "lora"),
    [
        (PPO_ALGORITHM, None),
        pytest.param(CORRECTED, None, marks=pytest.mark.exhaustive),
        pytest.param(CORRECTED, LoRA(rank=2), marks=pytest.mark.exhaustive),
    ],
)
def test_staleness_0_is_the_synchronous_training(algorithm, lora, model32, tmp_path):
    for mode in ("sync", "async"):
        run = asynchronous(model32, tmp_path / mode, 0, algorithm, mode=mode, eval_interval=2)
        fit(dataclasses.replace(run, actor=dataclasses.replace(run.actor, lora=lora)), tmp_path / mode / "run")
    for line in same_at_staleness_0(tmp_path).values():
        assert line["async/lag_0_share"] == 1


def same_at_staleness_0(directory, timeless=lambda record: record):
    """Assert that the runs `sync` and `async` have the same numbers, records and weights; returns those of `async`."""
    runs = [directory / "sync/run", directory / "async/run"]
    one, other = map(numbers, runs)
    assert one.keys() == other.keys()
    for step, line in one.items():
        assert {key: other[step][key] for key in line} == line
    rows = [{file.relative_to(run): timeless(lines_of(file)) for file in run.glob("*/step_*.jsonl")} for run in runs]
    assert rows[0] == rows[1]
    assert {file.parts[0] for file in rows[0]} == {"samples", "evals", "tokens"}
    left, right = weights(directory / "sync"), weights(directory / "async")
    assert left.keys() == right.keys()
    assert all(x.equal(right[name]) for name, x in left.items())
    return other


def noted_updates(monkeypatch):
    """The versions of the policy that drew what each update trains on, as the updates come."""
    trained_on, update = [], PPOTrainer.update

    def noted(self, experience, step):
        assert experience["token_versions"].shape == experience["responses"].shape
        trained_on.append(sorted(set(experience["policy_version"].tolist())))
        return update(self, experience, step)

    monkeypatch.setattr(PPOTrainer, "update", noted)
    return trained_on


@pytest.mark.parametrize(
    ("staleness", "versions"),
    [
        pytest.param(1, [[0], [0], [1], [2]], marks=pytest.mark.exhaustive),
        (2, [[0], [0], [0], [1]]),
        pytest.param(9, [[0], [0], [0], [0]], marks=pytest.mark.exhaustive),
    ],
)
def test_each_batch_is_of_the_weights_so_many_syncs_before_and_a_resume_goes_on_with_them(
    staleness, versions, model32, tmp_path, monkeypatch
):
    trained_on = noted_updates(monkeypatch)
    fit(asynchronous(model32, tmp_path / "whole", staleness), tmp_path / "whole/run")
    assert trained_on == versions
    metrics = numbers(tmp_path / "whole/run")
    assert metrics[4][f"async/lag_{min(staleness, 3)}_share"] == 1
    assert "rollout/off_policy_gap_nats" in metrics[2]
    resume = tmp_path / "whole/checkpoints/global_step_2"
    fit(asynchronous(model32, tmp_path, staleness, resume=resume), tmp_path / "run")
    assert trained_on[4:] == versions[2:]
    same_training(saved(tmp_path), saved(tmp_path / "whole"), after=2)


@pytest.mark.slow
def test_a_running_trainer_that_loads_a_checkpoint_goes_on_with_what_was_drawn_ahead_of_it(
    model32, tmp_path, monkeypatch
):
    trained_on = noted_updates(monkeypatch)
    run = asynchronous(model32, tmp_path, 2, total_steps=6)
    with run.build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        loop = TrainLoop(trainer, {})
        loop.open()
        for _ in range(5):
            loop.step()
        whole = numbers(tmp_path / "run")
        load_checkpoint(loop, tmp_path / "checkpoints/global_step_3")
        for _ in range(2):
            loop.step()
    assert trained_on == [[0], [0], [0], [1], [2], [1], [2]]
    assert numbers(tmp_path / "run") == whole


@pytest.mark.slow
def test_rows_of_the_replay_buffer_are_no_older_than_their_limit_for_the_present_weights(
    model32, tmp_path, monkeypatch
):
    oldest, update = {}, PPOTrainer.update

    def noted(self, experience, step):
        replayed = experience["policy_version"][experience["is_replayed"]]
        oldest[step] = int((self.sampling.queue.current_version() - replayed).max()) if len(replayed) else None
        return update(self, experience, step)

    monkeypatch.setattr(PPOTrainer, "update", noted)
    algorithm = dataclasses.replace(CORRECTED, replay_fraction=0.5, replay_max_staleness=3)
    replay = TieredReplay(memory_mib=8, shard_mib=1)
    fit(asynchronous(model32, tmp_path, 2, algorithm, replay=replay, total_steps=6), tmp_path / "run")
    assert oldest == {1: None, 2: 1, 3: 2, 4: 3, 5: 3, 6: 3}


@pytest.mark.slow
def test_behaviour_log_probs_train_as_the_trainers_where_engine_and_trainer_agree(model64, tmp_path, monkeypatch):
    lines = {}
    for proximal in ("trainer", "behaviour"):
        algorithm = dataclasses.replace(PPO_ALGORITHM, proximal=proximal)
        fit(course(model64, tmp_path / proximal, algorithm), tmp_path / proximal / "run")
        lines[proximal] = numbers(tmp_path / proximal / "run")
        monkeypatch.delattr(ActorWorker, "compute_log_probs", raising=False)  # the second run has none
    for step, line in lines["behaviour"].items():
        assert line.pop("rollout/off_policy_gap_nats") > 0  # of the second epoch
        assert line["rollout/log_prob_gap_nats"] < ROUNDING
        measured = ("rollout/log_prob_gap_nats", "rollout/log_prob_gap_max_nats", "rollout/entropy_nats")
        equal = {key: value for key, value in lines["trainer"][step].items() if key not in measured}
        assert {key: line[key] for key in line if key not in measured} == pytest.approx(equal, rel=1e-6, abs=ROUNDING)


@pytest.mark.slow
def test_behaviour_log_probs_weigh_older_responses_by_the_ratio_of_the_loss(model64, tmp_path, monkeypatch):
    losses, update = [], PPOTrainer.update

    def by_hand(self, experience, step):
        x = experience
        assert torch.equal(x["old_log_probs"], x["rollout_log_probs"])
        now = self.actor.plain_log_probs(x.select(SEQUENCE_FIELDS, [])).result()["old_log_probs"]
        ratio = (now - x["rollout_log_probs"]).exp()
        token = -torch.minimum(ratio * x["advantages"], ratio.clamp(0.8, 1.2) * x["advantages"])
        loss = float(masked_mean(token, x["response_mask"]))
        metrics = update(self, experience, step)
        losses.append((float(ratio.max()), loss, metrics["actor/loss"]))
        return metrics

    monkeypatch.setattr(PPOTrainer, "update", by_hand)
    algorithm = Algorithm(advantage=GRPO(), policy_loss=PPOClip(), proximal="behaviour")
    fit(asynchronous(model64, tmp_path, 2, algorithm), tmp_path / "run")
    assert [loss for _, _, loss in losses] == pytest.approx([loss for _, loss, _ in losses], rel=1e-6, abs=1e-9)
    assert [largest > 1.001 for largest, *_ in losses] == [False, True, True, True]
    assert "rollout/off_policy_gap_nats" in numbers(tmp_path / "run")[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signal_number", "kind", "words"),
    [
        (signal.SIGKILL, WorkerDied, "ended with signal SIGKILL"),
        pytest.param(signal.SIGSTOP, WorkerHung, "stopped", marks=pytest.mark.exhaustive),
    ],
)
def test_a_sampler_that_dies_or_hangs_ends_the_run_by_name_and_says_what_to_do(
    signal_number, kind, words, model32, tmp_path
):
    run = asynchronous(model32, tmp_path)
    with run.build(BuildContext(run_dir=tmp_path / "run")) as trainer:
        loop = TrainLoop(trainer, {})
        loop.open()
        loop.step()
        trainer.rollout_workers._call_timeout_s = 3.0
        os.kill(trainer.rollout_workers.pids[0], signal_number)
        steps = iter(loop.step, None)
        with pytest.raises(kind) as error:
            list(itertools.islice(steps, 3))  # one batch may be there already
    assert error.value.process == "the rollout worker"
    assert [word for word in (words, "resume=DIRECTORY") if word not in str(error.value)] == []


def in_flight(model, directory, staleness=2, kv_cache="keep", min_new_tokens=0, **options):
    """A run whose responses are long enough for several updates within each."""
    engine: Any = {"max_new_tokens": 24, "weight_update": "in_flight", "kv_cache": kv_cache}
    engine |= {"min_new_tokens": min_new_tokens}
    options |= {"rollout": HFRollout(**engine), "group_size": 4, "total_steps": 6}
    return asynchronous(model, directory, staleness, **options)


MODES: dict[str, Any] = {
    "drain": asynchronous,
    "keep": in_flight,
    "recompute": functools.partial(in_flight, kv_cache="recompute"),
}


def schedule_of(run_dir):
    return (run_dir / FILE).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_cache", "staleness"),
    [("recompute", 2), *(pytest.param("keep", bound, marks=pytest.mark.exhaustive) for bound in (1, 2))],
)
def test_a_replayed_run_and_one_that_is_resumed_in_the_middle_of_responses_have_the_bits_of_the_first(
    kv_cache, staleness, model32, tmp_path, monkeypatch
):
    trained_on, update = [], PPOTrainer.update

    def noted(self, experience, step):
        mask, versions = experience["response_mask"], experience["token_versions"]
        trained_on.append([sorted(set(row[real].tolist())) for row, real in zip(versions, mask, strict=True)])
        return update(self, experience, step)

    monkeypatch.setattr(PPOTrainer, "update", noted)
    fit(in_flight(model32, tmp_path / "first", staleness, kv_cache), tmp_path / "first/run")
    first = saved(tmp_path / "first")
    assert all(step - 1 - staleness <= min(row) for step, batch in enumerate(trained_on, 1) for row in batch)
    replay = {"replay_schedule": str(tmp_path / "first/run")}
    fit(in_flight(model32, tmp_path / "again", staleness, kv_cache, **replay), tmp_path / "again/run")  # type: ignore
    assert schedule_of(tmp_path / "again/run") == schedule_of(tmp_path / "first/run")
    same_training(saved(tmp_path / "again"), first)
    resume = tmp_path / "first/checkpoints/global_step_3"
    fit(in_flight(model32, tmp_path / "cut", staleness, kv_cache, resume=resume, **replay), tmp_path / "cut/run")  # type: ignore
    assert schedule_of(tmp_path / "cut/run") == schedule_of(tmp_path / "first/run")
    same_training(saved(tmp_path / "cut"), first, after=3)


def with_head_of(run_dir, schedule: bytes) -> bytes:
    """The events of a schedule, under the head of another run."""
    return schedule_of(run_dir).splitlines(keepends=True)[0] + b"".join(schedule.splitlines(keepends=True)[1:])


@pytest.fixture(scope="module")
def local(model64, tmp_path_factory):
    """A run in flight whose sampler is a process beside the driver."""
    directory = tmp_path_factory.mktemp("local")
    fit(in_flight(model64, directory), directory / "run")
    return directory


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "where",
    [pytest.param("mesh", marks=TWO), pytest.param("ray", marks=RAY), pytest.param("ray, restarted", marks=RAY)],
)
def test_a_sampler_in_flight_anywhere_gives_the_bits_of_one_beside_the_driver(
    where, local, model64, tmp_path, request, monkeypatch
):
    if where.startswith("ray"):
        request.getfixturevalue("ray_here")
    mesh = DeviceMesh(devices=("cpu:0",), sub_meshes={"rollout": ("cpu:1",)})
    options: dict[str, Any] = {"placement": mesh if where == "mesh" else placed(max_restarts=int("restarted" in where))}
    if "restarted" in where:
        kill_sampler_once(monkeypatch, step=4)
    result = fit(in_flight(model64, tmp_path / "first", **options), tmp_path / "first/run")
    assert len(result.restarts) == options["placement"].max_restarts
    first = compared(tmp_path / "first")
    replay: dict[str, Any] = {"replay_schedule": str(tmp_path / "first/run")}
    fit(in_flight(model64, tmp_path / "again", **options, **replay), tmp_path / "again/run")
    same_training(compared(tmp_path / "again"), first)
    schedule = schedule_of(tmp_path / "first/run")
    assert schedule_of(tmp_path / "again/run") == schedule
    (tmp_path / "first/run" / FILE).write_bytes(with_head_of(local / "run", schedule))
    fit(in_flight(model64, tmp_path / "here", **replay), tmp_path / "here/run")
    same_training(compared(tmp_path / "here"), first)


def kill_sampler_once(monkeypatch, step):
    """Kill the rollout worker in Ray when responses of a step are awaited."""
    submit, killed = RayWorkerGroup.submit, []

    def submit_and_kill(group, role, method, args):
        future = submit(group, role, method, args)
        if (role, method, args) == ("rollout", "finish_batch", (step,)) and not killed:
            killed.extend(group.pids)
            os.kill(killed[0], signal.SIGKILL)
        return future

    monkeypatch.setattr(RayWorkerGroup, "submit", submit_and_kill)


def with_later_weights(schedule: bytes, staleness: int, rows: int, delay: int = 5) -> bytes:
    """The schedule of a run whose responses all have one length, with weights `delay` steps after they could be there.

    Args:
        rows: responses of a batch.
    """
    heads, events = read_lines(schedule.decode().splitlines())
    length = next(event.engine_step for event in events if (event.event, event.number) == ("begin", 2))
    begun: dict[int, int] = {}  # engine step before which each batch was begun
    now, later = 0, []
    for event in events:
        ready = event.number if event.event == "weights" else max(1, event.number - staleness)
        if event.event != "save" and ready in begun:
            now = max(now, begun[ready] + length)  # what it waits for
        open_rows = rows * sum(now < begin + length for begin in begun.values())
        if event.event == "weights" and open_rows:
            now = min(now + delay, max(begun.values()) + length)
            open_rows = rows * sum(now < begin + length for begin in begun.values())
        later.append(dataclasses.replace(event, engine_step=now, open_rows=open_rows))
        if event.event == "begin":
            begun[event.number] = now
    lines = [{"head": heads[0]}, *map(dataclasses.asdict, later)]
    return "".join(f"{json.dumps(line)}\n" for line in lines).encode()


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache", ["keep", pytest.param("recompute", marks=pytest.mark.exhaustive)])
def test_weights_that_come_within_responses_are_those_of_the_tokens_behind_them(
    kv_cache, model32, tmp_path, monkeypatch
):
    options: dict[str, Any] = {"kv_cache": kv_cache, "min_new_tokens": 24}
    fit(in_flight(model32, tmp_path / "first", **options), tmp_path / "first/run")
    schedule = with_later_weights(schedule_of(tmp_path / "first/run"), 2, rows=8)
    (tmp_path / "first/run" / FILE).write_bytes(schedule)
    mixed, update = [], PPOTrainer.update

    def noted(self, experience, step):
        mixed.append(sum(len(set(versions)) > 1 for versions in experience["token_versions"].tolist()))
        return update(self, experience, step)

    monkeypatch.setattr(PPOTrainer, "update", noted)
    replay = {"replay_schedule": str(tmp_path / "first/run"), **options}
    for name in ("once", "again"):
        fit(in_flight(model32, tmp_path / name, **replay), tmp_path / name / "run")
        assert read_lines(schedule_of(tmp_path / name / "run").decode().splitlines()) == read_lines(
            schedule.decode().splitlines()
        )
    same_training(saved(tmp_path / "again"), saved(tmp_path / "once"))
    assert mixed == mixed[:6] * 2
    assert mixed[:6] == [0, 8, 8, 8, 8, 8]
