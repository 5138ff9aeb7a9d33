"""The OpenAI-compatible endpoint: OpenAI's own client against it, and tokens that are those that were drawn."""

import contextlib
import dataclasses
import http.client
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import refusals
import torch
from on_use import OnUse
from refusals import refusal, refused
from serving.listening import asked, listening
from storage.s3_server import wait_until
from trainer.runs import GRPO_ALGORITHM, fit, ppo_run

from verl.checkpoint.config import Checkpointing
from verl.cli.generate import located, one_prompt, running, served, server_of
from verl.compose.load_policy import trained_on_texts
from verl.data.calculator import CalculatorPrompts
from verl.environments.calculator import Calculator
from verl.errors import ConfigError, RolloutError
from verl.models.tiny import CHAT_TEMPLATE
from verl.ops.logprobs import log_probs_of
from verl.rewards.rules import ExactMatch
from verl.rollout.hf import HFRollout
from verl.serving.conversations import RecordedTurn, Session, merge_turns

openai = OnUse("openai")

# Every letter ends a turn: random weights seldom end one by themselves.
TEMPLATE = (
    "{% if tools %}{{ tools | length }}{% endif %}"
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] }}{% for c in m['tool_calls'] or [] %}"
    "<tool_call>{{ {'name': c['function']['name'], 'arguments': c['function']['arguments']} | tojson }}</tool_call>"
    "{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calc",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]


@pytest.fixture(scope="module")
def trainer(dir32, tmp_path_factory):
    directory = tmp_path_factory.mktemp("serving")
    overrides = ["reward=length", "data.prompt_key=prompt", "rollout.max_new_tokens=6", "rollout.temperature=0.9"]
    overrides += [f"rollout.stop_token_ids={list(range(12, 40))}"]
    with located(str(dir32)) as saved, running(saved, "ppo", overrides, one_prompt(directory)) as made:
        made.tokenizer.chat_template = TEMPLATE
        yield made


@pytest.fixture
def server(trainer, tmp_path):
    with listening(server_of(trainer, "127.0.0.1", 0, tmp_path / "record.jsonl", timeout_s=60.0)) as made:
        yield made


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_a_conversation_goes_on_from_the_very_tokens_that_were_drawn(client, server, tmp_path):
    messages = [{"role": "user", "content": "1+2="}]
    for turn in range(3):
        answer = asked(client, messages, tools=TOOLS)
        assert answer.continues == (turn > 0)
        messages += [answer.choices[0].message, {"role": "user", "content": f"{turn}<eos>"}]
    turns = server.endpoint.recorded
    for before, after in pairwise(turns):
        assert after.prompt_ids[: len(before.ids)] == before.ids
    (row,) = merge_turns(turns)
    assert row.ids == turns[-1].ids
    assert sum(row.mask) == sum(len(turn.token_ids) for turn in turns)
    records = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    assert [tuple(record["token_ids"]) for record in records] == [turn.token_ids for turn in turns]


def test_log_probs_are_the_policys_own(client, server, trainer):
    answer = asked(client, [{"role": "user", "content": "34+5="}], logprobs=True)
    turn = server.endpoint.recorded[-1]
    told = [token.logprob for token in answer.choices[0].logprobs.content]
    assert told == pytest.approx(list(turn.log_probs))
    ids = torch.tensor([turn.ids])
    with torch.no_grad():
        logits = trainer.actor_worker.model(input_ids=ids, use_cache=False).logits
    start = len(turn.prompt_ids)
    expected = log_probs_of(logits[:, start - 1 : -1], ids[:, start:], 0.9)[0]
    assert told == pytest.approx(expected.tolist(), abs=2e-5)
    assert answer.choices[0].token_ids == list(turn.token_ids)
    assert answer.usage.completion_tokens == len(turn.token_ids)


