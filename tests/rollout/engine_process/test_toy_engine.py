"""An engine of one's own in a process of its own has the proof, the sync, the sleep and the restart that vLLM has."""

import os
import signal
from collections.abc import Callable, Iterator

import pytest
from rollout.engine_process.toy_engine import ToyRollout
from rollout.engines import agreement, generate, random_prompts, save_family, shake

from verl.errors import WeightSyncError
from verl.models.tiny import character_tokenizer
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout
from verl.rollout.process_engine import ProcessEngine

REQUEST = GenerationRequest(step=1, num_samples=2)
SKIPPED = "model.norm.weight"


@pytest.fixture
def started(tmp_path) -> Iterator[Callable[..., ProcessEngine]]:
    """Start the engine for a model; it ends with the test."""
    source, engines = save_family(tmp_path, "qwen2_tied"), []

    def start(**options) -> ProcessEngine:
        model = source.load_causal_lm("cpu")
        engines.append(ToyRollout(max_new_tokens=6, **options).attach(model, source.load_tokenizer(), seed=0))
        engines[-1].sync()
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def agrees_with_hf(engine: ProcessEngine) -> bool:
    prompts, plain = random_prompts(4, 20), HFRollout(max_new_tokens=6)
    ours = plain.attach(engine.model, character_tokenizer(), engine.seed)
    share, gap = agreement(generate(engine, prompts, REQUEST), generate(ours, prompts, REQUEST))
    return share == 1.0 and gap < 1e-4


def test_it_follows_the_trainer_sleeps_and_is_started_again_after_it_was_killed(started):
    engine = started()
    assert agrees_with_hf(engine)
    shake(engine.model)
    assert not agrees_with_hf(engine)
    assert engine.sync().metrics["sync/unproven_tensors"] == 0
    assert agrees_with_hf(engine)
    engine.weights.sleep()
    engine.sync()
    assert agrees_with_hf(engine)
    first = engine.process_id
    os.kill(first, signal.SIGKILL)
    assert agrees_with_hf(engine)
    assert engine.process_id != first


def test_a_tensor_that_it_does_not_load_is_named(started):
    engine = started(skips=SKIPPED)
    assert agrees_with_hf(engine)
    shake(engine.model)
    with pytest.raises(WeightSyncError) as caught:
        engine.sync()
    assert caught.value.names == (SKIPPED,)
    assert "stale" in caught.value.faults[0]
