"""`rollout=server` against a server on loopback that speaks as vLLM does (the one in `rollout/speaking.py`)."""

import re

import pytest
import torch
from environments.episodes import Scripted
from http_client.servers import Say, serving
from random_models import save_random_model
from refusals import refusal
from roles import start_actor
from rollout.speaking import Speaker, gap

from verl.component import BuildContext
from verl.environments.base import StepResult
from verl.environments.episode_loop import EpisodeGenerator
from verl.errors import ConfigError, RolloutError
from verl.ops.sampling import EVALUATION
from verl.rollout.base import GenerationRequest, TurnLimits
from verl.rollout.server.config import ServerRollout


def fields(rows):
    return {name: rows[name] for name in ("responses", "response_mask", "rollout_log_probs")}


def assert_same(left, right):
    for name, tensor in fields(left).items():
        assert torch.equal(tensor, right[name]), name


def test_rows_hold_the_servers_tokens_and_the_log_probs_that_the_trainer_would_compute(attached, speaker, prompts):
    actor = attached(speaker)
    rows = actor.generate(prompts(), GenerationRequest(0, 3))
    assert len(rows) == 12
    assert rows["sample_ids"].tolist() == [0, 1, 2] * 4
    assert rows["group_ids"].tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert gap(actor, rows) < 1e-5
    assert len({tuple(row.tolist()) for row in rows["responses"]}) > 8


def test_a_seed_of_run_step_prompt_and_sample_goes_with_each_request(attached, speaker, prompts):
    actor = attached(speaker)
    first = actor.generate(prompts(), GenerationRequest(0, 2))
    assert_same(first, actor.generate(prompts(), GenerationRequest(0, 2)))
    backwards = prompts("9-", "what is 6*7? ", "34+5=", "1+2=", ids=[3, 2, 1, 0])
    again = actor.generate(backwards, GenerationRequest(0, 2))
    assert again["responses"][-2:].tolist() == first["responses"][:2].tolist()
    seeds = [asked.body["seed"] for asked in actor.server.asked if asked.body.get("max_tokens") == 6]
    assert len(set(seeds)) == 8
    assert all(0 <= seed < 2**53 for seed in seeds)
    others = [
        actor.generate(prompts(), GenerationRequest(1, 2)),
        actor.generate(prompts(), GenerationRequest(0, 2, stream=EVALUATION)),
    ]
    assert all(other["responses"].tolist() != first["responses"].tolist() for other in others)


def test_what_is_begun_is_drawn_while_the_trainer_does_something_else(attached, speaker, prompts):
    actor = attached(speaker)
    expected = actor.generate(prompts(), GenerationRequest(0, 2))
    rows = prompts()
    actor.generator.begin(rows, GenerationRequest(0, 2))
    with torch.no_grad():
        actor.model.get_input_embeddings().weight.mul_(2)  # the server has weights of its own
    found = actor.generator.finish()
    assert_same(found, expected)


def test_what_the_trainer_would_tell_of_changed_weights_is_not_begun(attached, speaker, prompts):
    actor = attached(speaker, log_probs="trainer")
    with refusal("trainer.mode"):
        actor.generator.begin(prompts(), GenerationRequest(0))


def test_only_what_failed_is_asked_again(attached, speaker, prompts, caplog):
    failed = []

    def post(asked):
        seed = asked.body.get("seed") if asked.path == "/v1/completions" else None
        if seed is not None and seed % 3 == 0 and seed not in failed and asked.body["max_tokens"] == 6:
            failed.append(seed)
            return Say(status=500)
        return speaker.post(asked)

    actor = attached(speaker, post)
    rows = actor.generate(prompts(), GenerationRequest(0, 4))
    assert failed
    assert sum(asked.body.get("max_tokens") == 6 for asked in actor.server.asked) == 16 + len(failed)
    told = re.search(r"(\d+) of 16 responses needed more than one request", caplog.text)
    assert told
    assert int(told[1]) >= len(failed)  # and whose connection was closed before it was read
    assert gap(actor, rows) < 1e-5


def test_a_server_that_is_gone_ends_the_step(attached, speaker, prompts):
    actor = attached(speaker)
    actor.generate(prompts(), GenerationRequest(0))
    actor.server.is_over = True
    actor.server.shutdown()
    actor.server.server_close()
    with pytest.raises(RolloutError, match="gives no response to prompt"):
        actor.generate(prompts(), GenerationRequest(0))


def test_a_prompt_that_is_too_long_is_told_with_the_numbers(attached, speaker, prompts):
    speaker.max_len = 16
    actor = attached(speaker)
    with pytest.raises(ConfigError, match="with a prompt of 13 tokens that makes 19, and the server takes 16"):
        actor.generate(prompts(), GenerationRequest(0))


# What is refused at the start


def test_a_server_that_gives_text_only_is_refused_at_the_start(attached, speaker):
    speaker.tells_ids = False
    with refusal("rollout.endpoint.base_url"):
        attached(speaker)


