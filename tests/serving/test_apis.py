"""Streams, stop texts, several choices and other APIs: unchanged clients, and the very tokens of chat completions."""

import contextlib
import copy
import http.client
import json
import re
import threading
from functools import partial
from pathlib import Path

import pytest
from environments.episodes import tiny
from environments.test_damaged_calls import HERMES, hermes
from on_use import OnUse
from refusals import refusal
from serving.listening import listening
from storage.s3_server import wait_until
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from verl.environments.tools import Tool
from verl.errors import RolloutError
from verl.rollout.base import TurnLimits, TurnQueue, TurnResult
from verl.rollout.hf import HFRollout
from verl.serving import endpoint as endpoint_module
from verl.serving.conversations import Session, merge_turns
from verl.serving.endpoint import PolicyEndpoint
from verl.serving.http_api import PolicyServer
from verl.serving.token_text import TurnText

openai, anthropic = OnUse("openai"), OnUse("anthropic")


def two(first: str, second: int = 0) -> str:
    """Gives back the first."""
    return first


SCHEMA = Tool.of(two).schema["function"]
CHAT_TOOLS = [{"type": "function", "function": SCHEMA}]
TOOLS_OF = {
    "responses": [{"type": "function", **SCHEMA, "strict": True}],
    "messages": [{"name": "two", "description": SCHEMA["description"], "input_schema": SCHEMA["parameters"]}],
}
SCRIPT = [
    hermes('{"first": "x1", "second": 2}'),
    "Both: " + hermes('{"first": "a b"}') + " and " + hermes('{"second": 2.0, "first": "<eos>"}'),
    "It is 5.",
    "Yes!",
]


class Dictated(TurnQueue):
    """Draws given texts token by token, one after another.

    Args:
        fails_at: fail at this token.
        waits_at: draw no further in a turn than that until it is ended.
    """

    def __init__(self, tokenizer, texts, fails_at=None, waits_at=None):
        super().__init__()
        self.tokenizer, self.texts, self.fails_at, self.waits_at = tokenizer, list(texts), fails_at, waits_at
        self.num_sampled, self.live, self.ended = 0, {}, set()

    @property
    def num_pending(self):
        return len(self.live)

    def add(self, turn):
        ids = self.tokenizer(self.texts.pop(0), add_special_tokens=False).input_ids
        self.live[turn.episode] = [[*ids, self.tokenizer.eos_token_id][: turn.max_new_tokens], 0]

    def drawn(self, episode):
        ids, count = self.live[episode]
        log_probs = [-0.01 * (place + 1) for place in range(count)]
        return TurnResult(episode, ids[:count], log_probs, ids[count - 1] == self.tokenizer.eos_token_id)

    def advance(self):
        for episode, turn in self.live.items():
            if turn[1] == self.waits_at and episode not in self.ended:
                threading.Event().wait(0.001)
                continue
            turn[1] += 1
            self.num_sampled += 1
            if self.num_sampled == self.fails_at:
                raise RolloutError("the engine has had it")
        ended = [self.drawn(episode) for episode, (ids, count) in self.live.items() if count == len(ids)]
        for turn in ended:
            del self.live[turn.episode]
        return ended

    def open_turns(self):
        return [self.drawn(episode) for episode in self.live]

    def end(self, episode):
        self.ended.add(episode)
        self.live[episode][0] = self.live[episode][0][: self.live[episode][1] + 1]


@pytest.fixture(scope="module")
def model():
    return tiny(512)


@pytest.fixture(autouse=True)
def every_token_is_shown(monkeypatch):
    monkeypatch.setattr(endpoint_module, "SHOW_S", 0.0)


@contextlib.contextmanager
def serving(turns, tokenizer, template=HERMES, max_new_tokens=400, row_tokens=2000, stop_ids=None, record=None):
    stops = [tokenizer.eos_token_id] if stop_ids is None else stop_ids
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = template
    endpoint = PolicyEndpoint(turns, tokenizer, stops, max_new_tokens, row_tokens, record)
    server = PolicyServer(endpoint, "127.0.0.1", 0, "policy", {"temperature": 1.0, "top_p": 1.0}, timeout_s=60.0)
    with listening(server):
        yield server


def clients(server, url=None):
    url, options = url or server.url, {"api_key": "none", "max_retries": 0, "timeout": 60}
    return openai.OpenAI(base_url=url, **options), anthropic.Anthropic(base_url=url.removesuffix("/v1"), **options)


