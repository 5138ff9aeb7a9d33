"""Writes the configuration of a run beside its results, without secrets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl.utils.redact import redact, redact_tree


def save(config: DictConfig, overrides: Sequence[str], run_dir: Path) -> None:
    """Write `config.yaml`, references unresolved, and `overrides.yaml`, what was given on the command line."""
    run_dir.mkdir(parents=True, exist_ok=True)
    tree = redact_tree(OmegaConf.to_container(config, resolve=False))
    (run_dir / "config.yaml").write_text(redact(OmegaConf.to_yaml(OmegaConf.create(tree))))
    (run_dir / "overrides.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create([redact(text) for text in overrides])))
