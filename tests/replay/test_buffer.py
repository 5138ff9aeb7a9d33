"""One buffer over all layers: what is drawn, what it depends on, and how much memory it takes."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refused
from replay.rows_here import scored_rows

from verl.checkpoint.save.save_request import ExistingFile
from verl.errors import ReplayCorrupt
from verl.protocol import DataProto
from verl.replay.buffer import TieredBuffer
from verl.replay.config import ReplayRequest, TieredReplay, draw

SMALL = TieredReplay(max_rows=400, memory_mib=8, shard_mib=1)


def filled(directory: Path, settings: TieredReplay = SMALL, steps: int = 12, seals: bool = True) -> TieredBuffer:
    """A buffer with 24 rows of each step, those of every third step sealed."""
    buffer = TieredBuffer(settings, directory, seed=7)
    for step in range(1, steps + 1):
        buffer.append(scored_rows(24, seed=step, version=step), step)
        if seals and step % 3 == 0:
            buffer.state_dict()
    return buffer


def texts(batch: DataProto | None) -> list[str]:
    return [] if batch is None else list(batch["response_text"])


def carried(buffer: TieredBuffer, directory: Path, settings: TieredReplay | None = None) -> TieredBuffer:
    """The buffer of a run that goes on from a checkpoint of this one."""
    other = TieredBuffer(settings or buffer.settings, directory / "next", seed=7)
    other.load_state_dict(saved(buffer, directory / "saved"))
    return other


def saved(buffer: TieredBuffer, directory: Path) -> Path:
    """A directory with what a checkpoint holds of a buffer."""
    directory.mkdir(parents=True)
    for name, item in buffer.state_dict().items():
        if isinstance(item, bytes):
            (directory / name).write_bytes(item)
        else:
            (directory / name).hardlink_to(item.source)
    return directory


def shared(buffer: TieredBuffer) -> dict[str, Path]:
    """Files that a checkpoint links."""
    files = {name: item.source for name, item in buffer.state_dict().items() if isinstance(item, ExistingFile)}
    return {name: source for name, source in files.items() if source is not None}


@pytest.mark.parametrize("sampling", ["uniform", "recency", "advantage"])
def test_what_is_drawn_is_what_was_put_in_whatever_layer_it_lies_in(sampling, tmp_path):
    buffer = filled(tmp_path, dataclasses.replace(SMALL, sampling=sampling))
    found = buffer.sample(ReplayRequest(num_rows=60, step=13, version=13, whole_groups=True))
    assert len(found) == 60
    for row in range(60):
        _, where = texts(found)[row].split(" ")
        step, number = map(int, where.split("-"))
        source = scored_rows(24, seed=step, version=step)
        there = source["attention_mask"][number].bool()
        mine = found["attention_mask"][row].bool()
        assert torch.equal(source["input_ids"][number][there], found["input_ids"][row][mine])
        assert int(found["policy_version"][row]) == step
    members = found["group_ids"].bincount()
    assert members.tolist() == [2] * 30
    assert buffer.stats()["replay/rows_hot"] > 0
    assert buffer.stats()["replay/rows_warm"] > 0
    buffer.close()


def test_the_draw_depends_on_seed_and_step_but_not_on_where_rows_lie(tmp_path):
    wanted = ReplayRequest(num_rows=40, step=13, version=13)
    one, other = filled(tmp_path / "a"), filled(tmp_path / "b", seals=False)
    assert texts(one.sample(wanted)) == texts(other.sample(wanted))
    assert texts(one.sample(dataclasses.replace(wanted, step=14))) != texts(one.sample(wanted))
    for buffer in (one, other):
        buffer.close()


def test_a_buffer_from_a_checkpoint_draws_and_goes_on_like_the_one_that_was_saved(tmp_path):
    settings = dataclasses.replace(SMALL, max_rows=200)  # so that rows leave too
    one = filled(tmp_path / "one", settings)
    other = carried(one, tmp_path)
    assert other.stats()["replay/rows_hot"] == settings.hot_rows
    for step in range(13, 20):
        wanted = ReplayRequest(30, step, step, whole_groups=True)
        mine, theirs = one.sample(wanted), other.sample(wanted)
        assert texts(mine) == texts(theirs)
        assert all(torch.equal(mine[name], theirs[name]) for name in mine.batch)
        for buffer in (one, other):
            buffer.append(scored_rows(24, seed=step, version=step), step)
    assert len(one) == len(other) <= 200
    one.close()
    other.close()


def test_a_second_save_adds_only_the_files_of_new_rows(tmp_path):
    buffer = filled(tmp_path)
    before = shared(buffer)
    buffer.append(scored_rows(24, seed=13), 13)
    after = shared(buffer)
    assert before.keys() < after.keys()
    (new,) = after.keys() - before.keys()
    rows = sum(len(batch) for batch in buffer.iterate(100))
    assert rows == 13 * 24
    assert after[new].stat().st_size < 2 * 24 * 400
    buffer.close()


def test_stale_rows_stay_where_they_are(tmp_path):
    buffer = filled(tmp_path)
    found = buffer.sample(ReplayRequest(1000, 13, version=13, max_staleness=3))
    assert set(found["policy_version"].tolist()) == {10, 11, 12}
    assert len(found) == 3 * 24
    assert buffer.sample(ReplayRequest(1000, 13, version=100, max_staleness=3)) is None
    buffer.close()


def test_nothing_is_drawn_while_the_buffer_warms_up(tmp_path):
    settings = dataclasses.replace(SMALL, buffer_warmup_steps=3)
    buffer = filled(tmp_path / "two", settings, steps=2)
    assert buffer.sample(ReplayRequest(4, 3, 3)) is None
    buffer.append(scored_rows(24, seed=3), 3)
    assert buffer.sample(ReplayRequest(4, 4, 4)) is not None
    buffer.close()


def test_processes_that_iterate_share_the_rows_among_them(tmp_path):
    buffer = filled(tmp_path)
    whole = [text for batch in buffer.iterate(50) for text in texts(batch)]
    shares = [[text for batch in buffer.iterate(50, rank, 3) for text in texts(batch)] for rank in range(3)]
    assert len(whole) == 12 * 24
    assert sorted(whole) == sorted(text for share in shares for text in share)
    assert sum(1 for share in shares if share) > 1
    buffer.close()


@pytest.mark.slow
def test_weights_are_the_odds_of_being_drawn():
    numbers, weights = np.arange(4), np.array([1.0, 2.0, 3.0, 4.0])
    first = [int(draw(numbers, weights, np.ones(4, dtype=int), 1, 5, step)[0]) for step in range(4000)]
    shares = np.bincount(first, minlength=4) / len(first)
    assert shares == pytest.approx(weights / 10, abs=0.03)


def test_a_file_that_is_cut_short_is_not_read(tmp_path):
    buffer = filled(tmp_path / "one", steps=3)
    (shard,) = saved(buffer, tmp_path / "saved").glob("*.arrow")
    with open(shard, "r+b") as file:
        file.truncate(shard.stat().st_size - 8)
    buffer.close()
    other = TieredBuffer(SMALL, tmp_path / "next")
    with pytest.raises(ReplayCorrupt, match="rows_"):
        other.load_state_dict(tmp_path / "saved")
    other.close()


test_settings_that_contradict_each_other_are_named = refused(
    ("hot_share", 0.5, lambda: TieredReplay(hot_share=0.5)), ("shard_mib", 32, lambda: TieredReplay(memory_mib=32))
)
