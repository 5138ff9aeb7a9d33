"""metrics.jsonl holds every number as valid JSON, whole lines only, and says where it could not write."""

import json
import math
from pathlib import Path

import numpy as np
import torch

from verl.tracking.base import TrackerSet
from verl.tracking.jsonl import JsonLinesTracker


def running(run_dir: Path) -> JsonLinesTracker:
    tracker = JsonLinesTracker()
    tracker.start("run", {}, run_dir, None)
    return tracker


def lines(path: Path) -> list[dict]:
    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_each_step_is_on_disk_when_the_call_returns(tmp_path):
    tracker = running(tmp_path)
    for step in range(3):
        tracker.log({"reward/mean": step / 3, "rollout/rows": 7}, step)
        assert len(lines(tmp_path / "metrics.jsonl")) == step + 1
    tracker.evaluation({"eval/accuracy": 0.5}, 3)
    found = lines(tmp_path / "metrics.jsonl")
    assert list(found[1]) == ["step", "time_s", "reward/mean", "rollout/rows"]
    assert found[1]["reward/mean"] == 1 / 3
    assert (found[3]["step"], found[3]["eval/accuracy"]) == (3, 0.5)
    assert [line["time_s"] for line in found] == sorted(line["time_s"] for line in found)
    tracker.close("finished")


def test_numbers_that_are_not_finite_are_texts_that_float_reads_back(tmp_path):
    tracker = running(tmp_path)
    tracker.log({"a": math.nan, "b": math.inf, "c": -math.inf}, 1)
    found = lines(tmp_path / "metrics.jsonl")[0]
    assert (found["a"], found["b"], found["c"]) == ("nan", "inf", "-inf")
    assert math.isnan(float(found["a"]))


def test_samples_of_any_kind_are_rows_of_the_steps_file(tmp_path):
    tracker = running(tmp_path)
    rows = [{"prompt": "1+1=\n\ud800é\u2028", "score": np.float32(0.5), "ids": torch.tensor([1, 2]), "path": Path("x")}]
    tracker.samples(rows, 4, "eval")
    tracker.samples([{"prompt": "b"}], 4, "train")
    tracker.close("finished")
    found = lines(tmp_path / "samples" / "step_4.jsonl")
    assert found == [
        {"table": "eval", "prompt": "1+1=\n\ud800é\u2028", "score": 0.5, "ids": [1, 2], "path": "x"},
        {"table": "train", "prompt": "b"},
    ]


def test_a_step_that_another_run_sampled_is_replaced(tmp_path):
    for prompt in ("old", "new"):
        tracker = running(tmp_path)
        tracker.samples([{"prompt": prompt}], 4, "eval")
        tracker.close("finished")
    assert [row["prompt"] for row in lines(tmp_path / "samples" / "step_4.jsonl")] == ["new"]


def test_a_step_that_is_evaluated_again_has_the_rows_of_the_last_time_and_no_file_is_left_beside_them(tmp_path):
    tracker = running(tmp_path)
    tracker.evaluated_rows([{"score": 0.0}, {"score": math.nan}], 4)
    tracker.evaluated_rows([{"score": 1.0}], 4)
    tracker.token_rows([{"ids": [1, 2], "advantages": [-math.inf, 0.5]}], 4)
    tracker.close("finished")
    assert lines(tmp_path / "evals" / "step_4.jsonl") == [{"score": 1.0}]
    assert lines(tmp_path / "tokens" / "step_4.jsonl") == [{"ids": [1, 2], "advantages": ["-inf", 0.5]}]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evals", "metrics.jsonl", "tokens"]
    assert all(len(list((tmp_path / name).iterdir())) == 1 for name in ("evals", "tokens"))


def test_tables_stop_at_the_limit_of_a_run_with_one_message_and_metrics_go_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("verl.tracking.jsonl.TABLE_BYTES", 2**20)
    for first in (1, 5):  # the second one goes on in the same directory
        tracker = running(tmp_path)
        for step in range(first, first + 4):
            tracker.token_rows([{"prompt": "x" * 400_000}], step)
            tracker.log({"a": 1.0}, step)
        tracker.close("finished")
        assert sorted(file.name for file in (tmp_path / "tokens").iterdir()) == ["step_1.jsonl", "step_2.jsonl"]
    assert len(lines(tmp_path / "metrics.jsonl")) == 8
    assert caplog.text.count("samples/, evals/, tokens/ of this run have reached 1 MiB") == 2


def test_a_table_that_cannot_be_written_is_told_and_counted_and_metrics_go_on(tmp_path, caplog):
    trackers = TrackerSet({"jsonl": JsonLinesTracker()})
    trackers.start("run", {}, tmp_path, 2)
    (tmp_path / "evals").write_text("in the way of the directory")
    trackers.evaluated_rows([{"score": 0.5}], 1)
    assert "FAILED" in caplog.text
    trackers.log({"a": 1.0}, 1)
    trackers.close()
    assert len(lines(tmp_path / "metrics.jsonl")) == 1
    assert "lost 1 records" in caplog.text


def test_half_a_line_of_a_killed_run_is_not_joined(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    running(tmp_path).log({"a": 1.0}, 2)
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[2])["step"] == 2
