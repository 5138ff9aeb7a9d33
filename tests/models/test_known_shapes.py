"""Shipped shapes of models: their sizes, and plans without a network."""

import json
import socket
import time
from importlib.resources import files
from pathlib import Path

import pytest
import yaml
from cases import exhaustive
from refusals import refusal
from transformers import AutoConfig
from typer.testing import CliRunner

from verl.cli.main import app
from verl.models.model_files import is_local
from verl.models.model_stats import has_shipped_shapes, known_shapes, model_stats, sizes_config
from verl.models.pretrained import Pretrained

ENTRIES = json.loads(files("verl.models").joinpath("known_shapes.json").read_text())
CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    """An empty cache, and a hub at a port where nothing listens, nor anybody else can."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        yield


@pytest.mark.first_rows(3)
@pytest.mark.parametrize(
    "entry",
    [*ENTRIES[::5], *exhaustive(*(x for i, x in enumerate(ENTRIES) if i % 5))],
    ids=lambda entry: next(iter(entry["max_position_embeddings"])),
)
def test_shapes_have_the_published_number_of_parameters(entry):
    fields = dict(entry["config"])
    assert model_stats(AutoConfig.for_model(fields.pop("model_type"), **fields)).parameters == entry["parameters"]


def test_every_model_of_the_configuration_is_shipped():
    paths = [
        source["path"]
        for file in CONF.glob("*/*.yaml")
        if isinstance(source := (yaml.safe_load(file.read_text()) or {}).get("model"), dict) and "path" in source
    ]
    paths = [path.removeprefix("${hub_or_package:").removesuffix("}") for path in paths]
    named = [path for path in paths if path != "???" and not path.startswith("warm-start://")]
    assert len(named) >= 4
    assert not [path for path in named if not is_local(path) and path not in known_shapes()]


ROLES = ["actor=llama8b", "critic=none", "algorithm=grpo", "sharding=fsdp", "trainer.n_gpus_per_node=8"]


@pytest.mark.slow
@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("words", [ROLES, ["experiment=gsm8k_qwen2_5_0_5b"]])
def test_a_plan_without_a_network_takes_shipped_shapes(words):
    assert "GiB of each process" in CliRunner().invoke(app, ["plan", *words, "--device", "h100"]).output


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("revision", [None, "main"])
def test_a_model_that_is_neither_here_nor_shipped_is_refused_within_seconds(revision):
    path = "nobody/no-such-model" if revision is None else "Qwen/Qwen3-1.7B"
    begin = time.monotonic()
    with refusal("path", value=path, varies=True):
        sizes_config(Pretrained(path=path, revision=revision))
    assert time.monotonic() - begin < 30  # the retries of the hub's client take a minute


def test_a_configuration_on_this_machine_comes_before_shipped_shapes(monkeypatch, tmp_path):
    name, commit = "Qwen/Qwen3-1.7B", "a" * 40
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert has_shipped_shapes(Pretrained(path=name))
    cached = tmp_path / "models--Qwen--Qwen3-1.7B"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    (cached / "snapshots" / commit).mkdir(parents=True)
    (cached / "snapshots" / commit / "config.json").write_text("{}")
    assert not has_shipped_shapes(Pretrained(path=name))