def test_messages_that_were_changed_are_a_conversation_of_their_own(client, server):
    messages = [{"role": "user", "content": "9-"}]
    answer = asked(client, messages)
    changed = [*messages, {"role": "assistant", "content": answer.choices[0].message.content + "zz"}]
    other = asked(client, [*changed, {"role": "user", "content": "?"}])
    assert not other.continues
    assert len(merge_turns(server.endpoint.recorded)) == 2


def test_requests_side_by_side_are_drawn_as_each_alone(client, server):
    texts = [f"{number}+{number}=" for number in range(8)]
    alone = [asked(client, [{"role": "user", "content": text}], seed=3).choices[0].token_ids for text in texts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda text: asked(client, [{"role": "user", "content": text}], seed=3), texts))
    assert [answer.choices[0].token_ids for answer in together] == alone
    again = asked(client, [{"role": "user", "content": texts[0]}], seed=4).choices[0].token_ids
    assert again != alone[0]


def one(content="1", **fields):
    return lambda client: asked(client, [{"role": "user", "content": content}], **fields)


FIELDS = [
    ("temperature", 0.1), ("top_p", 0.5), ("n", 0), ("n", 1000), ("stop", [""]), ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "calc"}}), ("stream_options", "usage"),
    ("max_tokens", 0), ("presence_penalty", 1.0), ("response_format", {"type": "json_object"}), ("seed", -1),
]  # fmt: skip
IMAGE = [{"type": "image_url", "image_url": {"url": "x"}}]
test_what_would_change_the_policy_or_is_not_understood_is_refused_by_name = refused(
    *((field, refusals.ANY, one(**{field: value})) for field, value in FIELDS),
    ("messages", refusals.ANY, lambda client: asked(client, [])),
    ("messages", refusals.ANY, one(IMAGE)),
    ("a conversation has at most", 64, one("1" * 5000)),
    ("no model", "gpt", lambda client: client.models.retrieve("gpt"), "openai.NotFoundError"),
    ("--max-tokens", 4000, lambda trainer: server_of(trainer, "127.0.0.1", 0, max_tokens=4000), ConfigError),
    kind="openai.BadRequestError",
)


def test_a_port_in_use_is_refused(server, trainer):
    with refusal("--port", varies=True):
        server_of(trainer, "127.0.0.1", server.server_address[1])


def body(**fields) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "1"}], **fields}).encode()


def tool(**function) -> list:
    return [{"type": "function", "function": {"name": "f", **function}}]


def call(**function) -> bytes:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}", **function}}]
    return body(messages=[{"role": "assistant", "content": None, "tool_calls": calls}])


DEEP = "[" * 20_000 + "]" * 20_000
MALFORMED = {
    "no JSON": b"{", "nothing": b"", "no object": b"[]", "not UTF-8": b"\xff\xfe", "deep": DEEP.encode(),
    "deep in a field": f'{{"messages": [], "metadata": {DEEP}}}'.encode(), "NaN": b'{"messages": NaN}',
    "a number of many digits": b'{"seed": ' + b"9" * 9000 + b"}", "lone surrogate": body(messages="\ud800"),
    "surrogate in a content": body(messages=[{"role": "user", "content": "a\udfffb"}]),
    "surrogate in a tool": body(tools=tool(description="\ud83d")),
    "no messages": b"{}", "messages of another type": body(messages="hi"), "null in messages": body(messages=[None]),
    "role": body(messages=[{"role": 3, "content": "1"}]), "no role": body(messages=[{"content": "1"}]),
    "content": body(messages=[{"role": "user", "content": 3}]),
    "part without a text": body(messages=[{"role": "user", "content": [{"type": "text"}]}]),
    "part of another type": body(messages=[{"role": "user", "content": [{"type": ["text"], "text": "1"}]}]),
    "part that is a text": body(messages=[{"role": "user", "content": ["1"]}]),
    "tool_call_id": body(messages=[{"role": "tool", "content": "1", "tool_call_id": [1]}]),
    "tool calls": body(messages=[{"role": "assistant", "tool_calls": {"a": 1}}]),
    "arguments": call(arguments={"a": 1}), "name of a call": call(name=None), "tools": body(tools={"a": 1}),
    "tool": body(tools=[3]), "tool without a name": body(tools=[{"type": "function", "function": {}}]),
    "parameters": body(tools=tool(parameters=[1])), "parameters of a text": body(tools=tool(parameters="object")),
    "properties": body(tools=tool(parameters={"properties": 3})), "description": body(tools=tool(description=3)),
    "max_completion_tokens": body(max_completion_tokens=True), "seed": body(seed="1"), "large seed": body(seed=2**31),
    "logprobs": body(logprobs="yes"), "model": body(model=3), "n": body(n=[1]), "stop": body(stop="x" * 50_000),
    "unknown field": body(**{"x" * 50_000: 1}),
}  # fmt: skip