@pytest.mark.parametrize("weights", ["fixed", "reload"])
def test_a_server_of_another_model_is_refused_before_its_weights_are_replaced(weights, attached, tmp_path):
    other = Speaker(save_random_model(tmp_path / "other", "llama", torch.float32))
    with pytest.raises(ConfigError, match="it serves another model than the actor's: log-probs of fixed text differ"):
        attached(other, weights=weights)
    assert other.reloads == []


def test_models_are_chosen_by_name(attached, speaker):
    with refusal("rollout.model"):
        attached(speaker, served="gpt")
    two = {"data": [{"id": "a"}, {"id": "b"}]}
    with refusal("rollout.model"):
        attached(speaker, page=lambda path: two if path == "/v1/models" else "here")


def test_a_server_that_takes_no_weights_is_refused_unless_they_are_fixed(attached, speaker, prompts):
    speaker.is_dev = False
    with refusal("rollout.weights"):
        attached(speaker)
    actor = attached(speaker, weights="fixed")
    assert gap(actor, actor.generate(prompts(), GenerationRequest(0))) < 1e-5
    assert actor.sync().note == "the server keeps its weights"


def test_no_server_is_told_at_the_start(model32):
    with serving(lambda asked: None) as server:
        pass
    with refusal("rollout.endpoint.base_url"):
        start_actor(model32, ServerRollout(endpoint=server.endpoint()))


# What log-probs mean


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "options", "source"),
    [
        pytest.param("raw", {}, "server", marks=pytest.mark.exhaustive),
        ("raw", {"temperature": 0.5}, "trainer"),
        pytest.param("raw", {"top_p": 0.5}, "server", marks=pytest.mark.exhaustive),
        pytest.param("raw", {"temperature": 0.5, "top_k": 3}, "trainer", marks=pytest.mark.exhaustive),
        ("processed", {}, "server"),
        pytest.param("processed", {"temperature": 0.5}, "server", marks=pytest.mark.exhaustive),
        ("processed", {"top_p": 0.5}, "trainer"),
        pytest.param("processed", {"temperature": 2.0, "top_p": 0.5}, "trainer", marks=pytest.mark.exhaustive),
        ("raw", {"log_probs": "trainer"}, "trainer"),
    ],
)
def test_log_probs_are_right_whatever_the_server_means_by_them(mode, options, source, attached, dir32, prompts):
    actor = attached(Speaker(dir32, mode), **options)
    assert actor.generator.engine.source == source
    for request in (GenerationRequest(0, 2), GenerationRequest(0, greedy=True)):
        rows = actor.generate(prompts(), request)
        assert rows["rollout_log_probs"].dtype == torch.float32
        assert gap(actor, rows) < 1e-5


@pytest.mark.parametrize(
    ("mode", "options", "remedy"),
    [
        ("raw", {"temperature": 0.5}, "Set temperature=1, or use a server of processed log-probs"),
        ("processed", {"top_p": 0.5}, "Set temperature=1 with a server of raw log-probs"),
        ("raw", {"temperature": 0.5, "top_p": 0.5}, "Set temperature=1"),
    ],
)
def test_log_probs_that_would_be_wrong_are_refused_where_the_trainer_cannot_tell_them(
    mode, options, remedy, attached, dir32
):
    with pytest.raises(ConfigError, match=r"log-probs must be log_softmax\(logits / temperature\)") as refused:
        attached(Speaker(dir32, mode), weights="fixed", **options)
    assert remedy in str(refused.value)


def test_turns_of_episodes_are_requests_of_their_own_with_seeds_by_turn(attached, speaker, prompts):
    actor = attached(speaker, stop_token_ids=tuple(range(20, 60)))
    request, sampler = GenerationRequest(1, 2), actor.generator.engine

    def answer(row, turn, action):
        return StepResult("12", float(turn), terminated=turn >= 3)

    def played(rows):
        environment, context = Scripted(answer=answer, max_tokens=30), BuildContext()
        stops = sampler.sampling_params.stop_ids
        episodes = EpisodeGenerator(environment, sampler, sampler.options, actor.tokenizer, stops, context)
        found = episodes.generate(rows, request)
        episodes.calls.close()
        return found

    rows = played(prompts())
    assert gap(actor, rows) < 1e-5
    assert max(len(record["turns"]) for record in rows["episode"]) == 3
    backwards = played(prompts("9-", "what is 6*7? ", "34+5=", "1+2=", ids=[3, 2, 1, 0]))
    texts = [
        {
            (prompt, sample): [turn["text"] for turn in record["turns"]]
            for prompt, sample, record in zip(
                found["prompt_ids"].tolist(), found["sample_ids"].tolist(), found["episode"], strict=True
            )
        }
        for found in (rows, backwards)
    ]
    assert texts[0] == texts[1]


def test_turns_need_the_servers_own_log_probs(attached, speaker):
    actor = attached(speaker, log_probs="trainer")
    with pytest.raises(ConfigError, match="turns of episodes need those of the server"):
        actor.generator.engine.turns(TurnLimits(32))
    with pytest.raises(ConfigError, match="episodes of up to 500 tokens"):
        attached(speaker).generator.engine.turns(TurnLimits(500))
