"""The coldest rows: brought to a store and back, and what becomes of them when the store fails."""

import dataclasses
import logging
import threading
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
from replay.rows_here import scored_rows
from replay.test_buffer import SMALL, saved, texts

from verl.errors import StorageUnreachable
from verl.replay.buffer import TieredBuffer
from verl.replay.config import ReplayRequest
from verl.replay.remote_tier import RemoteTier
from verl.storage.config import LocalStorage

TIERED = dataclasses.replace(SMALL, max_rows=290, fetch_timeout_s=60.0)
ALL = ReplayRequest(num_rows=1000, step=20, version=20)


def tiered(directory: Path, store: Path, timeout_s: float = 60.0) -> TieredBuffer:
    cold = RemoteTier(LocalStorage(path=str(store)).connect(), directory / "cold", timeout_s, retry_s=1e6)
    return TieredBuffer(TIERED, directory, seed=7, cold=cold)


def uploaded(buffer: TieredBuffer) -> None:
    """Wait for uploads, and let the buffer see that they are over."""
    wait([shard.upload for shard in buffer.index.shards if shard.upload is not None], timeout=60)
    buffer.settle()


def with_cold_rows(directory: Path, store: Path, timeout_s: float = 60.0) -> TieredBuffer:
    """A buffer with shards of 24 rows, of which the oldest are in the store alone."""
    buffer = tiered(directory, store, timeout_s)
    for step in range(1, 13):
        buffer.append(scored_rows(24, seed=step, version=step), step)
        buffer.state_dict()
    uploaded(buffer)
    assert buffer.stats()["replay/rows_cold"] == 24  # 288 rows, of which the newest 261 stay here: a whole shard goes
    buffer.sweep()
    return buffer


def test_rows_in_the_store_are_drawn_like_all_others(tmp_path):
    buffer = with_cold_rows(tmp_path / "here", tmp_path / "store")
    assert not [path for path in (tmp_path / "here").glob("rows_000000000000_*.arrow") if "index" not in path.name]
    buffer.prefetch(ALL)
    found = buffer.sample(ALL)
    assert len(found) == 288
    first = scored_rows(24, seed=1, version=1)
    mask = first["attention_mask"].bool()
    mine = found[:24]
    assert torch.equal(first["input_ids"][mask], mine["input_ids"][mine["attention_mask"].bool()])
    buffer.close()


def test_rows_in_a_store_that_a_run_no_longer_has_are_lost_and_told(tmp_path, caplog):
    buffer = with_cold_rows(tmp_path / "here", tmp_path / "store")
    other = TieredBuffer(TIERED, tmp_path / "next", seed=7)
    other.load_state_dict(saved(buffer, tmp_path / "saved"))
    assert len(other) == 288 - 24
    assert other.stats()["replay/lost_rows"] == 24
    assert "24 replay rows are lost" in caplog.text
    found = other.sample(ALL)
    assert set(found["policy_version"].tolist()) == set(range(2, 13))
    again = TieredBuffer(TIERED, tmp_path / "again", seed=7)
    again.load_state_dict(saved(other, tmp_path / "saved_again"))
    assert texts(again.sample(ALL)) == texts(found)
    assert again.stats()["replay/lost_rows"] == 24
    for one in (buffer, other, again):
        one.close()


def test_a_buffer_goes_on_with_rows_in_the_store_from_a_checkpoint(tmp_path):
    buffer = with_cold_rows(tmp_path / "here", tmp_path / "store")
    saved(buffer, tmp_path / "saved")
    other = tiered(tmp_path / "next", tmp_path / "store")
    other.load_state_dict(tmp_path / "saved")
    wanted = dataclasses.replace(ALL, num_rows=100)
    assert texts(other.sample(wanted)) == texts(buffer.sample(wanted))
    assert other.stats()["replay/rows_cold"] == 24
    buffer.close()
    other.close()


