"""Weights are cast to the dtype of the computation once per update, and their gradients add up in their own dtype."""

from collections import Counter

import pytest
import torch
from cases import exhaustive
from roles import experience, gradients, start_actor
from torch.utils._python_dispatch import TorchDispatchMode

from verl.model_paths.micro_batch import cut_into_micro_batches
from verl.models import parallel_info
from verl.models.lora import LoRA
from verl.models.parallel_info import computing_in
from verl.models.tiny import TinyModel

MODEL = TinyModel(hidden_size=32, intermediate_size=64)


class Casts(TorchDispatchMode):
    """Counts casts of weights to bfloat16, and the calls that make them."""

    def __init__(self, model):
        super().__init__()
        self.names = {p.data_ptr(): name for name, p in model.named_parameters()}
        self.found, self.calls = Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        options = kwargs or {}
        cast = ()
        if func is torch.ops.aten._to_copy.default and options.get("dtype") == torch.bfloat16:
            cast = args[:1]
        elif func is torch.ops.aten._foreach_copy_.default and args[0][0].dtype == torch.bfloat16:
            cast = args[1]
        names = [name for x in cast if (name := self.names.get(x.data_ptr())) is not None]
        self.found.update(names)
        self.calls += bool(names)
        return func(*args, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"gradient_checkpointing": True}, *exhaustive({}, {"lora": LoRA(rank=2)})], ids=str
)
def test_an_update_of_many_micro_batches_casts_each_weight_once(options, prompts):
    actor = start_actor(MODEL, autocast="bfloat16", micro_batch_tokens=25, **options)
    rows = experience(actor, prompts(), num_samples=6)
    actor.update(rows)  # the first batch is looked at in another way
    assert len(list(cut_into_micro_batches(rows, 25, actor.engine.paths(rows)))) >= 4
    with Casts(actor.engine.model) as casts:
        actor.update(rows)
    assert casts.found.keys() == set(casts.names.values())
    assert set(casts.found.values()) == {1}
    assert casts.calls == 1


@pytest.mark.parametrize("held", [0, 2000, parallel_info.GRADIENT_BYTES], ids=["each", "some", "all of a pass"])
def test_gradients_of_several_backward_passes_are_those_of_weights_cast_for_each(held, monkeypatch):
    monkeypatch.setattr(parallel_info, "GRADIENT_BYTES", held)
    model = MODEL.load_causal_lm("cpu")
    ids = torch.randint(4, 60, (5, 9), generator=torch.Generator().manual_seed(0))

    def backward(row):
        model(input_ids=row[None]).logits.float().logsumexp(-1).sum().backward()

    for row in ids:
        with computing_in("bfloat16", model):
            backward(row)
    wanted = gradients(model)
    model.zero_grad()
    monkeypatch.setattr(parallel_info, "compute_device", lambda model: torch.device("meta"))  # not a CPU
    with computing_in("bfloat16", model):
        for row in ids:
            backward(row)
    found = gradients(model)
    assert found.keys() == wanted.keys()
    assert {x.dtype for x in found.values()} == {torch.float32}
    assert all(torch.equal(found[name], x) for name, x in wanted.items())


def test_a_model_that_does_not_train_gets_copies_without_gradients_and_its_weights_come_back():
    model = MODEL.load_causal_lm("cpu")
    before = dict(model.named_parameters())
    with torch.no_grad(), computing_in("bfloat16", model):
        made = model.state_dict(keep_vars=True).values()
        assert {x.dtype for x in made} == {torch.bfloat16}
        assert not any(x.requires_grad for x in made)
    assert all(after is before[name] for name, after in model.named_parameters())
