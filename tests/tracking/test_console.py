"""The console shows steps, stages and samples on terminals and in pipes, without tearing or control characters."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from verl.errors import ConfigError
from verl.tracking.console import Console, ConsoleTracker


def screen(terminal: bool) -> RichConsole:
    return RichConsole(
        file=io.StringIO(), force_terminal=terminal, width=100, color_system="standard" if terminal else None
    )


def shown(console: RichConsole) -> str:
    return console.file.getvalue()


def run(console: RichConsole, settings: Console | None = None, total_steps: int | None = 2) -> str:
    tracker = ConsoleTracker(settings or Console(), console)
    tracker.start("quickstart", {}, Path("/out"), total_steps)
    for step in (1, 2):
        tracker.stage("gen", 1.236, "384 responses, 1536 tokens")
        tracker.log({"reward/mean": 0.8125, "kl/reference_nats": 0.00312345, "other": 9.0}, step)
    tracker.evaluation({"eval/greedy_accuracy": 0.914}, 2)
    tracker.close("finished")
    return shown(console)


def test_a_pipe_gets_plain_lines():
    text = run(screen(terminal=False))
    assert all(c.isprintable() or c == "\n" for c in text)
    lines = text.splitlines()
    assert lines[0] == "run quickstart, 2 steps, results in /out"
    assert lines[1] == "[gen] 1.24s  384 responses, 1536 tokens"
    assert lines[2] == "step 1/2  reward/mean 0.8125  kl/reference_nats 0.003123  0:00:00 left"
    assert lines[4] == "step 2/2  reward/mean 0.8125  kl/reference_nats 0.003123"
    assert lines[5:] == ["evaluation after step 2  eval/greedy_accuracy 0.914", "run finished"]


def test_a_terminal_gets_a_bar_that_is_gone_at_the_end():
    console = screen(terminal=True)
    text = run(console)
    assert "━" in text
    assert "2/2" in text
    assert text.endswith("run finished\x1b[0m\n")
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is hidden and shown again
    assert "reward/mean 0.8125" in text


def test_the_bar_can_be_left_out():
    assert "━" not in run(screen(terminal=True), Console(progress_bar=False))


def test_stage_lines_can_be_left_out():
    assert "[gen]" not in run(screen(terminal=False), Console(stage_lines=False))


def test_a_run_of_unknown_length_counts_steps():
    assert "step 2  reward/mean" in run(screen(terminal=False), total_steps=None)
    assert "step 2" in run(screen(terminal=True), total_steps=None)


def test_a_line_shows_the_columns_asked_for_or_the_first_metrics():
    assert "step 1/2  other 9  0:" in run(screen(terminal=False), Console(columns=("missing", "other")))
    assert "step 1/2  reward/mean 0.8125  kl/reference_nats" in run(screen(terminal=False), Console(columns=()))


def test_long_lines_are_not_cut_in_a_pipe():
    console = screen(terminal=False)
    ConsoleTracker(Console(), console).message("x" * 300 + " " + "y" * 300)
    assert shown(console) == "x" * 300 + " " + "y" * 300 + "\n"


def test_markup_and_control_characters_of_a_response_are_only_text():
    console = screen(terminal=False)
    row = {"response": "[bold]a[/x] \x1b[2J\x07é", "reward": 1.0}
    ConsoleTracker(Console(), console).samples([row], 1, "eval")
    ConsoleTracker(Console(), console).message("raw \x1b[2J [/x]")
    assert shown(console).splitlines() == [
        "eval sample  response='[bold]a[/x] \\x1b[2J\\x07é'  reward=1.0",
        "raw \\x1b[2J [/x]",
    ]


def test_only_a_few_samples_are_shown_and_long_ones_are_cut():
    console = screen(terminal=False)
    ConsoleTracker(Console(sample_rows=2), console).samples([{"response": "z" * 500}] * 5, 1, "eval")
    lines = shown(console).splitlines()
    assert len(lines) == 2
    assert lines[0].endswith("zzz...")
    assert len(lines[0]) < 160


def test_a_message_during_the_bar_stands_above_it():
    console = screen(terminal=True)
    tracker = ConsoleTracker(Console(), console)
    tracker.start("r", {}, Path("/out"), 5)
    tracker.message("one sentence")
    tracker.close("interrupted")
    assert "one sentence\n" in shown(console)


def test_a_negative_number_of_samples_is_refused():
    with pytest.raises(ConfigError, match="sample_rows is -1"):
        Console(sample_rows=-1)


def test_a_run_goes_on_when_nobody_reads_its_output_any_more(tmp_path):
    code = f"""
from verl.component import BuildContext
from verl.tracking.console import Console
from verl.tracking.jsonl import JsonLines
from verl.tracking.logging_setup import setup_logging
from verl.tracking.base import Trackers

undo = setup_logging({str(tmp_path)!r})
running = Trackers(console=Console(), jsonl=JsonLines()).build(BuildContext())
running.start("run", {{}}, {str(tmp_path)!r}, 3)
input()
for step in range(3):
    running.log({{"reward/mean": 1.0}}, step)
running.close()
undo()
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline().startswith("run run, 3 steps")
        process.stdout.close()
        process.stdin.write("\n")
        process.stdin.close()
        assert process.wait() == 0
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert "tracker.console FAILED" in (tmp_path / "run.log").read_text()
