"""`verl watch`: lines of a running run as they are written."""

import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

from cli.report.run_files import metrics, run_directory
from typer.testing import CliRunner

from verl.checkpoint.ownership import Owner, RunLock
from verl.cli.main import app


def add_lines(directory: Path, rows: list[dict], end: str = "") -> None:
    with open(directory / "metrics.jsonl", "a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows) + end)


def held(directory: Path) -> RunLock:
    lock = RunLock(directory, Owner.here(), "DIR")
    assert lock.acquire() is None
    return lock


def test_a_run_that_has_ended_is_shown_from_its_last_lines_on(tmp_path):
    result = CliRunner().invoke(app, ["watch", str(run_directory(tmp_path / "run"))])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "run verl/small, 30 steps"
    assert any(line.startswith("step 30/30  reward ") for line in lines)
    assert not any(line.startswith("step 2/30 ") for line in lines)
    assert any(line.startswith("eval 30/30") for line in lines)
    assert lines[-1].startswith("Finished after 30 of 30 steps")


def test_the_lines_of_a_running_run_are_shown_once_each_as_they_come_until_it_ends(tmp_path):
    rows = metrics(1, 6)
    directory = run_directory(tmp_path / "run", rows=rows[:4])
    lock = held(directory)
    command = [sys.executable, "-m", "verl.cli", "watch", str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        shown: list[str] = []
        reader = threading.Thread(target=lambda: shown.extend(watching.stdout))
        reader.start()
        half = json.dumps(rows[4])
        wait_for(lambda: any("step 3/30" in line for line in shown))
        add_lines(directory, [], end=half[:20])
        time.sleep(1.5)  # more than one look at the file
        add_lines(directory, [], end=half[20:] + "\n")
        wait_for(lambda: any("step 4/30" in line for line in shown))
        add_lines(directory, rows[5:])
        lock.release()
        assert watching.wait(120) == 0
        reader.join()
    steps = [int(match[1]) for line in shown if (match := re.match(r"step (\d+)/30", line))]
    assert steps == [1, 2, 3, 4, 5, 6]


def wait_for(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_is_no_run_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["watch", str(tmp_path)])
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "has neither metrics.jsonl nor config.yaml" in result.output
