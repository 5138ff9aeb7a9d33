"""Model directories as failed downloads leave them: each is told in one sentence, before weights are loaded."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from random_models import save_random_model
from refusals import refusal

from verl.compose.launch import end_message
from verl.errors import ConfigError
from verl.models.model_files import directory_faults
from verl.models.pretrained import Pretrained

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4096\n"


def cut(name: str, share: float):
    def damage(directory: Path) -> None:
        file = directory / name
        os.truncate(file, int(file.stat().st_size * share))

    return damage


def pointer(name: str):
    return lambda directory: (directory / name).write_text(POINTER)


def shards(directory: Path) -> None:
    """Two shards are listed, one of which was not downloaded."""
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    names = {"model.embed_tokens.weight": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def dangling(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").symlink_to(directory / "blobs/absent")


DAMAGES = {
    "cut weights": (cut("model.safetensors", 0.7), "file not fully covered"),
    "weights cut in the header": (cut("model.safetensors", 0.01), "invalid header length"),
    "empty weights": (cut("model.safetensors", 0.0), "it is empty"),
    "pointer for weights": (pointer("model.safetensors"), "pointer of git-lfs"),
    "missing shard": (shards, "lacks 1 of 2 files of weights, such as model-00002-of-00002.safetensors"),
    "dangling link": (dangling, "a link to a file that does not exist"),
    "cut configuration": (cut("config.json", 0.6), "it is not JSON"),
    "empty configuration": (cut("config.json", 0.0), "it is empty"),
    "list as configuration": (lambda d: (d / "config.json").write_text("[]"), "not a mapping"),
    "cut tokenizer": (cut("tokenizer.json", 0.5), "it is not JSON"),
    "pointer for the tokenizer": (pointer("tokenizer.json"), "pointer of git-lfs"),
    "cut tokenizer configuration": (cut("tokenizer_config.json", 0.5), "it is not JSON"),
    "cut index": (lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": '), "it is not JSON"),
    "page of an error": (lambda d: (d / "config.json").write_text("<html>404</html>"), "it is not JSON"),
    "old weights that are cut": (lambda d: (d / "pytorch_model.bin").write_bytes(b"PK\3\4" + b"0" * 99), "its end"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_directory_that_a_failed_download_left_is_told_in_one_sentence_by_its_file(name, dir32, tmp_path):
    damage, said = DAMAGES[name]
    shutil.copytree(dir32, tmp_path / "m")
    assert list(directory_faults(tmp_path / "m")) == []
    damage(tmp_path / "m")
    with refusal("path", value=said, varies=True) as caught:
        Pretrained(path=str(tmp_path / "m"))
    assert len(str(caught.value).splitlines()) == 1


def test_a_directory_without_weights_can_be_planned_with_and_is_told_of_when_it_is_loaded(dir32, tmp_path):
    shutil.copytree(dir32, tmp_path / "m")
    (tmp_path / "m/model.safetensors").unlink()
    model = Pretrained(path=str(tmp_path / "m"))
    with refusal("path", value="has no weights") as caught:
        model.load_causal_lm("cpu")
    assert "Traceback" not in end_message(caught.value)


def test_damage_that_happens_after_the_check_is_told_as_well(dir32, tmp_path):
    shutil.copytree(dir32, tmp_path / "m")
    model = Pretrained(path=str(tmp_path / "m"))
    cut("tokenizer.json", 0.5)(tmp_path / "m")
    cut("model.safetensors", 0.5)(tmp_path / "m")
    for load in (model.load_tokenizer, lambda: model.load_causal_lm("cpu")):
        with pytest.raises(ConfigError) as caught:
            load()
        assert "Traceback" not in end_message(caught.value)


def test_flash_attention_without_its_package_is_told_before_anything_loads(dir32):
    (fault,) = Pretrained(path=str(dir32), attention="flash_attention_2").machine_faults()
    assert fault.startswith("attention is 'flash_attention_2': needs the package flash_attn, which is not installed.")


def test_a_model_in_shards_is_sound(tmp_path):
    path = save_random_model(tmp_path / "m", "qwen2", torch.float32)
    model = Pretrained(path=str(path)).load_causal_lm("cpu")
    model.save_pretrained(tmp_path / "s", max_shard_size="20KB")
    assert len(list((tmp_path / "s").glob("*.safetensors"))) > 1
    assert list(directory_faults(tmp_path / "s")) == []
