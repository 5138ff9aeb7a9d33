"""Answers on disk."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from verl.http_client.request import CACHE_NAME, AnswerCache, key_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cache(tmp_path):
    made = AnswerCache(tmp_path / "cache", max_gib=1.0)
    yield made
    made.close()


def test_an_answer_is_found_by_its_key_in_this_run_and_a_later_one(cache, tmp_path):
    cache.put("a", "1")
    cache.put("b", "2")
    cache.put("a", "3")
    assert cache.find(["a", "b", "c", "a"]) == {"a": "3", "b": "2"}
    cache.close()
    cache.close()
    later = AnswerCache(tmp_path / "cache", max_gib=1.0)
    assert later.find(str(i) for i in range(2000)) == {}
    assert later.find(["a"]) == {"a": "3"}
    later.close()


def test_keys_tell_addresses_and_questions_apart_and_show_neither():
    keys = {key_of(url, body) for url in ("http://a", "http://b") for body in ({"m": "x"}, {"m": "y"}, ["secret"])}
    assert len(keys) == 6
    assert key_of("http://a", {"x": 1, "y": 2}) == key_of("http://a", {"y": 2, "x": 1})
    assert not any("secret" in key for key in keys)


def test_threads_and_processes_may_write_at_the_same_time(tmp_path):
    source = """
import sys
from pathlib import Path
from verl.http_client.request import AnswerCache
cache = AnswerCache(Path(sys.argv[1]), 1.0)
for i in range(200):
    cache.put(f"{sys.argv[2]}{i}", str(i))
assert cache.connection is not None
"""
    cache = AnswerCache(tmp_path, max_gib=1.0)
    others = [subprocess.Popen([sys.executable, "-c", source, tmp_path, name], cwd=ROOT) for name in "pq"]

    def write(name):
        for i in range(200):
            cache.put(f"{name}{i}", str(i))

    threads = [threading.Thread(target=write, args=name) for name in "rs"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [process.wait(60) for process in others] == [0, 0]
    found = cache.find(f"{name}{i}" for name in "pqrs" for i in range(200))
    assert found == {f"{name}{i}": str(i) for name in "pqrs" for i in range(200)}
    cache.close()


def test_the_oldest_answers_make_room(tmp_path):
    cache = AnswerCache(tmp_path, max_gib=256 * 1024 / 2**30)
    for i in range(300):
        cache.put(str(i), "x" * 4096)
    found = cache.find(str(i) for i in range(300))
    assert "299" in found
    assert "0" not in found
    assert 20 < len(found) < 80
    cache.close()


@pytest.mark.parametrize(("directory", "error"), [("", "DatabaseError"), (f"{CACHE_NAME}/below", "NotADirectoryError")])
def test_a_damaged_file_or_directory_is_told_once_and_costs_nothing_else(directory, error, tmp_path, caplog):
    (tmp_path / CACHE_NAME).write_bytes(b"this is not a database" * 1000)
    cache = AnswerCache(tmp_path / directory, max_gib=1.0)
    cache.put("a", "1")
    assert cache.find(["a"]) == {}
    assert caplog.text.count(f"responses are no longer cached, {error}") == 1
    cache.close()


def test_a_kill_in_the_middle_of_a_write_leaves_whole_answers(tmp_path):
    source = """
import sys, os, threading, time
from pathlib import Path
from verl.http_client.request import AnswerCache
cache = AnswerCache(Path(sys.argv[1]), 1.0)
cache.put("0", "0" * 1000)
threading.Thread(target=lambda: (time.sleep(0.2), os.kill(os.getpid(), 9)), daemon=True).start()
i = 1
while True:
    cache.put(str(i), str(i) * 1000)
    i += 1
"""
    process = subprocess.run([sys.executable, "-c", source, tmp_path], cwd=ROOT, check=False)
    assert process.returncode == -9
    with sqlite3.connect(tmp_path / CACHE_NAME) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        rows = connection.execute("SELECT key, text FROM answers").fetchall()
    assert ("0", "0" * 1000) in rows
    assert all(text == key * 1000 for key, text in rows)
