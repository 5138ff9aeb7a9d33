"""The training service with the unchanged SDK of Tinker as its client, and with clients that do what it does not."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from on_use import OnUse
from refusals import refusal
from service.test_session import TEXTS, same_bits

from verl import TrainingSession
from verl.cli.report.page import report
from verl.cli.report.read import read_run
from verl.service import service as module
from verl.service.adapters import BaseModel
from verl.service.data import Datum
from verl.service.http_api import application
from verl.service.service import TrainingService
from verl.service.wire import data_of

tinker, types, uvicorn = OnUse("tinker"), OnUse("tinker.types"), OnUse("uvicorn")
KEY = "tml-a-key"


@contextlib.contextmanager
def running(model, directory: Path, key: str | None = KEY, joins=True) -> Iterator[tuple[str, TrainingService]]:
    service = TrainingService(BaseModel(model, "cpu"), ["small", model.path], directory, seed=3, joins=joins)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(application(service, key), "127.0.0.1", port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}", service
    finally:
        server.should_exit = server.force_exit = True
        thread.join(60)


@pytest.fixture(scope="module")
def served(model32, tmp_path_factory):
    with running(model32, tmp_path_factory.mktemp("service")) as found:
        yield found


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


def client_of(served):
    return tinker.ServiceClient(base_url=served[0], api_key=KEY)


def adam(learning_rate=1e-2):
    return types.AdamParams(learning_rate=learning_rate)


def datum(ids: list[int], **inputs):
    fields = {"target_tokens": torch.tensor(ids[1:]), **{name: torch.tensor(x) for name, x in inputs.items()}}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=fields)


def rows(tokenizer) -> list[list[int]]:
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]


def test_the_sdk_trains_as_the_session_in_python(served, model32, tokenizer):
    client = client_of(served).create_lora_training_client("small", rank=4, seed=1).result()
    session = TrainingSession(model32, 4, seed=1, device="cpu")
    for _ in range(3):
        forward = client.forward_backward([datum(ids) for ids in rows(tokenizer)], "cross_entropy")
        step = client.optim_step(adam())
        output = session.forward_backward([Datum(ids[:-1], {"target_tokens": ids[1:]}) for ids in rows(tokenizer)])
        metrics = session.optim_step(1e-2)
        assert forward.result().metrics == {"loss:sum": pytest.approx(output.loss, rel=1e-12)}
        for found, expected in zip(forward.result().loss_fn_outputs, output.log_probs, strict=True):
            assert torch.equal(found["logprobs"].to_torch(), expected)
        assert step.result().metrics == pytest.approx(metrics)
    assert same_bits(served[1].model(client.model_id).session.weights(), session.weights())
    record = read_run(served[1].run_directory(client.model_id))
    assert list(record.column("actor/loss").steps) == [1, 2, 3]
    assert "actor/grad_norm" in report([record.directory])


@pytest.mark.slow
def test_reinforcement_learning_by_the_sdk_raises_the_reward(served, tokenizer):
    """The loop of the cookbook's rl_loop, with a reward for the letter `7`."""
    client = client_of(served).create_lora_training_client("small", rank=16, seed=0).result()
    prompt, wanted = tokenizer("1+2=", add_special_tokens=False)["input_ids"], tokenizer.encode("7")[-1]
    means = []
    for _ in range(12):
        sampler = client.save_weights_and_get_sampling_client().result()
        found = sampler.sample(
            types.ModelInput.from_ints(prompt), 32, types.SamplingParams(max_tokens=4, stop=[])
        ).result()
        rewards = torch.tensor([float(x.tokens.count(wanted)) for x in found.sequences])
        means.append(float(rewards.mean()))
        data = []
        for x, advantage in zip(found.sequences, (rewards - rewards.mean()).tolist(), strict=True):
            count = len(prompt) - 1
            data.append(
                types.Datum(
                    model_input=types.ModelInput.from_ints([*prompt, *x.tokens[:-1]]),
                    loss_fn_inputs={
                        "target_tokens": torch.tensor([*prompt[1:], *x.tokens]),
                        "logprobs": torch.tensor([0.0] * count + x.logprobs),
                        "advantages": torch.tensor([0.0] * count + [advantage] * len(x.tokens)),
                    },
                )
            )
        client.forward_backward(data, "importance_sampling")
        client.optim_step(adam(3e-2)).result()
    assert sum(means[-3:]) / 3 > 4 * max(sum(means[:3]) / 3, 0.05), means


