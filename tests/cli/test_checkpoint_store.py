"""`verl checkpoint ls|verify|pull|push` on object storage."""

import json
from pathlib import Path

import pytest
from checkpoint.remote.test_upload_and_download import save
from typer.testing import CliRunner

from verl.checkpoint.manager import CheckpointManager
from verl.checkpoint.remote.remote_store import object_key
from verl.cli.main import app
from verl.storage.config import storage_at


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket/runs"


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["checkpoint", *arguments])
    assert result.exit_code == status, result.output
    return result.output


def test_what_is_pushed_is_listed_verified_and_pulled(address: str, tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / "here", step)
    assert "global_step_2 is in" in run("push", str(tmp_path / "here"), address, "--all")
    told = json.loads(run("ls", address, "--json"))
    assert [(one["name"], one["step"], one["is_newest"]) for one in told] == [
        ("global_step_1", 1, False),
        ("global_step_2", 2, True),
    ]
    assert told[1]["added_bytes"] < told[0]["added_bytes"] + 200, "the tokenizer is there once"
    assert "global_step_2: complete" in run("verify", address, "--full")
    run("pull", address, str(tmp_path / "there"))
    run("pull", f"{address}/global_step_1", str(tmp_path / "there"))
    assert [one.step for one in CheckpointManager(tmp_path / "there").list()] == [1, 2]


def test_damage_in_the_store_is_told_by_file(address: str, tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "here", 1)
    run("push", str(tmp_path / "here"), address)
    entry = checkpoint.manifest.file("actor/weights.bin")
    assert entry is not None
    with storage_at(address).connect() as store:
        store.put(object_key(entry), b"~" * entry.size)
    run("verify", address)
    assert "actor/weights.bin: bytes 0 to 5000" in run("verify", address, "--full", status=1)
    run("pull", address, str(tmp_path / "there"), status=1)


def test_what_is_not_there_is_said(address: str, tmp_path: Path) -> None:
    assert "holds no checkpoints" in run("ls", address, status=2)
    save(tmp_path / "here", 1)
    assert "expected one such as" in run("push", str(tmp_path / "here"), str(tmp_path / "there"), status=2)
