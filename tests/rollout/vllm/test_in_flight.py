"""Weights that vLLM takes between two tokens of its responses."""

import dataclasses
import os
import signal
import time
from typing import Any

import pytest
import torch
from cluster.ray_here import placed
from roles import start_actor
from rollout.engines import plain_log_probs, save_family
from rollout.faulty_vllm import WRONG, WrongVLLM
from same_training import course, same_training, saved
from trainer.runs import fit
from trainer.test_async_training import CORRECTED
from workers.versions import VersionedModel

from verl.cluster.placement import DeviceMesh
from verl.engines.sharding import FSDP
from verl.errors import WorkerError
from verl.models.lora import LoRA
from verl.ops.sampling import EVALUATION
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest
from verl.rollout.vllm.config import VLLMRollout
from verl.workers.schedule import FILE, Schedule, ScheduledEvent, ScheduleFile, read_schedule
from verl.workers.step_loop import StepLoop

pytestmark = pytest.mark.xdist_group("vllm")

RAY = pytest.mark.xdist_group("ray")
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


def prompts_of(length):
    """Two prompts; a block of the prefix cache has 128 tokens."""
    ids = torch.randint(3, 90, (2, length), generator=torch.Generator().manual_seed(0))
    numbers, mask = torch.arange(2), torch.ones_like(ids, dtype=torch.bool)
    return DataProto.from_dict({"prompts": ids, "prompt_mask": mask, "prompt_ids": numbers, "group_ids": numbers})


class Engine:
    """A loop over an engine and its events, with weights of each version that are known."""

    def __init__(self, directory, kv_cache, events):
        limits = {"max_new_tokens": 20, "min_new_tokens": 20, "max_model_len": 180}
        rollout = VLLMRollout(kv_cache=kv_cache, **limits, **OPTIONS)
        self.actor, self.events = start_actor(save_family(directory / "model", "qwen2"), rollout), events
        self.set_weights = VersionedModel(self.actor.model, 0.02).load
        self.loop = StepLoop(self.actor.generator, 180, Schedule({}, replayed=events))

    def load(self, version):
        self.set_weights(version)
        return self.actor.generator.sync()

    def play(self, prompts, events):
        """The rows of both batches, and what was saved."""
        state = {}
        for event in events:
            if event.event == "weights":
                self.loop.take_weights(event.number, lambda version=event.number: self.load(version))
            elif event.event == "begin":
                self.loop.begin(prompts, GenerationRequest(event.number, 2))
            else:
                state = self.loop.save(event.number)
        return [self.loop.finish(1), self.loop.finish(2)], state

    def close(self):
        self.loop.close()
        self.actor.close()


@pytest.mark.exhaustive
@KV_CACHES
def test_equal_prompts_across_three_updates_have_the_log_probs_of_transformers_with_its_own_cache(kv_cache, tmp_path):
    """Keys that are kept are of the weights that have read their tokens; those of a prompt are of one version."""
    engine, prompts = Engine(tmp_path, kv_cache, EVENTS), prompts_of(150)
    try:
        batches, _ = engine.play(prompts, EVENTS)
        vllm: Any = engine.actor.generator.engine
        state = vllm.weights.state
        assert state.was_probed == (kv_cache == "recompute")
        engine.loop.generate(prompts, GenerationRequest(3, 1, stream=EVALUATION))
        assert state.was_probed
        assert vllm._turns.cached_tokens == 0  # a new engine would have none of them
        engine.loop.close()
        assert batches[0]["token_versions"].tolist() == [[0] * 5 + [1] * 4 + [2] * 3 + [3] * 8] * 4
        assert batches[1]["token_versions"].tolist() == [[1] * 4 + [2] * 3 + [3] * 13] * 4
        for rows in batches:
            for row in range(len(rows)):
                ids = rows["input_ids"][row][rows["attention_mask"][row].bool()].tolist()
                width, versions = int(rows["prompt_mask"][row].sum()), rows["token_versions"][row].tolist()
                keeps = kv_cache == "keep"
                plain = plain_log_probs(engine.actor.model, engine.set_weights, ids, width, versions, keeps=keeps)
                assert (plain - rows["rollout_log_probs"][row]).abs().max() < 1e-4, row
    finally:
        engine.close()


@pytest.mark.exhaustive
@KV_CACHES
def test_rows_that_fill_blocks_of_the_prefix_cache_go_on_from_a_save_with_the_same_bits(kv_cache, tmp_path):
    events = [*EVENTS[:4], ScheduledEvent(14, "save", 0, 8), ScheduledEvent(16, "weights", 2, 8)]
    engine, prompts = Engine(tmp_path, kv_cache, events), prompts_of(121)
    try:
        rows, state = engine.play(prompts, events)
        engine.loop.restore(state, 1, lambda: engine.load(1))
        restored, _ = engine.play(prompts, events[5:])
        for one, other in zip(rows, restored, strict=True):
            assert [name for name, x in one.batch.items() if not x.equal(other[name])] == []
    finally:
        engine.close()