def test_custom_losses_are_computed_by_the_client(served, tokenizer):
    client = client_of(served).create_lora_training_client("small", rank=4).result()
    data = [datum(ids) for ids in rows(tokenizer)]

    def squares(_, log_probs):
        return sum((x**2).sum() for x in log_probs), {"count": float(len(log_probs))}

    result = client.forward_backward_custom(data, squares).result()
    assert result.metrics["count"] == 4.0
    assert client.optim_step(adam()).result().metrics["grad_norm"] > 0


def test_samples_have_the_scores_that_are_asked_for(served, tokenizer):
    client = client_of(served).create_lora_training_client("small", rank=4, seed=5).result()
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = rows(tokenizer)[2]
    response = sampler.sample(
        types.ModelInput.from_ints(prompt), 2, types.SamplingParams(max_tokens=4, seed=1, stop=[], temperature=0.5),
        include_prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2,
    ).result()  # fmt: skip
    forward = client.forward([datum(prompt)], "cross_entropy").result()
    expected = forward.loss_fn_outputs[0]["logprobs"].to_torch()
    assert response.prompt_logprobs[0] is None
    assert torch.allclose(torch.tensor(response.prompt_logprobs[1:]), expected, atol=1e-4)
    assert response.topk_prompt_logprobs[0] is None
    for (first, *_), own in zip(response.topk_prompt_logprobs[1:], response.prompt_logprobs[1:], strict=True):
        assert first[1] >= own - 1e-5
    for sequence in response.sequences:
        assert len(sequence.tokens) == len(sequence.topk_logprobs) == 4
        for token, log_prob, best in zip(sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True):
            assert dict(best).get(token, log_prob) == pytest.approx(log_prob, abs=1e-4)
    last = sampler.sample(
        types.ModelInput.from_ints(prompt), 1, types.SamplingParams(max_tokens=1, seed=1),
        include_prompt_logprobs=True, prompt_logprobs_last_n=2,
    ).result()  # fmt: skip
    assert [x is None for x in last.prompt_logprobs] == [True] * (len(prompt) - 2) + [False] * 2
    assert len({x.sequence_id for x in response.sequences}) == 2
    assert sampler.compute_logprobs(types.ModelInput.from_ints(prompt)).result()[1:] == pytest.approx(
        expected.tolist(), abs=1e-4
    )
    assert sampler.compute_logprobs(types.ModelInput.from_ints(prompt[:1])).result() == [None]
    options = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
    first = sampler.sample(types.ModelInput.from_ints(prompt[:1]), 1, types.SamplingParams(max_tokens=1), **options)
    assert first.result().topk_prompt_logprobs == [None]


@pytest.mark.parametrize("sparse", [False, True])
def test_chosen_tokens_of_a_prompt_are_scored(served, tokenizer, sparse):
    sampler = client_of(served).create_sampling_client(base_model="small").result()
    prompt = rows(tokenizer)[2]
    chosen = torch.full((len(prompt) - 1, 8), -1)
    chosen[:, 0] = torch.tensor(prompt[1:])
    chosen[1, 5] = prompt[1]
    asked = (types.TensorData.from_torch_sparse if sparse else lambda x, pad_value: types.TensorData.from_torch(x))(
        chosen, pad_value=-1
    )
    assert (asked.sparse_crow_indices is not None) == sparse
    found = sampler.sample(
        types.ModelInput.from_ints(prompt), 1, types.SamplingParams(max_tokens=1, seed=1),
        include_prompt_logprobs=True, topk_prompt_logprobs=3, target_prompt_logprobs=asked,
    ).result()  # fmt: skip
    scores = found.target_prompt_logprobs.to_torch()
    assert scores[:, 0].tolist() == pytest.approx(found.prompt_logprobs[1:], abs=1e-5)
    assert scores[1, 5] < 0
    assert (scores[chosen < 0] == 0).all()


