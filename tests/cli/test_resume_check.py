"""The check of resuming: it finds nothing where nothing is wrong, and names what was planted."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cli.small_runs import small_run
from cluster.processes_of import wait_until_gone
from typer.testing import CliRunner

from verl.checkpoint.read.lazy_tensors import as_tensor
from verl.checkpoint.read.reader import CheckpointReader
from verl.cli import resume_check
from verl.cli.main import app
from verl.cli.resume_check import RunFailed, RunLauncher, laid_over
from verl.trainer.state.compare_runs import Tolerance, first_step_apart, steps_of
from verl.utils.progress import ProgressWatch

runner = CliRunner()


def check(*arguments, **small):
    return runner.invoke(app, ["resume-check", *arguments, *small_run(**small)])


@pytest.fixture
def forked(fork_server, monkeypatch):
    """Runs start without the seconds that their imports take."""

    class Run:
        def __init__(self, words, **_):
            root, *arguments = words[len(resume_check.COMMAND) :]
            run_dir = Path(next(text for text in arguments if text.startswith("hydra.run.dir=")).partition("=")[2])
            self.child = fork_server.start(run_dir.parent, run_dir.name, arguments, f"main_{root}.py")
            self.pid = self.child.pid

        def wait(self, timeout):
            return self.child.wait()

        def kill(self):
            self.child.kill()

    names = {"Popen": Run, "STDOUT": subprocess.STDOUT, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(resume_check, "subprocess", SimpleNamespace(**names))


def test_seconds_and_requests_of_a_server_are_not_compared(tmp_path):
    names = "remote_latency_p50_s", "judge_remote_requests", "remote_retries"
    line = {"step": 1, "timing/step_s": 1.0, "replay/memory_mib": 0.5, "reward/mean": 0.5}
    line |= {f"reward/{name}": 1.0 for name in names}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert steps_of(tmp_path) == {1: {"reward/mean": 0.5}}


@pytest.mark.exhaustive
def test_a_sound_run_passes_bit_by_bit_and_its_directory_is_kept_if_asked(model32, tmp_path):
    result = check("--steps", "3", "--at", "1", "--keep", str(tmp_path / "kept"), model=model32, directory=tmp_path)
    assert result.exit_code == 0, result.output
    assert "OK: steps 2 to 3 and " in result.output
    assert "are equal bit by bit" in result.output
    assert (tmp_path / "kept/resumed/metrics.jsonl").is_file()
    assert (tmp_path / "kept/stopped_checkpoints/global_step_1").is_dir()
    assert not (tmp_path / "kept/straight_checkpoints/global_step_1").exists()  # it was not even saved there


def flip_a_bit(checkpoint, name):
    """Change the largest element of a float32 tensor on the disk by about a quarter; its hash is not updated."""
    (tensor,) = [tensor for tensor in checkpoint.manifest.tensors if tensor.full_name == name]
    values = as_tensor(CheckpointReader(checkpoint).tensor(tensor.component, tensor.name), tensor).flatten()
    place, file = int(values.abs().argmax()), checkpoint.path(tensor.slices[0].file)
    file.chmod(0o644)
    with file.open("r+b") as data:
        data.seek(tensor.slices[0].offset + 4 * place + 2)
        byte = data.read(1)[0]
        data.seek(-1, os.SEEK_CUR)
        data.write(bytes([byte ^ 1 << 5]))


@pytest.mark.slow
def test_a_flipped_bit_is_found_with_its_step_its_tensor_and_its_size(forked, model32, tmp_path, monkeypatch):
    run = RunLauncher.run

    def run_from_a_damaged_checkpoint(launcher, name, saved_in, overrides, *rest):
        if name != "resumed":
            return run(launcher, name, saved_in, overrides, *rest)
        checkpoint = launcher.last(saved_in)
        whole = tmp_path / "whole"
        shutil.copytree(checkpoint.directory, whole)
        flip_a_bit(checkpoint, "actor/model.norm.weight")
        run_dir = run(launcher, name, saved_in, [*overrides, "checkpoint.verify=false"], *rest)
        shutil.rmtree(checkpoint.directory)
        shutil.copytree(whole, checkpoint.directory)
        return run_dir

    monkeypatch.setattr(RunLauncher, "run", run_from_a_damaged_checkpoint)
    result = check("--steps", "2", "--at", "1", model=model32, directory=tmp_path)
    assert result.exit_code == 1, result.output
    assert "DIFFERS: step 2: " in result.output  # the policy is another one, and so are the numbers of the next step
    assert "DIFFERS: tensor actor/" in result.output
    assert "in the first run and" in result.output
    assert "at most by" in result.output


STOPPING = """
import os, signal, time
from verl.utils.progress import report, report_to_starter
report_to_starter()
for _ in range(30):
    time.sleep(0.1)
    report("generating")
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_run_that_stands_still_is_named_with_its_stage_and_ended(tmp_path, monkeypatch):
    class OnceItWorks(ProgressWatch):
        """The time in which the process starts does not count."""

        @property
        def is_overdue(self) -> bool:
            return bool(self.progress.stage(0)) and super().is_overdue

    monkeypatch.setattr(resume_check, "ProgressWatch", OnceItWorks)
    monkeypatch.setattr(resume_check, "COMMAND", (sys.executable, "-c", STOPPING))
    legs = RunLauncher(root="ppo", steps=1, directory=tmp_path, timeout_s=2.0)
    told = r"the straight run made no progress for 2 s \(--timeout\) at: generating; it is stopped .*; it was ended"
    with pytest.raises(RunFailed, match=told):
        legs.run("straight", "straight", [])


