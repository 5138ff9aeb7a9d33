"""The console shows steps, stages and samples on terminals and in pipes, without tearing or control characters."""

import io
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from verl.tracking.console import Console, ConsoleTracker, print_table, sample_line, set_command


def screen(terminal: bool) -> RichConsole:
    return RichConsole(
        file=io.StringIO(), force_terminal=terminal, width=100, color_system="standard" if terminal else None
    )


def shown(console: RichConsole) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def started(settings: Console) -> tuple[ConsoleTracker, RichConsole]:
    """The tracker of a run of nine steps, whose output is no terminal."""
    tracker = ConsoleTracker(settings, console := screen(terminal=False))
    tracker.start("verl/ppo", {}, Path("/out"), 9)
    return tracker, console


def run(console: RichConsole, settings: Console | None = None, total_steps: int | None = 2) -> str:
    tracker = ConsoleTracker(settings or Console(), console)
    tracker.start("quickstart", {}, Path("/out"), total_steps)
    for step in (1, 2):
        tracker.stage("gen", 1.236, "384 responses, 1536 tokens")
        tracker.log({"reward/mean": 0.8125, "kl/reference_nats": 0.00312345, "other": 9.0}, step)
    tracker.evaluation({"eval/greedy_accuracy": 0.914}, 2)
    tracker.close("finished")
    return shown(console)


STEP = {
    "reward/mean": 0.81214,
    "kl/reference_nats": -3.786e-08,
    "rollout/entropy_nats": 4.47612,
    "rollout/response_length_tokens": 7.66927,
    "timing/gen_s": 0.0912,
    "timing/update_actor_s": 0.2441,
    "timing/step_s": 0.89641,
}
STAGES = {"gen": 1.24, "reward": 0.02, "old": 0.19, "ref": 0.2, "values": 0.18, "adv": 0.0, "update_critic": 0.64}


def test_a_pipe_gets_plain_lines():
    text = run(screen(terminal=False))
    assert all(c.isprintable() or c == "\n" for c in text)
    lines = text.splitlines()
    assert lines[0] == "run quickstart, 2 steps"
    assert re.fullmatch(r"step 1/2  reward 0\.812  kl 0\.00312  eta 0:\d\d", lines[1])
    assert lines[2] == "step 2/2  reward 0.812  kl 0.00312"
    assert lines[3:] == ["eval 2/2  greedy_accuracy 0.914", "run finished"]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("terminal", [True, False])
def test_every_line_of_a_step_fits_the_width_and_holds_whole_numbers(width, terminal):
    console = RichConsole(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)
    tracker = ConsoleTracker(Console(stage_lines=True), console)
    tracker.start("verl/ppo", {}, Path("/out"), 12000)
    for name, seconds in STAGES.items():
        tracker.stage(name, seconds, "what was done")
    tracker.log({**STEP, **{f"timing/{name}_s": seconds for name, seconds in STAGES.items()}}, 11999)
    tracker.samples([{"prompt_text": "a" * 99, "response_text": "b" * 99, "score": 0.25, "answer": "184"}], 1, "eval")
    tracker.evaluation({f"eval/source_{i}/accuracy": 0.123456 for i in range(9)}, 11999)
    lines = shown(console).splitlines()
    assert all(len(line) <= width for line in lines), lines
    whole = {"0.812", "-3.79e-08", "4.48", "7.67", "0.90s", "0.25", "0.123", *(f"{s:.2f}s" for s in STAGES.values())}
    numbers = [w for line in lines for w in line.replace("score=", " ").split() if w[-1].isdigit() or w.endswith("s")]
    odd = [n for n in numbers[1:] if n[0] in "-0123456789" and n not in whole and "/" not in n and ":" not in n]
    assert odd == []
    assert sum(line.count("accuracy 0.123") for line in lines) == 9  # an evaluation is told in full, on several lines


def test_the_stage_times_of_a_step_stand_below_it_without_what_came_between_steps():
    tracker, console = started(Console(stage_lines=True))
    tracker.stage("eval", 4.0, "")
    for name in ("gen", "reward", "update_actor"):
        tracker.stage(name, STAGES.get(name, 0.71), "")
    tracker.log({"reward/mean": 1.0, "timing/gen_s": 1.24, "timing/reward_s": 0.02, "timing/update_actor_s": 0.71}, 1)
    assert shown(console).splitlines()[-1] == "  gen 1.24s  reward 0.02s  update_actor 0.71s"


def test_of_fast_steps_the_first_the_last_and_those_before_an_evaluation_have_a_line():
    tracker, console = started(Console(every_s=60))
    for step in range(1, 10):
        tracker.log({"reward/mean": 1.0}, step)
        if step == 4:
            tracker.evaluation({"eval/score": 1.0}, step)
        if step == 7:  # as if a minute had gone by
            tracker._shown_at = time.monotonic() - 60
    assert [line.split("/")[0] for line in shown(console).splitlines()[1:]] == [
        "step 1", "step 4", "eval 4", "step 8", "step 9",
    ]  # fmt: skip
    tracker, stopped = started(Console(every_s=60))
    for step in range(1, 4):
        tracker.log({"reward/mean": 1.0}, step)
    tracker.close("stopped")
    assert [line.split("/")[0] for line in shown(stopped).splitlines()[1:]] == ["step 1", "step 3", "run stopped"]


