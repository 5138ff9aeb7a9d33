"""An engine that keeps its GPU memory while the trainer works: counted, refused where it does not fit; and the limit of
the probe by the types of both sides."""

from __future__ import annotations

import numpy as np
import pytest

from verl.component import BuildContext
from verl.compose.compose import compose_root
from verl.compose.validate import validate
from verl.errors import ConfigError, WeightSyncError
from verl.trainer.plan import memory_estimate
from verl.trainer.plan.memory_estimate import estimate_ppo, log_estimate
from verl.weight_verification.logprob_probe import ALLOWED_NATS
from verl.weight_verification.verifier import TrainerSide, VerifyReply, verify_sync

AHEAD = ("trainer.rollout_ahead=1", "algorithm.correction=token_truncate")


def run_of(*choices):
    sizes = ["actor=tiny_scratch", "critic=none", "algorithm=grpo", "rollout=vllm", "rollout.kv_cache_gib=2"]
    return validate(compose_root("ppo", [*sizes, *choices]))


@pytest.mark.parametrize("choices", [("rollout.sleep=false",)])
def test_an_engine_that_never_rests_is_in_every_phase(choices):
    resting, awake = (estimate_ppo(run_of(*own), on_host=False) for own in ((), choices))
    assert not resting.stays_awake
    assert awake.stays_awake
    for phase in ("score", "update actor"):
        assert awake.phases()[phase] - resting.phases()[phase] == awake.cache
    assert awake.phases()["generate"] == resting.phases()["generate"]
    assert resting.beside_engine < awake.beside_engine  # the most that a phase takes, not what rests
    assert awake.beside_engine >= resting.phases()["update actor"]
    assert not estimate_ppo(run_of(*choices), on_host=True).stays_awake


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        (
            ("rollout.sleep=false",),
            r"rollout.sleep is false: the engine keeps its GPU memory, so .* Set rollout.sleep=true",
        )
    ],
)
def test_it_is_refused_before_anything_loads_where_it_does_not_fit(choices, words, monkeypatch, tmp_path):
    monkeypatch.setattr(memory_estimate, "free_memory", lambda device, processes: 2 << 30)
    monkeypatch.setattr(memory_estimate, "_is_on_host", lambda settings: False)
    context = BuildContext(device="cuda:0", run_dir=tmp_path)
    with pytest.raises(ConfigError, match=words):
        log_estimate(run_of(*choices), context, tmp_path)
    assert log_estimate(run_of("rollout.kv_cache_gib=null"), context, tmp_path) is not None


@pytest.mark.parametrize(("own", "allowed"), [("float32", 1e-3), ("tf32", 5e-2), ("bfloat16", 3e-1)])
def test_the_probe_allows_what_the_coarser_type_of_both_sides_rounds_away(own, allowed):
    assert ALLOWED_NATS[own] == allowed

    def proven(gap):
        trainer = TrainerSide({}, np.zeros((1, 4)), "float32", compute_type=own)
        return verify_sync(trainer, VerifyReply({}, np.full((1, 4), gap)))

    assert proven(0.9 * allowed).metrics["sync/probe_gap_nats"] == pytest.approx(0.9 * allowed)
    with pytest.raises(WeightSyncError):
        proven(1.1 * allowed)
