"""What a switch costs, and that measuring it changes nothing."""

import pytest

from verl.errors import ConfigError
from verl.hybrid.actor import HybridActor
from verl.hybrid.benchmark import measure_switch_overhead

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def actor(dir32):
    return HybridActor.from_pretrained(dir32, device="cpu")


@pytest.mark.parametrize("mode", ["eval", "train", "round_trip", "reload"])
def test_every_way_of_switching_is_timed_and_weighed_and_leaves_the_actor_as_it_was(mode, actor, tokenizer):
    ids = tokenizer(["1+2="], return_tensors="pt")["input_ids"]
    actor.train()(input_ids=ids, labels=ids).loss.backward()
    actor.model.lm_head.eval()
    before = {name: (p.data_ptr(), p.grad.clone()) for name, p in actor.named_parameters()}
    found = measure_switch_overhead(actor, mode=mode, repeats=3)
    assert found["latency_ms"] > 0
    assert found["mem_increase_mb"] >= 0
    assert found["mode"] == mode
    low, high = found["latency_ms_quartiles"]
    assert low <= found["latency_ms"] <= high
    assert all(
        p.data_ptr() == before[name][0] and p.grad.equal(before[name][1]) for name, p in actor.named_parameters()
    )
    assert actor.training
    assert not actor.model.lm_head.training


def test_a_mode_that_does_not_exist_is_refused(actor):
    with pytest.raises(ConfigError, match=r"mode is 'relod': must be one of .* Did you mean reload\?"):
        measure_switch_overhead(actor, mode="relod")  # type: ignore
    with pytest.raises(ConfigError, match="repeats is 0"):
        measure_switch_overhead(actor, repeats=0)