@pytest.mark.parametrize("what", ["altered", "cut short", "missing"])
def test_an_object_that_is_not_what_was_written_costs_its_rows_and_is_told(what, tmp_path, caplog):
    buffer = with_cold_rows(tmp_path / "here", tmp_path / "store")
    (stored,) = (tmp_path / "store").rglob("rows_*.arrow")
    if what == "missing":
        stored.unlink()
    else:
        data = bytearray(stored.read_bytes())
        data[len(data) // 2] ^= 1
        stored.write_bytes(data if what == "altered" else data[:-100])
    found = buffer.sample(ALL)
    assert set(found["policy_version"].tolist()) == set(range(2, 13))
    assert buffer.stats()["replay/lost_rows"] == 24
    assert "24 replay rows are lost" in caplog.text
    buffer.close()


def test_rows_in_place_of_lost_ones_may_be_in_the_store_too(tmp_path):
    settings = dataclasses.replace(TIERED, warm_share=0.2, cold_share=0.7)
    cold = RemoteTier(
        LocalStorage(path=str(tmp_path / "store")).connect(), tmp_path / "cold", timeout_s=60.0, retry_s=1e6
    )
    buffer = TieredBuffer(settings, tmp_path / "here", seed=7, cold=cold)
    for step in range(1, 13):
        buffer.append(scored_rows(24, seed=step, version=step), step)
        buffer.state_dict()
    uploaded(buffer)
    buffer.sweep()
    stored = sorted((tmp_path / "store").rglob("rows_*.arrow"))
    assert len(stored) == 8
    for path in stored[::2]:
        path.unlink()
    gone = set(range(1, 9, 2))
    for step in range(20, 30):
        found = buffer.sample(ReplayRequest(num_rows=20, step=step, version=20))
        assert len(found) == 20
        assert not gone & set(found["policy_version"].tolist())
    assert buffer.stats()["replay/lost_rows"] == 4 * 24
    buffer.close()


def test_a_store_that_does_not_answer_costs_a_moment_and_a_warning(tmp_path, monkeypatch, caplog):
    buffer = with_cold_rows(tmp_path / "here", tmp_path / "store", timeout_s=60.0)
    buffer.cold.timeout_s = 0.2
    over, ended = threading.Event(), threading.Event()

    def stalls(*_):
        over.wait(120)
        ended.set()
        raise StorageUnreachable("no answer")

    monkeypatch.setattr(buffer.cold.store, "get", stalls)
    with caplog.at_level(logging.WARNING):
        found = buffer.sample(ALL)
        buffer.cold.timeout_s = 600.0
        again = buffer.sample(ALL)  # the store is left alone: not even what was asked for is waited for
    assert not ended.is_set(), "nobody waited until the store gave up"
    over.set()
    assert len(found) == 288 - 24
    assert texts(again) == texts(found)
    assert caplog.text.count("The storage does not give") == 1
    assert buffer.stats()["replay/lost_rows"] == 0
    buffer.close()


def test_what_the_store_does_not_take_stays_here(tmp_path, monkeypatch):
    buffer = tiered(tmp_path / "here", tmp_path / "store")

    def refuses(*_):
        raise StorageUnreachable("no answer")

    monkeypatch.setattr(buffer.cold.store, "put_file", refuses)
    for step in range(1, 13):
        buffer.append(scored_rows(24, seed=step, version=step), step)
        buffer.state_dict()
    assert buffer.stats()["replay/rows_cold"] == 0
    found = buffer.sample(ALL)
    assert len(found) == 288
    buffer.close()


def test_rows_that_expire_in_the_store_leave_no_file_here(tmp_path):
    buffer = with_cold_rows(tmp_path / "here", tmp_path / "store")
    assert len([*(tmp_path / "here").glob("*.index.arrow")]) == 1
    for step in (13, 14):
        buffer.append(scored_rows(24, seed=step, version=step), step)
    assert len(buffer.released) == 1
    assert len([*(tmp_path / "here").glob("rows_000000000000_*")]) == 1, "a save under way may link it"
    buffer.sweep()
    assert not [*(tmp_path / "here").glob("rows_000000000000_*")]
    buffer.close()
