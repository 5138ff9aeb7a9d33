"""Rewards by a scoring service, on loopback: batches, failures, and a run that logs them."""

from __future__ import annotations

import math

import pytest
from http_client.servers import Say, in_turn, serving
from refusals import refusal
from rewards import rated
from trainer.runs import JSONL, fit, ppo_run, read_lines

from verl.component import BuildContext
from verl.errors import RewardError
from verl.models.pretrained import Pretrained
from verl.rewards.async_rewards import AsyncRewards
from verl.rewards.remote.http_reward import HTTPReward
from verl.rewards.weighted_sum import WeightedSum

RESPONSES = ["0", "1", "2", "3", "4"]
KEY = "sk-abcdef0123456789abcdef"


def batch_of(responses=RESPONSES, **columns):
    return rated.batch_of(responses, **columns)


def scored_by_value(asked):
    return [float(item["response"]) for item in asked.body]


def each_of(score):
    return lambda asked: [score] * len(asked.body)


@pytest.fixture
def made():
    """Build the reward of a server; it is closed after the test."""
    rewards = []

    def make(server, endpoint=None, **settings):
        settings = {"batch_size": 2, **settings}
        described = HTTPReward(endpoint=server.endpoint("/score", **(endpoint or {})), **settings)
        rewards.append(described.build(BuildContext()))
        return rewards[-1]

    yield make
    for reward in rewards:
        reward.close()


def outcomes(scored):
    return list(scored["reward_outcome"])


def test_samples_are_posted_as_a_list_and_scores_keep_their_order(made):
    with serving(scored_by_value) as server:
        scored = made(server).score_tokens(batch_of())
        assert list(scored["score"]) == [0, 1, 2, 3, 4]
        assert scored["token_level_scores"][:, 1].tolist() == [0, 1, 2, 3, 4]
        assert sorted(len(asked.body) for asked in server.asked) == [1, 2, 2]
        assert {asked.path for asked in server.asked} == {"/score"}
        assert all(text.startswith("scored in ") for text in outcomes(scored))
        first = next(asked for asked in server.asked if asked.body[0]["response"] == "0")
        assert first.body == [{"prompt": "prompt 0", "response": "0"}, {"prompt": "prompt 1", "response": "1"}]
        assert len(made(server).score_tokens(batch_of([]))) == 0


def test_names_of_fields_and_places_of_scores_are_the_services_own(made):
    def answer(asked):
        assert asked.body["kind"] == "math"
        return {"result": {"scores": [{"value": item["gold"] * 2} for item in asked.body["items"]]}}

    settings = {
        "fields": {"said": "response", "gold": "answer"},
        "items_key": "items",
        "options": {"kind": "math"},
        "scores_path": "result.scores",
        "score_path": "value",
    }
    with serving(answer) as server:
        scored = made(server, **settings).score_tokens(batch_of(answer=[3, 1, 4, 1, 5]))
        assert list(scored["score"]) == [6, 2, 8, 2, 10]
        assert server.asked[0].body["items"][0].keys() == {"said", "gold"}
        with pytest.raises(RewardError, match="fields.gold is answer, and the data has no such column. It has prompt"):
            made(server, **settings).score_tokens(batch_of())


def test_a_retry_asks_only_for_the_scores_that_were_missing(made):
    def once_wrong(asked):
        return [float("nan") if item["response"] == "1" else 0.5 for item in asked.body]

    with serving(in_turn(once_wrong, scored_by_value)) as server:
        scored = made(server, batch_size=5).score_tokens(batch_of())
        assert list(scored["score"]) == [0.5, 1, 0.5, 0.5, 0.5]
        assert [len(asked.body) for asked in server.asked] == [5, 1]
        assert outcomes(scored)[1].endswith(", asked 2 times")


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ([1.0], "1 scores in place of a list of 2 scores"),
        ([1.0, 2.0, 3.0], "3 scores in place of a list of 2 scores"),
        ({"scores": [1.0, 2.0]}, "in place of a list of 2 scores"),
        (each_of(None), "None in place of a number"),
        (each_of("high"), "'high' in place of a number"),
        (each_of("1_0"), "'1_0' in place of a number"),
        (each_of([2.0]), "[2.0] in place of a number"),
        (Say(status=500, body="broken"), "HTTP 500"),
    ],
)
def test_a_sample_that_fails_for_good_ends_the_run_with_its_texts(bad, why, made):
    with serving(in_turn(bad)) as server, pytest.raises(RewardError) as refused:
        made(server, batch_size=2).score_tokens(batch_of(["a", "b"]))
    message = str(refused.value)
    assert f"Expected: one finite number for each response, from {server.url}/score" in message
    assert why in message
    assert "Sample: " in message
    assert len(server.asked) == 3


