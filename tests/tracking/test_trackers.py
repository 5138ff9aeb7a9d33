"""A run's trackers act as one: redacted, released, and never the reason that training stops."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from verl.component import BuildContext
from verl.errors import ConfigError
from verl.tracking.base import Tracker, Trackers, TrackerSet
from verl.tracking.jsonl import JsonLines


class Recording(Tracker):
    """A tracker that keeps what it is told, and fails where asked to."""

    def __init__(self, fails_in: str = ""):
        self.calls: list[tuple] = []
        self.fails_in = fails_in

    def _note(self, *call):
        self.calls.append(call)
        if call[0] == self.fails_in:
            raise RuntimeError("no room at https://u:p4ss@h")

    def start(self, run_name, config, run_dir, total_steps):
        self._note("start", config)

    def stage(self, name, seconds, note):
        self._note("stage", name, seconds, note)

    def log(self, metrics, step):
        self._note("log", metrics, step)

    def evaluation(self, metrics, step):
        self._note("evaluation", metrics, step)

    def samples(self, rows, step, name):
        self._note("samples", rows, step, name)

    def message(self, text):
        self._note("message", text)

    def close(self, status):
        self._note("close", status)


def started(run_dir: Path, **trackers: Tracker) -> TrackerSet:
    running = TrackerSet(trackers)
    running.start("run", {"a": 1}, run_dir, 10)
    return running


def test_every_tracker_hears_everything_in_order(tmp_path):
    one, two = Recording(), Recording()
    running = started(tmp_path / "new" / "run", one=one, two=two)
    running.stage("gen", 1.236, "384 responses")
    running.log({"reward/mean": torch.tensor(0.5), "n": 3, "std": np.float32(0.25)}, step=1)
    running.evaluation({"eval/accuracy": 1}, step=1)
    running.samples([{"response": "46"}], step=1, name="eval")
    running.message("done")
    running.close("interrupted")
    assert one.calls == two.calls
    assert one.calls[1:] == [
        ("stage", "gen", 1.236, "384 responses"),
        ("log", {"reward/mean": 0.5, "n": 3, "std": 0.25}, 1),
        ("evaluation", {"eval/accuracy": 1}, 1),
        ("samples", [{"response": "46"}], 1, "eval"),
        ("message", "done"),
        ("close", "interrupted"),
    ]
    assert all(type(value) in (int, float) for value in one.calls[2][1].values())


def test_no_secret_passes_to_any_tracker(tmp_path):
    one = Recording()
    running = TrackerSet({"one": one})
    running.start("run", {"hub": {"token": "abc"}, "max_tokens": 8}, tmp_path, None)
    running.stage("gen", 1.0, "from https://u:p4ss@h")
    running.samples([{"response": "password=p4ss"}], 1, "s")
    running.message("Authorization: Bearer p4ss")
    assert one.calls[0] == ("start", {"hub": {"token": "***"}, "max_tokens": 8})
    assert "p4ss" not in repr(one.calls)


def test_a_tracker_that_cannot_start_is_an_error_that_names_it_and_the_others_are_closed(tmp_path):
    good, bad, later = Recording(), Recording(fails_in="start"), Recording()
    running = TrackerSet({"good": good, "wandb": bad, "later": later})
    with pytest.raises(
        ConfigError, match=r"^tracker\.wandb could not start: RuntimeError: no room at https://u:\*\*\*@h"
    ):
        running.start("run", {}, tmp_path, 1)
    assert good.calls[-1] == ("close", "failed")
    assert bad.calls[-1] == ("close", "failed")
    assert later.calls == []


def test_a_tracker_that_fails_while_training_is_named_once_and_training_goes_on(tmp_path, caplog):
    good, bad = Recording(), Recording(fails_in="log")
    running = started(tmp_path, bad=bad, good=good)
    with caplog.at_level(logging.WARNING, logger="verl"):
        for step in range(3):
            running.log({"reward/mean": 1.0}, step)
        running.close()
    assert [call[0] for call in good.calls] == ["start", "log", "log", "log", "close"]
    assert [record.getMessage() for record in caplog.records] == [
        "tracker.bad FAILED, training goes on: RuntimeError: no room at https://u:***@h",
        "tracker.bad failed 3 times and lost 3 records of this run.",
    ]


def test_close_releases_every_tracker_once_even_if_one_fails(tmp_path, caplog):
    bad, good = Recording(fails_in="close"), Recording()
    running = started(tmp_path, bad=bad, good=good)
    running.close("failed")
    running.close("finished")
    running.log({"reward/mean": 1.0}, 5)
    assert [call for call in good.calls if call[0] == "close"] == [("close", "failed")]
    assert good.calls[-1] == ("close", "failed")
    assert "tracker.bad failed while closing" in caplog.text


def test_a_metric_that_is_no_number_is_refused_by_name(tmp_path):
    running = started(tmp_path, one=Recording())
    with pytest.raises(ValueError, match="metric reward/mean is 'high'"):
        running.log({"reward/mean": "high"}, 1)
    with pytest.raises(ValueError, match="metric reward/all"):
        running.log({"reward/all": torch.zeros(3)}, 1)


def test_stage_lines_and_metrics_reach_the_log_marked_as_already_shown(tmp_path, caplog):
    running = started(tmp_path)
    with caplog.at_level(logging.INFO, logger="verl"):
        running.stage("gen", 1.236, "384 responses, 1536 tokens")
        running.log({"reward/mean": 0.8125}, 3)
    assert caplog.messages == ["[gen] 1.24s  384 responses, 1536 tokens", "step 3  reward/mean 0.8125"]
    assert all(record.console is False for record in caplog.records)


def test_the_description_builds_what_it_names_and_nothing_else(tmp_path):
    running = Trackers(jsonl=JsonLines()).build(BuildContext())
    running.start("run", {}, tmp_path, 1)
    running.log({"a": 1.0}, 1)
    running.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["a"] == 1.0


def test_a_further_tracker_needs_a_name_of_its_own_and_no_other_edit(tmp_path):
    running = Trackers(jsonl=JsonLines(), more={"mine": JsonLines()}).build(BuildContext())
    assert list(running._trackers) == ["jsonl", "more.mine"]
    with pytest.raises(ConfigError, match="more has the name 'console', which is a tracker of its own"):
        Trackers(more={"console": JsonLines()})


def test_a_tracker_of_the_wrong_kind_is_refused():
    with pytest.raises(ConfigError, match="jsonl is 'yes': expected a component"):
        Trackers(jsonl="yes")
