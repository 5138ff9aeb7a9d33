"""Prints a composed configuration as a tree, and writes it beside the results of a run; both without secrets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.compose.validate import TARGET
from verl.utils.redact import redact, redact_tree


def print_config(config: DictConfig, console: Any) -> None:
    """Print the resolved configuration.

    Args:
        config: a composed root that passed the check.
        console: a rich console.
    """
    from rich.markup import escape
    from rich.tree import Tree

    def grow(tree: Tree, node: dict[str, Any]) -> None:
        for key, value in node.items():
            if isinstance(value, dict) and value:
                grow(tree.add(f"[bold]{escape(str(key))}[/] [dim]{_kind(value)}[/]"), _fields(value))
            else:
                tree.add(f"{escape(str(key))} [cyan]{escape(_text(value))}[/]")

    root = redact_tree(OmegaConf.to_container(config, resolve=True))
    tree = Tree(f"[bold]{_kind(root)}[/]", guide_style="dim")
    grow(tree, _fields(root))
    console.print(tree)


def _kind(node: dict[str, Any]) -> str:
    return str(node.get(TARGET, "")).rpartition(".")[2]


def _fields(node: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key != TARGET}


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def save_config(config: DictConfig, overrides: Sequence[str], run_dir: Path) -> None:
    """Write `config.yaml`, references unresolved, and `overrides.yaml`, what was given on the command line."""
    run_dir.mkdir(parents=True, exist_ok=True)
    tree = redact_tree(OmegaConf.to_container(config, resolve=False))
    (run_dir / "config.yaml").write_text(redact(OmegaConf.to_yaml(OmegaConf.create(tree))))
    (run_dir / "overrides.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create([redact(text) for text in overrides])))