def error_of(answer: bytes) -> dict:
    """OpenAI's error object in an answer."""
    error = json.loads(answer)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(error["message"]) < 1000
    return error


def test_malformed_requests_are_refused_with_openais_error_object_on_one_connection(server):
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=30)
    for name, content in MALFORMED.items():
        connection.request("POST", "/v1/chat/completions", content)
        reply = connection.getresponse()
        assert reply.status == 400, name
        assert error_of(reply.read())["type"] == "invalid_request_error", name
    connection.request("POST", "/v1/chat/completions", body())
    assert json.loads(connection.getresponse().read())["object"] == "chat.completion"
    for arguments in ('{"a": ' + DEEP + "}", '"\\ud800"'):  # what is no JSON within limits stays a text
        connection.request("POST", "/v1/chat/completions", call(arguments=arguments))
        reply = connection.getresponse()
        assert (reply.status, "tokens, and a conversation" in error_of(reply.read())["message"]) == (400, True)
    connection.close()


def exchange(server, sent: bytes) -> tuple[int, bytes]:
    """Status and body of the answer to raw bytes, after which nothing more is sent."""
    with socket.create_connection(server.server_address[:2], timeout=30) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, content = answer.partition(b"\r\n\r\n")
    assert b"Content-Type: application/json" in head, answer[:200]
    return int(head.split()[1]), content


POST = b"POST /v1/chat/completions HTTP/1.1\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (POST + "Content-Length: ²\r\n\r\n".encode("latin-1"), 400), (POST + b"Content-Length: -5\r\n\r\n", 400),
        (POST + b"Content-Length: 1e3\r\n\r\n", 400), (POST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", 413),
        (POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400), (POST + b"\r\n", 411),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 411),
        (POST + b"Content-Length: 200\r\n\r\n{}", 400), (POST + b"Content-Length: 20000000\r\n\r\n" + b"1" * 9**7, 413),
        (POST + b"".join(b"X-%d: 1\r\n" % n for n in range(200)) + b"\r\n", 431), (b"GET /" + b"x" * 70_000, 414),
        (POST + b"X: " + b"x" * 70_000 + b"\r\n\r\n", 431), (b"PATCH /v1/models HTTP/1.1\r\n\r\n", 501),
        (b"GET /v1/models HTTP/9.9\r\n\r\n", 505), (b"GET /v1/models/other HTTP/1.1\r\nConnection: close\r\n\r\n", 404),
        (b"GET /v1/chat/completions HTTP/1.1\r\nConnection: close\r\n\r\n", 405), (b"nonsense\r\n\r\n", 400),
        (b"POST /v1/x HTTP/1.1\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}", 404),
        (b"GET /sessions/x/v1/models HTTP/1.1\r\nConnection: close\r\n\r\n", 404),
    ], ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_requests_that_http_or_a_limit_refuses_are_answered_in_json_too(server, sent, status):
    found, content = exchange(server, sent)
    assert found == status
    error_of(content)


