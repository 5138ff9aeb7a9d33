"""Log lines go once to the console and once to run.log, without secrets, until the set-up is undone."""

import io
import logging

import pytest
import rich

from verl.tracking.base import TrackerSet
from verl.tracking.logging_setup import setup_logging


@pytest.fixture
def screen(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(rich.get_console(), "file", stream)
    return stream


def test_a_line_is_written_once_to_each_place_without_secrets(tmp_path, screen):
    undo = setup_logging(tmp_path / "new")
    logging.getLogger("verl.data").warning("read https://u:p4ss@h [x]")
    logging.getLogger("elsewhere").warning("not ours")
    undo()
    logging.getLogger("verl.data").info("after the end")
    assert screen.getvalue() == "WARNING read https://u:***@h [x]\n"
    text = (tmp_path / "new" / "run.log").read_text()
    assert text.endswith("WARNING verl.data: read https://u:***@h [x]\n")
    assert text.count("\n") == 1


def test_stage_lines_are_in_run_log_and_left_to_the_console_tracker(tmp_path, screen):
    undo = setup_logging(tmp_path)
    trackers = TrackerSet({})
    trackers.start("run", {}, tmp_path, 2)
    trackers.stage("gen", 1.236, "384 responses, 1536 tokens")
    trackers.log({"reward/mean": 0.5}, 1)
    undo()
    assert screen.getvalue() == ""
    text = (tmp_path / "run.log").read_text()
    assert "[gen] 1.24s  384 responses, 1536 tokens\n" in text
    assert "step 1  reward/mean 0.5\n" in text


def test_lines_that_differ_in_numbers_alone_are_counted_after_the_fifth(tmp_path, screen, monkeypatch):
    undo, log = setup_logging(tmp_path), logging.getLogger("verl.environments")
    for prompt in range(500):
        log.info("Episode of prompt %d is restarted: %s", prompt, "division by zero")
        log.warning("Episode of prompt %d is left out: %s", prompt, "division by zero")
        if prompt < 8:
            log.info("saved %s", f"step_{prompt}")
            log.info("job %d", prompt)
    log.info("Episode of prompt %d is restarted: %s", 500, "another reason")
    undo()
    lines = screen.getvalue().splitlines()
    assert sum("is restarted: division" in line for line in lines) == 5
    assert sum("left out" in line for line in lines) == 5
    assert sum("saved" in line for line in lines) == sum("job" in line for line in lines) == 8
    assert sum(int(line[1:].split()[0]) for line in lines if line.startswith("(")) == 2 * 495
    assert lines[-1] == "INFO Episode of prompt 500 is restarted: another reason"
    assert f"more lines like these are in {tmp_path}" in lines[-2]
    assert (tmp_path / "run.log").read_text().count("\n") == 2 * 500 + 16 + 1


def test_a_set_up_within_another_replaces_it_until_undone(tmp_path, screen):
    undo_outer = setup_logging(tmp_path / "outer")
    undo_inner = setup_logging(tmp_path / "inner")
    logging.getLogger("verl.x").info("within")
    undo_inner()
    logging.getLogger("verl.x").info("again outside")
    undo_outer()
    assert screen.getvalue().splitlines() == ["INFO within", "INFO again outside"]
    assert "within" in (tmp_path / "inner" / "run.log").read_text()
    assert (tmp_path / "outer" / "run.log").read_text().endswith("again outside\n")
    assert "within" not in (tmp_path / "outer" / "run.log").read_text()
