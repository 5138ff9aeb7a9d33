"""Shows a composed configuration once, as a tree, without secrets."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.compose.check import TARGET
from verl.utils.redact import redact_tree


def show(config: DictConfig, console: Any) -> None:
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