def test_the_base_model_is_sampled_without_an_adapter(served, tokenizer):
    prompt = types.ModelInput.from_ints(rows(tokenizer)[0])
    params = types.SamplingParams(max_tokens=6, seed=4)
    first = client_of(served).create_sampling_client(base_model="small").result().sample(prompt, 2, params).result()
    client = client_of(served).create_lora_training_client("small", rank=4).result()
    untouched = client.save_weights_and_get_sampling_client().result().sample(prompt, 2, params).result()
    assert [x.tokens for x in first.sequences] == [x.tokens for x in untouched.sequences]


def trained(client, tokenizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        forward = client.forward_backward([datum(ids) for ids in rows(tokenizer)], "cross_entropy")
        client.optim_step(adam())
        losses.append(forward.result().metrics["loss:sum"])
    return losses


def with_samples(client, tokenizer, steps: int) -> list:
    """Steps of training, each after samples without a seed."""
    found: list = []
    for _ in range(steps):
        sampler, prompt = client.save_weights_and_get_sampling_client().result(), rows(tokenizer)[0]
        response = sampler.sample(types.ModelInput.from_ints(prompt), 2, types.SamplingParams(max_tokens=9, stop=[]))
        found += [[x.tokens for x in response.result().sequences], *trained(client, tokenizer, 1)]
    return found


@pytest.mark.slow
def test_a_service_that_was_started_again_continues_from_what_was_saved(model32, tokenizer, tmp_path):
    with running(model32, tmp_path / "service") as served:
        client = client_of(served).create_lora_training_client("small", rank=4, seed=1).result()
        with_samples(client, tokenizer, 2)
        path = client.save_state("second").result().path
        sampler_path = client.save_weights_for_sampler("second").result().path
        expected = with_samples(client, tokenizer, 2)
        prompt = types.ModelInput.from_ints(rows(tokenizer)[0])
        params = types.SamplingParams(max_tokens=5, seed=1)
        sampler = client_of(served).create_sampling_client(model_path=sampler_path).result()
        samples = [x.tokens for x in sampler.sample(prompt, 2, params).result().sequences]
    with running(model32, tmp_path / "service") as served:
        service = client_of(served)
        again = service.create_training_client_from_state_with_optimizer(path).result()
        assert with_samples(again, tokenizer, 2) == expected
        sampler = service.create_sampling_client(model_path=sampler_path).result()
        assert [x.tokens for x in sampler.sample(prompt, 2, params).result().sequences] == samples
        rest = tinker.RestClient(base_url=served[0], api_key=KEY)
        assert [x.checkpoint_id for x in rest.list_user_checkpoints().result().checkpoints] == [
            "weights/second",
            "sampler_weights/second",
        ]
        info = rest.get_weights_info_by_tinker_path(path).result()
        assert (info.base_model, info.is_lora, info.lora_rank) == ("small", True, 4)
        rest.delete_checkpoint_from_tinker_path(path).result()
        with pytest.raises(tinker.APIStatusError, match="no such checkpoint"):
            service.create_training_client_from_state(path).result()


def test_an_adapter_is_downloaded_in_the_form_of_peft(served, tokenizer):
    client = client_of(served).create_lora_training_client("small", rank=4, seed=1).result()
    trained(client, tokenizer, 1)
    path = client.save_external_weights("adapter").result().path if hasattr(client, "save_external_weights") else None
    path = path or client.save_weights_for_sampler("adapter").result().path
    run, kind, name = path.removeprefix("tinker://").split("/")
    with httpx.Client(base_url=served[0], headers={"X-API-Key": KEY}) as plain:
        urls = plain.get(f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls").json()["urls"]
        assert {"adapter_config.json", "adapter_model.safetensors"} <= urls.keys()
    with urllib.request.urlopen(urls["adapter_model.safetensors"]) as answer:  # by its URL alone, as the cookbook does
        content = answer.read()
    from safetensors.torch import load

    assert same_bits(load(content), served[1].model(client.model_id).session.weights())
    for link in served[1].downloads.iterdir():
        os.utime(link, (0, 0), follow_symlinks=False)  # an hour has passed
    served[1].sweep()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(urls["adapter_model.safetensors"])


# -- clients that do something else


@pytest.mark.parametrize("count", [16, pytest.param(200, marks=pytest.mark.slow)])
def test_many_requests_at_once_are_each_answered_as_alone(served, tokenizer, count):
    """Two clients train and sample at the same time; each has the results that it has alone."""
    service = client_of(served)
    sampler = service.create_sampling_client(base_model="small").result()
    prompts = [types.ModelInput.from_ints(ids) for ids in rows(tokenizer)]
    alone = [
        [x.tokens for x in sampler.sample(prompt, 2, types.SamplingParams(max_tokens=4, seed=9)).result().sequences]
        for prompt in prompts
    ]

    def train(seed: int) -> list[float]:
        return trained(client_of(served).create_lora_training_client("small", rank=4, seed=seed).result(), tokenizer, 4)

    expected = [train(seed) for seed in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        trainings = [pool.submit(train, seed) for seed in (1, 2)]
        futures = [sampler.sample(prompts[i % 4], 2, types.SamplingParams(max_tokens=4, seed=9)) for i in range(count)]
        for i, future in enumerate(futures):
            assert [x.tokens for x in future.result().sequences] == alone[i % 4]
        assert [x.result() for x in trainings] == expected


def test_requests_that_are_not_joined_have_the_same_bits_beside_others(model32, tokenizer, tmp_path):
    with running(model32, tmp_path, joins=False) as served:
        sampler = client_of(served).create_sampling_client(base_model="small").result()
        prompts = [types.ModelInput.from_ints(ids) for ids in rows(tokenizer)]
        ask = partial(sampler.sample, num_samples=2, sampling_params=types.SamplingParams(max_tokens=4, seed=9))
        alone = [[x.logprobs for x in ask(prompt).result().sequences] for prompt in prompts]
        together = [ask(prompt) for prompt in prompts]
        assert [[x.logprobs for x in future.result().sequences] for future in together] == alone


def test_a_client_that_has_gone_is_freed_and_harms_no_other(served, tokenizer):
    service = client_of(served)
    client = service.create_lora_training_client("small", rank=4).result()
    other = client_of(served).create_lora_training_client("small", rank=4, seed=1).result()
    name = client.model_id.partition(":")[0]
    served[1].clients[name].seen_at -= module.SESSION_TIMEOUT_S + 1
    served[1].sweep()
    assert name not in served[1].clients
    assert len(trained(other, tokenizer, 1)) == 1
    with pytest.raises(Exception, match="no session"):
        client.forward([datum(rows(tokenizer)[0])], "cross_entropy").result()


def asked_scores(service, values: list, rows: list | None = None, columns: list | None = None):
    """Log-probs of chosen tokens of a prompt of three, dense or by rows and columns of two."""
    sparse = {} if rows is None else {"shape": [2, 2], "sparse_crow_indices": rows, "sparse_col_indices": columns}
    asked = types.TensorData(values, "int64", **({"shape": [len(values), 1]} | sparse))
    sampler = service.create_sampling_client(base_model="small").result()
    params = types.SamplingParams(max_tokens=1)
    return sampler.sample(types.ModelInput.from_ints([5, 6, 7]), 1, params, target_prompt_logprobs=asked).result()


def test_refusals_say_what_and_where(served, tokenizer):
    service = client_of(served)
    client = service.create_lora_training_client("small", rank=4).result()
    data = [datum(rows(tokenizer)[0])]
    for fails, words in (
        (lambda: client.forward(data, "stable_reinforce").result(), "loss_fn is 'stable_reinforce'"),
        (lambda: client.forward(data, "cross_entropy", {"x": 1.0}).result(), "loss_fn_config.x"),
        (lambda: client.forward(data, "cross_entropy", {"data": 1.0}).result(), "loss_fn_config.data"),
        (lambda: client.optim_step(adam()).result(), "forward_backward"),
        (lambda: client.forward([datum([5, 10**6])], "cross_entropy").result(), r"data\[0\]"),
        (lambda: asked_scores(service, [[5]]), "target_prompt_logprobs is int64"),
        (lambda: asked_scores(service, [[5], [10**6]]), "target_prompt_logprobs has other numbers"),
        (lambda: asked_scores(service, [1, 2], [0, 1, 2], [0, 9]), "target_prompt_logprobs cannot be read"),
        (lambda: service.create_lora_training_client("other", rank=4).result(), "base_model is 'other'"),
        (lambda: service.create_sampling_client(model_path="tinker://a/weights/b").result(), "no such checkpoint"),
    ):
        with pytest.raises(Exception, match=words):
            fails()
    assert client.forward(data, "cross_entropy").result().metrics["loss:sum"] > 0
    sampler = service.create_sampling_client(base_model="small").result()
    prompt = {"chunks": [{"tokens": [5], "type": "encoded_text"}]}
    body = {"sampling_session_id": sampler._sampling_session_id, "prompt": prompt, "sampling_params": {}}
    answer = httpx.post(f"{served[0]}/api/v1/asample", json=body, headers={"X-API-Key": KEY})
    assert (answer.status_code, "seq_id" in answer.json()["detail"]) == (422, True)
    answer = httpx.post(f"{served[0]}/api/v1/create_session", json={}, headers={"X-API-Key": "tml-another"})
    assert (answer.status_code, "API key" in answer.json()["detail"]) == (401, True)


def test_malformed_requests_are_answered_and_harm_nothing(served, tokenizer):
    """200 requests: bodies that are cut, of other types, huge numbers, unknown routes and methods."""
    coin, client = random.Random(1), client_of(served).create_lora_training_client("small", rank=4, seed=1).result()
    bodies = [
        {"session_id": "x", "model_seq_id": 0, "base_model": "small"},
        {"model_id": client.model_id, "seq_id": -1, "adam_params": {"learning_rate": 1e300}},
        {"model_id": client.model_id, "path": "../../x", "seq_id": 10**18},
        {"request_id": "\0" * 50},
        {"sampling_session_id": "x", "seq_id": 1, "prompt": {"chunks": []}, "sampling_params": {}},
        {"session_id": "x", "model_seq_id": 0, "path": "tinker://../weights/..", "optimizer": True},
        {"tinker_path": "tinker://a/b"},
        [1], "text", None, {}, {"model_id": {"a": [1] * 100}},
    ]  # fmt: skip
    paths = [
        "create_session", "create_model", "forward_backward", "optim_step", "save_weights", "load_weights", "asample",
        "retrieve_future", "cancel_future", "weights_info", "create_sampling_session", "save_weights_for_sampler",
        "get_info", "session_heartbeat", "nothing", "training_runs/../../x", "sessions/x/finish",
    ]  # fmt: skip
    before = set(Path(served[1].directory).parent.iterdir())
    with httpx.Client(base_url=f"{served[0]}/api/v1/", headers={"X-API-Key": KEY}, timeout=60) as plain:
        for number in range(200):
            path, method = coin.choice(paths), coin.choice(["POST"] * 8 + ["GET", "PUT", "DELETE"])
            if coin.random() < 0.3:
                answer = plain.request(method, path, content=coin.randbytes(coin.randint(0, 300)))
            else:
                answer = plain.request(method, path, json=coin.choice(bodies))
            assert answer.status_code < 500, (number, method, path, answer.text)
            if answer.status_code >= 400:
                assert answer.json()["detail"]
    assert set(Path(served[1].directory).parent.iterdir()) == before
    assert len(trained(client, tokenizer, 1)) == 1


def test_a_checkpoint_is_overwritten_whole_or_not_at_all(served, tokenizer, monkeypatch):
    client = client_of(served).create_lora_training_client("small", rank=4, seed=1).result()
    first = client.save_state("same").result().path
    trained(client, tokenizer, 1)
    with pytest.raises(Exception, match="something already"):
        client.save_state("same").result()
    with monkeypatch.context() as patch:
        patch.setattr(TrainingSession, "save", lambda *_, **__: 1 / 0)
        with pytest.raises(Exception, match="ZeroDivisionError"):
            client.save_state("same", overwrite=True).result()
    updates = [json.loads((served[1].saved_at(first) / "session.json").read_text())["updates"]]
    client.save_state("same", overwrite=True).result()
    updates.append(json.loads((served[1].saved_at(first) / "session.json").read_text())["updates"])
    assert updates == [0, 1]
    assert len([*served[1].saved_at(first).parent.iterdir()]) == 2  # what it links to
    (served[1].saved_at(first).parent / "other").symlink_to("deleted while the checkpoints are listed")
    assert [x.tinker_path for x in served[1].checkpoints(client.model_id)] == [first]


@pytest.mark.slow
def test_more_snapshots_than_are_in_memory_are_each_of_their_own_weights(served, tokenizer, monkeypatch):
    monkeypatch.setattr(module, "RESIDENT_SAMPLERS", 2)
    served[1].jobs.run(lambda: [*map(served[1]._drop, [*served[1]._resident])]).result()
    prompt = rows(tokenizer)[2]
    clients = [client_of(served).create_lora_training_client("small", rank=rank, seed=1).result() for rank in (4, 2)]
    samplers, expected = [], []
    for number in range(6):
        client = clients[number % 3 == 2]  # adapters of two shapes
        trained(client, tokenizer, 1)
        samplers.append(client.save_weights_and_get_sampling_client().result())
        expected.append(client.forward([datum(prompt)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data)
        scores = [sampler.compute_logprobs(types.ModelInput.from_ints(prompt)).result()[1:] for sampler in samplers]
    assert len(served[1]._resident) == 2
    for found, own in zip(scores, expected, strict=True):
        assert found == pytest.approx(list(own), abs=1e-4)


def test_snapshots_are_removed_with_their_session(served, monkeypatch):
    monkeypatch.setattr(module, "KEPT_SNAPSHOTS", 3)
    service = client_of(served)
    client = service.create_lora_training_client("small", rank=2).result()
    prompt, params, samplers = types.ModelInput.from_ints([5, 6]), types.SamplingParams(max_tokens=2), []
    for _ in range(module.KEPT_SNAPSHOTS + 2):
        samplers.append(client.save_weights_and_get_sampling_client().result())
        assert len(samplers[0].sample(prompt, 1, params).result().sequences) == 1  # a reference, which stays in use
    with pytest.raises(Exception, match="weights of this sampler are gone"):
        samplers[1].sample(prompt, 1, params).result()
    model = served[1].model(client.model_id)
    snapshots = [path for path, owner in served[1]._snapshots.items() if owner is model]
    assert len(snapshots) == module.KEPT_SNAPSHOTS
    service.close("success").result()
    served[1].jobs.run(int).result()
    assert not any(path.exists() for path in snapshots)


def test_a_refused_request_does_not_hold_up_those_after_it(served, tokenizer):
    client = client_of(served).create_lora_training_client("small", rank=4, seed=1).result()
    with httpx.Client(base_url=f"{served[0]}/api/v1/", headers={"X-API-Key": KEY}) as plain:
        body = {"model_id": client.model_id, "seq_id": 1, "path": "x", "age_encryption_recipients": ["y"]}
        assert plain.post("save_weights_external", json=body).status_code == 422
        body = {"model_id": client.model_id, "seq_id": 2, "path": "x"}
        number = plain.post("save_weights", json=body).json()["request_id"]
        assert plain.post("retrieve_future", json={"request_id": number}).json()["path"].endswith("/weights/x")


def test_a_number_means_one_request(served):
    client = client_of(served).create_lora_training_client("small", rank=4, seed=1).result()
    name, session = client.model_id, client.model_id.partition(":")[0]
    requests: list[tuple[str, dict, dict]] = [
        ("save_weights", {"model_id": name, "seq_id": 7, "path": "x"}, {"path": "y"}),
        ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 7, "base_model": "small"}, {}),
    ]
    with httpx.Client(base_url=f"{served[0]}/api/v1/", headers={"X-API-Key": KEY}) as plain:
        first = [plain.post(path, json=body) for path, body, _ in requests]
        found = plain.post("retrieve_future", json=first[0].json()).json()["path"]
        requests[1][2]["model_path"] = found
        for (path, body, change), answer in zip(requests, first, strict=True):
            assert plain.post(path, json=body).json() == answer.json()  # repeated
            other = plain.post(path, json=body | change)
            assert (other.status_code, "different one" in other.json()["detail"]) == (422, True)


def test_tensors_without_a_shape_have_one_dimension_and_bfloat16_is_refused():
    pb, convert = OnUse("tinker.proto.tinker_public_pb2"), OnUse("tinker.proto.request_conv")
    message = pb.ForwardBackwardRequest()
    row = message.data.add()
    row.model_input.add().encoded_text.tokens = np.array([5, 6], np.int32).tobytes()
    row.loss_fn_inputs["target_tokens"].CopyFrom(convert._tensor_data_to_proto(types.TensorData([6, 7], "int64")))
    assert data_of(message)[0].inputs["target_tokens"].tolist() == [6, 7]
    row.loss_fn_inputs["target_tokens"].dtype = pb.DTYPE_BFLOAT16
    with refusal("data[0].loss_fn_inputs.target_tokens", varies=True):
        data_of(message)


def test_a_step_without_a_part_of_its_gradients_is_refused(served, tokenizer):
    client = client_of(served).create_lora_training_client("small", rank=4, seed=1).result()
    data = [datum(ids) for ids in rows(tokenizer)]
    before = served[1].model(client.model_id).session.weights()
    client.forward_backward(data[:2], "cross_entropy").result()
    with pytest.raises(Exception, match="ids that are no tokens"):
        client.forward_backward([datum([5, 10**6])], "cross_entropy").result()
    with pytest.raises(Exception, match="has failed"):
        client.optim_step(adam()).result()
    assert same_bits(served[1].model(client.model_id).session.weights(), before)
    state = client.save_state("before").result().path
    with pytest.raises(Exception, match="ids that are no tokens"):
        client.forward_backward([datum([5, 10**6])], "cross_entropy").result()
    client.load_state_with_optimizer(state).result()
    other = client_of(served).create_lora_training_client("small", rank=4, seed=1).result()
    assert trained(client, tokenizer, 2) == trained(other, tokenizer, 2)


def test_without_a_key_a_name_that_leads_here_is_refused(model32, tmp_path):
    with running(model32, tmp_path, key=None) as (address, _), httpx.Client(base_url=f"{address}/api/v1/") as plain:
        port = address.rsplit(":", 1)[1]
        hosts = [(f"rebound.example:{port}", 403), (f"localhost:{port}", 200), (f"[::1]:{port}", 200)]
        for host, status in hosts:
            assert plain.get("healthz", headers={"Host": host, "X-API-Key": "any"}).status_code == status
        assert plain.get("healthz").status_code == 401


def test_log_probs_of_a_prompt_that_fills_the_context(served, model32, tokenizer):
    base = served[1].base
    assert base.longest is not None
    sampler = client_of(served).create_sampling_client(base_model="small").result()
    full = [5] * base.longest
    assert len(sampler.compute_logprobs(types.ModelInput.from_ints(full)).result()) == base.longest
    with pytest.raises(Exception, match="leaves no response"):
        sampler.sample(types.ModelInput.from_ints(full), 1, types.SamplingParams(max_tokens=2)).result()
