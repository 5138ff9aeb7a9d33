"""Generation in steps of an engine: the same events at the same steps give the same bits, at any speed."""

import os
import random
import time
from typing import Any

import pytest
from roles import start_actor
from workers.versions import VersionedModel, same_rows

from verl.component import BuildContext
from verl.errors import ConfigError, RolloutError
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout
from verl.trainer.state.lineage import environment_record
from verl.utils.seeding import CUBLAS_WORKSPACE, seed_everything
from verl.workers.schedule import FILE, Schedule, ScheduledEvent, ScheduleFile, ScheduleOptions, read_schedule
from verl.workers.step_loop import StepLoop

TOKENS = 20  # of every response
EVENTS = [  # of two batches with 4 responses each
    ScheduledEvent(0, "weights", 0, 0),
    ScheduledEvent(0, "begin", 1, 0),
    ScheduledEvent(5, "weights", 1, 4),
    ScheduledEvent(5, "begin", 2, 4),
    ScheduledEvent(9, "save", 0, 8),
    ScheduledEvent(12, "weights", 2, 8),
]


class Engine:
    """A loop over a small model, whose weights of each version are known."""

    def __init__(self, model, kv_cache="recompute", events=EVENTS, file=None, scale=1.0):
        options: dict[str, Any] = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "max_rows": 6}
        options |= {"weight_update": "in_flight", "kv_cache": kv_cache}
        self.actor = start_actor(model, HFRollout(**options))
        self.versions = VersionedModel(self.actor.model, 0.02 * scale)
        self.load, self.gap = self.versions.load, self.versions.gap
        schedule = Schedule({"setting": 1}, None if file is None else ScheduleFile(file), events)
        self.loop = StepLoop(self.actor.generator, 40, schedule)

    def play(self, prompts, seed=None):
        """Ask for the events of `EVENTS`; returns the rows of both batches, and what was saved."""
        chance = random.Random(seed)
        state = {}
        for event in EVENTS:
            if seed is not None:
                time.sleep(chance.choice([0.0, 0.01, 0.05]))
            if event.event == "weights":
                self.loop.take_weights(event.number, lambda v=event.number: self.load(v))
            elif event.event == "begin":
                self.loop.begin(prompts("ab", "cde"), GenerationRequest(event.number, 2))
            else:
                state = self.loop.save(event.number)
        return self.finish(), state

    def finish(self):
        rows = [self.loop.finish(step) for step in (1, 2)]
        self.loop.close()
        return rows


def test_each_token_has_the_log_prob_of_the_version_that_is_said_to_have_drawn_it(model64, prompts):
    engine = Engine(model64)
    (first, second), _ = engine.play(prompts)
    assert first["token_versions"].tolist() == [[0] * 5 + [1] * 7 + [2] * 8] * 4
    assert first["policy_version"].tolist() == [0] * 4
    assert second["policy_version"].tolist() == [1, 1, 2, 2]  # six rows fit
    for rows in (first, second):
        for version in set(rows["token_versions"].flatten().tolist()):
            assert engine.gap(rows, version) < 1e-9


def test_a_cache_that_is_kept_is_of_former_weights_until_the_next_save(model64, prompts):
    engine = Engine(model64, "keep")
    (first, _), _ = engine.play(prompts)
    assert first["token_versions"].tolist() == [[0] * 6 + [1] * 7 + [2] * 7] * 4
    assert engine.gap(first, 0) < 1e-9
    assert engine.gap(first, 1) > 1e-6
    assert engine.gap(first, 2) > 1e-6


@pytest.mark.first_rows(1)
@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
def test_equal_events_at_equal_steps_give_equal_bits_at_any_speed_and_after_a_restore(
    kv_cache, model64, prompts, tmp_path
):
    rows, state = Engine(model64, kv_cache).play(prompts)
    slow = Engine(model64, kv_cache, file=tmp_path / FILE)
    same_rows(rows, slow.play(prompts, seed=3)[0])
    assert list(read_schedule(tmp_path, {"setting": 1})) == EVENTS
    restored = Engine(model64, kv_cache, file=tmp_path / "restored.jsonl")
    restored.loop.restore(state, 1, lambda: restored.load(1))
    restored.loop.take_weights(2, lambda: restored.load(2))
    same_rows(rows, restored.finish())
    assert (tmp_path / "restored.jsonl").read_bytes() == (tmp_path / FILE).read_bytes()


