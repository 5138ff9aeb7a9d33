"""Rows with images: log-probs, gradients and responses are those of transformers for each row alone."""

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import short_where
from image_models import FAMILIES, PLACEHOLDERS, picture, save_image_model
from PIL import Image
from refusals import refusal
from roles import gradients, largest_difference, start_actor, start_critic, with_experience

from verl.engines.chunked_logprobs import token_log_probs
from verl.models.images import images_of
from verl.models.pretrained import Pretrained, quiet_transformers
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout
from verl.rollout.hf_rows import SlotRows
from verl.rollout.rows import left_padded, media_fields

TOLERANCE = {"qwen3_5": 1e-4}  # its linear attention computes in float32
CHEAP = {"qwen2_5_vl", "idefics3"}

Prompt = tuple[str, list[Image.Image]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Any:
    """Family -> its model, saved at first use."""
    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in made:
            made[family] = save_image_model(tmp_path_factory.mktemp(family) / "model", family)
        return made[family]

    return of


def source(path: Path, **options: Any) -> Pretrained:
    return Pretrained(path=str(path), dtype="float64", images=True, **{"freeze": (), **options})


def prompts_of(family: str) -> list[Prompt]:
    """Two prompts that differ in their image alone, several images of several sizes, and none."""
    here = PLACEHOLDERS[family]
    long = "many words so that a packed line is shorter than the padded rows, and some more of them"
    return [
        (f"{here}how many?", [picture(1)]),
        (f"{here}how many?", [picture(2)]),
        (f"a{here}b{here}c", [picture(3), picture(4, 40, 16)]),
        (long, []),
        (f"{here}what?", [picture(5, 16, 40)]),
    ]


def batch_of(tokenizer: Any, prompts: list[Prompt]) -> DataProto:
    processor = images_of(tokenizer)
    assert processor is not None
    encoded = [processor.encode(*prompt) for prompt in prompts]
    tokens, mask = left_padded([ids for ids, _ in encoded], tokenizer.pad_token_id)
    numbers = torch.arange(len(prompts))
    fields = {"prompts": tokens, "prompt_mask": mask, "prompt_ids": numbers, "group_ids": numbers}
    keys = [zlib.crc32(b"".join(image.tobytes() for image in images)) for _, images in prompts]
    media = media_fields([(key, media or None) for key, (_, media) in zip(keys, encoded, strict=True)])
    return DataProto.from_dict(fields).union(media)


def sampled(actor: Any, prompts: DataProto, num_samples: int = 3) -> DataProto:
    rows = actor.generate(prompts, GenerationRequest(0, num_samples))
    return rows.union(prompts.select([], [])[torch.arange(len(prompts)).repeat_interleave(num_samples)])


def plain_model(path: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    with quiet_transformers():
        return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float64).eval()


def plain_inputs(model: Any, rows: DataProto, row: int) -> dict[str, torch.Tensor]:
    """What the model's own forward takes for a row alone."""
    ids = rows["input_ids"][row][rows["attention_mask"][row].bool()][None]
    if not int(rows["media_keys"][row]):
        return {"input_ids": ids}
    media = {name.removeprefix("media."): x[row] for name, x in rows.ragged.items()}
    types = ids == model.config.image_token_id
    if model.config.model_type == "gemma3":
        media["token_type_ids"] = types.long()
    elif "image_grid_thw" in media:
        media["mm_token_type_ids"] = types.int()
    return {"input_ids": ids, **media}


def plain_log_probs(model: Any, rows: DataProto, row: int) -> torch.Tensor:
    inputs, width = plain_inputs(model, rows, row), int(rows["prompt_mask"][row].sum())
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None
    logits = model(**inputs, use_cache=False).logits[0, width - 1 : -1]
    return logits.log_softmax(-1).gather(-1, inputs["input_ids"][0, width:, None])[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["auto", "off"])
@pytest.mark.parametrize("family", short_where(FAMILIES, CHEAP.__contains__))
def test_log_probs_and_gradients_are_those_of_a_plain_forward_pass_of_each_row(family, packing, saved):
    path = saved(family)
    actor = start_actor(source(path), HFRollout(max_new_tokens=9), packing=packing, micro_batch_tokens=800)
    rows = sampled(actor, batch_of(actor.tokenizer, prompts_of(family)))
    rows = with_experience(rows, actor)
    packed = [micro.packing is not None for micro in actor.engine.micro_batches(rows)]
    assert any(packed) == (packing == "auto" and family not in ("gemma3", "qwen3_5"))
    model, bound = plain_model(path), TOLERANCE.get(family, 1e-9)
    chosen = rows["responses"] != model.config.image_token_id  # transformers refuses a row that has sampled one
    alone = [row for row in range(len(rows)) if bool((chosen | ~rows["response_mask"])[row].all())]
    assert len(alone) > 8
    for row in alone:
        mask = rows["response_mask"][row]
        plain = plain_log_probs(model, rows, row)
        for name in ("old_log_probs", "rollout_log_probs"):
            assert (rows[name][row][mask] - plain).abs().max() < bound, (name, row)
    rows = rows[alone]
    weight = rows["advantages"] * rows["response_mask"]
    for row in range(len(rows)):
        (plain_log_probs(model, rows, row) * weight[row][rows["response_mask"][row]]).sum().backward()

    def weighted(module: Any, micro: Any, totals: Any) -> Any:
        log_probs = token_log_probs(module, actor.head, micro).log_probs
        return (log_probs * micro.tensors["advantages"] * micro.tensors["response_mask"]).sum(), {}

    actor.engine.forward_backward(rows, weighted)
    found, expected = gradients(actor.model), gradients(model)
    largest = max(float(x.abs().max()) for x in expected.values())  # norms of transformers compute in float32
    assert largest_difference(found, {name: expected[name] for name in found}) < max(bound, 1e-6) * largest
    assert {name for name in expected if float(expected[name].abs().max())} <= found.keys()


@pytest.mark.slow
@pytest.mark.parametrize("family", short_where(FAMILIES, CHEAP.__contains__))
def test_responses_of_prompts_that_differ_in_their_image_alone_are_those_of_each_alone(family, saved):
    path = saved(family)
    actor = start_actor(source(path), HFRollout(max_new_tokens=9))
    prompts = batch_of(actor.tokenizer, prompts_of(family))
    rows = sampled(actor, prompts)
    assert torch.equal(prompts["prompts"][0], prompts["prompts"][1])
    first, second = rows["rollout_log_probs"][0], rows["rollout_log_probs"][3]
    assert abs(float(first[0] - second[0])) > 1e-3, "the image does not matter, so this test could not fail"
    for number in range(len(prompts)):
        one = sampled(actor, prompts[number : number + 1])
        other = rows[3 * number : 3 * number + 3]
        for row in range(3):
            mask = one["response_mask"][row]
            length = int(mask.sum())
            assert torch.equal(one["responses"][row][mask], other["responses"][row][:length])
            gap = one["rollout_log_probs"][row][mask] - other["rollout_log_probs"][row][:length]
            assert gap.abs().max() < TOLERANCE.get(family, 1e-9)


@pytest.mark.first_rows(1)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3"])
def test_stored_prompts_that_differ_in_their_image_alone_are_two(family, saved, monkeypatch):
    stored, put = [], SlotRows._put_behind_prompts

    def noted(rows, admitted):
        found = put(rows, admitted)
        stored.append(len(rows._prompts))
        return found

    monkeypatch.setattr(SlotRows, "_put_behind_prompts", noted)
    path, text = saved(family), f"{PLACEHOLDERS[family]}{'how many? ' * 8}"
    actor = start_actor(source(path), HFRollout(max_new_tokens=5))
    rows = sampled(actor, batch_of(actor.tokenizer, [(text, [picture(1)]), (text, [picture(2)])]))
    assert stored[-1] == 2
    model, compared = plain_model(path), 0
    for row in range(len(rows)):
        mask = rows["response_mask"][row]
        if not bool((rows["responses"][row][mask] == model.config.image_token_id).any()):
            assert (rows["rollout_log_probs"][row][mask] - plain_log_probs(model, rows, row)).abs().max() < 1e-9
            compared += 1
    assert compared > 3


def test_an_image_token_that_the_policy_has_sampled_is_a_token_like_others(saved):
    actor = start_actor(source(saved("qwen2_5_vl")), HFRollout(max_new_tokens=4))
    prompts = batch_of(actor.tokenizer, prompts_of("qwen2_5_vl")[:2])
    rows = sampled(actor, prompts, 1)
    stray = rows["responses"].clone()
    stray[0, 1] = actor.model.config.image_token_id
    width = rows["prompts"].shape[1]
    ids = torch.cat([rows["input_ids"][:, :width], stray], dim=1)
    rows = rows.select([name for name in rows.batch if name not in ("responses", "input_ids")])
    rows = rows.union(DataProto.from_dict({"responses": stray, "input_ids": ids}))
    together = actor.compute_log_probs(rows)["old_log_probs"]
    embeddings, base = actor.model.get_input_embeddings(), actor.model.model
    processed = rows[:1]
    with torch.no_grad():  # by hand: the features in place of the placeholders of the prompt alone
        tokens = ids[:1][rows["attention_mask"][:1].bool()][None]
        grid, pixels = processed["media.image_grid_thw"][0], processed["media.pixel_values"][0]
        features = torch.cat(base.get_image_features(pixels, grid, return_dict=True).pooler_output)
        states = embeddings(tokens).clone()
        states[0, (tokens[0] == actor.model.config.image_token_id).nonzero()[: len(features), 0]] = features
        types = (tokens == actor.model.config.image_token_id).int()
        types[0, -stray.shape[1] :] = 0
        positions = base.get_rope_index(tokens, types, image_grid_thw=grid)[0]
        logits = actor.model(inputs_embeds=states, position_ids=positions, use_cache=False).logits
    count = int(rows["response_mask"][0].sum())
    plain = logits[0, -count - 1 : -1].log_softmax(-1).gather(-1, tokens[0, -count:, None])[:, 0]
    assert (together[0][:count] - plain).abs().max() < 1e-9


def test_a_prompt_with_too_few_placeholders_is_refused(saved):
    actor = start_actor(source(saved("idefics3")), HFRollout(max_new_tokens=4))
    prompts = batch_of(actor.tokenizer, prompts_of("idefics3")[:1])
    cut = DataProto.from_dict(
        {name: prompts[name] for name in ("prompt_ids", "group_ids", "media_keys")}
        | {name: prompts[name][:, 4:] for name in ("prompts", "prompt_mask")},
        ragged=prompts.ragged,
    )
    with refusal("actor.model", value=20):
        actor.generate(cut, GenerationRequest(0, 1))


@pytest.mark.slow
def test_a_critic_sees_the_images(saved):
    path = saved("qwen2_5_vl")
    actor, critic = start_actor(source(path), HFRollout(max_new_tokens=5)), start_critic(source(path))
    rows = sampled(actor, batch_of(actor.tokenizer, prompts_of("qwen2_5_vl")))
    with torch.no_grad():
        critic.engine.model.head.weight.normal_()
    together = critic.compute_values(rows)["values"]
    for row in range(0, len(rows), 4):
        mask = rows["response_mask"][row]
        alone = critic.compute_values(rows[row : row + 1])["values"][0]
        assert (alone[mask] - together[row][mask]).abs().max() < 1e-9
    states = plain_model(path).model(**plain_inputs(plain_model(path), rows, 0), use_cache=False).last_hidden_state[0]
    width, count = int(rows["prompt_mask"][0].sum()), int(rows["response_mask"][0].sum())
    values = critic.engine.model.head(states[width - 1 : width - 1 + count]).squeeze(-1)
    assert (values - together[0][:count]).abs().max() < 1e-9
