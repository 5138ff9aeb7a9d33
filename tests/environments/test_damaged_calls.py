"""Whatever a model writes as a call is an answer or an error of that call; the run and the endpoint go on."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from environments.episodes import prompts_of, tiny

from verl.component import BuildContext, component
from verl.environments.base import EnvironmentDescription, EnvironmentFactory
from verl.environments.episode_loop import EpisodeGenerator
from verl.environments.tools import Tool, ToolEnvironment
from verl.errors import ConfigError
from verl.rollout.base import GenerationRequest, RolloutEngine, TurnEngine, TurnResult
from verl.rollout.hf import HFRollout
from verl.serving.endpoint import PolicyEndpoint

HERMES = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ {'name': "
    "c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{# tools #}"
)


def two(first: Any, second: Any = None) -> Any:
    """Gives back what it gets."""
    return first


def surrogate(first: str) -> str:
    return "\ud800" + first


TOOLS = {tool.name: tool for tool in (Tool.of(two), Tool.of(surrogate))}


class _Factory(EnvironmentFactory):
    def __init__(self):
        self.tool_parameters = {name: tool.parameters for name, tool in TOOLS.items()}

    def make(self):
        return ToolEnvironment(TOOLS, 5.0)


@component
class Echo(EnvironmentDescription):
    has_tools = True

    def factory(self, context):
        return _Factory()

    def tool_schemas(self):
        return tuple(tool.schema for tool in TOOLS.values())


class Dictated(TurnEngine, RolloutEngine):
    """Draws given texts, one after another, and `5` after them."""

    def __init__(self, tokenizer, texts):
        self.tokenizer, self.texts, self.waiting = tokenizer, list(texts), []

    def turns(self, limits):
        return self

    @property
    def num_pending(self):
        return len(self.waiting)

    def add(self, turn):
        self.waiting.append(turn.episode)

    def advance(self):
        texts = [self.texts.pop(0) if self.texts else "5" for _ in self.waiting]
        tokens = [[*self.tokenizer(text).input_ids, self.tokenizer.eos_token_id] for text in texts]
        episodes, self.waiting = self.waiting, []
        return [TurnResult(x, ids, [0.0] * len(ids), True) for x, ids in zip(episodes, tokens, strict=True)]

    def close(self):
        pass


def hermes(arguments):
    return f'<tool_call>{{"name": "two", "arguments": {arguments}}}</tool_call>'


DEEP = "[" * 1000 + "]" * 1000
PLAIN = {
    "an unhashable key": ("two({[]:1}, 2)", 1), "deep": (f"two({DEEP}, 2)", 1), "a set": ("two({1}, ...)", 1),
    "a surrogate": ("two('\\ud800', 2)", 1), "a call in another format": (hermes("{}"), 1),
    "many signs": (f"two({'-' * 5000}1, 2)", 1), "too many": ("two(1, 2, 3)", 1), "fine": ("two(1, 2)", 0),
    "a surrogate as the result": ("surrogate(x)", 0),
}  # fmt: skip
CHAT = {
    "deep": (hermes(f'{{"first": {DEEP}}}'), 1), "a surrogate": (hermes('{"first": "\\ud800"}'), 1),
    "a surrogate as a name": ('<tool_call>{"name": "\\ud800"}</tool_call>', 1),
    "infinite": (hermes('{"first": 1e999}'), 1),
    "a long number": (hermes('{"first": ' + "9" * 5000 + "}"), 1), "not closed": ('<tool_call>{"name": "two"', 1),
    "no arguments": (hermes("{}"), 0), "a wrong argument": (hermes('{"third": 1}'), 0), "none": (hermes("null"), 1),
    "another format": ("<function=two><parameter=first>1</parameter></function>", 1),
    "fine": (hermes('{"first": {"a": [1, null]}}'), 0),
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return tiny(8192)


@pytest.mark.slow
@pytest.mark.parametrize("is_chat", [False, True])
def test_an_episode_goes_on_after_whatever_the_model_writes_as_a_call(is_chat, model):
    tokenizer = copy.copy(model[1])
    cases = CHAT if is_chat else PLAIN
    texts, counts = [text for text, _ in cases.values()], sum(count for _, count in cases.values())
    tokenizer.chat_template = HERMES if is_chat else None
    context = BuildContext(tokenizer=tokenizer)
    options = HFRollout(max_new_tokens=6000)
    engine = EpisodeGenerator(
        Echo(max_turns=50, max_tokens=60_000), Dictated(tokenizer, texts), options, tokenizer,
        (tokenizer.eos_token_id,), context,
    )  # fmt: skip
    columns = {"prompt_messages": [[{"role": "user", "content": "1+1="}]]} if is_chat else {}
    try:
        rows = engine.generate(prompts_of(tokenizer, ["1+1="], **columns), GenerationRequest(0, 1))
    finally:
        engine.close()
    (record,) = [json.loads(x) if isinstance(x, str) else x for x in rows.non_tensor_batch["episode"]]
    assert record["end"] == "terminated"
    assert len(record["turns"]) == len(cases) + 1
    assert [turn["parse_errors"] for turn in record["turns"]] == [count for _, count in cases.values()] + [0]
    assert counts
    assert torch.isfinite(rows["rollout_log_probs"]).all()


@pytest.mark.parametrize(("text", "num_faults"), CHAT.values(), ids=CHAT)
def test_the_endpoint_answers_whatever_the_model_writes(text, num_faults, model):
    tokenizer = copy.copy(model[1])
    tokenizer.chat_template = HERMES
    dictated = Dictated(tokenizer, [text])
    endpoint = PolicyEndpoint(lambda: dictated, tokenizer, [tokenizer.eos_token_id], 6000, 20_000)
    messages, tools = [{"role": "user", "content": "1+1="}], [tool.schema for tool in TOOLS.values()]
    try:
        found = endpoint.complete(messages, tools, timeout_s=120)
        json.dumps(found.message).encode()
        assert len(found.message.get("tool_call_errors", ())) == num_faults
        assert ("tool_calls" in found.message) == (num_faults == 0)
        calls = found.message.get("tool_calls", ())
        answers = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls]
        more = [*messages, found.message, *answers, {"role": "user", "content": "?"}]
        again = endpoint.complete(more, tools, timeout_s=120)
        assert again.continues
        assert again.message["content"] == "5"
    finally:
        endpoint.close()


def test_requests_with_tools_are_refused_where_no_format_reads_what_the_template_renders(model):
    tokenizer = copy.copy(model[1])
    tokenizer.chat_template = HERMES.replace("tojson", "string")
    endpoint = PolicyEndpoint(lambda: Dictated(tokenizer, []), tokenizer, [tokenizer.eos_token_id], 60, 2000)
    messages = [{"role": "user", "content": "1+1="}]
    try:
        assert endpoint.complete(messages, timeout_s=120).message["content"] == "5"
        with pytest.raises(ConfigError, match="tools: tool_format is auto, and calls .* cannot be read back: one call"):
            endpoint.complete(messages, [tool.schema for tool in TOOLS.values()], timeout_s=120)
    finally:
        endpoint.close()
