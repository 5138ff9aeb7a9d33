"""The journal of episodes: a run that is interrupted inside one goes on to the same tokens."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from environments.episodes import REQUEST, Scripted, ScriptedEnvironment, ScriptedFactory, engine_of, prompts_of, tiny

from verl.component import BuildContext, component
from verl.environments.base import CallRecord, InfraError, StepResult
from verl.environments.episode_loop import EpisodeGenerator
from verl.environments.journal import EpisodeJournal
from verl.errors import RolloutError
from verl.protocol import DataProto

TEXTS = ["1+2=", "34+5=", "what is 6*7? "]
STOPS = tuple(range(20, 60))


@pytest.fixture(scope="module")
def model():
    return tiny()


class Killed(BaseException):
    """Stands for SIGKILL where a process of its own would be too slow: nothing catches it."""


class Counting:
    """Answers that depend on the action alone, those that were asked for, and after how many the process is gone."""

    def __init__(self, kill_after: int | None = None, suffix: str = "", recovery: str = "stateless"):
        self.asked: list[tuple[int, int, str]] = []
        self.ids: list[str] = []
        self.kill_after, self.suffix, self.recovery = kill_after, suffix, recovery

    def __call__(self, row, turn, action):
        self.asked.append((row["prompt_id"], turn, action.text))
        self.ids.append(action.call_id)
        said = sum(map(ord, action.text))
        return StepResult(f"{said % 10}{self.suffix}\n", float(said % 3), terminated=said % 7 == 0)


class RecoveringFactory(ScriptedFactory):
    def make(self) -> ScriptedEnvironment:
        made = super().make()
        made.recovery = self.answer.recovery
        return made


@component
class Recovering(Scripted):
    """`answer.recovery` is what its environments say of themselves."""

    def factory(self, context: BuildContext) -> RecoveringFactory:
        return RecoveringFactory(self.answer, self.tools or {})

    def identity(self) -> str:
        return "the same in every life"


def journaled(model, directory: Path, answer, **options) -> EpisodeGenerator:
    engine = engine_of(
        Recovering(answer=answer, max_tokens=60, max_turns=4), model=model, stop_token_ids=STOPS, **options
    )
    engine.journal = EpisodeJournal(directory / "episode_journal", "the same in every life", 0)
    return engine


def kill_while_writing(journal: EpisodeJournal, kill_after: int | None) -> None:
    """Let a journal raise `Killed` at the answer after so many."""
    write, written = journal.write_answer, itertools.count(1)

    def write_answer(key, entry):
        if kill_after is not None and next(written) > kill_after:
            raise Killed
        write(key, entry)

    journal.write_answer = write_answer


def life(model, directory: Path, answer, request=REQUEST, texts=TEXTS) -> DataProto:
    """One process: plays until its end, or until it is gone."""
    engine = journaled(model, directory, answer)
    kill_while_writing(engine.journal, answer.kill_after)
    try:
        return engine.generate(prompts_of(model[1], texts), request)
    finally:
        engine.close()


def same(one: DataProto, other: DataProto) -> bool:
    names = ("responses", "response_mask", "turn_ids", "turn_rewards")
    assert torch.allclose(one["rollout_log_probs"], other["rollout_log_probs"], atol=1e-5)  # rounds by what runs beside
    return all(torch.equal(one[name], other[name]) for name in names)


@pytest.fixture(scope="module")
def uninterrupted(model, tmp_path_factory):
    answer = Counting()
    return life(model, tmp_path_factory.mktemp("whole"), answer), answer


@pytest.mark.first_rows(1)
@pytest.mark.parametrize("recovery", ["stateless", "deterministic", "restart"])
def test_lives_that_end_inside_of_episodes_come_to_the_same_tokens(model, tmp_path, uninterrupted, recovery):
    whole, all_asked = uninterrupted
    lives = []
    assert len(all_asked.asked) > 12
    for kill_after in (14, 18 if recovery == "restart" else 4):  # answers that were not known
        lives.append(Counting(kill_after, recovery=recovery))
        with pytest.raises(Killed):
            life(model, tmp_path, lives[-1])
    lives.append(Counting(recovery=recovery))
    rows = life(model, tmp_path, lives[-1])
    assert same(rows, whole)
    counts = {name: sum(episode["journal"][name] for episode in rows["episode"]) for name in ("reused", "replayed")}
    restarted = sum(episode["journal"]["restarted"] for episode in rows["episode"])
    last = len(lives[-1].asked)
    if recovery == "stateless":
        assert last == len(all_asked.asked) - counts["reused"]
        assert counts["reused"] >= 6
        assert restarted == 0
    elif recovery == "deterministic":
        assert last == len(all_asked.asked)
        assert counts["replayed"] >= 18  # resets too
        assert (counts["reused"], restarted) == (0, 0)
    else:
        assert last == len(all_asked.asked)
        assert restarted == 12
    assert set(lives[-1].ids) <= set(all_asked.ids)
    assert len(set(all_asked.ids)) == len(all_asked.ids)


def test_a_whole_group_of_an_environment_that_cannot_be_replayed_is_reused(model, tmp_path, uninterrupted):
    whole, _ = uninterrupted
    assert same(life(model, tmp_path, Counting(recovery="restart")), whole)
    again = Counting(recovery="restart")
    rows = life(model, tmp_path, again)
    assert same(rows, whole)
    assert again.asked == []
    assert not any(episode["journal"]["restarted"] for episode in rows["episode"])


def test_a_deterministic_environment_that_answers_otherwise_stops_the_run_and_is_shown(model, tmp_path):
    with pytest.raises(Killed):
        life(model, tmp_path, Counting(16, recovery="deterministic"))
    with pytest.raises(RolloutError, match=r"call 0\.3\.\d\.\d\.1\.0 \(step\) answers .*other.* recovery = 'restart'"):
        life(model, tmp_path, Counting(suffix=" other", recovery="deterministic"))


def test_answers_are_not_found_under_other_tokens_steps_or_settings(model, tmp_path, uninterrupted):
    _, asked = uninterrupted
    life(model, tmp_path, Counting())
    step = Counting()
    life(model, tmp_path, step, request=replace(REQUEST, step=4))
    assert len(step.asked) > 0
    other = journaled(model, tmp_path, Counting())
    other.seed = 9
    answer = other.options.answer
    other.journal = EpisodeJournal(tmp_path / "episode_journal", "another setting", 0)
    other.generate(prompts_of(model[1], TEXTS), REQUEST)
    other.close()
    assert len(answer.asked) == len(asked.asked)


def test_failures_that_are_not_the_models_are_not_recorded(model, tmp_path):
    class Failing(Counting):
        def __call__(self, row, turn, action):
            if turn == 2 and self.suffix == "broken":
                raise InfraError("the service is down")
            return super().__call__(row, turn, action)

    engine = journaled(model, tmp_path, Failing(suffix="broken"))
    object.__setattr__(engine.options, "on_infra", "stop")
    with pytest.raises(RolloutError, match="the service is down"):
        engine.generate(prompts_of(model[1], TEXTS), REQUEST)
    engine.close()
    assert len(life(model, tmp_path, Failing())) == 12


@pytest.mark.parametrize("answers_at_once", [False, True])
def test_answers_are_on_disk_before_anything_follows_from_them(model, tmp_path, answers_at_once):
    late = []

    def answer(row, turn, action):
        (path,) = (tmp_path / "episode_journal").iterdir()
        own = action.call_id.rpartition(".")[0]
        before = f"{own}.{turn - 2}" if turn > 1 else f"{own}.reset"
        late.extend([before] * (before not in path.read_text()))
        return StepResult("x", 1.0, terminated=turn >= 3)

    engine = engine_of(Scripted(answer=answer, answers_at_once=answers_at_once), model=model, stop_token_ids=STOPS)
    engine.journal = EpisodeJournal(tmp_path / "episode_journal", "x", 0)
    writes, flush = [], engine.journal.flush
    engine.journal.flush = lambda: writes.append(len(engine.journal.unwritten)) or flush()
    try:
        rows = engine.generate(prompts_of(model[1], TEXTS), REQUEST)
    finally:
        engine.close()
    assert late == []
    assert sum(len(record["turns"]) for record in rows["episode"]) > 20
    assert max(writes) >= 6  # what comes together is written together


def test_time_outs_are_reused_and_not_waited_for_again(model, tmp_path):
    import asyncio

    class Slow(Counting):
        def __call__(self, row, turn, action):
            if row["prompt_id"] == 0 and turn == 2:
                self.asked.append((0, turn, action.text))

                async def never():
                    await asyncio.sleep(60)

                return never()
            return super().__call__(row, turn, action)

    def played(answer):
        engine = journaled(model, tmp_path, answer)
        object.__setattr__(engine.options, "step_timeout_s", 0.2)
        try:
            return engine.generate(prompts_of(model[1], TEXTS), REQUEST)
        finally:
            engine.close()

    first, again = played(Slow()), Slow()
    second = played(again)
    assert same(first, second)
    assert [episode["end"] for episode in second["episode"]].count("timeout") > 0
    assert again.asked == []


def test_a_line_that_was_cut_short_is_left_out_with_all_after_it(tmp_path):
    journal = EpisodeJournal(tmp_path / "journal", "x", 0)
    journal.open(1)
    record = CallRecord("a", "step", "ok", 0.1)
    for name in "ab":
        journal.write_answer(name, _entry(record, name))
        journal.flush()
    journal.close()
    (path,) = (tmp_path / "journal").iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    again = EpisodeJournal(tmp_path / "journal", "x", 0)
    again.open(1)
    assert again.answers == {"a": _entry(record, "a")}


def _entry(record, text):
    from verl.environments.journal import JournalEntry

    calls = [CallRecord("a.0", "calc", "tool_error", 0.25, "no number")]
    return JournalEntry(record, StepResult([{"role": "tool", "content": text}], 0.1 + 0.2, calls=tuple(calls)))


def test_steps_before_the_newest_checkpoint_are_removed(tmp_path):
    journal = EpisodeJournal(tmp_path / "journal", "x", 0)
    for step in (1, 2, 3):
        journal.open(step)
    (tmp_path / "global_step_2").mkdir()
    journal.open(4)
    journal.close()
    assert sorted(path.name[:13] for path in (tmp_path / "journal").iterdir()) == [
        "step-00000002", "step-00000003", "step-00000004"
    ]  # fmt: skip