def test_a_body_longer_than_the_context_ends_the_episode_of_its_session_by_its_tokens(server):
    server.sessions["one"] = session = Session(0, 0, 4)
    with (
        openai.OpenAI(base_url=server.session_url("one"), api_key="none", max_retries=0) as client,
        refusal("a conversation has at most", value=64, kind=openai.APIStatusError) as refused,
    ):
        asked(client, [{"role": "user", "content": "1" * 3_000_000}])
    assert refused.value.status_code == 413
    assert session.cut == "tokens"


def test_a_model_is_found_by_its_id_and_takes_its_own_settings(client, server):
    assert asked(client, [{"role": "user", "content": "1"}], temperature=0.9, max_tokens=2).usage.completion_tokens <= 2
    assert client.models.retrieve("policy").id == "policy"
    server.sessions["one"] = Session(0, 0, 4)
    with openai.OpenAI(base_url=server.session_url("one"), api_key="none", max_retries=0) as of_session:
        assert of_session.models.list().data[0].id == "policy"


def test_a_text_that_is_tokenised_for_long_delays_no_other_request(client, server, monkeypatch):
    begun, may_end, tokenizer = threading.Event(), threading.Event(), server.endpoint.tokenizer

    class Slow:
        def __call__(self, text, **options):
            if "999" in text:
                begun.set()
                may_end.wait(60)
            return tokenizer(text, **options)

        def __getattr__(self, name):
            return getattr(tokenizer, name)

    monkeypatch.setattr(server.endpoint, "tokenizer", Slow())
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(asked, client, [{"role": "user", "content": "999"}])
        assert begun.wait(60)
        try:
            assert asked(client, [{"role": "user", "content": "1+1="}]).choices
            assert not slow.done()
        finally:
            may_end.set()
        assert slow.result().choices


def test_turns_are_merged_on_exact_prefixes_alone():
    def turn(name, prompt, tokens):
        return RecordedTurn(name, tuple(prompt), tuple(tokens), tuple(-0.5 for _ in tokens), True)

    turns = [
        turn("a", [1], [2, 3]),
        turn("b", [1, 2, 3, 4], [5]),
        turn("c", [1, 2, 9], [5]),
        turn("d", [1, 2, 3, 8], [6]),
    ]
    rows = merge_turns(turns)
    assert [row.request_ids for row in rows] == [("a", "b"), ("c",), ("d",)]
    assert rows[0].ids == (1, 2, 3, 4, 5)
    assert rows[0].mask == (False, True, True, False, True)
    assert rows[0].log_probs == (0.0, -0.5, -0.5, 0.0, -0.5)
    assert rows[2].mask == (False, False, False, False, True)


@pytest.fixture(scope="module")
def with_calculator(model32, tmp_path_factory):
    """A checkpoint of a run with the tool `calc`, and without a chat template."""
    directory = tmp_path_factory.mktemp("with_calculator")
    saving = Checkpointing(save_dir=str(directory / "checkpoints"), save_async=False)
    run = ppo_run(model32, total_steps=1, reward=ExactMatch())
    run = dataclasses.replace(
        run,
        data=CalculatorPrompts(train_size=4, held_out=2),
        environment=Calculator(tool_format="plain", max_tokens=32),
        rollout=HFRollout(max_new_tokens=6, stop_token_ids=tuple(range(12, 40))),
        checkpoint=saving,
        critic=None,
        algorithm=GRPO_ALGORITHM,
        trainer=dataclasses.replace(run.trainer, group_size=3, eval_without_tools=True),
    )
    fit(run, directory / "run")
    return directory / "checkpoints"


@contextlib.contextmanager
def asked_of(checkpoint, directory, template=None, text=None):
    """A client of `verl serve-policy CHECKPOINT`, and the endpoint."""
    settings = ["reward=length", "data.prompt_key=prompt"]
    with located(str(checkpoint)) as saved, served(saved, settings, directory) as (trainer, environment):
        trainer.tokenizer.chat_template = template
        text = trained_on_texts(saved) if text is None else text
        server = server_of(trainer, "127.0.0.1", 0, timeout_s=60.0, environment=environment, joins_texts=text)
        client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60)
        with listening(server), client:
            yield client, server.endpoint


