"""Whatever a server sends in place of a response, the step ends in words that name the prompt and the sample."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from http_client.servers import Say, serving
from roles import start_actor
from rollout.speaking import Speaker

from verl.errors import ConfigError, RolloutError
from verl.http_client.request import RetryableAnswer
from verl.rollout.base import GenerationRequest
from verl.rollout.server.config import ServerRollout
from verl.rollout.server.protocols import OpenAIProtocol, SamplingRequest

LENGTH = 6  # of the responses that are asked for; the requests of the start are shorter


@pytest.fixture(scope="module")
def refusing(dir32, model32, prompts) -> Iterator[Callable[..., None]]:
    """Let a server change its answers to requests for responses, and see that the step ends with that reason."""
    change: list[Callable[[Any], Any]] = [lambda answer: answer]
    speaker = Speaker(dir32, "processed")

    def post(asked):
        answer = speaker.post(asked)
        limit = asked.body.get("parameters", asked.body).get("max_new_tokens", asked.body.get("max_tokens"))
        return change[0](answer) if limit == LENGTH else answer

    with serving(post, speaker.page) as server:
        endpoint = server.endpoint(retries=1)
        actors = {
            protocol: start_actor(
                model32, ServerRollout(endpoint=endpoint, protocol=protocol, weights="fixed", max_new_tokens=LENGTH)
            )
            for protocol in ("openai", "tgi")
        }

        def refuses(protocol: str, changed: Callable[[Any], Any], why: str) -> None:
            change[0] = changed
            told = r"gives no response to prompt \d, sample \d, sent \d times: "
            with pytest.raises(RolloutError, match=told) as refused:
                actors[protocol].generate(prompts("1+2=", "9-"), GenerationRequest(0))
            assert why in str(refused.value)

        yield refuses
        for actor in actors.values():
            actor.close()


def log_probs(told: Any, **more: Any) -> dict[str, Any]:
    return {"logprobs": {"token_logprobs": told}, **more}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (log_probs([-1.0, -9999.0, *[-1.0] * 4]), "token_logprobs[1] is -9999.0: a log-prob of -9999, and"),
        (log_probs([-math.inf] * 6), "a log-prob of -inf, and"),
        (log_probs([math.inf] * 6), "a log-prob of inf, and"),
        (log_probs([[-1.0]] * 6), "token_logprobs[0] is [-1.0]: Input should be a valid number"),
        (log_probs(["-1.0"] * 6), "token_logprobs[0] is '-1.0': Input should be a valid number"),
        (log_probs([-(10**400)] * 6), "token_logprobs[0] is -1000000000"),
        (log_probs(-1.0), "choices[0].logprobs.token_logprobs is -1.0: Input should be a valid list"),
        (log_probs([-1.0, None, -1.0]), "tokens without log-probs"),
        (log_probs([-1.0] * 5), "5 log-probs for 6 tokens"),
        ({"logprobs": [-1.0]}, "choices[0].logprobs is [-1.0]: Input should be a valid dictionary"),
        ({"token_ids": [3, 4, 5, 6, 7, 10**6]}, "token_ids[5] is 1000000: ids of the actor's model are 0 to"),
        ({"token_ids": [-1, 4, 5, 6, 7, 8]}, "choices[0].token_ids[0] is -1: ids of the actor's model are 0 to"),
        ({"token_ids": [3.0, 4, 5, 6, 7, 8]}, "choices[0].token_ids[0] is 3.0: Input should be a valid integer"),
        ({"token_ids": [True, 4, 5, 6, 7, 8]}, "choices[0].token_ids[0] is True: Input should be a valid integer"),
        ({"token_ids": "345678"}, "choices[0].token_ids is '345678': Input should be a valid list"),
        ({"finish_reason": None}, "choices[0].finish_reason is None: Input should be 'stop' or 'length'"),
        ({"finish_reason": "tool_calls"}, "finish_reason is 'tool_calls': Input should be 'stop' or 'length'"),
        ({"token_ids": [5]}, "a response of 1 tokens, where 6 were requested"),
        ({"token_ids": []}, "text without token ids"),
        ({"finish_reason": "stop"}, "which ends none here. Add it to stop_token_ids"),
        ({"prompt_token_ids": "1 2"}, "another prompt than was sent"),
    ],
)
def test_an_openai_server(change, why, refusing):
    def changed(answer):
        full = {"token_ids": [5] * 6, "finish_reason": "length", **log_probs([-1.0] * 6)}
        answer["choices"][0] |= full | change
        return answer

    refusing("openai", changed, why)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda choice: [choice, choice], "List should have at most 1 item"),
        (lambda choice: [], "choices is []: List should have at least 1 item"),
        (lambda choice: choice, "Input should be a valid list"),
        (lambda choice: ["text"], "choices[0] is 'text'"),
        (lambda choice: None, "choices is None"),
    ],
)
def test_choices_that_are_not_one(change, why, refusing):
    refusing("openai", lambda answer: {"choices": change(answer["choices"][0])}, why)


@pytest.mark.first_rows(4)
@pytest.mark.parametrize("answer", [[], "text", 7, None, True, {"error": "busy"}])
@pytest.mark.parametrize(
    ("protocol", "why"),
    [("openai", " is "), ("tgi", "an answer without details")],
)
def test_an_answer_of_another_form(protocol, why, answer, refusing):
    refusing(protocol, lambda _: Say(body=answer), why)


def tokens(**changed: Any) -> dict[str, Any]:
    return {"tokens": [{"id": 5, "logprob": -1.0, **changed}] * 6}


@pytest.mark.first_rows(4)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (tokens(logprob=-9999.0), "tokens[0].logprob is -9999.0: a log-prob of -9999"),
        (tokens(logprob="-1.0"), "tokens[0].logprob is '-1.0': Input should be a valid number"),
        (tokens(logprob=math.nan), "tokens[0].logprob is nan: a log-prob of nan"),
        (tokens(id="5"), "tokens[0].id is '5': Input should be a valid integer"),
        (tokens(id=10**6), "is 1000000: ids of the actor's model are 0 to"),
        ({"tokens": [5] * 6}, "tokens[0] is 5: Input should be a valid dictionary"),
        ({"tokens": "text"}, "tokens is 'text': Input should be a valid list"),
        ({"tokens": []}, "a response of 0 tokens, where 6 were requested"),
        ({"generated_tokens": 5}, "generated_tokens is 5, and tokens has 6"),
        ({"finish_reason": "broken"}, "finish_reason is 'broken': Input should be 'length', 'eos_token'"),
    ],
)
def test_a_tgi_server(change, why, refusing):
    def changed(answer):
        answer["details"] |= {**tokens(), "finish_reason": "length", **change}
        return answer

    refusing("tgi", changed, why)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ("text", "prompt_logprobs is 'text': Input should be a valid list"),
        ([None], "prompt_logprobs are not of the prompt's own tokens"),
        ([None, {"3": {"logprob": -1.0}}], "prompt_logprobs are not of the prompt's own tokens"),
        ([None, -1.0], "prompt_logprobs[1] is -1.0: Input should be a valid dictionary"),
        ([None, {"4": {"logprob": "-1"}}], "prompt_logprobs[1].4.logprob is '-1': Input should be a valid number"),
        ([None, {"4": {"logprob": -9999.0}}], "prompt_logprobs[1].4.logprob is -9999.0: a log-prob of -9999"),
    ],
)
def test_log_probs_of_a_prompt_that_are_none(told, why):
    choice = {"token_ids": [5], "finish_reason": "length", **log_probs([-1.0]), "prompt_logprobs": told}
    with pytest.raises(RetryableAnswer) as refused:
        OpenAIProtocol("m").read({"choices": [choice]}, [3, 4], SamplingRequest(max_tokens=1, tells_prompt=True))
    assert why in str(refused.value)


def test_they_are_refused_at_the_start(dir32, model32):
    speaker = Speaker(dir32)

    def post(asked):
        answer = speaker.post(asked)
        if (told := answer["choices"][0].get("prompt_logprobs")) is not None:
            told[1] = {key: {"logprob": "-1.5"} for key in told[1]}
        return answer

    with serving(post, speaker.page) as server:
        why = r"rollout.endpoint.base_url is http.*choices\[0\].prompt_logprobs\[1\].\d+.logprob is '-1.5'"
        with pytest.raises(ConfigError, match=why):
            start_actor(model32, ServerRollout(endpoint=server.endpoint(retries=0)))
