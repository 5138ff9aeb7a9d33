"""Images in requests: OpenAI's own client, and answers that are those to the same prompts of a data set."""

import base64
import io
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import refusals
import torch
from image_models import picture, reader, save_image_model
from on_use import OnUse
from PIL import Image
from refusals import refused
from serving.listening import asked as asked_texts
from serving.listening import listening

from verl.cli.generate import located, one_prompt, running, server_of
from verl.data.rlhf_dataset import RLHFDataset
from verl.serving import http_api

openai = OnUse("openai")
FAMILY, TEMPERATURE = "qwen2_5_vl", 0.9


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("serving")
    model = save_image_model(directory / "model", FAMILY)
    overrides = ["reward=length", "data.prompt_key=prompt", "rollout.max_new_tokens=6", "actor.model.dtype=float64"]
    overrides += [f"rollout.temperature={TEMPERATURE}", "data.max_pixels=1500", "rollout.stop_token_ids=[20,21,22,23]"]
    with located(str(model)) as saved, running(saved, "ppo", overrides, one_prompt(directory)) as made:
        yield made


@pytest.fixture(scope="module")
def server(trainer):
    with listening(server_of(trainer, "127.0.0.1", 0, timeout_s=60.0, max_tokens=400)) as made:
        yield made


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def url_of(image) -> str:
    image.save(content := io.BytesIO(), "PNG")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def user(text: str, *urls: str) -> dict:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


asked = partial(asked_texts, logprobs=True)


def told(answer) -> torch.Tensor:
    return torch.tensor([token.logprob for token in answer.choices[0].logprobs.content], dtype=torch.float64)


def media_of(*images) -> dict[str, torch.Tensor]:
    processor = reader(FAMILY).image_processor
    return processor.encode(processor.placeholder * len(images), list(images))[1]


def plain(trainer, answer, media: dict[str, torch.Tensor]) -> torch.Tensor:
    """Log-probs of an answer by the model's own forward pass over all its tokens and these images."""
    model, prompt = trainer.actor_worker.model, answer.prompt_token_ids
    ids = torch.tensor([[*prompt, *answer.choices[0].token_ids]])
    types = (ids == model.config.image_token_id).int()
    model.model.rope_deltas = None
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=types, use_cache=False, **media).logits
    model.model.rope_deltas = None
    log_probs = (logits[0, len(prompt) - 1 : -1].double() / TEMPERATURE).log_softmax(-1)
    return log_probs.gather(1, ids[0, len(prompt) :, None])[:, 0]


def test_an_answer_is_that_to_the_same_prompt_of_a_data_set(client, trainer):
    images = [picture(1), picture(2, 80, 40)]  # the second one is over data.max_pixels
    answer = asked(client, [user("how many?", *map(url_of, images))], seed=3)
    content = [{"type": "image", "image": image} for image in images] + [{"type": "text", "text": "how many?"}]
    rows = [{"prompt": [{"role": "user", "content": content}]}]
    data = RLHFDataset.from_rows(rows, trainer.tokenizer, {"max_prompt_length": 400, "max_pixels": 1500})
    batch = data.collate([0])
    assert answer.prompt_token_ids == batch["prompts"][0].tolist()
    media = {name.removeprefix("media."): x[0] for name, x in batch.ragged.items()}
    assert torch.allclose(told(answer), plain(trainer, answer, media), atol=1e-9)


def test_requests_of_equal_tokens_and_other_images_get_answers_of_their_own(client, trainer):
    images = [picture(number) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda image: asked(client, [user("how many?", url_of(image))], seed=3), images))
    assert len({tuple(answer.prompt_token_ids) for answer in answers}) == 1
    assert len({float(told(answer)[0]) for answer in answers}) == 4
    for image, answer in zip(images, answers, strict=True):
        assert torch.allclose(told(answer), plain(trainer, answer, media_of(image)), atol=1e-9)


def test_a_conversation_goes_on_with_further_images(client, trainer):
    images, token = [picture(1), picture(2), picture(3)], trainer.actor_worker.model.config.image_token_id
    for seed in range(9):  # until a turn in which the policy has not written the token of images
        messages = [user("how many?", url_of(images[0]))]
        answer = asked(client, messages, seed=seed)
        if token not in answer.choices[0].token_ids:
            break
    drawn = [*answer.prompt_token_ids, *answer.choices[0].token_ids]
    messages.append(answer.choices[0].message)
    for last in images[1:]:
        after = asked(client, [*messages, user("and here?", url_of(last))])
        assert after.continues
        assert after.prompt_token_ids[: len(drawn)] == drawn
        assert torch.allclose(told(after), plain(trainer, after, media_of(images[0], last)), atol=1e-9)
    changed = [user("how many?", url_of(images[1])), *messages[1:], user("and here?")]
    assert not asked(client, changed).continues  # another image, another conversation


def test_an_image_after_a_placeholder_that_the_policy_has_written_is_refused(client, server, trainer, monkeypatch):
    messages = [user("how many?", url_of(picture(1)))]
    answer = asked(client, messages)
    messages += [answer.choices[0].message, user("and here?", url_of(picture(2)))]
    for key, known in server.endpoint.known._known.items():
        server.endpoint.known._known[key] = known.__class__(**{**vars(known), "takes_images": False})
    with pytest.raises(openai.BadRequestError, match="no image can follow"):
        asked(client, messages)


def image(url):
    return lambda client: asked(client, [user("?", url)])


def blank(width, height):
    return lambda client: asked(client, [user("?", url_of(Image.new("RGB", (width, height))))])


PNG = url_of(picture(1))
test_other_images_are_refused_by_their_place = refused(
    ("messages.0.content.0.image_url.url", refusals.ANY, image("https://example.org/a.png")),
    ("messages.0.content.0.image_url.url", refusals.ANY, image("file:///etc/passwd")),
    ("messages.0.content.0.image_url.url", refusals.ANY, image("0.png")),
    ("messages.0.content.0.image_url.url", refusals.ANY, image("data:image/png;base64,????")),
    ("messages.0.content.0.image_url.url", refusals.ANY, image(PNG[:200])),
    ("messages.0.content.0.image_url.url", refusals.ANY, blank(9000, 9000)),
    ("messages.0.content.0.image_url.url", "1 x 900 pixels", blank(1, 900)),
    ("for 0 images", refusals.ANY, lambda client: asked(client, [user("<|image_pad|>")])),
    ("for 1 images", refusals.ANY, lambda client: asked(client, [user("<|image_pad|>", PNG)])),
    ("messages", "input_audio", lambda client: asked(client, [{"role": "user", "content": [{"type": "input_audio"}]}])),
    kind="openai.BadRequestError",
    first=4,
)


def test_the_place_of_an_image_is_in_openais_error_object(client):
    with pytest.raises(openai.BadRequestError) as caught:
        asked(client, [user("?", PNG, "http://example.org/a.png")])
    assert caught.value.body["param"] == "messages"
    assert caught.value.body["message"].startswith("messages.0.content.1.image_url.url: ")


def test_a_body_may_be_as_long_as_its_images(client, server, monkeypatch):
    large = url_of(picture(1, 200, 200))  # 160 KB, more than a conversation of texts could have
    assert asked(client, [user("?", large)]).usage.prompt_tokens < 400
    monkeypatch.setattr(http_api, "IMAGE_BYTES", 0)
    with pytest.raises(openai.APIStatusError, match="bytes"):
        asked(client, [user("?", large)])
