"""`verl checkpoint` tells the truth about real directories, in words, in JSON, and by its exit status."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import short_where
from golden_run import as_of_format, flip_bit, golden_run
from random_models import save_random_model
from refusals import refusal
from same_training import course
from trainer.runs import fit
from transformers import AutoModelForCausalLM, GenerationConfig
from typer.testing import CliRunner

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.ownership import Owner, RunLock
from verl.cli.main import app
from verl.errors import ConfigError
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained
from verl.tracking.base import headline

SHARD = "actor/model-00002-of-00003.safetensors"


def run(*arguments: object) -> tuple[int, str, str]:
    """Exit status, output, and what was said on standard error."""
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def directory(tmp_path) -> Path:
    return golden_run(tmp_path / "run/checkpoints")


def test_ls_lists_in_order_of_publication_with_damage(directory):
    with CheckpointStore(directory).begin(50, "after_resume") as transaction:
        transaction.commit()
    flip_bit(directory / "global_step_200/manifest.json")
    status, told, _ = run("ls", directory.parent)
    lines = told.splitlines()
    assert status == 0
    names = [line[1:].split()[0] for line in lines]
    assert names == ["checkpoint", "global_step_100", "after_resume", "global_step_200"]
    assert [line[0] for line in lines] == [" ", " ", "*", " "]
    assert "corrupt; manifest.json: it is not the manifest that COMMIT names" in lines[3]


def test_directories_of_projects_and_experiments_need_not_be_written_out(directory, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(directory, "checkpoints/verl/first", symlinks=True)
    assert "global_step_200" in run("ls", "checkpoints")[1]
    shutil.copytree(directory, "checkpoints/verl/second", symlinks=True)
    status, told, _ = run("ls", "checkpoints")
    assert (status, told.count("global_step_200")) == (0, 2)
    assert all(f"{tmp_path}/checkpoints/verl/{name}:" in told for name in ("first", "second"))
    assert len(json.loads(run("ls", "checkpoints", "--json")[1])) == 4
    status, _, said = run("verify", "checkpoints")
    assert status == 2
    assert "checkpoints/verl/first" in said
    for name in ("a", "b"):  # what was fetched from addresses
        shutil.copytree(directory, f"checkpoints/verl/first/fetched/{name}", symlinks=True)
    assert "fetched" not in run("ls", "checkpoints/verl/first")[1]


@pytest.mark.slow
def test_an_adapter_is_exported_with_the_full_path_of_its_base_or_merged_into_it(model32, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model32.path, "base")
    tokenizer = model32.load_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<system>{% endfor %}"
    tokenizer.save_pretrained("base")
    described = course(dataclasses.replace(model32, path="base"), tmp_path, stop_after=1)
    described = dataclasses.replace(described, actor=dataclasses.replace(described.actor, lora=LoRA(rank=2)))
    fit(described, tmp_path / "run")
    assert run("export", "checkpoints", "adapter")[0] == 0
    config = json.loads(Path("adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    status, told, said = run("export", "checkpoints", "whole", "--merge")
    assert status == 0, said
    assert "merged into its base model" in told
    merged = AutoModelForCausalLM.from_pretrained("whole").state_dict()
    expected = Pretrained(path="adapter").load_causal_lm("cpu").state_dict()
    assert all(torch.equal(merged[name], expected[name]) for name in expected)
    assert tokenizer.convert_tokens_to_ids("<system>") in GenerationConfig.from_pretrained("whole").eos_token_id
    status, _, said = run("export", "adapter", "again", "--merge")
    assert status == 0, said
    again = AutoModelForCausalLM.from_pretrained("again").state_dict()
    assert all(torch.equal(again[name], expected[name]) for name in expected)
    assert "is inside the checkpoint" in run("export", "checkpoints/global_step_1/actor", "x", "--merge")[2]
    shutil.rmtree("base")
    assert "the base model of adapter cannot be opened" in run("export", "adapter", "other", "--merge")[2]
    assert (
        "the base model of actor of global_step_1 cannot be opened"
        in run("export", "checkpoints", "other", "--merge")[2]
    )
    assert not Path("other").exists()


def test_ls_gives_json(directory):
    status, told, _ = run("ls", directory, "--json")
    first, second = json.loads(told)
    assert status == 0
    assert {key: second[key] for key in ("name", "step", "epoch", "status", "is_newest", "faults")} == {
        "name": "global_step_200", "step": 200, "epoch": 2, "status": "complete", "is_newest": True, "faults": [],
    }  # fmt: skip
    assert first["metrics"] == {"reward/mean": 0.25, "eval/accuracy": 0.4}
    assert first["added_bytes"] == first["bytes"]
    assert second["added_bytes"] == second["bytes"] - 312  # config.json is shared


def test_ls_of_a_directory_without_a_save_is_no_error(tmp_path):
    CheckpointStore(tmp_path).claim_directory()
    assert run("ls", tmp_path) == (0, f"{tmp_path} holds no checkpoint yet\n", "")
    assert run("ls", tmp_path, "--json")[:2] == (0, "[]\n")
    assert run("verify", tmp_path)[0] == 1


def test_ls_cuts_metrics_where_it_is_narrow_and_folds_no_name(directory, monkeypatch):
    for width in (80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        head, *lines = run("ls", directory)[1].splitlines()
        assert [name in line for name, line in zip(("global_step_100", "global_step_200"), lines)] == [True, True]
        assert "state" in head
        assert all(len(line) <= width for line in (head, *lines))


def test_inspect_gives_json(directory):
    told = json.loads(run("inspect", directory / "global_step_100")[1])
    assert told["components"][0]["name"] == "actor"
    step = {"component": "optimizer", "name": "model.embed_tokens.weight.step", "dtype": "F32", "shape": [], "bytes": 4}
    assert step in told["tensors"]
    assert told["trainer_state"]["lineage"]["run_id"] == "golden"
    of_actor = json.loads(run("inspect", directory, "--component", "actor")[1])["tensors"]
    assert {tensor["component"] for tensor in of_actor} == {"actor"}


def test_inspect_shows_a_damaged_one_as_far_as_it_goes(directory):
    (directory / "global_step_100" / SHARD).unlink()
    status, told, _ = run("inspect", directory / "global_step_100")
    assert status == 1
    found = json.loads(told)
    assert (found["status"], [fault["file"] for fault in found["faults"]]) == ("incomplete", [SHARD])
    assert found["trainer_state"]["step"] == 100


@pytest.mark.parametrize(
    "path",
    short_where(
        ["checkpoints", "checkpoints/", ".", "checkpoints/latest", "checkpoints/global_step_200/"], "checkpoints".__eq__
    ),
)
def test_verify_full_finds_a_flipped_bit_and_names_file_and_tensor(path, directory, monkeypatch):
    monkeypatch.chdir(directory.parent)
    assert run("verify", path, "--full")[0] == 0
    flip_bit(directory / "global_step_200" / SHARD)
    assert run("verify", path)[0] == 0
    status, told, _ = run("verify", path, "--full")
    assert status == 1
    assert re.search(
        rf"global_step_200: corrupt.*\n  {SHARD}: bytes 1304 to 1320 are not .* \(in actor/model\.\S+\)\n", told
    )
    told = [one for one in json.loads(run("verify", path, "--full", "--json")[1]) if one["status"] == "corrupt"]
    assert [(f["file"], f["tensors"]) for one in told for f in one["faults"]] == [
        (SHARD, ["actor/model.layers.0.post_attention_layernorm.weight"])
    ]


def test_health_is_for_probes(directory, tmp_path):
    with CheckpointStore(directory).begin(300) as transaction:
        transaction.commit()
    status, told, _ = run("health", directory)
    assert status == 0
    assert re.fullmatch(r"ready: global_step_300, step 300, saved \d+s ago\n", told)
    assert run("health", directory, "--max-age", "1h")[0] == 0
    status, told, _ = run("health", directory / "global_step_100", "--max-age", "1d")
    assert (status, told.startswith("not ready: global_step_100"), told.endswith("more than 1d\n")) == (1, True, True)
    (directory / "global_step_300/COMMIT").unlink()
    status, told, _ = run("health", directory)
    assert (status, told.startswith("ready: global_step_200"), "passed over global_step_300" in told) == (0, True, True)
    for step in (100, 200):
        (directory / f"global_step_{step}/COMMIT").unlink()
    all_three = "global_step_100, global_step_200, global_step_300"
    assert run("health", directory)[:2] == (1, f"not ready: no complete checkpoint in {directory} (bad: {all_three})\n")
    assert run("health", tmp_path / "nowhere")[0] == 2


def test_a_checkpoint_of_a_later_verl_is_not_ready_and_not_verified(directory):
    as_of_format(directory / "global_step_200", "2.0.0")
    assert run("health", directory)[:2] == (1, "not ready: global_step_200 was saved by a later version of verl\n")
    status, told, _ = run("verify", directory)
    assert status == 1
    assert "global_step_200: too new\n  manifest.json: it is of format 2.0.0; this version of verl reads up to" in told
    assert run("inspect", directory)[::2][0] == 1


def test_a_checkpoint_anywhere_can_be_inspected(directory, tmp_path):
    (directory / "global_step_100").rename(tmp_path / ".kept")
    for command in ("inspect", "verify", "health", "ls"):
        assert run(command, tmp_path / ".kept")[::2] == (0, "")


def test_a_damaged_state_is_told_by_ls(directory):
    flip_bit(directory / "global_step_200/trainer_state.json", 40)
    assert "corrupt; trainer_state.json: its bytes are not those that were written" in run("ls", directory)[1]


BAD = {
    "a path where nothing is": (["ls", "nowhere"], "error: nowhere does not exist"),
    "a directory of something else": (["verify", "other"], "error: other holds no checkpoints: give"),
    "a file": (["inspect", "file"], "error: file is a file"),
    "no duration": (["health", "run", "--max-age", "soon"], "error: --max-age is 'soon': expected a duration"),
    "a component that is not a model": (["export", "run", "out", "--component", "rng"], "error: component is 'rng'"),
    "a directory in use": (["export", "run", "run"], "error: OUT is "),
}


@pytest.mark.first_rows(3)
@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_one_line_and_status_two(kind, directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "file").touch()
    arguments, expected = BAD[kind]
    status, told, error = run(*arguments)
    assert (status, told, error.count("\n")) == (2, "", 1)
    assert expected in error


def test_damage_in_the_way_of_a_command_is_one_line_and_status_one(directory, tmp_path):
    flip_bit(directory / "global_step_200" / SHARD)
    status, told, error = run("export", directory, tmp_path / "model")
    assert (status, told, error.count("\n")) == (1, "", 1)
    assert f"{SHARD}: bytes 1304 to 1320" in error


@pytest.mark.skipif(os.getuid() == 0, reason="root reads everything")
def test_a_directory_that_may_not_be_read_is_one_line(directory):
    directory.chmod(0)
    assert run("ls", directory)[0] == 2
    directory.chmod(0o755)


COMPAT = [sys.executable, "-m", "verl.cli.checkpoint_compat"]


@pytest.mark.exhaustive
def test_compat_is_a_command_of_its_own(directory):
    as_of_format(directory / "global_step_200", "2.0.0")
    command = [*COMPAT, "--from", "v0.3.5", "--to", "v0.4.0"]
    root = Path(__file__).parents[2]
    done = subprocess.run([*command, directory], capture_output=True, text=True, cwd=root)
    assert done.returncode == 1
    assert re.search(r"global_step_200 +2\.0\.0 .* BREAKS: format 2\.0\.0 is not of the major versions", done.stdout)
    assert done.stdout.endswith("1 of 2 checkpoints would break\n")
    done = subprocess.run([*command, directory / "global_step_100", "--json"], capture_output=True, text=True, cwd=root)
    assert (done.returncode, json.loads(done.stdout)["checkpoints"][0]["breaks"]) == (0, None)
    done = subprocess.run([*command, "nowhere"], capture_output=True, text=True, cwd=root)
    assert (done.returncode, done.stderr) == (2, "error: nowhere does not exist\n")


@pytest.mark.exhaustive
def test_looking_loads_no_torch(directory):
    code = (
        "import sys; from typer.testing import CliRunner; from verl.cli.main import app\n"
        f"for command in (['ls'], ['inspect'], ['verify', '--full'], ['health']):\n"
        f"    assert CliRunner().invoke(app, ['checkpoint', *command, {str(directory)!r}]).exit_code == 0\n"
        "assert not {'torch', 'transformers', 'numpy'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_of_many_metrics_the_list_shows_the_few_that_tell_most():
    many = {f"timing/{i}_s": 0.1 for i in range(40)}
    assert headline({**many, "reward/mean": 0.5, "eval/accuracy": 0.8}, 3) == {"eval/accuracy": 0.8, "reward/mean": 0.5}
    assert len(headline(many, 3)) == 3


@pytest.mark.first_rows(2)
@pytest.mark.parametrize(
    "out",
    ["global_step_200/model", "global_step_200/actor/model", "linked/model", "staging/model", "pins/x/y", "trash/m"],
)
def test_nothing_is_written_into_a_checkpoint_or_among_the_files_of_a_store(out, directory):
    (directory / "linked").symlink_to(directory / "global_step_200/actor")
    before = sorted(directory.rglob("*"))
    status, _, said = run("export", directory / "global_step_200", directory / out)
    assert status == 2
    assert "which is never changed. Give a directory elsewhere" in said or "is the store's own, which it cleans" in said
    assert sorted(directory.rglob("*")) == before
    assert run("verify", directory / "global_step_200", "--full")[0] == 0


@pytest.mark.parametrize("inside", ["checkpoints", "."])
def test_no_directory_of_checkpoints_is_made_inside_a_checkpoint(inside, directory):
    with pytest.raises(ConfigError, match="it is inside the checkpoint .*global_step_200, which is never changed"):
        CheckpointStore(directory / "global_step_200" / inside).claim_directory()
    with refusal("checkpoint.save_dir"):
        RunLock(directory / "global_step_200" / inside, Owner.here("run")).acquire()
    assert run("verify", directory / "global_step_200")[0] == 0


def test_a_model_in_no_checkpoint_is_exported_in_the_dtype_that_is_named(tmp_path):
    source = save_random_model(tmp_path, "llama", torch.float32)
    status, told, _ = run("export", source, tmp_path / "narrow", "--dtype", "bfloat16")
    assert status == 0
    assert "bfloat16" in told
    written = Pretrained(path=str(tmp_path / "narrow"), dtype="bfloat16").load_causal_lm("cpu")
    assert written.config.dtype == torch.bfloat16
    expected = Pretrained(path=str(source)).load_causal_lm("cpu").to(torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(written.parameters(), expected.parameters(), strict=True))
