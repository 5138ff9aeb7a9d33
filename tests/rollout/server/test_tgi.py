"""`rollout=server` with TGI's protocol, against a server on loopback that speaks it (the one in
`rollout/speaking.py`).
"""

import pytest
import torch
from http_client.servers import Say
from refusals import refusal
from rollout.speaking import Speaker

from verl.errors import RolloutError
from verl.rollout.base import GenerationRequest
from verl.rollout.server.protocols import SamplingRequest, TGIProtocol


@pytest.fixture
def speaker(dir32):
    return Speaker(dir32, mode="processed")  # as TGI does


TGI = {"protocol": "tgi", "weights": "fixed"}


@pytest.mark.first_rows(1)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.5}])
def test_rows_hold_the_servers_tokens_and_the_log_probs_that_the_trainer_would_compute(
    options, attached, speaker, prompts
):
    actor = attached(speaker, **TGI, **options)
    rows = actor.generate(prompts(), GenerationRequest(0, 3))
    again = actor.generate(prompts(), GenerationRequest(0, 3))
    assert torch.equal(rows["responses"], again["responses"])
    found, expected = rows["rollout_log_probs"], actor.compute_log_probs(rows)["old_log_probs"]
    torch.testing.assert_close(found[rows["response_mask"]], expected[rows["response_mask"]], atol=1e-5, rtol=0)
    asked = [a.body for a in actor.server.asked if a.body["parameters"]["max_new_tokens"] == 6]
    assert {a["inputs"] for a in asked} == {"1+2=", "34+5=", "what is 6*7? ", "9-"}
    assert all("top_p" not in a["parameters"] for a in asked)  # which TGI refuses to be 1
    assert actor.sync().metrics["sync/probe_gap_nats"] < 1e-5


def test_a_server_whose_tokenizer_is_another_is_refused(attached, speaker):
    def post(asked):
        answer = speaker.post(asked)
        for token in answer["details"]["prefill"]:
            token["id"] += 1
        return answer

    with refusal("rollout.endpoint.base_url") as refused:
        attached(speaker, post, **TGI)
    assert "another model" in str(refused.value)


def test_a_server_that_is_no_tgi_is_refused(attached, speaker):
    with refusal("rollout.endpoint.base_url"):
        attached(speaker, lambda asked: {"generated_text": "4"}, **TGI)
    with refusal("rollout.protocol"):
        attached(speaker, page=lambda path: Say(status=404) if path == "/info" else "here", **TGI)


def test_a_prompt_that_no_text_is_read_as_is_refused_and_a_start_of_every_text_is_left_out(tokenizer):
    class Starting:
        """The character tokenizer, with <eos> before every text."""

        def __call__(self, text):
            return {"input_ids": [tokenizer.eos_token_id, *tokenizer(text)["input_ids"]]}

        decode = tokenizer.decode

    ids = Starting()("1+2=")["input_ids"]
    assert TGIProtocol(Starting()).body(ids, SamplingRequest(max_tokens=1))["inputs"] == "1+2="
    with pytest.raises(RolloutError, match="no text is read as the tokens of the prompt '1"):
        TGIProtocol(Starting()).as_text(ids[1:])