@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
def test_weights_that_do_not_change_draw_what_a_batch_without_updates_draws(kv_cache, model64, prompts):
    engine = Engine(model64, kv_cache, scale=0.0)
    plain = [engine.actor.generate(prompts("ab", "cde"), GenerationRequest(step, 2)) for step in (1, 2)]
    for rows, expected in zip(engine.play(prompts)[0], plain, strict=True):
        assert rows["responses"].equal(expected["responses"])
        gap = (rows["rollout_log_probs"] - expected["rollout_log_probs"]).abs().max()
        assert gap < 1e-9


def test_another_run_than_the_scheduled_one_is_named(model64, prompts, tmp_path):
    engine = Engine(model64, events=[*EVENTS[:4], ScheduledEvent(9, "weights", 3, 8)], file=tmp_path / FILE)
    with pytest.raises(RolloutError, match="event 5 is weights 3 before engine step 9 .* and save 0 before engine"):
        engine.play(prompts)
    with pytest.raises(ConfigError, match="setting was 1 in .*, and is 2 here"):
        read_schedule(tmp_path, {"setting": 2})
    saved = (tmp_path / FILE).read_bytes()
    Schedule({"setting": 2}, ScheduleFile(tmp_path / FILE)).load(saved)  # it was resumed under another
    with pytest.raises(ConfigError, match="setting was 1, then 2 in .*, and is 2 here.* no single run repeats it"):
        read_schedule(tmp_path, {"setting": 2})
    with pytest.raises(ConfigError, match="cannot be read"):
        read_schedule(tmp_path / "nothing", {})


def test_a_variable_that_chooses_other_kernels_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv(CUBLAS_WORKSPACE[0], raising=False)
    Schedule(environment_record(), ScheduleFile(tmp_path / FILE))
    seed_everything(0)
    assert os.environ[CUBLAS_WORKSPACE[0]]
    assert read_schedule(tmp_path, environment_record()) == ()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    with pytest.raises(ConfigError, match=r'variables was null in .*, and is {"ONEDNN_MAX_CPU_ISA": "AVX2"} here'):
        read_schedule(tmp_path, environment_record())


def test_responses_that_no_event_would_bring_are_not_awaited(model64, prompts):
    engine = Engine(model64, events=[*EVENTS[:2], ScheduledEvent(40, "weights", 1, 4)])
    engine.loop.take_weights(0, lambda: engine.load(0))
    engine.loop.begin(prompts("ab", "cde"), GenerationRequest(1, 2))
    engine.loop.finish(1)
    engine.loop.begin(prompts("ab", "cde"), GenerationRequest(2, 2))
    with pytest.raises(RolloutError, match="event 3 is weights 1 .* and begin 2"):
        engine.loop.finish(2)
    engine.loop.close()


def test_saves_side_by_side_that_a_replay_is_asked_for_late_are_each_of_its_own_step(model64, prompts):
    """Steps that are skipped at the end of a run have neither weights nor a batch between their saves."""
    events = [*EVENTS[:4], ScheduledEvent(9, "save", 1, 8), ScheduledEvent(12, "save", 2, 8)]
    engine = Engine(model64, events=events)
    for version, step in enumerate((1, 2)):
        engine.loop.take_weights(version, lambda v=version: engine.load(v))
        engine.loop.begin(prompts("ab", "cde"), GenerationRequest(step, 2))
    until = time.monotonic() + 30
    while engine.loop.schedule.next is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert [int(engine.loop.save(step)["engine_step"][0]) for step in (1, 2, 2)] == [9, 12, 12]
    engine.finish()


def test_lines_of_a_schedule_without_a_directory_are_written_by_the_driver(tmp_path):
    head = {"setting": 1}
    here, away = Schedule(head, ScheduleFile(tmp_path / FILE)), Schedule(head)
    assert here.take_unwritten() == (1, [])
    (tmp_path / "driver").mkdir()
    driver = ScheduleFile(tmp_path / "driver" / FILE)
    for part in (EVENTS[:2], EVENTS[2:3], EVENTS[3:]):
        for event in part:
            here.note(event)
            away.note(event)
        driver.write(*away.take_unwritten())
    assert (tmp_path / "driver" / FILE).read_bytes() == (tmp_path / FILE).read_bytes()
    away.load(away.state())  # of a checkpoint: all of it is written again
    driver.write(*away.take_unwritten())
    assert (tmp_path / "driver" / FILE).read_bytes() == (tmp_path / FILE).read_bytes()
    elsewhere = ScheduleOptions('{"setting": 1}').build(BuildContext(run_dir=tmp_path / "of another machine"))
    elsewhere.note(EVENTS[0])
    assert elsewhere.take_unwritten()[0] == 0
    assert not (tmp_path / "of another machine").exists()


