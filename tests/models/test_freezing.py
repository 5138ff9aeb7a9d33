"""What of an image-text model is trained: its vision tower only if it is asked for."""

import pytest
import torch
from image_models import save_image_model
from model_paths.families import prompts
from refusals import refusal
from roles import experience, plain_log_probs, start_actor, weights

from verl.models.images import freeze, images_of, vision_tower
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained
from verl.models.tiny import TinyModel
from verl.rollout.hf import HFRollout


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_image_model(tmp_path_factory.mktemp("qwen") / "model", "qwen2_5_vl")


def trained(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_the_vision_tower_is_frozen_unless_all_is_trained(path):
    model = Pretrained(path=str(path)).load_causal_lm("cpu")
    everything = trained(model)
    freeze(model, None, "actor.model")
    assert everything - trained(model) == {name for name in everything if name.startswith("model.visual.")}
    actor = start_actor(Pretrained(path=str(path), freeze=()))
    assert trained(actor.model) == everything
    actor = start_actor(Pretrained(path=str(path), freeze=("embed_tokens", "layers.0")))
    rest = everything - trained(actor.model)
    assert {name.rpartition(".")[0].split(".layers.0")[0] for name in rest} == {
        "model.language_model.embed_tokens",
        "model.language_model",
    }


def test_a_text_model_has_nothing_frozen_and_no_tower():
    actor = start_actor(TinyModel())
    assert all(p.requires_grad for p in actor.model.parameters())
    assert vision_tower(actor.model) is None
    assert images_of(actor.tokenizer) is None


@pytest.mark.parametrize("names", [("visual.nothing",), ("model", "lm_head")], ids=["no module", "nothing is left"])
def test_names_that_match_nothing_and_that_leave_nothing_are_refused(names, path):
    with refusal("actor.model.freeze"):
        start_actor(Pretrained(path=str(path), freeze=names))


def test_adapters_leave_the_tower_out_unless_it_is_trained(path):
    def adapted(**options):
        actor = start_actor(Pretrained(path=str(path), **options), lora=LoRA(rank=2))
        return {"visual" in name for name in trained(actor.model)}

    assert adapted() == {False}
    assert adapted(freeze=()) == {False, True}


@pytest.mark.slow
def test_an_image_text_model_trains_on_text_alone(path):
    from transformers import AutoModelForImageTextToText

    actor = start_actor(Pretrained(path=str(path)), HFRollout(max_new_tokens=6))
    rows = experience(actor, prompts(), 2)
    before, plain = weights(actor.model), AutoModelForImageTextToText.from_pretrained(path).eval()
    for row in range(len(rows)):
        expected = plain_log_probs(plain, rows, row)
        for name in ("old_log_probs", "rollout_log_probs"):
            assert (rows[name][row][rows["response_mask"][row]] - expected).abs().max() < 1e-4
    actor.update(rows)
    changed = {name for name, x in weights(actor.model).items() if not torch.equal(x, before[name])}
    assert changed
    assert not any("visual" in name for name in changed)
