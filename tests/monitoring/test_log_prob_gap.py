"""The engine's log-probs against the trainer's: runs that draw from another policy stop, sound ones go on silently."""

import dataclasses
import json
import logging
import math
from typing import Any

import pytest
import torch
from cases import each_value_once, exhaustive
from http_client.servers import serving
from monitoring.faulty_engine import FaultyRollout
from refusals import refusal
from rollout.speaking import Speaker
from trainer.runs import (
    GRPO_ALGORITHM,
    JSONL,
    PPO_ALGORITHM,
    Prompts,
    fit,
    ppo_run,
    step_lines,
    without_times,
)

from verl.algorithms.importance_sampling import TruncatedIS
from verl.checkpoint.config import Checkpointing
from verl.component import BuildContext
from verl.errors import LogProbGapError
from verl.models.lora import LoRA
from verl.models.parallel_info import Numerics, compute_type
from verl.models.tiny import TinyModel
from verl.monitoring.config import Monitoring
from verl.monitoring.log_prob_gap import CAP_NATS, LIMITS, GapWatch, LogProbGapLimit, limit_of
from verl.ops.logprobs import LogProbGap
from verl.protocol import DataProto
from verl.replay.config import TieredReplay
from verl.rollout.hf import HFRollout
from verl.rollout.scripted import ScriptedRollout
from verl.rollout.server.config import ServerRollout

GAP, LARGEST, OFF_POLICY = "rollout/log_prob_gap_nats", "rollout/log_prob_gap_max_nats", "rollout/off_policy_gap_nats"
ONE_UPDATE = dataclasses.replace(
    GRPO_ALGORITHM, mini_batches=1
)  # no log-probs before the update: it tells the gap itself
CORRECTED = dataclasses.replace(ONE_UPDATE, correction=TruncatedIS())
QUICK: dict[str, Any] = {
    "eval_before": False,
    "save_final": False,
    "data": Prompts(eval=()),
    "tracker": JSONL,
    "critic": None,
    "total_steps": 3,
}


def faulty(model, fault, algorithm=ONE_UPDATE, says=None, **options):
    rollout = FaultyRollout(max_new_tokens=7, fault=fault, says=says)
    return ppo_run(model, algorithm, rollout=rollout, **{**QUICK, **options})


def updates_of(trainer: Any) -> int:
    return trainer.cluster.worker("actor").version


WHEN = pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(ONE_UPDATE, id="told by the update"),
        pytest.param(GRPO_ALGORITHM, id="known before", marks=pytest.mark.exhaustive),
    ],
)

# Runs that are wrong


@pytest.mark.first_rows(1)
@pytest.mark.parametrize(
    ("fault", "step", "likeliest"),
    [
        ("stale", 2, "FaultySampler did not take over the last weights"),
        ("temperature", 1, "FaultySampler holds another model"),
        ("padding", 1, "FaultySampler holds another model"),
        ("positions", 1, "FaultySampler holds another model"),
        ("other model", 1, "FaultySampler holds another model"),
        ("narrow", 1, "rounding: FaultySampler computes in a narrower type than float32"),
    ],
)
def test_an_engine_that_draws_from_another_policy_stops_the_run_with_the_likely_cause(
    fault, step, likeliest, model32, tmp_path
):
    with faulty(model32, fault).build(BuildContext(run_dir=tmp_path)) as trainer:
        with pytest.raises(LogProbGapError, match=f"Step {step}: {GAP} is") as caught:
            trainer.fit()
        assert updates_of(trainer) == step - 1  # nothing has learned from such rows
    assert f"Likely causes, the likeliest first: {likeliest}" in str(caught.value)
    assert "trainer.safety.log_prob_gap.on_excess=warn" in str(caught.value)
    assert caught.value.gap_nats > caught.value.limit_nats == LIMITS["float32"]
    assert len(step_lines(tmp_path)) == step - 1
    assert f"step_{step}_log_prob_gap" in str(caught.value)
    rows = DataProto.load(tmp_path / f"anomalies/step_{step}_log_prob_gap/batch.safetensors")
    assert 1 < len(rows) <= 6
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