SLOW = """
import sys
import time
from verl.cli import resume_check
from verl.cli.main import app
child = "import os, time; print(os.getpid(), file=open('pid', 'w'), flush=True); time.sleep(600)"
resume_check.COMMAND = sys.executable, "-c", child
app(["resume-check", "--steps", "2", "--at", "1"])
"""


@pytest.mark.slow
def test_a_command_that_is_terminated_leaves_no_process(tmp_path):
    command = subprocess.Popen([sys.executable, "-c", SLOW], cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)})
    while not (pid := (tmp_path / "pid").read_text() if (tmp_path / "pid").exists() else ""):
        assert command.poll() is None
        time.sleep(0.05)
    command.terminate()
    assert command.wait(60) == 143
    assert wait_until_gone([int(pid)]) == []
    assert [path.name for path in tmp_path.iterdir()] == ["pid"]


@pytest.mark.exhaustive
def test_another_layout_agrees_to_rounding_and_the_check_says_so(model32, tmp_path):
    result = check("--to-sharding", "ddp", "--processes", "2", "--steps", "2", model=model32, directory=tmp_path)
    assert result.exit_code == 0, result.output
    assert "agree to within 0.001 (rounding may differ)" in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "2", "--at", "2"], "--at is 2: must lie between 1 and --steps 2, less one."),
        (["--root", "dqn"], "'dqn' is not one of 'ppo', 'sft'"),
        (["actor.lr=1"], "the straight run ended with status 2:\nactor.lr is not a known key"),
    ],
)
def test_what_cannot_be_checked_is_told_with_status_2(arguments, said, tmp_path):
    result = runner.invoke(app, ["resume-check", *arguments])
    assert result.exit_code == 2
    assert said in result.output


def test_closeness_is_of_bits_without_a_tolerance_and_of_size_with_one():
    exact, near = Tolerance(), Tolerance(1e-3)
    assert exact.numbers(float("nan"), float("nan"))
    assert not exact.numbers(1.0, 1.0 + 1e-12)
    assert near.numbers(1000.0, 1000.5)
    assert not near.numbers(1.0, 1.01)
    assert not near.numbers(1, True)
    zeros, values = torch.tensor([0.0, -0.0]), torch.tensor([100.0, 0.0])
    assert exact.elements(zeros, zeros.flip(0)).tolist() == [True, True]
    assert near.elements(values, torch.tensor([100.05, 0.05])).tolist() == [False, False]
    assert near.elements(values, torch.tensor([100.0, 0.2])).tolist() == [False, True]
    assert not exact.elements(torch.tensor([float("nan")]), torch.tensor([float("nan")])).any()


def test_the_first_difference_of_steps_is_the_earliest_and_an_absent_metric_is_one():
    whole = {1: {"a": 1.0}, 2: {"a": 1.0, "b": 2.0}, 3: {"a": 1.0}}
    exact = Tolerance()
    assert first_step_apart(whole, {2: {"a": 1.0, "b": 2.0}}, exact) is None
    assert first_step_apart(whole, {3: {"a": 2.0}, 2: {"a": 1.0, "b": 3.0}}, exact) == (
        "step 2: b is 2.0 in the first run and 3.0 in the second"
    )
    assert "step 2: b is 2.0 in the first run and absent" in str(first_step_apart(whole, {2: {"a": 1.0}}, exact))


def test_what_the_check_itself_sets_takes_the_place_of_what_was_given():
    given = ["tracker=wandb", "tracker.wandb.project=x", "trainer.total_steps=9", "trainer.seed=1", "sharding=none"]
    assert laid_over(given, ["tracker=none", "trainer.total_steps=4"]) == [
        *("trainer.seed=1", "sharding=none", "tracker=none", "trainer.total_steps=4")
    ]
    assert laid_over(given[3:], ["sharding=ddp"]) == ["trainer.seed=1", "sharding=ddp"]