@contextlib.contextmanager
def dictated(tokenizer, texts, **options):
    engine = Dictated(tokenizer, texts, **options)
    with serving(lambda: engine, tokenizer) as server:
        yield server, engine, *clients(server)


@contextlib.contextmanager
def drawing(model, max_new_tokens=24, **options):
    """A server of a model with random weights, whose turns do not end by themselves."""
    causal_lm, tokenizer = model
    engine = HFRollout(max_new_tokens=max_new_tokens, min_new_tokens=max_new_tokens, **options).attach(
        causal_lm, tokenizer, 0
    )
    with serving(lambda: engine.turns(TurnLimits(400, 0.1)), tokenizer, HERMES, max_new_tokens, 400) as server:
        yield server, *clients(server)


# Agents, each written for its API: a tool loop, and a question after it


def chat_agent(client, is_streamed, tools=CHAT_TOOLS):
    messages, texts = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="}], []
    while len(texts) < len(SCRIPT):
        options = {"model": "policy", "messages": messages, "tools": tools}
        if is_streamed:
            with client.chat.completions.stream(**options) as stream:
                answer = stream.get_final_completion()
        else:
            answer = client.chat.completions.create(**options)
        message = answer.choices[0].message
        texts.append(message.content)
        messages.append(message if not is_streamed else message.model_dump(exclude={"parsed"}, exclude_none=True))
        assert answer.choices[0].finish_reason == ("tool_calls" if message.tool_calls else "stop")
        for call in message.tool_calls or ():
            result = two(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            messages.append({"role": "user", "content": "Sure?"})
    return texts


def responses_agent(client, is_streamed, by_id=False):
    items, before, texts = [{"role": "user", "content": "1+1="}], None, []
    while len(texts) < len(SCRIPT):
        options = {"model": "policy", "input": items, "tools": TOOLS_OF["responses"], "instructions": "Be brief."}
        options |= {"previous_response_id": before} if before else {}
        if is_streamed:
            with client.responses.stream(**options) as stream:
                response = stream.get_final_response()
        else:
            response = client.responses.create(**options)
        texts.append(response.output_text)
        before = response.id if by_id else None
        items = [] if by_id else [*items, *response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        for call in calls:
            result = two(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        if not calls:
            items.append({"role": "user", "content": [{"type": "input_text", "text": "Sure?"}]})
    return texts


def messages_agent(client, is_streamed):
    messages, texts = [{"role": "user", "content": "1+1="}], []
    while len(texts) < len(SCRIPT):
        options = {"model": "policy", "max_tokens": 400, "messages": messages, "tools": TOOLS_OF["messages"]}
        options["system"] = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        if is_streamed:
            with client.messages.stream(**options) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**options)
        texts.append("".join(block.text for block in message.content if block.type == "text"))
        messages.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == ("tool_use" if calls else "end_turn")
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": two(**call.input)} for call in calls]
        messages.append({"role": "user", "content": results or [{"type": "text", "text": "Sure?"}]})
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_tool_loop_has_the_same_tokens_over_every_api_and_goes_on_from_them(is_streamed, model):
    _, tokenizer = model
    rows = {}
    agents = {
        "chat": lambda chat, _: chat_agent(chat, is_streamed),
        "responses": lambda chat, _: responses_agent(chat, is_streamed),
        "responses by id": lambda chat, _: responses_agent(chat, is_streamed, by_id=True),
        "messages": lambda _, messages: messages_agent(messages, is_streamed),
    }
    for name, agent in agents.items():
        with dictated(tokenizer, SCRIPT) as (server, _, *both):
            assert agent(*both) == SCRIPT, name
            recorded = server.endpoint.recorded
        rows[name] = [(turn.prompt_ids, turn.token_ids, turn.log_probs, turn.is_complete) for turn in recorded]
        (row,) = merge_turns(recorded)  # each goes on from the tokens of the one before
        assert sum(row.mask) == sum(len(turn.token_ids) for turn in recorded)
        assert [turn.text for turn in recorded] == SCRIPT
    assert len(rows["chat"]) == 4
    assert all(found == rows["chat"] for found in rows.values())


def test_a_stream_joins_to_the_answer_with_its_tokens_and_log_probs(model):
    with drawing(model) as (_, chat, messages):
        options = {"model": "policy", "messages": [{"role": "user", "content": "1+1="}]}
        whole = chat.chat.completions.create(**options, seed=3, logprobs=True)
        *chunks, last = chat.chat.completions.create(
            **options, seed=3, logprobs=True, stream=True, stream_options={"include_usage": True}
        )
        parts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
        assert "".join(parts) == whole.choices[0].message.content
        assert len(parts) > 3
        end = chunks[-1].choices[0]
        assert (end.token_ids, end.finish_reason) == (whole.choices[0].token_ids, "length")
        assert end.logprobs.model_dump() == whole.choices[0].logprobs.model_dump()
        assert (last.choices, last.usage) == ([], whole.usage)
        assert not list(chat.chat.completions.create(**options, stream=True))[-1].usage

        response = chat.responses.create(model="policy", input="1+1=", extra_body={"seed": 3})
        assert (response.output_text, response.status) == (whole.choices[0].message.content, "incomplete")
        assert response.incomplete_details.reason == "max_output_tokens"
        events = list(chat.responses.create(model="policy", input="1+1=", extra_body={"seed": 3}, stream=True))
        parts = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert ("".join(parts), len(parts) > 3) == (response.output_text, True)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == "response.incomplete"
        assert events[-1].response.token_ids == whole.choices[0].token_ids

        options = {**options, "max_tokens": 100, "extra_body": {"seed": 3}}
        with messages.messages.stream(**options) as stream:
            parts = list(stream.text_stream)
            message = stream.get_final_message()
        assert ("".join(parts), len(parts) > 3) == (response.output_text, True)
        assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 24)
        assert messages.messages.create(**options).token_ids == whole.choices[0].token_ids


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(["and then"], trainers.BpeTrainer(initial_alphabet=alphabet, vocab_size=260))
    return made


def byte_fallback() -> Tokenizer:
    letters = [*"naïved", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(letters)}, [], byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


@pytest.mark.parametrize("made", [byte_level, byte_fallback])
def test_a_stream_has_whole_characters_alone(made):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made(), eos_token="<eos>")
    text = "naïve 日本語 👩‍🚀 �" if made is byte_level else "naïve日本語👩‍🚀"
    with dictated(tokenizer, [text] * 3) as (_, _, chat, messages):
        options = {"model": "policy", "messages": [{"role": "user", "content": "1"}]}
        parts = [chunk.choices[0].delta.content or "" for chunk in chat.chat.completions.create(**options, stream=True)]
        assert "".join(parts) == text
        assert len([part for part in parts if part]) > 5
        assert not any("\ufffd" in part for part in parts[:-2])
        with messages.messages.stream(**options, max_tokens=400) as stream:
            assert "".join(stream.text_stream) == text
        stopped = chat.chat.completions.create(**options, stop="本").choices[0]
        assert stopped.message.content == text.partition("本")[0]
        assert tokenizer.decode(stopped.token_ids).endswith("本")


