"""What is shown and saved of a configuration holds no secrets."""

import io
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from verl.compose.compose import apply_values, choices_of, compose_root
from verl.compose.run_start import print_start, save_config
from verl.compose.schema import ROOTS
from verl.compose.validate import validate

SECRET = "sk-abcdefgh12345678ijkl"


@pytest.fixture
def secretive():
    config = compose_root("ppo")
    url = f"https://user:{SECRET}@host/"
    apply_values(config, [("reward.api_key", "plainword99"), ("reward.url", url), ("actor.model.path", "a/b")])
    return config


def test_saved_files_and_the_opening_hold_no_secrets(secretive, tmp_path):
    save_config(secretive, ["++reward.api_key=plainword99", f"++reward.header=Bearer {SECRET}"], tmp_path)
    saved = (tmp_path / "config.yaml").read_text() + (tmp_path / "overrides.yaml").read_text()
    for text in (saved, opening(secretive, width=300)):
        assert not [secret for secret in ("plainword99", SECRET) if secret in text]
        assert "a/b" in text


def test_a_saved_configuration_gives_the_same_run(tmp_path):
    config = compose_root("ppo", ["algorithm=grpo", "++trainer.seed=7"])
    save_config(config, [], tmp_path)
    assert validate(OmegaConf.load(tmp_path / "config.yaml")) == validate(config)


def opening(config, choices=None, root="ppo", width=80):
    out = io.StringIO()
    console = Console(file=out, width=width)
    print_start(config, root, choices_of(root) if choices is None else choices, Path("outputs/verl/ppo/now"), console)
    return out.getvalue()


def test_a_run_opens_with_what_differs_from_the_defaults_and_where_it_writes():
    options = ["algorithm=grpo", "experiment=arithmetic_grpo", "+sharding@actor.sharding=none"]
    config = compose_root("ppo", [*options, "++trainer.seed=7", "++actor.optimizer.lr=0.5"])
    apply_values(config, [("actor.lora", {"_target_": "verl.models.lora.LoRA", "rank": 8})])
    lines = opening(config, choices_of("ppo", options)).splitlines()
    assert lines[0].endswith("writes to outputs/verl/ppo/now")
    assert any(line.split() == ["algorithm=grpo", "was", "ppo"] for line in lines)
    assert any(line.split() == ["trainer.seed=7", "was", "0"] for line in lines)
    assert any(line.split() == ["actor.sharding=none", "was", "null"] for line in lines)
    assert any(line.split()[0] == "actor.lora=LoRA(rank=8)" for line in lines)
    assert any(line.split()[0] == "actor.optimizer.lr=0.5" for line in lines)
    assert not any("advantage" in line for line in lines)  # comes with the option
    assert len(lines) < 20
    assert all(len(line) <= 80 for line in lines)


def test_a_run_with_nothing_but_defaults_opens_with_one_line():
    for root in ROOTS:
        assert len(opening(compose_root(root), root=root).splitlines()) == 1


def test_what_follows_another_value_is_not_told_beside_it():
    config = compose_root("ppo")
    apply_values(config, [("actor.model.path", "a/b")])
    assert [line for line in opening(config).splitlines() if "a/b" in line] == [
        "  actor.model.path=a/b  was warm-start://arithmetic_sft"
    ]


def test_square_brackets_in_values_are_shown_as_they_are():
    config = compose_root("ppo")
    apply_values(config, [("trainer.experiment_name", "[bold]x[/bold]")])
    assert "trainer.experiment_name=[bold]x[/bold]" in opening(config)
