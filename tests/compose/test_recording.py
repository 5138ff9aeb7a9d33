"""What is shown and saved of a configuration holds no secrets."""

from __future__ import annotations

import io

from omegaconf import OmegaConf
from rich.console import Console

from verl.compose.compose import apply_values, compose_root
from verl.compose.print_config import print_config, save_config
from verl.compose.validate import validate

SECRET = "sk-abcdefgh12345678ijkl"


def secretive():
    config = compose_root("ppo")
    apply_values(
        config,
        [
            ("reward.api_key", "plainword99"),
            ("reward.url", f"https://user:{SECRET}@host/"),
            ("actor.model.path", "a/b"),
        ],
    )
    return config


def test_saved_files_hold_no_secrets(tmp_path):
    save_config(secretive(), ["++reward.api_key=plainword99", f"++reward.header=Bearer {SECRET}"], tmp_path)
    text = (tmp_path / "config.yaml").read_text() + (tmp_path / "overrides.yaml").read_text()
    assert "plainword99" not in text
    assert SECRET not in text
    assert "a/b" in text


def test_a_saved_configuration_gives_the_same_run(tmp_path):
    config = compose_root("ppo", ["algorithm=grpo", "++trainer.seed=7"])
    save_config(config, [], tmp_path)
    assert validate(OmegaConf.load(tmp_path / "config.yaml")) == validate(config)


def test_the_tree_shows_values_without_secrets():
    out = io.StringIO()
    print_config(secretive(), Console(file=out, width=120))
    text = out.getvalue()
    assert "plainword99" not in text
    assert SECRET not in text
    assert "trainer PPOSettings" in text
    assert text.count("path a/b") == 2  # the actor's, and the critic's that refers to it


def test_square_brackets_in_values_are_shown_as_they_are():
    out = io.StringIO()
    config = compose_root("ppo")
    apply_values(config, [("trainer.experiment_name", "[bold]x[/bold]")])
    print_config(config, Console(file=out, width=120))
    assert "[bold]x[/bold]" in out.getvalue()