def test_bytes_that_are_no_character_wait_for_what_they_become():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_fallback(), eos_token="<eos>")
    ids = tokenizer.convert_tokens_to_ids(["n", *(f"<0x{byte:02X}>" for byte in "日".encode()), "<0xFF>", "a"])
    texts = TurnText(tokenizer, ())
    shown = [texts.settled(tokenizer.decode(ids[:n]), ids[:n]) for n in range(1, len(ids) + 1)]
    assert shown == ["n", "", "", "", "", tokenizer.decode(ids)]  # a later byte takes back the character
    assert "日" not in shown[-1]


def test_a_stop_text_ends_the_turn_at_the_token_that_completes_it(model):
    _, tokenizer = model
    with drawing(model) as (server, chat, messages):
        options = {"model": "policy", "messages": [{"role": "user", "content": "1+1="}], "seed": 5}
        whole = chat.chat.completions.create(**options).choices[0]
        text = whole.message.content
        stops = ["no such text", text[9:12], text[10:14]]
        place = min(text.find(stop) for stop in stops[1:])
        stopped = chat.chat.completions.create(**options, stop=stops).choices[0]
        assert (stopped.message.content, stopped.finish_reason) == (text[:place], "stop")
        assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]
        sampled = [
            tokenizer.decode(stopped.token_ids[:n]) for n in (len(stopped.token_ids), len(stopped.token_ids) - 1)
        ]
        assert [any(stop in drawn for stop in stops) for drawn in sampled] == [True, False]
        turn = server.endpoint.recorded[-1]
        assert (list(turn.token_ids), turn.is_complete, turn.text) == (stopped.token_ids, False, text[:place])
        assert len(turn.log_probs) == len(turn.token_ids)

        asked = {"model": "policy", "max_tokens": 100, "messages": options["messages"], "stop_sequences": stops}
        message = messages.messages.create(**asked, extra_body={"seed": 5})
        assert (message.stop_reason, message.token_ids) == ("stop_sequence", stopped.token_ids)
        assert message.stop_sequence in stops[1:]
        with messages.messages.stream(**asked, extra_body={"seed": 5}) as stream:
            assert "".join(stream.text_stream) == text[:place]
            assert stream.get_final_message().stop_sequence == message.stop_sequence
        streamed = chat.chat.completions.create(**options, stop=stops, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text[:place]

        more = [*options["messages"], stopped.message, {"role": "user", "content": "and?"}]
        again = chat.chat.completions.create(model="policy", messages=more)
        assert again.continues
        assert again.prompt_token_ids[: len(turn.ids)] == list(turn.ids)  # the stop text is among them


def test_generation_ends_soon_after_a_stop_text(model):
    _, tokenizer = model
    with dictated(tokenizer, ["12345" + "6" * 300, "7"], waits_at=20) as (_, engine, chat, _):
        options = {"model": "policy", "messages": [{"role": "user", "content": "1"}]}
        assert chat.chat.completions.create(**options, stop="45").choices[0].message.content == "123"
        assert chat.chat.completions.create(**options).choices[0].message.content == "7"
        wait_until(lambda: not engine.live, 60)
        assert (len(engine.ended), engine.num_sampled < 30) == (1, True)


def test_choices_are_drawn_side_by_side_each_with_noise_of_its_own(model):
    with drawing(model) as (server, chat, _):
        options = {"model": "policy", "messages": [{"role": "user", "content": "1+1="}], "seed": 5}
        three = chat.chat.completions.create(**options, n=3)
        ids = [choice.token_ids for choice in three.choices]
        assert [choice.index for choice in three.choices] == [0, 1, 2]
        assert len({*map(tuple, ids)}) == 3
        assert three.usage.completion_tokens == sum(map(len, ids))
        assert chat.chat.completions.create(**options).choices[0].token_ids == ids[0]
        streamed = {}
        for chunk in chat.chat.completions.create(**options, n=3, stream=True):
            (choice,) = chunk.choices
            streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
        assert [streamed[index] for index in range(3)] == [choice.message.content for choice in three.choices]
        assert len({turn.request_id for turn in server.endpoint.recorded}) == 7
        for choice in three.choices:  # every one can be continued, by several choices too
            more = [*options["messages"], choice.message, {"role": "user", "content": "?"}]
            both = chat.chat.completions.create(model="policy", messages=more, n=2)
            assert both.continues
            assert both.choices[0].token_ids != both.choices[1].token_ids

        server.sessions["one"] = session = Session(7, 0, 3)
        chat, _ = clients(server, server.session_url("one"))
        choices = chat.chat.completions.create(**options, n=2).choices
        assert [list(turn.token_ids) for turn in session.recorded] == [choice.token_ids for choice in choices]
        assert len(merge_turns(session.recorded)) == 2
        with refusal("3 turns", kind=openai.BadRequestError):
            chat.chat.completions.create(**options, n=2)


def test_tool_choice_none_leaves_calls_in_the_text(model):
    _, tokenizer = model
    with dictated(tokenizer, SCRIPT[:1] * 4) as (server, _, chat, messages):
        asked = {"model": "policy", "messages": [{"role": "user", "content": "1+1="}]}
        answer = chat.chat.completions.create(**asked, tools=CHAT_TOOLS, tool_choice="none").choices[0]
        assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == (SCRIPT[0], None, "stop")
        tools = TOOLS_OF["responses"]
        response = chat.responses.create(model="policy", input="1+1=", tools=tools, tool_choice="none")
        assert [item.type for item in response.output] == ["message"]
        tools = TOOLS_OF["messages"]
        message = messages.messages.create(**asked, max_tokens=400, tools=tools, tool_choice={"type": "none"})
        assert [block.type for block in message.content] == ["text"]
        called = messages.messages.create(**asked, max_tokens=400, tools=tools, tool_choice={"type": "auto"})
        assert called.content[1].input == {"first": "x1", "second": 2}
        assert len({turn.prompt_ids for turn in server.endpoint.recorded}) == 1  # the tools stay in the prompt


def test_a_failure_in_a_stream_is_an_error_of_the_client(model):
    _, tokenizer = model
    asked = {"model": "policy", "messages": [{"role": "user", "content": "1"}]}
    cases = [
        (openai.APIError, lambda chat, _: list(chat.chat.completions.create(**asked, stream=True))),
        (openai.APIError, lambda chat, _: list(chat.responses.create(model="policy", input="1", stream=True))),
        (anthropic.APIError, lambda _, other: list(other.messages.create(**asked, max_tokens=50, stream=True))),
    ]
    for error, ask in cases:
        with dictated(tokenizer, ["1234567890"], fails_at=5) as (server, _, *both):
            with refusal("the engine has had it", kind=error, varies=True):
                ask(*both)
            assert not server.endpoint.recorded


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_turn_that_cannot_be_recorded_is_an_error_of_the_client(is_streamed, model):
    _, tokenizer = model
    engine = Dictated(tokenizer, ["12"])
    with serving(lambda: engine, tokenizer, record=Path("/dev/full")) as server:
        chat, _ = clients(server)
        asked = {"model": "policy", "messages": [{"role": "user", "content": "1"}]}
        with refusal("/dev/full cannot be written", kind=openai.APIError, varies=True):
            [*chat.chat.completions.create(**asked, stream=is_streamed)]


def test_a_turn_whose_client_has_left_is_recorded(model):
    _, tokenizer = model
    with dictated(tokenizer, ["1" * 390, "2"]) as (server, _, chat, _):
        asked = {"model": "policy", "messages": [{"role": "user", "content": "1"}]}
        with chat.chat.completions.create(**asked, stream=True) as stream:
            next(iter(stream))
        assert chat.chat.completions.create(**asked).choices[0].message.content == "2"
        wait_until(lambda: len(server.endpoint.recorded) == 2, 60)
        assert {turn.text for turn in server.endpoint.recorded} == {"1" * 390, "2"}


def test_instructions_hold_for_one_response_and_ids_for_a_session(model):
    _, tokenizer = model
    with dictated(tokenizer, ["1", "2", "3"]) as (server, _, chat, _):
        ask = partial(chat.responses.create, model="policy")
        first = ask(input="1+1=", instructions="Be brief.")
        same = ask(input="Sure?", previous_response_id=first.id, instructions="Be brief.")
        other = ask(input="Sure?", previous_response_id=first.id, instructions="Be long.")
        assert [answer.continues for answer in (first, same, other)] == [False, True, False]
        text = tokenizer.decode(other.prompt_token_ids)
        assert ("Be long." in text, "Be brief." in text, "<assistant>1" in text) == (True, False, True)
        server.sessions["one"] = Session(0, 0, 4)
        chat, _ = clients(server, server.session_url("one"))
        with refusal("previous_response_id", kind=openai.BadRequestError, varies=True):
            chat.responses.create(model="policy", input="1", previous_response_id=first.id)


def test_a_conversation_goes_on_over_another_api(model):
    _, tokenizer = model
    with dictated(tokenizer, [SCRIPT[0], "It is x1.", "Yes!"]) as (_, _, chat, messages):
        asked = [{"role": "user", "content": "1+1="}]
        called = messages.messages.create(
            model="policy", max_tokens=400, messages=asked, tools=TOOLS_OF["messages"]
        ).content
        result = {"role": "tool", "tool_call_id": called[1].id, "content": "x1"}
        call = {"name": "two", "arguments": json.dumps(called[1].input)}
        turn = {"role": "assistant", "content": called[0].text}
        turn["tool_calls"] = [{"id": called[1].id, "type": "function", "function": call}]
        asked += [turn, result]
        second = chat.chat.completions.create(model="policy", messages=asked, tools=CHAT_TOOLS)
        assert second.continues
        items = [
            *({"role": m["role"], "content": m["content"]} for m in asked[:2]),
            {"type": "function_call", "call_id": called[1].id, **call},
            {"type": "function_call_output", "call_id": called[1].id, "output": "x1"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "It is x1."}]},
            {"role": "user", "content": "Sure?"},
        ]
        third = chat.responses.create(model="policy", input=items, tools=TOOLS_OF["responses"])
        assert third.continues
        assert third.prompt_token_ids[: len(second.prompt_token_ids)] == second.prompt_token_ids