def test_a_run_with_an_environment_is_served_without_additions_as_its_episodes_were(with_calculator, tmp_path):
    with asked_of(with_calculator, tmp_path) as (client, endpoint):
        messages = [{"role": "user", "content": "12+34="}]
        first = asked(client, messages)
        messages += [first.choices[0].message, {"role": "tool", "tool_call_id": "a", "content": "46"}]
        second = asked(client, messages)
        encode = endpoint.tokenizer
        assert first.prompt_token_ids == encode("12+34=").input_ids
        turn = [*first.prompt_token_ids, *first.choices[0].token_ids]
        assert second.continues
        assert second.prompt_token_ids == [*turn, *encode("46\n", add_special_tokens=False).input_ids]
        assert [tool["function"]["name"] for tool in endpoint.tools] == ["calc"]
        assert endpoint.style == "plain"


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, TEMPLATE], ids=["of the embedded model", "with tools"])
def test_a_policy_that_was_trained_on_texts_is_asked_in_texts_whatever_its_tokenizer_has(
    template, with_calculator, tmp_path
):
    with asked_of(with_calculator, tmp_path, template) as (client, endpoint):
        messages = [{"role": "user", "content": "12+34="}]
        for tools in ({}, {"tools": TOOLS}):
            answer = asked(client, messages, **tools)
            assert answer.prompt_token_ids == endpoint.tokenizer("12+34=").input_ids
        result = {"role": "tool", "tool_call_id": "a", "content": "46"}
        again = asked(client, [*messages, answer.choices[0].message, result], tools=TOOLS)
        assert again.continues
        assert again.prompt_token_ids[-3:] == endpoint.tokenizer("46\n", add_special_tokens=False).input_ids
        other = {"type": "function", "function": {"name": "search"}}
        with refusal("search", "calc", kind=openai.BadRequestError):
            asked(client, messages, tools=[other])


@pytest.mark.exhaustive
def test_schemas_of_the_environment_are_those_of_requests_without_tools(with_calculator, tmp_path):
    with asked_of(with_calculator, tmp_path, TEMPLATE, text=False) as (client, endpoint):
        messages = [{"role": "user", "content": "1+2="}]
        assert [tool["function"]["name"] for tool in endpoint.tools] == ["calc"]
        own, others = asked(client, messages), asked(client, messages, tools=TOOLS * 2)
        assert endpoint.tokenizer.decode(own.prompt_token_ids).startswith("1u:")  # the template writes their number
        assert endpoint.tokenizer.decode(others.prompt_token_ids).startswith("2u:")


class LatePut:
    """The queue of an endpoint that is closed, by another thread, right before a request is put into it."""

    def __init__(self, endpoint):
        self._endpoint, self._queue = endpoint, endpoint._waiting

    def put(self, item):
        if not self._endpoint._is_closed:
            self._endpoint.close()
        self._queue.put(item)

    def __getattr__(self, name):
        return getattr(self._queue, name)


def test_a_request_that_comes_as_the_engine_ends_is_refused_and_waits_for_nothing(server):
    endpoint = server.endpoint
    endpoint._waiting = LatePut(endpoint)
    for _ in range(2):  # the second is one to a closed endpoint
        with pytest.raises(RolloutError, match="the endpoint was closed"):
            endpoint.complete([{"role": "user", "content": "1+2="}], timeout_s=1.0)


def test_a_turn_that_was_drawn_is_answered_although_the_endpoint_is_closed_meanwhile(server):
    turn = server.endpoint.begin([{"role": "user", "content": "1+2="}])
    wait_until(lambda: not turn.shown.empty(), 60)
    server.endpoint.close()
    assert list(turn)[-1].turn.token_ids
