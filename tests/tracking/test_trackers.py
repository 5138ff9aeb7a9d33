"""A run's trackers act as one: redacted, released, and never the reason that training stops."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import exhaustive
from refusals import refusal

from verl.component import BuildContext, as_plain
from verl.compose.compose import compose_root
from verl.compose.from_yaml import compose_over_default
from verl.compose.overrides import command_line
from verl.compose.validate import validate
from verl.errors import ConfigError
from verl.tracking.base import Tracker, Trackers, TrackerSet
from verl.tracking.jsonl import JsonLines
from verl.tracking.tensorboard import TensorBoard


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


for method in ("stage", "log", "evaluation", "samples", "evaluated_rows", "token_rows", "message", "close"):
    setattr(Recording, method, lambda self, *given, method=method: self._note(method, *given))


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
    running.evaluated_rows([{"score": 1.0}], 1)
    running.token_rows([{"prompt": "4", "ids": [7], "texts": ["6"]}], 1)
    running.message("done")
    running.close("interrupted")
    assert one.calls == two.calls
    assert one.calls[1:] == [
        ("stage", "gen", 1.236, "384 responses"),
        ("log", {"reward/mean": 0.5, "n": 3, "std": 0.25}, 1),
        ("evaluation", {"eval/accuracy": 1}, 1),
        ("samples", [{"response": "46"}], 1, "eval"),
        ("evaluated_rows", [{"score": 1.0}], 1),
        ("token_rows", [{"prompt": "4", "ids": [7], "texts": ["6"]}], 1),
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
    running.token_rows([{"prompt": "password=p4ss", "ids": [1, 2, 3], "texts": ["password", "=p4", "ss"]}], 1)
    running.message("Authorization: Bearer p4ss")
    assert one.calls[0] == ("start", {"hub": {"token": "***"}, "max_tokens": 8})
    assert "p4" not in repr(one.calls)
    assert ("token_rows", [{"prompt": "password=***", "texts": ["***"] * 3}], 1) in one.calls


def test_a_tracker_that_cannot_start_is_an_error_that_names_it_and_the_others_are_closed(tmp_path):
    good, bad, later = Recording(), Recording(fails_in="start"), Recording()
    running = TrackerSet({"good": good, "wandb": bad, "later": later})
    with refusal("tracker.wandb"):
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


# Composed from a list


def composed(*arguments: str) -> Trackers:
    words, assigned = command_line("ppo", list(arguments))
    if assigned.faults:
        raise ConfigError(assigned.faults)
    return validate(compose_root("ppo", words)).tracker


def names(trackers: Trackers) -> list[str]:
    return sorted(name for name, tracker in as_plain(trackers).items() if isinstance(tracker, dict) and tracker)


@pytest.mark.first_rows(3)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tracker=[console,jsonl,wandb]", "tracker.wandb.project=x"], ["console", "jsonl", "wandb"]),
        (["tracker=console"], ["console"]),
        (["tracker=[jsonl]"], ["jsonl"]),
        (["tracker=default"], ["console", "jsonl", "report", "tensorboard"]),
        (["tracker=[wandb,default]"], ["console", "jsonl", "report", "tensorboard", "wandb"]),
        (["tracker=wandb"], ["console", "jsonl", "report", "tensorboard", "wandb"]),  # as before lists
        (["tracker=[wandb]"], ["wandb"]),
        (["tracker=none"], []),
        (["tracker=[]"], []),
        (["tracker=[console,jsonl]", "tracker.jsonl=null"], ["console"]),
    ],
)
def test_trackers_are_a_list_and_older_forms_mean_what_they_meant(arguments, expected):
    assert names(composed(*arguments)) == expected


def test_a_tracker_of_a_list_has_its_settings_under_its_name():
    found = composed("tracker=[console,wandb]", "tracker.wandb.project=x", "tracker.console.sample_rows=7")
    assert (as_plain(found)["wandb"]["project"], as_plain(found)["console"]["sample_rows"]) == ("x", 7)
    short = compose_over_default({"tracker": ["console", "jsonl"]}, ["tracker.console.sample_rows=2"])
    found = validate(short.config, short.faults).tracker
    assert names(found) == ["console", "jsonl"]
    assert found.console.sample_rows == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("key", ["tracker.mine", *exhaustive("tracker.more.mine", "+tracker.mine")])
def test_a_sixth_tracker_stands_beside_the_others_under_its_name(key, tmp_path):
    own, path = f"{key}={{_target_:verl.tracking.tensorboard.TensorBoard}}", key.lstrip("+")
    found = composed("tracker=[jsonl]", own, f"{path}.flush_s=3")
    assert found.more == {"mine": TensorBoard(flush_s=3)}
    running = found.build(BuildContext(run_dir=tmp_path))
    assert list(running.trackers) == ["jsonl", "mine"]
    with pytest.raises(ConfigError) as caught:
        composed(own, f"{path}.flush_s=0")
    assert caught.value.faults == [f"{path}.flush_s is 0: input should be greater than 0."]


def test_an_option_of_ones_own_is_composed_like_those_of_the_package(tmp_path):
    (tmp_path / "tracker").mkdir()
    (tmp_path / "tracker/mine.yaml").write_text(
        "_target_: verl.tracking.base.Trackers\nmine: {_target_: verl.tracking.tensorboard.TensorBoard, flush_s: 5}\n"
    )
    options = [f"hydra.searchpath=[file://{tmp_path}]", "tracker=[mine,jsonl]", "++tracker.mine.flush_s=6"]
    found = validate(compose_root("ppo", options)).tracker
    assert (found.jsonl, found.more) == (JsonLines(), {"mine": TensorBoard(flush_s=6)})


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["tracker.wandb.project=x"], r"tracker\.wandb.*choose an option of its group"),
        (["tracker=[console,jsom]"], "tracker=jsom: no such option.*Did you mean jsonl"),
        (["tracker.consol.sample_rows=1"], r"tracker\.consol is not a known key.*tracker\.console"),
        (["reward=[exact_match,length]"], "it takes one option"),
        (["tracker=[console,jsonl],none"], "several values .* -m"),
    ],
)
def test_what_is_no_list_of_trackers_is_told(arguments, fault):
    with pytest.raises(ConfigError, match=fault):
        composed(*arguments)