def responses_body(**fields):
    return "/v1/responses", {"model": "policy", "input": "1", **fields}


def messages_body(**fields):
    return "/v1/messages", {"messages": [{"role": "user", "content": "1"}], "max_tokens": 5, **fields}


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
REFUSED = {
    "input of a number": (responses_body(input=3), "messages"), "no input": (responses_body(input=[]), "messages"),
    "image": (responses_body(input=[{"role": "user", "content": [{"type": "input_image"}]}]), "messages"),
    "part": (responses_body(input=[{"role": "user", "content": ["x"]}]), "another type"),
    "reasoning": (responses_body(input=[{"type": "reasoning", "summary": []}]), "input has .*reasoning"),
    "reference": (responses_body(input=[{"type": "item_reference", "id": "x"}]), "input has .*item_reference"),
    "previous": (responses_body(previous_response_id="resp_x"), "previous_response_id has 'resp_x'"),
    "web search": (responses_body(tools=[{"type": "web_search"}]), "tools has .*web_search"),
    "required": (responses_body(tool_choice="required"), "tool_choice"),
    "named": (responses_body(tool_choice={"type": "function", "name": "two"}), "tool_choice"),
    "effort": (responses_body(reasoning={"effort": "low"}), "reasoning"), "n": (responses_body(n=2), "n is 2"),
    "format": (responses_body(text={"format": {"type": "json_object"}}), "text"),
    "background": (responses_body(background=True), "background"), "sampling": (responses_body(top_p=0.5), "top_p"),
    "chat messages": (responses_body(messages=[]), "messages"),
    "tokens": (responses_body(max_output_tokens=0), "tokens"),
    "any": (messages_body(tool_choice={"type": "any"}), "tool_choice has"),
    "tool": (messages_body(tool_choice={"type": "tool", "name": "two"}), "tool_choice has"),
    "parallel": (messages_body(tool_choice={"type": "auto", "disable_parallel_tool_use": True}), "tool_choice has"),
    "top_k": (messages_body(top_k=5), "top_k"), "temperature": (messages_body(temperature=0.1), "temperature"),
    "thinking": (messages_body(thinking={"type": "enabled", "budget_tokens": 1024}), "thinking"),
    "an image": (messages_body(messages=[{"role": "user", "content": [IMAGE]}]), "messages has .*image"),
    "prefill": (messages_body(messages=[{"role": "assistant", "content": "It"}]), "begins its turns itself"),
    "role": (messages_body(messages=[{"role": "system", "content": "It"}]), "messages has"),
    "no messages": (messages_body(messages=[]), "messages"), "a number": (messages_body(messages=3), "another type"),
    "server tool": (messages_body(tools=[{"type": "bash_20250124", "name": "bash"}]), "tools has .*bash"),
    "schema": (messages_body(tools=[{"name": "f", "input_schema": 3}]), "tools"),
    "stop": (messages_body(stop_sequences=[""]), "stop"), "many": (messages_body(stop_sequences=["x"] * 99), "stop"),
    "mcp": (messages_body(mcp_servers=[{}]), "mcp_servers"), "no JSON": (("/v1/messages", None), "not JSON"),
    "long": (messages_body(system="1" * 5000), "a conversation has at most"),
}  # fmt: skip


def test_what_cannot_be_exact_is_refused_by_name_in_the_error_form_of_its_api():
    with dictated(tiny(512)[1], []) as (server, *_):
        connection = http.client.HTTPConnection(*server.server_address[:2], timeout=30)
        for name, ((path, body), told) in REFUSED.items():
            connection.request("POST", path, b"{" if body is None else json.dumps(body))
            reply = connection.getresponse()
            answer = json.loads(reply.read())
            assert reply.status == 400, name
            is_messages = path == "/v1/messages"
            assert answer.get("type") == ("error" if is_messages else None), name
            assert {*answer["error"]} == ({"type", "message"} if is_messages else {"message", "type", "param", "code"})
            assert answer["error"]["type"] == "invalid_request_error", name
            assert re.search(told, answer["error"]["message"]), name
        assert not server.endpoint.recorded
        for path, kind in (("/v1/messages/count", "not_found_error"), ("/sessions/x/v1/messages", "not_found_error")):
            connection.request("POST", path, b"{}")
            reply = connection.getresponse()
            error = json.loads(reply.read())["error"]
            assert (reply.status, error["type"]) == (
                404,
                kind if path.endswith("messages") else "invalid_request_error",
            )
        connection.close()