def test_where_log_probs_are_computed_before_the_updates_the_step_makes_none_of_them(model32, tmp_path):
    with faulty(model32, "stale", GRPO_ALGORITHM).build(BuildContext(run_dir=tmp_path)) as trainer:
        with pytest.raises(LogProbGapError, match=rf"(?s)Step 2: {GAP} is .* weights are as they were"):
            trainer.fit()
        assert updates_of(trainer) == GRPO_ALGORITHM.mini_batches > 1


@pytest.mark.parametrize("mini_batches", [1, *exhaustive(2)], ids=["told by the update", "known before"])
def test_a_fault_of_long_rows_stops_the_run_before_the_first_of_them_is_trained_on(mini_batches, model32, tmp_path):
    algorithm = dataclasses.replace(GRPO_ALGORITHM, mini_batches=mini_batches)
    run = faulty(model32, "long rows", algorithm, prompts_per_step=8)
    with run.build(BuildContext(run_dir=tmp_path)) as trainer:
        with pytest.raises(LogProbGapError, match=f"Step 3: {GAP} is"):
            trainer.fit()
        assert updates_of(trainer) == 2 * mini_batches


def test_a_server_that_draws_by_a_temperature_of_its_own_stops_the_run(model32, dir32, tmp_path):
    speaker = Speaker(dir32, "processed")

    def post(asked):
        if asked.body.get("max_tokens") == 7:
            asked.body["temperature"] = 2.0  # from a configuration of its own
        return speaker.post(asked)

    with serving(post, speaker.page) as server:
        rollout = ServerRollout(endpoint=server.endpoint(), max_new_tokens=7)
        with pytest.raises(LogProbGapError, match=r"ServerEngine holds another model.*another temperature"):
            fit(ppo_run(model32, ONE_UPDATE, rollout=rollout, **QUICK), tmp_path)


