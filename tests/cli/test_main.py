"""The console command says its version and checks the environment."""

import os
import re
import subprocess
import sys

import pytest
from cases import exhaustive
from typer.testing import CliRunner

import verl
from verl.cli.main import app
from verl.cli.resume_check import RunLauncher
from verl.compose.launch import start_message
from verl.compose.schema import own_conf_dirs

runner = CliRunner()


def test_the_version_is_that_of_the_package():
    result = runner.invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"{verl.__version__}\n")


SHOWS = """
import rich
from verl.cli.console import faults_reported
from verl.cli.main import app

@app.command()
def by_rich():
    rich.get_console().print("shown")

@app.command()
def in_full():
    with faults_reported():
        print("shown", flush=True)

app()
"""


@pytest.mark.first_rows(1)
@pytest.mark.parametrize("command", ["by-rich", "in-full"])
def test_a_command_whose_reader_leaves_ends_without_a_word(command):
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-c", SHOWS, command]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--help"], ["ppo", "--help"], *exhaustive(["runs", "."], ["plan"])])
def test_a_command_whose_output_cannot_be_written_says_so_on_one_line(words):
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "verl.cli", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode in (1, 2)
    assert len(done.stderr.splitlines()) == 1


def test_env_prints_the_check_and_ends_with_its_status(monkeypatch, tmp_path):
    result = runner.invoke(app, ["env", "--backend", "ddp"])
    assert result.exit_code == 0
    assert "[✓] torch" in result.output
    assert "[✓] ddp" in result.output
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    result = runner.invoke(app, ["env", "--backend", "ddp"])
    assert result.exit_code == 1
    assert "[✗] torch is missing" in result.output


def test_an_unknown_backend_is_a_usage_error_with_the_known_ones():
    result = runner.invoke(app, ["env", "--backend", "nope"])
    assert result.exit_code == 2
    assert "backends has nope" in result.output


def test_without_a_command_the_help_is_shown():
    result = runner.invoke(app, [])
    assert "env" in result.output
    assert "--version" in result.output


HELPS = """
import sys
import typer
from typer.testing import CliRunner
from verl.cli.main import app
from verl.compose.schema import ROOTS

def commands(command, words):
    yield words
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, [*words, name])

trains = [[root.command] for root in ROOTS.values()]
found = [words for words in commands(typer.main.get_command(app), []) if words not in trains]
failed = [words for words in found if CliRunner().invoke(app, [*words, "--help"]).exit_code]
print(len(found), str(failed).replace(" ", ""), "torch" in sys.modules)
"""


@pytest.mark.slow
def test_the_module_runs_as_the_command_without_loading_torch():
    version, imported = (
        subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
        for words in (["-X", "importtime", "-m", "verl.cli", "--version"], ["-c", HELPS])
    )
    count, failed, has_torch_after_help = imported.stdout.split()
    assert version.stdout == f"{verl.__version__}\n"
    assert not re.search(r"\| +torch$", version.stderr, re.MULTILINE)
    assert int(count) > 20
    assert (failed, has_torch_after_help) == ("[]", "False"), "--help of every command is there without torch"


@pytest.mark.slow
def test_the_commands_that_train_take_hydras_words_and_end_with_its_status(monkeypatch):
    monkeypatch.setattr("sys.argv", ["verl"])
    refused = runner.invoke(app, ["ppo", "-m", "actor=lama8b", "trainer.group_sise=4"])
    assert refused.exit_code == 2
    assert "Did you mean llama8b?" in refused.stderr
    shown = runner.invoke(app, ["sft", "--cfg", "job", "--package", "trainer"])
    assert (shown.exit_code, "SFTSettings" in shown.stdout) == (0, True)
    assert runner.invoke(app, ["sft", "--root"]).exit_code == 2
    for command in ("dpo", "reward-model"):
        shown = runner.invoke(app, [command, "--cfg", "job", "--package", "loss"])
        assert (shown.exit_code, "verl.algorithms.preference_losses" in shown.stdout) == (0, True)
    refused = runner.invoke(app, ["dpo", "trainer=ray"])  # an option of another root
    assert refused.exit_code == 2
    assert "'algorithm' not found" in refused.stderr
    assert "verl dpo --help" in refused.stderr


def test_the_command_that_a_run_proposes_is_the_one_that_started_it():
    assert start_message("main_ppo.py") == ["python", "main_ppo.py"]
    assert start_message("verl ppo") == ["verl", "ppo"]


@pytest.fixture
def own_groups(tmp_path, monkeypatch):
    """A directory with an option of one's own, whose component is a module in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "rules_of_mine.py").write_text("from verl.rewards.rules import Length as Mine\n")
    (tmp_path / "own/reward").mkdir(parents=True)
    (tmp_path / "own/reward/mine.yaml").write_text("_target_: rules_of_mine.Mine\n")
    return tmp_path / "own"


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["-cd", *exhaustive("--config-dir")])
def test_groups_of_ones_own_are_planned_as_they_are_trained(flag, own_groups, model32):
    model = ["actor=pretrained", f"actor.model.path={model32.path}", "reward=mine", "--device", "cpu"]
    found = runner.invoke(app, ["plan", flag, str(own_groups), *model])
    assert found.exit_code == 0, found.output


def test_a_flag_of_training_is_refused_by_plan():
    found = runner.invoke(app, ["plan", "--", "--multirun"])
    assert "--multirun is a flag of training" in found.output


def test_groups_of_ones_own_evaluate_a_policy(own_groups, model32, monkeypatch):
    monkeypatch.syspath_prepend(str(own_groups.parent))
    file = own_groups / "rows.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    words = ["eval", model32.path, "--config-dir", str(own_groups), "--data", str(file), "reward=mine"]
    found = runner.invoke(app, [*words, "rollout.max_new_tokens=2", "trainer.num_threads=1"])
    assert found.exit_code == 0, found.output
    assert own_conf_dirs() == ()


def test_groups_of_ones_own_reach_the_runs_of_a_resume_check(own_groups, monkeypatch):
    started = []
    monkeypatch.setattr(RunLauncher, "run", lambda self, *_: started.extend(self.overrides) or sys.exit(0))
    runner.invoke(app, ["resume-check", "--config-dir", str(own_groups), "reward=mine"])
    assert started == [f"--config-dir={own_groups}", "reward=mine"]
