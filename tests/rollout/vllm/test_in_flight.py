"""Weights that vLLM takes between two tokens of its responses."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
from environments.digit_game import DigitGames
from roles import start_actor
from rollout.engines import random_prompts, save_family
from rollout.faulty_vllm import WRONG, DyingVLLM, WrongVLLM
from same_training import course, same_training, saved
from trainer.runs import GRPO_ALGORITHM, fit
from transformers import DynamicCache

from verl.algorithms.importance_sampling import TruncatedIS
from verl.cluster.placement import DeviceMesh
from verl.engines.sharding import FSDP
from verl.errors import WorkerError
from verl.models.lora import LoRA
from verl.ops.sampling import EVALUATION
from verl.rewards.episode_reward import EpisodeReward
from verl.rollout.base import GenerationRequest
from verl.rollout.vllm.config import VLLMRollout
from verl.workers.schedule import FILE, Schedule, ScheduledEvent
from verl.workers.step_loop import StepLoop

pytestmark = pytest.mark.xdist_group("vllm")

CORRECTED = dataclasses.replace(GRPO_ALGORITHM, correction=TruncatedIS(), mini_batches=1)
GAMES = DigitGames(recovery="deterministic", answers_at_once=True, max_tokens=40, max_turns=4)
STOPS = tuple(range(20, 28))
OPTIONS: dict[str, Any] = {"kv_cache_gib": 0.05, "max_num_seqs": 16, "num_threads": 1, "weight_update": "in_flight"}
KV_CACHES = pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
EVENTS = [
    ScheduledEvent(0, "weights", 0, 0),
    ScheduledEvent(0, "begin", 1, 0),
    ScheduledEvent(5, "weights", 1, 4),
    ScheduledEvent(5, "begin", 2, 4),
    ScheduledEvent(9, "weights", 2, 8),
    ScheduledEvent(12, "weights", 3, 8),
]


@pytest.mark.exhaustive
@KV_CACHES
def test_equal_prompts_across_three_updates_have_the_log_probs_of_transformers_with_its_own_cache(kv_cache, tmp_path):
    """Keys that are kept are of the weights that have read their tokens; those of a prompt are of one version."""
    rollout = VLLMRollout(max_new_tokens=20, min_new_tokens=20, kv_cache=kv_cache, max_model_len=180, **OPTIONS)
    actor = start_actor(save_family(tmp_path / "model", "qwen2"), rollout)
    first = {name: x.clone() for name, x in actor.model.state_dict().items()}
    loop = StepLoop(actor.sampler, 180, Schedule({}, replayed=EVENTS))
    prompts = random_prompts(2, 150)  # longer than a block of the cache

    def set_weights(version):
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, x in actor.model.state_dict().items():
                x.copy_(first[name] + 0.02 * version * torch.randn(x.shape, generator=generator))

    def load(version):
        set_weights(version)
        return actor.sampler.sync()

    try:
        for event in EVENTS:
            if event.event == "weights":
                loop.take_weights(event.number, lambda version=event.number: load(version))
            else:
                loop.begin(prompts, GenerationRequest(event.number, 2))
        batches = [loop.finish(1), loop.finish(2)]
        state = actor.sampler.engine.weights.state
        assert state.was_probed == (kv_cache == "recompute")
        loop.generate(prompts, GenerationRequest(3, 1, stream=EVALUATION))
        assert state.was_probed
        loop.close()
        assert batches[0]["token_versions"].tolist() == [[0] * 5 + [1] * 4 + [2] * 3 + [3] * 8] * 4
        assert batches[1]["token_versions"].tolist() == [[1] * 4 + [2] * 3 + [3] * 13] * 4
        for rows in batches:
            for row in range(len(rows)):
                ids = rows["input_ids"][row][rows["attention_mask"][row].bool()][None]
                width, versions = int(rows["prompt_mask"][row].sum()), rows["token_versions"][row].tolist()
                plain, cache, read = [], DynamicCache(), 0
                for version, group in itertools.groupby(versions):
                    set_weights(version)
                    if kv_cache == "recompute":
                        cache, read = DynamicCache(), 0
                    count = len(list(group))
                    end = width + len(plain) + count - 1  # the last token of a version is read by the next one
                    with torch.no_grad():
                        logits = actor.model(input_ids=ids[:, read:end], past_key_values=cache).logits[0, -count:]
                    following = ids[0, end + 1 - count : end + 1, None]
                    plain += logits.log_softmax(-1).gather(-1, following)[:, 0].tolist()
                    read = end
                assert (torch.tensor(plain) - rows["rollout_log_probs"][row]).abs().max() < 1e-4, row
    finally:
        loop.close()
        actor.close()


def in_flight(model, directory, kv_cache, kind=VLLMRollout, **options):
    options.setdefault("rollout", kind(max_new_tokens=24, kv_cache=kv_cache, **OPTIONS))
    options = {"mode": "async", "max_staleness": 2, "prompts_per_step": 2, "total_steps": 5, **options}
    return course(model, directory, CORRECTED, **options)


def repeated(make, directory, resume=None):
    """The schedule of a run; asserts that a replay, and one that is resumed after step `resume`, have its bits."""
    fit(make("first"), directory / "first/run")
    first, schedule = saved(directory / "first"), (directory / "first/run" / FILE).read_bytes()
    replay = {"replay_schedule": str(directory / "first/run")}
    fit(make("again", **replay), directory / "again/run")
    assert (directory / "again/run" / FILE).read_bytes() == schedule
    same_training(saved(directory / "again"), first)
    if resume is not None:
        checkpoint = directory / f"first/checkpoints/global_step_{resume}"
        fit(make("cut", resume=checkpoint, **replay), directory / "cut/run")
        assert (directory / "cut/run" / FILE).read_bytes() == schedule
        same_training(saved(directory / "cut"), first, after=resume)
    return schedule


@pytest.mark.exhaustive
@KV_CACHES
def test_a_replayed_run_and_one_that_is_resumed_in_the_middle_of_responses_have_the_bits_of_the_first(
    kv_cache, tmp_path
):
    model = save_family(tmp_path / "model", "qwen2")
    repeated(lambda name, **options: in_flight(model, tmp_path / name, kv_cache, **options), tmp_path, resume=2)


@pytest.mark.exhaustive
@KV_CACHES
def test_episodes_go_on_across_updates_and_evaluations_and_are_repeated_by_their_schedule(kv_cache, tmp_path):
    model = save_family(tmp_path / "model", "qwen2")

    def make(name, **options):
        rollout = VLLMRollout(max_new_tokens=10, stop_token_ids=STOPS, kv_cache=kv_cache, **OPTIONS)
        run = in_flight(model, tmp_path / name, kv_cache, rollout=rollout, group_size=3, eval_interval=2, **options)
        return dataclasses.replace(run, environment=GAMES, reward=EpisodeReward())

    schedule = repeated(make, tmp_path, resume=2)
    assert schedule.count(b'"generate"') >= 3
    first = saved(tmp_path / "first")
    assert max(line["episode/turns"] for line in first.metrics.values()) > 1
    assert any(0 < line["async/lag_1_share"] < 1 for line in first.metrics.values())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("where", "kv_cache"),
    [("fsdp", "recompute"), ("fsdp, adapter", "recompute"), ("fsdp, adapter", "keep"), ("mesh", "keep")],
)
def test_the_sampler_has_the_engine_of_a_sharded_or_placed_actor(where, kv_cache, tmp_path):
    sharded = {"sharding": FSDP(), "n_gpus_per_node": 2}
    placed = {"placement": DeviceMesh(devices=("cpu:0", "cpu:1"), sub_meshes={"sampler": ("cpu:1",)})}
    model = save_family(tmp_path / "model", "qwen2")

    def make(name, **options):
        if "adapter" not in where:
            place = sharded if where == "fsdp" else placed
            return in_flight(model, tmp_path / name, kv_cache, **place, **options)
        rollout = VLLMRollout(max_new_tokens=24, kv_cache=kv_cache, lora="adapter", **OPTIONS)
        run = in_flight(model, tmp_path / name, kv_cache, rollout=rollout, **sharded, **options)
        return dataclasses.replace(run, actor=dataclasses.replace(run.actor, lora=LoRA(rank=8)))

    repeated(make, tmp_path, resume=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("call", [9, 30])
@KV_CACHES
def test_responses_of_a_killed_engine_begin_anew_by_the_schedule(kv_cache, call, tmp_path):
    model = save_family(tmp_path / "model", "qwen2")
    dying = functools.partial(DyingVLLM, call=call, killed=str(tmp_path / "killed"))
    schedule = repeated(lambda name, **options: in_flight(model, tmp_path / name, kv_cache, dying, **options), tmp_path)
    assert schedule.count(b'"lost"') == 1


@pytest.mark.exhaustive
@KV_CACHES
def test_a_wrong_weight_in_flight_stops_the_run_by_name(kv_cache, tmp_path):
    run = in_flight(save_family(tmp_path / "model", "qwen2"), tmp_path, kv_cache, WrongVLLM)
    with pytest.raises(WorkerError, match=WRONG):
        fit(run, tmp_path / "run")
