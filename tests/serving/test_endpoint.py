"""The OpenAI-compatible endpoint: OpenAI's own client against it, and tokens that are those that were drawn."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from trainer.runs import GRPO_ALGORITHM, ppo_run

from verl.checkpoint.config import Checkpointing
from verl.cli.generate import located, running
from verl.cli.serve_policy import one_prompt, served, server_of
from verl.component import BuildContext
from verl.data.calculator import CalculatorPrompts
from verl.environments.calculator import Calculator
from verl.errors import ConfigError
from verl.ops.logprobs import log_probs_of
from verl.rewards.rules import ExactMatch
from verl.rollout.hf import HFRollout
from verl.serving.conversations import RecordedTurn, merge_turns

openai = pytest.importorskip("openai")

# Every letter ends a turn: random weights seldom end one by themselves.
TEMPLATE = (
    "{% if tools %}{{ tools | length }}{% endif %}"
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + ';' }}{% endfor %}"
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
    with (
        located(str(dir32)) as saved,
        running(saved, "ppo", overrides, one_prompt(directory)) as made,
    ):
        object.__setattr__(made.description.data, "chat_template", TEMPLATE)
        yield made


@pytest.fixture
def server(trainer, tmp_path):
    made = server_of(trainer, "127.0.0.1", 0, tmp_path / "record.jsonl", timeout_s=60.0)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    made.endpoint.close()
    thread.join(10)


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def asked(client, messages, **values):
    return client.chat.completions.create(model="policy", messages=messages, **values)


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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.1), ("top_p", 0.5), ("n", 2), ("stream", True), ("stop", ["x"]), ("tool_choice", "required"),
        ("max_tokens", 0), ("presence_penalty", 1.0), ("response_format", {"type": "json_object"}), ("seed", -1),
    ],
)  # fmt: skip
def test_what_would_change_the_policy_or_is_not_understood_is_refused_by_name(client, field, value):
    with pytest.raises(openai.BadRequestError, match=field):
        asked(client, [{"role": "user", "content": "1"}], **{field: value})


def test_bad_requests_and_long_conversations_are_refused(client, trainer):
    assert [model.id for model in client.models.list()] == ["policy"]
    for messages in ([], [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]):
        with pytest.raises(openai.BadRequestError, match="messages"):
            asked(client, messages)
    with pytest.raises(openai.BadRequestError, match="a conversation has at most"):
        asked(client, [{"role": "user", "content": "1" * 5000}])
    assert asked(client, [{"role": "user", "content": "1"}], temperature=0.9, max_tokens=2).usage.completion_tokens <= 2


def test_more_tokens_than_the_model_holds_are_refused(trainer):
    with pytest.raises(ConfigError, match="--max-tokens is 4000: .* 64"):
        server_of(trainer, "127.0.0.1", 0, max_tokens=4000)


def test_a_port_in_use_is_refused(server, trainer):
    with pytest.raises(ConfigError, match="cannot listen"):
        server_of(trainer, "127.0.0.1", server.server_address[1])


def test_a_closed_endpoint_refuses(trainer):
    made = server_of(trainer, "127.0.0.1", 0)
    made.server_close()
    made.endpoint.close()
    with pytest.raises(Exception, match="closed"):
        made.endpoint.complete([{"role": "user", "content": "1"}])


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
    with run.build(BuildContext(run_dir=directory / "run")) as trainer:
        trainer.fit()
    return directory / "checkpoints"


@contextlib.contextmanager
def asked_of(checkpoint, directory, template=None):
    """A client of `verl serve-policy CHECKPOINT`, and the endpoint."""
    settings = ["reward=length", "data.prompt_key=prompt"]
    with located(str(checkpoint)) as saved, served(saved, settings, directory) as (trainer, environment):
        object.__setattr__(trainer.description.data, "chat_template", template)
        trainer.tokenizer.chat_template = template
        server = server_of(trainer, "127.0.0.1", 0, timeout_s=60.0, environment=environment)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
            yield client, server.endpoint
        server.shutdown()
        server.server_close()
        server.endpoint.close()
        thread.join(10)


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


def test_schemas_of_the_environment_are_those_of_requests_without_tools(with_calculator, tmp_path):
    with asked_of(with_calculator, tmp_path, TEMPLATE) as (client, endpoint):
        messages = [{"role": "user", "content": "1+2="}]
        assert [tool["function"]["name"] for tool in endpoint.tools] == ["calc"]
        own, others = asked(client, messages), asked(client, messages, tools=TOOLS * 2)
        assert endpoint.tokenizer.decode(own.prompt_token_ids).startswith("1u:")  # the template writes their number
        assert endpoint.tokenizer.decode(others.prompt_token_ids).startswith("2u:")
