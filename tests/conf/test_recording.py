"""What is shown and saved of a configuration holds no secrets."""

from __future__ import annotations

import io

from omegaconf import OmegaConf
from rich.console import Console

from verl.compose.check import check
from verl.compose.composition import compose_root, lay
from verl.compose.save import save
from verl.compose.show import show

SECRET = "sk-abcdefgh12345678ijkl"


def secretive():
    config = compose_root("ppo")
    lay(
        config,
        [
            ("reward.api_key", "plainword99"),
            ("reward.url", f"https://user:{SECRET}@host/"),
            ("actor.model.path", "a/b"),
        ],
    )
    return config


def test_saved_files_hold_no_secrets(tmp_path):
    save(secretive(), ["++reward.api_key=plainword99", f"++reward.header=Bearer {SECRET}"], tmp_path)
    text = (tmp_path / "config.yaml").read_text() + (tmp_path / "overrides.yaml").read_text()
    assert "plainword99" not in text
    assert SECRET not in text
    assert "a/b" in text


def test_a_saved_configuration_gives_the_same_run(tmp_path):
    config = compose_root("ppo", ["algorithm=grpo", "++trainer.seed=7"])
    save(config, [], tmp_path)
    assert check(OmegaConf.load(tmp_path / "config.yaml")) == check(config)


def test_the_tree_shows_values_without_secrets():
    out = io.StringIO()
    show(secretive(), Console(file=out, width=120))
    text = out.getvalue()
    assert "plainword99" not in text
    assert SECRET not in text
    assert "trainer PPOSettings" in text
    assert text.count("path a/b") == 2  # the actor's, and the critic's that refers to it


def test_square_brackets_in_values_are_shown_as_they_are():
    out = io.StringIO()
    config = compose_root("ppo")
    lay(config, [("trainer.experiment_name", "[bold]x[/bold]")])
    show(config, Console(file=out, width=120))
    assert "[bold]x[/bold]" in out.getvalue()
