"""Checkpoints of every format that there ever was can be read, and those of a later one are refused."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from golden_run import GOLDEN, as_of_format, script
from transformers import AutoModelForCausalLM

from verl.checkpoint.core.manifest import FORMAT_VERSION, content_digest
from verl.checkpoint.export import plain_directory
from verl.checkpoint.manager import CheckpointManager
from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.checkpoint.read.reader import CheckpointReader
from verl.errors import CheckpointTooNew

FORMATS = sorted(path.name for path in GOLDEN.glob("format_*"))
OWN = f"format_{'_'.join(FORMAT_VERSION.split('.')[:2])}"


def test_the_format_of_this_version_has_golden_checkpoints():
    assert OWN in FORMATS


@pytest.mark.parametrize("name", FORMATS)
def test_golden_checkpoints_hold_what_was_written_into_them(name):
    manager = CheckpointManager(GOLDEN / name)
    assert [(found.step, found.is_valid("full")) for found in manager.list()] == [(100, True), (200, True)]
    assert (manager.step, manager.epoch, manager.get_loss(), manager.components()) == (
        200, 2, 0.375, ["actor", "optimizer", "rng", "scheduler"],
    )  # fmt: skip
    assert manager.state["lineage"] == {"run_id": "golden", "parent_run": None, "parent_checkpoint": None}
    actor, optimizer = manager.load("actor"), manager.load("optimizer")
    assert {name: tuple(tensor.shape) for name, tensor in actor.items()} == script.SHAPES
    weight = (np.arange(96) * 7 % 23 - 11 + 2) / 64
    assert torch.equal(actor["model.embed_tokens.weight"], torch.tensor(weight).reshape(12, 8).bfloat16())
    moment = (torch.arange(96).reshape(12, 8) + 200) / 1024
    assert torch.equal(optimizer["model.embed_tokens.weight.exp_avg"], moment)
    assert optimizer["model.embed_tokens.weight.step"].item() == 200


@pytest.mark.parametrize("name", FORMATS)
def test_transformers_opens_a_golden_actor(name):
    directory = plain_directory(CheckpointManager(GOLDEN / name).published, "actor")
    model = AutoModelForCausalLM.from_pretrained(directory)
    weights = CheckpointManager(GOLDEN / name).load("actor")
    assert all(torch.equal(model.state_dict()[key], weight) for key, weight in weights.items())


@pytest.mark.parametrize("form", ["", "_incremental"])
def test_the_script_still_writes_the_golden_bytes_of_this_format(form, tmp_path):
    golden = GOLDEN / f"{OWN}{form}"
    assert script.main([str(tmp_path / "again"), *(["--incremental"] if form else [])]) == 0
    changing = {"COMMIT", "manifest.json", "trainer_state.json"}  # they name the version of verl
    for path in golden.rglob("*"):
        if path.is_file() and path.name not in changing:
            assert (tmp_path / "again" / path.relative_to(golden)).read_bytes() == path.read_bytes(), path
    old, new = (
        json.loads((root / "global_step_200/manifest.json").read_text()) for root in (golden, tmp_path / "again")
    )
    for key in ("tensors", "deltas", "saved_at", "metrics"):
        assert new[key] == old[key]


def test_an_increment_holds_what_the_whole_checkpoint_holds():
    whole, increment = (CheckpointManager(GOLDEN / name).published for name in (OWN, f"{OWN}_incremental"))
    assert [entry.path for entry in increment.manifest.deltas][:1] == ["actor/model-00001-of-00003.safetensors"]
    assert CheckpointReader(whole).digest() == CheckpointReader(increment).digest()
    assert content_digest(whole.manifest) == content_digest(increment.manifest)


def test_golden_checkpoints_are_not_written_over(capsys):
    with pytest.raises(SystemExit):
        script.main([str(GOLDEN / OWN)])
    assert "exists: what was written there once is to be read for ever" in capsys.readouterr().err


@pytest.mark.parametrize("version", ["2.0.0", "10.1.0"])
def test_a_checkpoint_of_a_later_major_format_is_refused_with_what_to_do(version, tmp_path):
    shutil.copytree(GOLDEN / OWN, tmp_path / "run")
    as_of_format(tmp_path / "run/global_step_200", version)
    manager = CheckpointManager(tmp_path / "run")
    expected = (
        rf"global_step_200: manifest\.json: it is of format {version}; this version of verl reads up to .*newer verl"
    )
    for ask in (lambda: manager.step, lambda: manager.load("actor"), manager.latest):
        with pytest.raises(CheckpointTooNew, match=expected):
            ask()
    assert not manager.is_valid()
    assert [published.step for published in CheckpointDirectory(tmp_path / "run").complete()] == [100]