@pytest.mark.exhaustive
def test_an_engine_that_is_gone_when_longer_rows_begin_is_lost_before_that_event(tmp_path):
    engine = Engine(tmp_path, "keep", ())
    sampler: Any = engine.actor.generator
    short, longer = prompts_of(30), prompts_of(60)
    engine.loop.close()

    def play(schedule, last):
        engine.loop = loop = StepLoop(sampler, None, schedule)
        loop.take_weights(0, lambda: engine.load(0))
        loop.begin(short, GenerationRequest(1, 2))
        while loop.engine_step < 3:
            time.sleep(0.001)
        loop.take_weights(1, lambda: last(loop))
        if 2 not in loop._batches:
            loop.begin(longer, GenerationRequest(2, 2))
        rows = [loop.finish(1), loop.finish(2)]
        loop.close()
        return rows

    def load_and_die(loop):
        synced = engine.load(1)
        if 2 not in loop._batches:  # also called for the new engine
            os.kill(sampler.engine.process_id, signal.SIGKILL)
            loop.begin(longer, GenerationRequest(2, 2))  # carried out before the next step
        return synced

    try:
        rows = play(Schedule({}, ScheduleFile(tmp_path / FILE)), load_and_die)
        events = read_schedule(tmp_path, {})
        assert [event.event for event in events] == ["weights", "begin", "weights", "lost", "begin"]
        for one, other in zip(rows, play(Schedule({}, replayed=events), lambda _: engine.load(1)), strict=True):
            assert [name for name, x in one.batch.items() if not x.equal(other[name])] == []
    finally:
        engine.close()


def in_flight(model, directory, kv_cache, kind=VLLMRollout, **options):
    options.setdefault("rollout", kind(max_new_tokens=24, kv_cache=kv_cache, **OPTIONS))
    options = {"mode": "async", "max_staleness": 2, "prompts_per_step": 2, "total_steps": 5, **options}
    return course(model, directory, CORRECTED, **options)


def schedules(run_dir):
    return b"".join(path.read_bytes() for path in sorted(run_dir.glob("schedule*.jsonl")))


def repeated(make, directory, resume=None):
    """The schedules of a run; asserts that a replay, and one that is resumed after step `resume`, have its bits."""
    fit(make("first"), directory / "first/run")
    first, schedule = saved(directory / "first"), schedules(directory / "first/run")
    replay = {"replay_schedule": str(directory / "first/run")}
    fit(make("again", **replay), directory / "again/run")
    assert schedules(directory / "again/run") == schedule
    same_training(saved(directory / "again"), first)
    if resume is not None:
        checkpoint = directory / f"first/checkpoints/global_step_{resume}"
        fit(make("cut", resume=checkpoint, **replay), directory / "cut/run")
        assert schedules(directory / "cut/run") == schedule
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
@pytest.mark.parametrize(
    ("where", "kv_cache"),
    [
        ("fsdp", "recompute"),
        ("fsdp, adapter", "recompute"),
        ("fsdp, adapter", "keep"),
        ("mesh", "keep"),
        ("two engines", "keep"),
        ("two engines", "recompute"),
        pytest.param("ray", "recompute", marks=RAY),
        pytest.param("ray", "keep", marks=RAY),
    ],
)
def test_the_sampler_has_the_engine_of_a_sharded_or_placed_actor(where, kv_cache, tmp_path, request):
    sharded = {"sharding": FSDP(), "n_gpus_per_node": 2}
    mesh = DeviceMesh(devices=("cpu:0", "cpu:1"), sub_meshes={"rollout": ("cpu:1",)})
    two = DeviceMesh(devices=("cpu:0",), sub_meshes={"rollout": ("cpu:0", "cpu:1")})
    of_actor = {"fsdp": sharded, "mesh": {"placement": mesh}, "two engines": {"placement": two}}
    of_actor["ray"] = {"placement": placed()}
    if where == "ray":
        request.getfixturevalue("ray_here")
    model = save_family(tmp_path / "model", "qwen2")

    def make(name, **options):
        if "adapter" not in where:
            return in_flight(model, tmp_path / name, kv_cache, **of_actor[where], **options)
        rollout = VLLMRollout(max_new_tokens=24, kv_cache=kv_cache, lora="adapter", **OPTIONS)
        run = in_flight(model, tmp_path / name, kv_cache, rollout=rollout, **sharded, **options)
        return dataclasses.replace(run, actor=dataclasses.replace(run.actor, lora=LoRA(rank=8)))

    repeated(make, tmp_path, resume=2)


@pytest.mark.exhaustive
@KV_CACHES
def test_a_wrong_weight_in_flight_stops_the_run_by_name(kv_cache, tmp_path):
    run = in_flight(save_family(tmp_path / "model", "qwen2"), tmp_path, kv_cache, WrongVLLM)
    with pytest.raises(WorkerError, match=WRONG):
        fit(run, tmp_path / "run")