@pytest.mark.parametrize("number", [math.nan, math.inf, 1e300])
def test_a_score_that_is_not_finite_is_told_as_such_with_its_row(number, made):
    def answer(asked):
        return [number if item["response"] == "b" else 1.0 for item in asked.body]

    with serving(answer) as server, pytest.raises(RewardError, match=r"(?s)the score .*Sample: 1"):
        made(server).score_tokens(batch_of(["a", "b"]))


def test_a_sample_may_get_a_score_of_its_own_instead_and_is_counted(made, caplog):
    def bad_for_2(asked):
        return Say(status=500) if any(item["response"] == "2" for item in asked.body) else scored_by_value(asked)

    with serving(bad_for_2) as server:
        reward = made(server, on_error="score", error_score=-1.0, batch_size=1)
        counted = AsyncRewards()
        counted.use(reward, None)
        scored = reward.score_tokens(batch_of(), counted.result_of(1, batch_of()))
    assert list(scored["score"]) == [0, 1, -1, 3, 4]
    assert list(scored["reward/failed"]) == [0, 0, 1, 0, 0]
    assert outcomes(scored)[2].startswith("failed, asked 3 times: HTTP 500")
    assert "1 of 5 samples failed and get error_score -1" in caplog.text
    metrics = {name.removeprefix("reward/remote_"): x for name, x in counted.take_counts().items()}
    assert metrics.pop("latency_p50_s") <= metrics.pop("latency_p95_s")
    assert metrics == {"requests": 7, "retries": 2, "failures": 1}
    assert counted.take_counts() == {}


def test_a_server_that_refuses_all_or_is_gone_ends_the_run_whatever_may_fail_and_is_told_before_anything_loads(made):
    with serving(in_turn(Say(status=401, body="who are you"))) as server:
        reward = made(server, on_error="score")
        with pytest.raises(RewardError, match="HTTP 401"):
            reward.score_tokens(batch_of())
    with pytest.raises(RewardError, match="the server seems to be down"):
        reward.score_tokens(batch_of())
    with refusal("endpoint.base_url"):
        made(server)


def test_a_run_asks_logs_and_shows_its_samples_without_the_key(dir32, tmp_path, monkeypatch):
    monkeypatch.setenv("SCORER_KEY", KEY)

    def lengths(asked):
        assert asked.headers["authorization"] == f"Bearer {KEY}"
        return [float(len(item["response"])) for item in asked.body]

    with serving(lengths) as server:
        endpoint = server.endpoint("/score", key_variable="SCORER_KEY")
        judge = HTTPReward(endpoint=endpoint, batch_size=4)
        run = ppo_run(
            Pretrained(path=str(dir32)),
            reward=WeightedSum(parts={"judge": judge}, weights={"judge": 2.0}),
            total_steps=1,
            tracker=JSONL,
        )
        fit(run, tmp_path / "run")
    line = next(line for line in read_lines(tmp_path / "run/metrics.jsonl") if "reward/mean" in line)
    assert line["reward/mean"] == 2 * line["reward/judge"]
    assert line["reward/judge_remote_requests"] > 0
    assert line["reward/judge_remote_failures"] == 0
    samples = read_lines(next((tmp_path / "run/samples").glob("*.jsonl")))
    assert all(row["reward_judge_outcome"].startswith("scored") for row in samples)
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    assert not [path for path in written if KEY.encode() in path.read_bytes()]
