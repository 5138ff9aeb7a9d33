"""Episodes across changes of the weights: versions of each turn, answers as events, environments made again."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from environments.digit_game import DigitGame, DigitGames
from environments.episodes import engine_of, prompts_of
from workers.versions import VersionedModel, same_rows

from verl.component import BuildContext, component
from verl.environments.base import EnvironmentFactory, InfraError
from verl.errors import RolloutError
from verl.models.tiny import TinyModel
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import GIB, slot_bytes
from verl.workers.open_batches import EpisodeBatch
from verl.workers.schedule import FILE, Schedule, ScheduledEvent, ScheduleFile, read_schedule
from verl.workers.step_loop import StepLoop

STEPS = (1, 2)
STOPS = tuple(range(20, 40))


class LateGame:
    """A `DigitGame` that answers after seconds that nobody knows; `num_calls` counts those of this process."""

    def __init__(self, games: LateGames):
        self.games, self.game = games, DigitGame(games)
        self.recovery = games.recovery

    async def reset(self, row: Any, seed: int) -> Any:
        await asyncio.sleep(random.uniform(0.0, self.games.most_s))
        while self.games.gate and row["prompt_text"].startswith("9") and Path(self.games.gate).exists():
            await asyncio.sleep(0.01)
        return self.game.reset(row, seed)

    async def step(self, action: Any) -> Any:
        await asyncio.sleep(random.uniform(0.0, self.games.most_s))
        if self.games.fails:
            raise InfraError("planted")
        found = self.game.step(action)
        return found if not self.games.lies else type(found)("9999", terminated=found.terminated)


@component
class LateGames(DigitGames):
    """Games of `LateGame`; `lies`: whose answers are others; `fails`: whose turns fail; `gate`: while there is
    such a file, those whose prompt begins with 9 do not answer."""

    most_s: float = 0.05
    lies: bool = False
    fails: bool = False
    gate: str = ""

    def factory(self, context: BuildContext) -> EnvironmentFactory:
        return EnvironmentFactory(lambda: LateGame(self))


class AtSteps(Schedule):
    """Carries events out at given steps, however many rows are open."""

    def note(self, event: ScheduledEvent) -> None:
        super().note(event if self.next is None or self.next.open_rows >= 0 else replace(event, open_rows=-1))


GAMES = {"max_tokens": 60, "max_turns": 4, "recovery": "deterministic"}


class Engine:
    """A loop over a small model, whose weights of each version are known."""

    def __init__(self, games: Any, kv_cache: str, events: Any = (), file: Any = None, journal_dir: Any = None):
        options: dict[str, Any] = {"weight_update": "in_flight", "kv_cache": kv_cache, "max_rows": 6}
        source = TinyModel(context_length=128, dtype="float64", hidden_size=32, intermediate_size=64)
        model = source.load_causal_lm("cpu"), source.load_tokenizer()
        self.generator = engine_of(games, 10, model=model, stop_token_ids=STOPS, **options)
        self.model, self.tokenizer = model
        self.generator._context = replace(self.generator._context, journal_dir=journal_dir)
        self.versions = VersionedModel(self.model, 0.05)
        self.load, self.gap = self.versions.load, self.versions.gap
        schedule = AtSteps({"setting": 1}, None if file is None else ScheduleFile(file), events)
        self.loop = StepLoop(self.generator, 100, schedule)

    def weights(self, version: int) -> None:
        self.loop.take_weights(version, lambda: self.load(version))

    def prompts(self) -> Any:
        return prompts_of(self.tokenizer, ["1+2=", "34+5="])

    def play(self, pause_s: float = 0.02) -> Any:
        """Two batches, two updates and a save between them; the rows of both, and what was saved."""
        self.weights(0)
        for step in STEPS:
            self.loop.begin(self.prompts(), GenerationRequest(step, 3))
        time.sleep(pause_s)
        self.weights(1)
        time.sleep(pause_s)
        state = self.loop.save(0)
        time.sleep(pause_s)
        self.weights(2)
        return self.finish(), state

    def resume(self, state: Any) -> Any:
        self.loop.restore(state, 1, lambda: self.load(1))
        self.weights(2)
        return self.finish()

    def finish(self) -> Any:
        rows = [self.loop.finish(step) for step in STEPS]
        self.close()
        return rows

    def close(self) -> None:
        self.loop.close()
        self.generator.close()


KINDS: list[tuple[int, Any, int]] = [
    (0, "weights", 0),
    (0, "begin", 1),
    (0, "begin", 2),
    (7, "weights", 1),
    (12, "save", 0),
    (15, "weights", 2),
]
AT_ONCE = [ScheduledEvent(step, kind, number, -1) for step, kind, number in KINDS]


@pytest.mark.first_rows(1)
@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
def test_turns_of_an_episode_have_versions_of_their_own_and_equal_events_give_equal_bits(kv_cache, tmp_path):
    games = DigitGames(answers_at_once=True, **GAMES)
    engine = Engine(games, kv_cache, AT_ONCE)
    rows, state = engine.play()
    lines = [line for x in rows for line in zip(x["token_versions"], x["response_mask"], strict=True)]
    versions = [sorted(set(line[mask].tolist())) for line, mask in lines]
    assert [0, 1, 2] in versions
    assert max(len(record["turns"]) for x in rows for record in x["episode"]) > 1
    for x in rows:
        assert bool((x["token_versions"][~x["response_mask"]] == -1).all())
        if kv_cache == "recompute":
            assert max(engine.gap(x, version) for version in (0, 1, 2)) < 1e-9
    slow = Engine(games, kv_cache, AT_ONCE, tmp_path / FILE)
    same_rows(rows, slow.play(0.3)[0])
    same_rows(rows, Engine(games, kv_cache, AT_ONCE).resume(state))


def test_a_resumed_engine_has_as_many_slots_as_before():
    model = TinyModel(context_length=128, dtype="float64", hidden_size=32, intermediate_size=64).load_causal_lm("cpu")
    fitting = 2.5 * slot_bytes(model, 100) / GIB  # of 12 episodes
    games = DigitGames(answers_at_once=True, kv_cache_gib=fitting, **GAMES)
    rows, state = Engine(games, "keep", AT_ONCE).play()
    same_rows(rows, Engine(games, "keep", AT_ONCE).resume(state))


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
def test_answers_that_come_later_are_events_by_which_a_run_is_repeated_and_resumed(kv_cache, tmp_path):
    games = LateGames(**GAMES)
    rows, state = Engine(games, kv_cache, file=tmp_path / FILE).play()
    events = read_schedule(tmp_path, {"setting": 1})
    answers = [event.number for event in events if event.event == "answer"]
    assert len(answers) == sum(len(record["calls"]) for x in rows for record in x["episode"])
    assert {number // 1_000_000 for number in answers} == {1, 2}
    slower = LateGames(most_s=0.2, **GAMES)
    again = Engine(slower, kv_cache, events, tmp_path / "again.jsonl")
    same_rows(rows, again.play()[0])
    same_rows(rows, Engine(slower, kv_cache, events, tmp_path / "cut.jsonl").resume(state))
    for name in ("again.jsonl", "cut.jsonl"):
        assert (tmp_path / name).read_bytes() == (tmp_path / FILE).read_bytes()


def test_an_environment_that_does_not_answer_holds_up_its_own_batch_only(tmp_path):
    (gate := tmp_path / "gate").touch()
    engine = Engine(LateGames(most_s=0.0, gate=str(gate), **GAMES), "keep")
    engine.weights(0)
    engine.loop.begin(prompts_of(engine.tokenizer, ["9+9=", "9-8="]), GenerationRequest(1, 3))
    engine.loop.begin(engine.prompts(), GenerationRequest(2, 3))
    engine.weights(1)
    assert len(engine.loop.finish(2)) >= 6
    assert engine.loop.finished_groups({1: []}) == (False, {})
    gate.unlink()
    assert len(engine.loop.finish(1)) >= 6
    engine.close()


def test_a_save_of_the_schedule_is_of_what_follows_its_step_whoever_takes_batches_meanwhile(tmp_path, monkeypatch):
    games, state, begun = DigitGames(answers_at_once=True, **GAMES), EpisodeBatch.state, threading.Event()

    def late(batch: EpisodeBatch, dtype: torch.dtype) -> Any:
        begun.set()
        time.sleep(0.3)
        return state(batch, dtype)

    def finished(engine: Engine) -> Engine:
        engine.weights(0)
        for step in STEPS:
            engine.loop.begin(engine.prompts(), GenerationRequest(step, 3))
        for step in STEPS:
            while not engine.loop.finished_groups({}, step)[0]:
                pass
        engine.weights(1)
        return engine

    first = finished(Engine(games, "keep", file=tmp_path / FILE))
    rows = [first.loop.finish(1)]
    assert first.loop.save(1)["steps"].tolist() == [2]
    rows += [first.loop.finish(2)]
    first.close()
    monkeypatch.setattr(EpisodeBatch, "state", late)
    again = finished(Engine(games, "keep", read_schedule(tmp_path, {"setting": 1})))
    assert begun.wait(60)  # nobody has asked for it
    same_rows(rows, [again.loop.finish(step) for step in STEPS])
    assert again.loop.save(1)["steps"].tolist() == [2]
    again.close()


def test_environments_are_made_again_as_their_recovery_says():
    rows, state = Engine(DigitGames(answers_at_once=True, **GAMES), "recompute", AT_ONCE).play()
    began_anew = {}
    for recovery in ("stateless", "restart"):
        games = DigitGames(answers_at_once=True, **{**GAMES, "recovery": recovery})
        engine = Engine(games, "recompute", AT_ONCE[:5])
        found = engine.resume(state)
        began_anew[recovery] = [record["journal"]["restarted"] for x in found for record in x["episode"]]
    assert sum(began_anew["stateless"]) == 0
    assert 0 < sum(began_anew["restart"]) <= 12
    liar = Engine(LateGames(lies=True, **GAMES), "recompute", AT_ONCE)
    with pytest.raises(RolloutError, match="before the run was interrupted it answered"):
        liar.resume(state)
    liar.close()
    assert len(rows) == 2


def test_failures_that_end_the_run_are_not_in_the_journal_of_a_resumed_one(tmp_path):
    games = {**GAMES, "retries": 0, "on_infra": "stop", "most_s": 0.0}
    for fails in (True, False):
        engine = Engine(LateGames(fails=fails, **games), "recompute", journal_dir=tmp_path)
        engine.weights(0)
        engine.loop.begin(engine.prompts(), GenerationRequest(1, 3))
        if fails:
            with pytest.raises(RolloutError, match="planted. environment.on_infra is stop"):
                engine.loop.finish(1)
        else:
            rows = engine.loop.finish(1)
            assert {record["end"] for record in rows["episode"]} <= {"terminated", "tokens", "turn_tokens"}
        engine.close()


def test_an_answer_of_the_schedule_that_cannot_come_is_not_awaited():
    events = [*AT_ONCE[:2], ScheduledEvent(3, "answer", 1_000_000, -1), *AT_ONCE[3:]]
    engine = Engine(DigitGames(answers_at_once=True, **GAMES), "recompute", events)
    engine.weights(0)
    engine.loop.begin(engine.prompts(), GenerationRequest(1, 3))
    with pytest.raises(RolloutError, match="answer 1000000 before engine step 3 .* and weights 1 before engine step 3"):
        engine.weights(1)
    engine.close()