def test_a_warning_is_told_once_and_a_wrong_start_is_never_the_measure(model32, tmp_path, caplog):
    safety = Monitoring(log_prob_gap=LogProbGapLimit(on_excess="warn"))
    with caplog.at_level(logging.WARNING, logger="verl"):
        run = faulty(model32, "other model", safety=safety, total_steps=4)
        with run.build(BuildContext(run_dir=tmp_path)) as trainer:
            assert trainer.fit().status == "finished"
            state = trainer.guards.monitor.state_dict()["log_prob_gap"]
            assert (state["first_nats"], state["is_beyond"]) == (None, True)
    told = [record.getMessage() for record in caplog.records if GAP in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(f"Step 1: {GAP} is")
    assert [line["safety/log_prob_gaps"] for line in step_lines(tmp_path)] == [1.0] * 4


# Runs that are sound


SOUND = {
    "hf": {"rollout": HFRollout(max_new_tokens=7)},
    "low temperature": {"rollout": HFRollout(max_new_tokens=7, temperature=0.3, top_k=5)},
    "own weights": {"rollout": FaultyRollout(max_new_tokens=7)},
    "scripted": {"rollout": ScriptedRollout(texts=("12", "7"), max_new_tokens=7)},
    "bfloat16": {"autocast": "bfloat16"},
    "adapter": {"lora": LoRA(rank=2)},
}


@pytest.mark.first_rows(1)
@pytest.mark.parametrize(
    ("algorithm", "options"), each_value_once({"told by the update": ONE_UPDATE, "known before": PPO_ALGORITHM}, SOUND)
)
def test_a_sound_run_is_silent(algorithm, options, model32, tmp_path, caplog):
    limit = LIMITS["bfloat16"] if "autocast" in options else 1e-5
    options = dict(options)
    actor = {name: options.pop(name) for name in ("autocast", "lora") if name in options}
    run = ppo_run(model32, algorithm, **{**QUICK, **options, "critic": ppo_run(model32).critic})
    fit(dataclasses.replace(run, actor=dataclasses.replace(run.actor, **actor)), tmp_path)
    lines = step_lines(tmp_path)
    assert len(lines) == 3
    for line in lines:
        assert 0 <= line[GAP] <= line[LARGEST]
        assert line[GAP] < limit
        assert OFF_POLICY not in line
    assert GAP not in caplog.text


@pytest.mark.exhaustive
def test_an_engine_in_a_narrower_type_that_says_so_is_sound(model32, tmp_path):
    fit(faulty(model32, "narrow", says="bfloat16"), tmp_path)
    assert all(line[GAP] > LIMITS["float32"] / 5 for line in step_lines(tmp_path))


def test_rows_of_the_replay_buffer_are_not_compared(model32, tmp_path):
    algorithm = dataclasses.replace(ONE_UPDATE, replay_fraction=0.5)
    run = ppo_run(model32, algorithm, lr=0.02, replay=TieredReplay(), **{**QUICK, "total_steps": 4})
    fit(run, tmp_path)
    lines = step_lines(tmp_path)
    assert lines[-1]["replay/old_rows"] > 0
    assert all(line[GAP] < 1e-5 and OFF_POLICY not in line for line in lines)


def test_rows_drawn_ahead_by_earlier_weights_are_told_apart(model32, tmp_path):
    fit(faulty(model32, "none", CORRECTED, mode="async", lr=0.02), tmp_path)
    first, *later = step_lines(tmp_path)
    assert first[GAP] < 1e-5
    assert OFF_POLICY not in first
    assert all(GAP not in line and LARGEST not in line for line in later)
    assert all(line[OFF_POLICY] > LIMITS["float32"] for line in later)


def test_an_engine_that_is_wrong_and_draws_ahead_stops_the_run_in_the_first_step(model32, tmp_path):
    with pytest.raises(LogProbGapError, match="Step 1"):
        fit(faulty(model32, "positions", CORRECTED, mode="async"), tmp_path)


@WHEN
def test_a_server_that_keeps_its_weights_is_compared_until_the_first_update(algorithm, model32, dir32, tmp_path):
    speaker = Speaker(dir32)
    with serving(speaker.post, speaker.page) as server:
        rollout = ServerRollout(endpoint=server.endpoint(), max_new_tokens=7, weights="fixed")
        fit(ppo_run(model32, algorithm, rollout=rollout, lr=0.02, **QUICK), tmp_path)
    first, *later = step_lines(tmp_path)
    assert first[GAP] < 1e-5
    assert all(GAP not in line and line[OFF_POLICY] > LIMITS["float32"] for line in later)


# Resume


@pytest.mark.exhaustive
def test_a_resumed_run_keeps_the_first_gap_bit_for_bit_and_an_older_checkpoint_goes_on(model32, tmp_path):
    def course(directory, resume=None):
        saved = Checkpointing(save_dir=str(directory / "checkpoints"), save_interval=1, keep_last_n=None)
        return dataclasses.replace(faulty(model32, "none"), checkpoint=saved, resume=resume)

    fit(course(tmp_path / "whole"), tmp_path / "whole")
    (first, *_), point = step_lines(tmp_path / "whole"), tmp_path / "whole/checkpoints/global_step_1"
    with course(tmp_path / "again", str(point)).build(BuildContext(run_dir=tmp_path / "again")) as trainer:
        trainer.fit()
        of = ["float32", "float32", "FaultySampler", 1.0]
        state = {"first_nats": first[GAP], "of": of, "is_beyond": False}
        assert trainer.guards.monitor.state_dict()["log_prob_gap"] == state
    again = [without_times(line) for line in step_lines(tmp_path / "again")]
    assert again == [without_times(line) for line in step_lines(tmp_path / "whole")[1:]]


def test_what_an_older_checkpoint_does_not_hold_begins_anew():
    watch = GapWatch(LogProbGapLimit())
    watch.add({GAP: 1e-4}, None)
    watch.load_state_dict({})
    assert watch.state_dict() == {"first_nats": None, "of": None, "is_beyond": False}


def test_a_run_resumed_with_another_type_measures_its_first_step_anew():
    watch, narrow = GapWatch(LogProbGapLimit()), Numerics("bfloat16", "bfloat16", "", 1.0)
    watch.add({GAP: 0.02}, narrow)
    again = GapWatch(LogProbGapLimit())
    again.load_state_dict(json.loads(json.dumps(watch.state_dict())))
    assert again.add({GAP: 0.04}, narrow) is None
    assert again.first == 0.02
    excess = again.add({GAP: 0.04}, Numerics("float32", "float32", "", 1.0))
    assert excess is not None
    assert excess.limit == LIMITS["float32"]


# The limit


@pytest.mark.parametrize(
    ("numerics", "limit"),
    [
        (Numerics("float32", "float32", "", 1.0), 0.005),
        (Numerics("float64", "float32", "", 1.0), 0.005),
        (Numerics("float32", "bfloat16", "", 1.0), 0.1),
        (Numerics("bfloat16", "float32", "", 1.5), 0.1),
        (Numerics("float32", "float8_e4m3fn", "", 1.0), 0.2),
        (Numerics("float32", "float32", "", 0.1), 0.05),
        (Numerics("bfloat16", "bfloat16", "", 0.1), CAP_NATS),
        (None, 0.1),
    ],
)
def test_the_coarser_type_and_a_low_temperature_make_the_limit(numerics, limit):
    assert limit_of(numerics)[0] == pytest.approx(limit)


def test_five_times_the_first_step_counts_up_to_a_cap():
    types = Numerics("bfloat16", "bfloat16", "", 1.0)
    watch = GapWatch(LogProbGapLimit())
    assert watch.add({GAP: 0.04}, types) is None
    assert watch.add({GAP: 0.19}, types) is None
    excess = watch.add({GAP: 0.21, LARGEST: 3.0}, types)
    assert excess is not None
    assert excess.limit == pytest.approx(0.2)
    watch.load_state_dict({**watch.state_dict(), "first_nats": 0.09})
    assert watch.add({GAP: 0.29}, types) is None
    excess = watch.add({GAP: 0.31}, types)
    assert excess is not None
    assert excess.limit == CAP_NATS


def test_a_limit_of_the_users_own_is_taken_and_a_wrong_one_refused():
    watch = GapWatch(LogProbGapLimit(limit_nats=0.7))
    assert watch.add({GAP: 0.6}, None) is None
    assert watch.add({GAP: 0.8}, None) is not None
    with refusal("limit_nats"):
        LogProbGapLimit(limit_nats=0.0)
    with refusal("factor"):
        LogProbGapLimit(factor=0.5)


def test_steps_without_a_gap_and_gaps_that_are_not_finite_say_nothing():
    watch = GapWatch(LogProbGapLimit())
    for metrics in ({}, {GAP: math.nan}, {GAP: math.inf}):
        assert watch.add(metrics, None) is None
    assert watch.first is None


def test_rows_of_two_kinds_and_masked_tokens_are_counted_apart():
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    ours = torch.zeros(3, 3)
    theirs = torch.tensor([[0.1, 0.3, math.nan], [2.0, math.nan, math.nan], [math.nan] * 3])
    gap = LogProbGap()
    gap.add(theirs, ours, mask, torch.tensor([True, False, True]))
    assert gap.metrics(gap.sums()) == {
        GAP: pytest.approx(0.2), LARGEST: pytest.approx(0.3), OFF_POLICY: pytest.approx(2.0),
    }  # fmt: skip
    assert LogProbGap.metrics(LogProbGap().sums()) == {}


@pytest.mark.parametrize(
    ("dtype", "autocast", "precision", "expected"),
    [
        ("float32", None, "highest", "float32"),
        ("float32", None, "high", "tf32"),
        ("float32", None, "medium", "bfloat16"),
        ("float32", "bfloat16", "highest", "bfloat16"),
        ("float64", None, "high", "float64"),
        ("float16", None, "highest", "float16"),
    ],
)
def test_the_type_that_a_model_computes_in_is_the_coarsest(dtype, autocast, precision, expected):
    model = TinyModel(dtype=dtype, hidden_size=8, intermediate_size=8, num_heads=1).load_causal_lm("cpu")
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        assert compute_type(model, autocast) == expected
    finally:
        torch.set_float32_matmul_precision(before)
    model.lm_head.to(torch.bfloat16)
    assert compute_type(model, autocast) == "bfloat16"