HEAD = '{"head": {"setting": 1}}'
EVENT = '{"engine_step": 0, "event": "weights", "number": 0, "open_rows": 0}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it has no head"),
        (f"{EVENT}\n", "it has no head"),
        (f"{HEAD}\nhello\n{EVENT}\n", "line 2: it is not JSON"),
        ('{"head": 3}\n', "line 1: it"),
        (f"{HEAD}\n[]\n", "line 2: it is .* and not a mapping"),
        (f"{HEAD}\n{EVENT.replace('weights', 'wait')}\n", "line 2: event: Input should be 'begin'"),
        (f"{HEAD}\n{EVENT.replace('0', 'null')}\n", "line 2: engine_step: .*number: .*open_rows: "),
    ],
)
def test_a_file_that_is_no_schedule_is_refused_with_the_line(text, said, tmp_path):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ConfigError, match=rf"trainer.replay_schedule is .* cannot be read: {said}.*Name the directory"):
        read_schedule(tmp_path, {"setting": 1})


@pytest.mark.parametrize("rest", ["", '{"engine_step": 5, "ev', EVENT])
def test_a_last_line_that_was_cut_off_is_left_out(rest, tmp_path, caplog):
    (tmp_path / FILE).write_text(f"{HEAD}\n{EVENT}\n{rest}")
    assert read_schedule(tmp_path, {"setting": 1}) == (EVENTS[0],)
    assert ("the last line" in caplog.text) == bool(rest)


def test_a_schedule_that_cannot_be_written_is_written_once_it_can(tmp_path, caplog):
    refusing = tmp_path / FILE
    refusing.mkdir()
    schedule = Schedule({"setting": 1}, ScheduleFile(refusing))
    schedule.note(EVENTS[0])
    schedule.note(EVENTS[1])
    assert caplog.text.count("The schedule is not written") == 1
    assert str(refusing) in caplog.text
    refusing.rmdir()
    schedule.note(EVENTS[2])
    assert refusing.read_bytes() == schedule.state()
    assert list(read_schedule(tmp_path, {"setting": 1})) == EVENTS[:3]


def written_schedule(directory) -> list[str]:
    schedule = Schedule({"setting": 1}, ScheduleFile(directory / FILE))
    for event in EVENTS:
        schedule.note(event)
    return (directory / FILE).read_text().splitlines()


@pytest.mark.slow
def test_a_schedule_of_which_a_bit_was_flipped_is_refused(tmp_path):
    written_schedule(tmp_path)
    data = (tmp_path / FILE).read_bytes()
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / FILE).write_bytes(flipped)
        with pytest.raises(ConfigError, match=r"trainer.replay_schedule"):
            read_schedule(tmp_path, {"setting": 1})


@pytest.mark.parametrize("change", [lambda x: x[:2] + x[3:], lambda x: [*x[:2], x[3], x[2], *x[4:]], lambda x: x[1:]])
def test_a_schedule_with_lines_lost_or_moved_is_refused(change, tmp_path):
    (tmp_path / FILE).write_text("".join(f"{line}\n" for line in change(written_schedule(tmp_path))))
    with pytest.raises(ConfigError, match=r"trainer.replay_schedule"):
        read_schedule(tmp_path, {"setting": 1})


@pytest.mark.parametrize(("steps", "open_rows"), [((-1,), 0), ((5, 3), 0), ((10**8,), 0), ((1, 2), -9)])
def test_an_impossible_schedule_without_checksums_is_refused_at_the_start(steps, open_rows, tmp_path):
    lines = ['{"head": {"setting": 1}}']
    lines += [f'{{"engine_step": {n}, "event": "weights", "number": 0, "open_rows": {open_rows}}}' for n in steps]
    (tmp_path / FILE).write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(ConfigError, match=r"line \d: .*cannot follow"):
        read_schedule(tmp_path, {"setting": 1})
