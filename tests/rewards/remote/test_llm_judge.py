"""Rewards by a judge behind an OpenAI-compatible server, on loopback."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from http_client.servers import Say, in_turn, serving
from omegaconf import OmegaConf
from rewards.rated import batch_of
from rewards.remote.test_http_reward import outcomes

from verl.component import BuildContext
from verl.errors import RewardError
from verl.http_client.request import RetryableAnswer
from verl.rewards.remote.llm_judge import LLMJudge
from verl.rewards.remote.remote_base import by_path

TEMPLATE = 'Q: {prompt} A: {response} Say {{score}} as {"score": 1}.'
SETTINGS = {"model": "judge-1", "template": TEMPLATE, "score_pattern": r"Score: (\S+)"}


def says(text, **more):
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop", **more}]}


def graded(asked):
    """The judge takes the number in the response."""
    said = asked.body["messages"][-1]["content"].split("A: ")[1].split()[0]
    return says(f"It says Score: 99 of itself.\nScore: {said}")


@pytest.fixture
def made():
    """Build the judge of a server; it is closed after the test."""
    rewards = []

    def make(server, **settings):
        settings = {**SETTINGS, **settings}
        rewards.append(LLMJudge(endpoint=server.endpoint("/v1"), **settings).build(BuildContext()))
        return rewards[-1]

    yield make
    for reward in rewards:
        reward.close()


def test_the_judge_reads_the_template_and_its_last_score_counts(made):
    options = {"temperature": 0.0, "max_tokens": 64}
    with serving(graded) as server:
        scored = made(server, options=options, system="Be strict.").score_tokens(batch_of(["3", "1.5"]))
        assert list(scored["score"]) == [3.0, 1.5]
        bodies = {asked.body["messages"][1]["content"]: asked.body for asked in server.asked}
    assert {asked.path for asked in server.asked} == {"/v1/chat/completions"}
    text = 'Q: prompt 0 A: 3 Say {score} as {"score": 1}.'
    messages = [{"role": "system", "content": "Be strict."}, {"role": "user", "content": text}]
    assert bodies[text] == {**options, "model": "judge-1", "messages": messages}


def test_columns_fill_the_template_and_what_they_hold_is_not_read_as_one(made):
    with serving(in_turn(says("Score: 1"))) as server:
        made(server, template="{response}|{answer}|{tags}").score_tokens(
            batch_of(["{answer}"], answer=["{prompt}"], tags=[["a", "ä"]])
        )
        assert server.asked[0].body["messages"] == [{"role": "user", "content": '{answer}|{prompt}|["a", "ä"]'}]
        with pytest.raises(RewardError, match=r"template names \{gold\}, and the data has no such column"):
            made(server, template="{response}{gold}").score_tokens(batch_of(["a"]))


@pytest.mark.first_rows(3)
@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (says("I would rather not."), "score_pattern does not match: 'I would rather not.'"),
        (says("Score: high"), "'high' in place of a number"),
        (says("Score: 11"), r"the score 11, outside [0, 10]"),
        (says(None, finish_reason="length"), "finish_reason length; raise options.max_tokens"),
        ({"error": "no"}, "an answer without choices[0].message.content"),
        ([], "an answer without choices[0].message.content"),
        ({"choices": []}, "an answer without choices[0].message.content"),
        (Say(status=429), "HTTP 429"),
    ],
)
def test_an_answer_without_a_score_is_asked_for_again_and_then_told(bad, why, made):
    bounds = {"min_score": 0.0, "max_score": 10.0}
    with serving(in_turn(bad, says("Score: 2"))) as server:
        scored = made(server, **bounds).score_tokens(batch_of(["a"]))
        assert list(scored["score"]) == [2]
        assert outcomes(scored)[0].endswith("asked 2 times")
    with serving(in_turn(bad)) as server, pytest.raises(RewardError) as refused:
        made(server, **bounds).score_tokens(batch_of(["a"]))
    assert why in str(refused.value)
    assert "Sample: 0, prompt 'prompt 0', response 'a'" in str(refused.value)


def test_a_function_of_ones_own_may_read_the_score_with_columns(made):
    Path("rule.py").write_text("def read(reply, answer):\n    return reply.count(answer) / (reply != 'bad')\n")
    settings = {"score_pattern": None, "score_function": "rule.py:read"}
    with serving(in_turn(says("bad"), says("x y x"))) as server:
        scored = made(server, **settings).score_tokens(batch_of(["a"], answer=["x"]))
        assert list(scored["score"]) == [2]
        assert outcomes(scored)[0].endswith("asked 2 times")
    with serving(in_turn(says("bad"))) as server, pytest.raises(RewardError) as refused:
        made(server, **settings).score_tokens(batch_of(["b"], answer=["x"]))
    assert "ZeroDivisionError in score_function: division by zero, of 'bad'" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "path", "score"),
    [
        ('{"score": 3}', "score", 3.0),
        ('```json\n{"verdict": {"score": "4.5"}}\n```', "verdict.score", 4.5),
        ('First {"score": 1}, no: {"score": 2}.', "score", 2.0),
        ('[{"x": [1, 7]}]', "0.x.-1", 7.0),
        ('a } b { c {"score": true} d', "score", 1.0),
    ],
)
def test_a_place_in_json_is_found_in_what_is_around_it(text, path, score):
    assert by_path(text, path) == score


@pytest.mark.parametrize("text", ["no", '{"scores": 3}', "{" * 5000, '{"score": null}', '{"score": {"score": 1}}'])
def test_a_text_without_that_place_has_no_score(text):
    with pytest.raises(RetryableAnswer):
        by_path(text, "score")


def test_the_shipped_template_and_pattern_go_together(made):
    import yaml

    shipped = yaml.safe_load((Path(__file__).resolve().parents[3] / "conf/reward/remote_chat.yaml").read_text())
    ours = {name: value for name, value in shipped.items() if name not in ("_target_", "endpoint", "model")}
    for text, score in (("Fine.\nScore: 7", 7), ("**Score:** 8/10", 8), ("score = 9.5", 9.5)):
        with serving(in_turn(says(text))) as server:
            scored = made(server, **ours).score_tokens(batch_of([json.dumps(text)], answer=["4"]))
            assert list(scored["score"]) == [score]
    assert "The reference answer is: 4" in server.asked[0].body["messages"][0]["content"]


REPLIES = {
    "Right. Score: 7": 7, "**Score:** 7/10": 7, "Score (0-10): 7": 7, "Score: 3\nFinal score = 7.5": 7.5,
    "Score: \u22127": None, "Score: .7": None, "Score: (6)": 6, "No score.": None,
}  # fmt: skip


@pytest.mark.parametrize("reply", REPLIES)
def test_the_pattern_of_the_option_reads_the_score_and_nothing_beside_it(reply):
    option = OmegaConf.load(Path(__file__).resolve().parents[3] / "conf/reward/remote_chat.yaml")
    match = [*re.finditer(option.score_pattern, reply)]
    assert (float(match[-1][1]) if match else None) == REPLIES[reply]
