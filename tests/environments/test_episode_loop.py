"""The loop of episodes: tokens are appended and never made again, and depend on nothing that runs beside them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import threading
import time

import pytest
import torch
from environments.episodes import (
    REQUEST,
    Scripted,
    ends_after,
    engine_of,
    long_turns,
    prompts_of,
    tiny,
    tokens_by_sample,
)
from roles import assert_own_log_probs

from verl.environments.base import InfraError, StepResult
from verl.environments.episode import without_dropped
from verl.errors import RolloutError
from verl.model_paths.kv_cache import SlotCache
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import slot_bytes

TEXTS = ["1+2=", "34+5=", "what is 6*7? ", "9-", "77+1="]


@pytest.fixture(scope="module")
def model():
    return tiny()


def played(model, environment, texts=TEXTS, ids=None, request=REQUEST, **options):
    with contextlib.closing(engine_of(environment, model=model, **options)) as engine:
        return engine.generate(prompts_of(model[1], texts, ids), request)


# Untrained turns rarely end by themselves: the letters end them too, or every character.
STOPS, EACH = tuple(range(20, 60)), tuple(range(6, 100))


def test_observations_stand_off_the_mask_with_the_models_tokens_around_them(model):
    rows = played(model, Scripted(answer=ends_after(3, "37\n", 1.0)), stop_token_ids=STOPS)
    _, tokenizer = model
    assert len(rows) == 20
    seen = 0
    for row in range(len(rows)):
        record = rows["episode"][row]
        ids, mask = rows["responses"][row], rows["response_mask"][row]
        turns = rows["turn_ids"][row]
        place = 0
        for number, turn in enumerate(record["turns"]):
            end = place + turn["tokens"]
            assert mask[place:end].all()
            said = ids[place : end - 1] if turn["is_complete"] else ids[place:end]
            assert tokenizer.decode(said) == turn["text"]
            assert rows["turn_rewards"][row, end - 1] == turn["reward"]
            place = end + turn["observed"]
            assert not mask[end:place].any()
            assert tokenizer.decode(ids[end:place]) == ("37\n" if turn["observed"] else "")
            assert (turns[end - turn["tokens"] : place] == number).all()
            seen += turn["observed"] > 0
        assert (turns[place:] == -1).all()
        assert not mask[place:].any()
        assert int(rows["attention_mask"][row].sum()) == int(rows["prompt_mask"][row].sum()) + place
        assert float(rows["turn_rewards"][row].sum()) == record["reward"]
    assert seen > 5


def test_the_log_probs_of_every_turn_are_the_models_own(model):
    rows = played(model, Scripted(answer=long_turns), stop_token_ids=STOPS)
    assert_own_log_probs(model[0], rows, atol=2e-5)
    assert not rows["rollout_log_probs"][~rows["response_mask"]].any()


def test_an_episode_is_the_same_alone_in_a_batch_in_another_order_and_with_few_slots(model):
    environment = Scripted(answer=long_turns)
    whole = tokens_by_sample(played(model, environment, stop_token_ids=STOPS))
    assert len({tuple(ids) for ids, _ in whole.values()}) == len(whole)
    backwards = played(model, environment, TEXTS[::-1], [4, 3, 2, 1, 0], stop_token_ids=STOPS)
    alone = played(model, environment, TEXTS[2:3], [2], stop_token_ids=STOPS)
    few = Scripted(answer=long_turns, kv_cache_gib=2.5 * slot_bytes(model[0], 1024 + 13) / 2**30)
    for found in (backwards, alone, played(model, few, stop_token_ids=STOPS)):
        for key, (ids, log_probs) in tokens_by_sample(found).items():
            assert ids == whole[key][0]
            assert log_probs == pytest.approx(whole[key][1], abs=1e-5)


def test_slots_of_live_turns_are_moved_to_the_front_and_give_what_whole_rows_give(model, monkeypatch):
    moved, copy = [], SlotCache.copy
    monkeypatch.setattr(SlotCache, "copy", lambda self, *given: moved.append(len(given[0])) or copy(self, *given))

    def answer(row, turn, action):
        async def slow():  # some wait, and their slots stay theirs, while others are drawn
            await asyncio.sleep(0.02 * (len(action.text) % 3))
            return long_turns(row, turn, action)

        return slow()

    engine = engine_of(Scripted(answer=answer, max_tokens=90), model=model, stop_token_ids=STOPS, max_new_tokens=12)
    found = []
    try:
        for engine.engine.keeps_slots in (True, False):  # type: ignore
            found.append(tokens_by_sample(engine.generate(prompts_of(model[1], TEXTS), REQUEST)))
    finally:
        engine.close()
    assert len(moved) > 3
    assert any(count % 2 == 0 for count in moved)  # two change places where a waiting episode has the slot
    for key, (ids, log_probs) in found[0].items():
        assert ids == found[1][key][0]
        assert log_probs == pytest.approx(found[1][key][1], abs=1e-5)


def test_an_environment_that_answers_at_once_is_called_in_the_thread_that_draws(model):
    threads, waits = set(), False

    async def answer_of(turn):
        if waits and turn == 2:
            await asyncio.sleep(0)
        return StepResult("x", 1.0, terminated=turn >= 2)

    def answer(row, turn, action):
        threads.add(threading.current_thread())
        return answer_of(turn)

    environment = Scripted(answer=answer, answers_at_once=True, retries=0)
    rows = played(model, environment, ["1+1="], stop_token_ids=EACH)
    assert threads == {threading.current_thread()}
    assert {(record["end"], record["reward"]) for record in rows["episode"]} == {("terminated", 2.0)}
    waits = True
    rows = played(model, environment, ["1+1="], stop_token_ids=EACH)
    assert all("says that it answers at once" in record["infra"][0] for record in rows["episode"])


def test_what_an_earlier_batch_of_episodes_asked_for_is_not_taken_for_an_answer_of_a_later_one(model):
    is_first = True

    def answer(row, turn, action):
        async def slow(delay_s, reward):
            await asyncio.sleep(delay_s)
            return StepResult(None, reward, terminated=True)

        if is_first and row["prompt_id"] == 0:
            raise InfraError("no machine")
        return slow(0.3, 5.0) if is_first else slow(0.6, 1.0)

    environment = Scripted(answer=answer, retries=0, on_infra="stop")
    with contextlib.closing(engine_of(environment, model=model, stop_token_ids=EACH)) as engine:
        with pytest.raises(RolloutError, match="no machine"):
            engine.generate(prompts_of(model[1], TEXTS), REQUEST)
        is_first = False
        rows = engine.generate(prompts_of(model[1], TEXTS), GenerationRequest(4, 4))
    assert {record["reward"] for record in rows["episode"]} == {1.0}


def test_a_turn_has_noise_of_its_own(model):
    rows = played(model, Scripted(answer=ends_after(4, "=")), ["="], stop_token_ids=EACH)
    first = [
        [int(rows["responses"][row][rows["turn_ids"][row] == turn][0]) for turn in range(4)] for row in range(len(rows))
    ]
    assert any(len(set(turns)) > 1 for turns in first)


def test_an_episode_that_waits_holds_up_no_other(model):
    answered: list[int] = []  # the prompt of each turn
    awaited = 0  # turns of other prompts, before the first one has an answer

    def answer(row, turn, action):
        async def slow():
            end = time.monotonic() + 60
            while row["prompt_id"] == 0 and sum(map(bool, answered)) < awaited and time.monotonic() < end:
                await asyncio.sleep(0.01)
            answered.append(row["prompt_id"])
            return StepResult("x", terminated=turn >= 3)

        return slow()

    environment = Scripted(answer=answer, step_timeout_s=120.0)
    played(model, environment, stop_token_ids=STOPS, request=GenerationRequest(1, 1))
    awaited = sum(map(bool, answered))
    answered.clear()
    played(model, environment, stop_token_ids=STOPS, request=GenerationRequest(1, 1))
    assert answered.index(0) == awaited > 4


def test_a_turn_cut_by_length_executes_nothing_and_each_cut_has_its_name(model):
    asked = []

    def answer(row, turn, action):
        asked.append(action.text)
        return StepResult("x" * 20, terminated=False)

    rows = played(model, Scripted(answer=answer), max_new_tokens=3)
    assert {record["end"] for record in rows["episode"]} == {"turn_tokens"}
    assert not asked
    ends = played(model, Scripted(answer=answer, max_turns=2), stop_token_ids=EACH)
    assert {record["end"] for record in ends["episode"]} == {"turns"}
    ends = played(model, Scripted(answer=answer, max_tokens=30), stop_token_ids=EACH)
    assert {record["end"] for record in ends["episode"]} == {"tokens"}
    assert ends["responses"].shape[1] <= 30


def test_a_failure_of_ours_is_retried_in_a_fresh_environment_and_changes_no_token(model):
    failed = set()

    def answer(row, turn, action):
        if turn == 2 and row["prompt_id"] not in failed:
            failed.add(row["prompt_id"])
            raise ConnectionError("the service is down")
        return long_turns(row, turn, action)

    sound = tokens_by_sample(played(model, Scripted(answer=long_turns), stop_token_ids=STOPS))
    rows = played(model, Scripted(answer=answer), stop_token_ids=STOPS)
    assert {key: ids for key, (ids, _) in tokens_by_sample(rows).items()} == {key: x for key, (x, _) in sound.items()}
    again = [record for record in rows["episode"] if record["attempts"] > 1]
    assert again
    assert all("ConnectionError: the service is down" in record["infra"][0] for record in again)


@pytest.mark.parametrize("how", ["drop_member", "drop_group"])
def test_an_episode_that_cannot_be_played_never_becomes_a_reward(model, how):
    def answer(row, turn, action):
        if row["prompt_id"] == 1:
            raise InfraError("no machine")
        return StepResult(None, 1.0, terminated=True)

    rows = played(model, Scripted(answer=answer, retries=1, on_infra=how), stop_token_ids=EACH)
    dropped = [record["end"] == "dropped" for record in rows["episode"]]
    assert dropped == [prompt == 1 for prompt in rows["prompt_ids"].tolist()]
    kept = without_dropped(rows)
    assert len(kept) == 16
    assert sum(record.get("left_out", 0) for record in kept["episode"]) == 4
    assert not rows["response_mask"][torch.tensor(dropped)].any()


def test_a_run_may_stop_at_a_failure_of_ours(model):
    def answer(row, turn, action):
        raise InfraError("no machine")

    with pytest.raises(RolloutError, match="no machine.*on_infra is stop"):
        played(model, Scripted(answer=answer, retries=0, on_infra="stop"), stop_token_ids=EACH)
    with pytest.raises(RolloutError, match="every episode of this step failed"):
        without_dropped(played(model, Scripted(answer=answer, retries=0), stop_token_ids=EACH))


def test_a_step_that_hangs_is_scored_and_its_late_answer_goes_nowhere(model):
    def answer(row, turn, action):
        async def slow():
            if row["prompt_id"] == 0 and turn == 2:
                await asyncio.sleep(30)
            return StepResult("x", 1.0, terminated=turn >= 3)

        return slow()

    environment = Scripted(answer=answer, step_timeout_s=0.3)
    rows = played(model, environment, stop_token_ids=EACH, request=GenerationRequest(1, 2))
    ends = {int(i): record["end"] for i, record in zip(rows["prompt_ids"], rows["episode"], strict=True)}
    assert ends == {0: "timeout", 1: "terminated", 2: "terminated", 3: "terminated", 4: "terminated"}
    first = rows["episode"][0]
    assert first["reward"] == 1.0
    assert [call["outcome"] for call in first["calls"]] == ["ok", "ok", "timeout"]


@pytest.mark.parametrize(
    "answer", [None, ("x", math.nan, False, False, {}), (5, 0.0, False, False, {}), (None, 0.0, False, False, {})]
)
def test_what_is_no_answer_of_an_environment_is_a_failure_of_ours(model, answer):
    rows = played(model, Scripted(answer=lambda *_: answer, retries=0), ["1"], stop_token_ids=EACH)
    assert all(record["end"] == "dropped" for record in rows["episode"])
    assert all("step gave" in record["infra"][0] for record in rows["episode"])
    assert all("episodes.py, " not in record["infra"][0] for record in rows["episode"])


@pytest.mark.first_rows(1)
@pytest.mark.parametrize("retries", [0, 1])
def test_after_faults_of_any_kind_a_group_has_two_members_or_none(model, retries):
    """200 groups, in each of which other calls fail."""
    draw, asked = random.Random(0), [0] * 200
    failing = {(group, draw.randrange(9)) for group in range(200) for _ in range(draw.randrange(12))}

    def answer(row, turn, action):
        group = row["prompt_id"]
        asked[group] += 1
        if (group, asked[group]) in failing:
            raise InfraError("no machine")
        return StepResult(None, 1.0, terminated=True)

    environment = Scripted(answer=answer, retries=retries, answers_at_once=True)
    with contextlib.closing(engine_of(environment, model=model, stop_token_ids=EACH)) as engine:
        rows = engine.generate(prompts_of(model[1], ["1="] * 200), GenerationRequest(1, 3))
    kept = without_dropped(rows)
    sizes = [kept["prompt_ids"].tolist().count(group) for group in range(200)]
    assert {2, 3} <= set(sizes) <= {0, 2, 3}
    assert sum(record.get("left_out", 0) for record in kept["episode"]) == 600 - len(kept)


def test_a_time_out_that_an_environment_raises_itself_is_not_a_deadline_of_the_model(model):
    def answer(row, turn, action):
        raise TimeoutError("a service gave no answer")

    rows = played(model, Scripted(answer=answer, retries=0), ["1"], stop_token_ids=EACH)
    assert {record["end"] for record in rows["episode"]} == {"dropped"}
    assert "TimeoutError: a service gave no answer, at line" in rows["episode"][0]["infra"][0]
