"""Commands that take a checkpoint take its address in an S3 store, and tell the same; others say what to do."""

import dataclasses
from pathlib import Path

import pytest
from storage.s3_server import BUCKET
from trainer.runs import GRPO_ALGORITHM, Prompts, ppo_run
from typer.testing import CliRunner

from verl.checkpoint.config import Checkpointing
from verl.checkpoint.manager import CheckpointManager
from verl.cli.main import app
from verl.component import BuildContext
from verl.replay.config import TieredReplay

PREFIX = "asked/checkpoints/verl/grpo"
ADDRESS = f"s3://{BUCKET}/{PREFIX}"


def run_of(model, directory: Path, total_steps: int, resume: str | None = None):
    """A run with a replay buffer that saves increments at every step."""
    replay = TieredReplay(memory_mib=8, shard_mib=1)
    algorithm = dataclasses.replace(GRPO_ALGORITHM, replay_fraction=0.5)
    saving = Checkpointing(save_dir=str(directory / "checkpoints"), save_interval=1, incremental_save=True)
    run = ppo_run(model, algorithm, total_steps=total_steps, lr=0.02, replay=replay)
    data = Prompts(eval=("5+5=", "7", "what is 6*7? "))
    return dataclasses.replace(run, checkpoint=saving, data=data, resume=resume)


def fit(run, directory: Path) -> None:
    with run.build(BuildContext(run_dir=directory / "run")) as trainer:
        trainer.fit()


@pytest.fixture
def store(s3_url, monkeypatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_url)


def told(*arguments, status: int = 0) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == status, result.output
    return result.output


@pytest.mark.exhaustive
def test_a_run_goes_on_from_an_address(store, model32, tmp_path):
    digests = []
    fit(run_of(model32, tmp_path, 2), tmp_path)
    told("checkpoint", "push", tmp_path / "checkpoints", ADDRESS, "--all")
    for name, place in (("disk", tmp_path / "checkpoints/global_step_2"), ("store", ADDRESS)):
        directory = tmp_path / name
        fit(run_of(model32, directory, 3, resume=str(place)), directory)
        manager = CheckpointManager(directory / "checkpoints")
        assert manager.step == 3
        digests.append(manager.reader().digest())
    assert digests[0] == digests[1]


@pytest.mark.parametrize("command", ["health", "export"])
def test_what_only_works_on_a_disk_says_how_to_get_it_there(command, store, tmp_path):
    extra = [tmp_path / "out"] if command == "export" else []
    said = told("checkpoint", command, ADDRESS, *extra, status=2)
    assert f"Fetch it with `verl checkpoint pull {ADDRESS} DIR`" in said


@pytest.mark.parametrize("command", ["eval", "generate", "checkpoint ls"])
def test_an_address_where_nothing_is_says_so(command, store):
    assert "holds no checkpoints" in told(*command.split(), f"s3://{BUCKET}/nothing/here", status=2)
