"""How often training and sampling would make their process wait for a GPU: counted per micro-batch and per token."""

from dataclasses import replace

import pytest
import torch
from devices.device_syncs import DeviceSyncs, is_in_package, pretend_micro_batches
from devices.flash_kernel import flash_on_cpu
from random_models import save_random_model
from roles import experience, start_actor, start_critic, with_experience
from trial_rows import TrialRow, as_batch

from verl.model_paths.micro_batch import cut_into_micro_batches
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained
from verl.models.tiny import TinyModel
from verl.ops import attention
from verl.ops.sampling import inverse_cdf, inverse_cdf_by_blocks

MODEL = TinyModel(hidden_size=32, intermediate_size=64)
PER_UPDATE = 3  # metrics in one question, the norm, and the scale of the gradients


@pytest.fixture
def pretended(monkeypatch):
    return pretend_micro_batches(monkeypatch)


def counted(syncs, work):
    syncs.counts.clear()
    with syncs:
        work()
    return dict(syncs.counts)


def micro_batches_of(rows, role):
    return len(list(cut_into_micro_batches(rows, role.engine.micro_batch_tokens, role.engine.paths(rows))))


OTHERS = [
    pytest.param(role, packing, marks=pytest.mark.exhaustive)
    for role, packing in (("actor", "off"), ("critic", "auto"), ("critic", "off"))
]


@pytest.mark.parametrize(("role", "packing"), [("actor", "auto"), *OTHERS])
def test_an_update_waits_for_the_device_as_often_with_many_micro_batches_as_with_one(role, packing, prompts, pretended):
    start = start_actor if role == "actor" else start_critic
    found, numbers = {}, {}
    rows = experience(start_actor(MODEL), prompts(), num_samples=2)
    for budget in (10_000, 25):
        worker = start(MODEL, packing=packing, micro_batch_tokens=budget, gradient_checkpointing=True)
        worker.update(rows)  # the first batch is looked at in another way
        pretended.on_device(list(worker.engine.model.parameters()))
        numbers[budget] = micro_batches_of(rows, worker)
        found[budget] = counted(pretended, lambda worker=worker: worker.update(rows))
    assert numbers[25] >= numbers[10_000] + 3
    # Of padded rows transformers asks whether the mask of padding is needed, once per forward pass.
    asked = 0 if packing == "auto" else numbers[25] - numbers[10_000]
    assert found[25].pop("item") - found[10_000].pop("item") <= asked
    assert found[25] == found[10_000]  # none of ours per micro-batch, layer or tensor
    assert sum(found[25].values()) <= PER_UPDATE, found[25]


@pytest.mark.slow
def test_a_packed_layer_computed_by_the_kernel_takes_half_of_the_operations_that_packing_adds(monkeypatch, pretended):
    """Operations of a layer and micro-batch, forward and backward: 172 of padded rows, and 271 under masks."""
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(4, 60, (20 + n,), generator=draw) for n in range(4)]
    batch = as_batch(
        [TrialRow(p, torch.randint(4, 60, (5 + 3 * n,), generator=draw)) for p in prompts for n in range(6)]
    )
    monkeypatch.setattr(attention, "takes_fewer_heads", lambda query, value, mask: mask is None)  # as on a GPU

    def of_a_layer(packing, is_used=False):
        found = {}
        for layers in (1, 2):
            actor = start_actor(replace(MODEL, num_layers=layers), packing=packing)
            rows = with_experience(batch, actor)
            with flash_on_cpu(monkeypatch, is_used):
                actor.update(rows)
                pretended.on_device([*actor.engine.model.parameters(), *actor.engine.model.buffers()])
                pretended.launches = 0
                counted(pretended, lambda actor=actor, rows=rows: actor.update(rows))
            found[layers] = pretended.launches
        return found[2] - found[1]

    padded, masks, kernel = of_a_layer("off"), of_a_layer("auto"), of_a_layer("auto", is_used=True)
    assert masks > 1.4 * padded
    assert kernel - padded <= 0.3 * (masks - padded)


def test_scores_come_to_main_memory_once_whatever_the_number_of_micro_batches(prompts, pretended):
    actor = start_actor(MODEL, micro_batch_tokens=25)
    rows = experience(actor, prompts(), num_samples=2)
    assert micro_batches_of(rows, actor) >= 4
    found = counted(pretended, lambda: actor.compute_log_probs(rows))
    assert found.pop("to") == 2  # log-probs and entropies
    assert not sum(found.values()), found


@pytest.mark.exhaustive
def test_the_load_of_experts_is_counted_without_a_question_per_micro_batch(prompts, pretended, tmp_path):
    model = Pretrained(path=str(save_random_model(tmp_path, "qwen3_moe", torch.float32)))
    found = {}
    rows = experience(start_actor(model), prompts(), num_samples=2)
    for budget in (10_000, 25):
        worker = start_actor(model, micro_batch_tokens=budget, gradient_checkpointing=True, lora=LoRA(rank=2))
        worker.update(rows)
        found[budget] = counted(pretended, lambda worker=worker: worker.update(rows))
    assert found[25] == found[10_000]
    assert sum(found[25].values()) <= PER_UPDATE + 2, found  # the load of all layers, and its mean


def test_the_counter_sees_what_waits():
    syncs = DeviceSyncs()
    x = syncs.on_device(torch.arange(6.0))
    with syncs:
        y = x * 2
        float(y.sum()), y.tolist(), y[y > 3], y.nonzero(), bool((y > 0).all())
        torch.ones(3).tolist()
    assert syncs.counts == {"item": 2, "tolist": 1, "boolean index": 1, "nonzero": 1}


def test_drawing_from_a_large_vocabulary_asks_the_device_nothing_in_few_operations():
    syncs = DeviceSyncs()
    probs = syncs.on_device(torch.rand(4, 128_256).softmax(-1))
    u = syncs.on_device(torch.rand(4, dtype=torch.float64))
    with syncs:
        tokens = inverse_cdf_by_blocks(probs, u)
    assert not sum(syncs.counts.values())
    assert syncs.launches <= 45
    assert tokens.tolist() == inverse_cdf(probs, u).tolist()


@pytest.mark.parametrize("checkout", ["verl", "a checkout/verl", "verl/verl/verl"])
def test_an_environment_below_a_checkout_called_verl_is_not_the_package(checkout, tmp_path):
    package = tmp_path / checkout / "verl"
    assert is_in_package(str(package / "ops" / "packing.py"), package)
    for file in (
        ".venv/lib/python3.11/site-packages/torch/nn/modules/module.py",
        "tests/batches.py",
        "verl_rewards.py",
    ):
        assert not is_in_package(str(package.parent / file), package)