def ended(tmp_path, command: tuple[str, ...] = (), **changes) -> list[str]:
    summary = {
        "status": "finished", "steps": 9, "wall_s": 12.3, "error": None, "saved": ["actor"], "checkpoints": [],
        "evaluations": {"0": {"eval/score": 1.0, "eval/accuracy": 0.644}, "9": {"eval/accuracy": 0.992}},
    }  # fmt: skip
    console = screen(terminal=False)
    tracker = ConsoleTracker(Console(), console)
    tracker.start("verl/ppo", {}, tmp_path, 9)
    set_command(command)
    try:
        tracker.result({**summary, **changes})
        tracker.close(changes.get("status", "finished"))
    finally:
        set_command(())
    return shown(console).splitlines()[1:]


def test_a_run_ends_with_before_and_after_its_directory_and_the_next_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    assert ended(tmp_path) == [
        "run finished after 9 of 9 steps, 12 s",
        "  accuracy 0.644 -> 0.992 (held-out rows, step 0 -> 9)",
        f"  results in {tmp_path.name}",
    ]


def test_a_run_that_is_not_over_ends_with_the_command_that_goes_on(tmp_path):
    command = ("python", "main_ppo.py", "resume=latest", "trainer.stop_after=4", "actor.model.path=a b")
    stopped = ended(tmp_path, command, status="stopped", steps=4, checkpoints=["global_step_4"])
    assert stopped[0] == "run stopped after 4 of 9 steps, 12 s"
    assert stopped[-1] == f"    python main_ppo.py 'actor.model.path=a b' resume={tmp_path}"
    failed = ended(tmp_path, command, status="failed", steps=4, error="RewardError: no\n  Expected: more")
    assert failed[:2] == ["run failed after 4 of 9 steps, 12 s", "  RewardError: no"]
    assert failed[-1] == f"    less {tmp_path}/run.log"
    restarting = ended(tmp_path, command, status="restarting", steps=4, error="WorkerDied: gone")
    assert restarting[-1] == f"  results in {tmp_path}"  # nobody has to do anything


def test_a_terminal_breaks_long_sentences_between_words_only():
    console = RichConsole(file=io.StringIO(), force_terminal=True, width=40, color_system=None)
    sentence = (
        "the checkpoint of step 1234567890 was not saved because /a/long/path/without/any/space/in/it/at/all is full"
    )
    ConsoleTracker(Console(), console).message(sentence)
    assert shown(console).split() == sentence.split()
    assert len(shown(console).splitlines()) > 2


def test_a_line_shows_the_columns_asked_for_or_the_first_metrics():
    assert "step 1/2  other 9  eta 0:" in run(screen(terminal=False), Console(columns=("missing", "other")))
    assert "step 1/2  reward 0.812  kl 0.00312  other 9" in run(screen(terminal=False), Console(columns=()))


def test_markup_and_control_characters_of_a_response_are_only_text():
    console = screen(terminal=False)
    row = {"response": "[bold]a[/x] \x1b[2J\x07é", "reward": 1.0}
    ConsoleTracker(Console(), console).samples([row], 1, "eval")
    ConsoleTracker(Console(), console).message("raw \x1b[2J [/x]")
    assert shown(console).splitlines() == [
        "eval sample  response='[bold]a[/x] \\x1b[2J\\x07é'  reward=1",
        "raw \\x1b[2J [/x]",
    ]


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
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline().startswith("run run, 3 steps")
        process.stdout.close()
        process.stdin.write("\n")
        process.stdin.close()
        assert process.wait() == 0
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert "tracker.console FAILED" in (tmp_path / "run.log").read_text()


def test_of_a_chat_the_last_turn_and_the_response_share_the_line():
    row = {"prompt_text": "<user>" + "x" * 90, "response_text": "The answer is 4, because 2+2=4.", "score": 1.0}
    row |= {"level": "easy" * 9, "subject": "sums" * 9, "answer": "4" * 30, "last_turn": "What is 2+2? Think first."}
    line = sample_line("train sample", row, 100)
    assert len(line) <= 100
    assert "What is 2+2?" in line
    assert "The answer is 4" in line
    assert "<user>" not in line


@pytest.mark.parametrize(
    ("metric", "values", "expected"),
    [("rollout/clipped_ratio", (0.1, 0.25), "clipped 0.25"), ("reward/unscored", (0.0, 3.0), "unscored 3")],
)
def test_cut_responses_above_a_tenth_and_responses_without_a_reward_have_a_column(metric, values, expected):
    tracker, console = started(Console(every_s=0))
    for step, value in enumerate(values, start=1):
        tracker.log({"reward/mean": 1.0, metric: value}, step)
    assert [expected in line for line in shown(console).splitlines()[1:3]] == [False, True]


def test_a_table_without_room_folds_what_may_not_be_cut(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    path = "outputs/verl/grpo_tiny/2026-11-29_10-18-33"
    print_table(
        ["directory", "status", "note", "size"], [[path, "interrupted", "a long note " * 3, "178 MiB"]], cut=["note"]
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("…  178 MiB")
    assert "".join(line.split()[0] for line in lines[1:]) == path
