"""The whole configuration of a run with a sentence for each field: `verl ppo ... --explain`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from verl.compose.component_import import TARGET, import_component
from verl.compose.schema import field_texts


def explained(config: DictConfig) -> str:
    """A composed configuration as YAML, its fields in the order of their classes, with their sentences as comments."""
    return "\n".join(_lines(OmegaConf.to_container(config, resolve=False), "")) + "\n"


def _lines(tree: Any, indent: str) -> Iterator[str]:
    kind = import_component(tree[TARGET]) if isinstance(tree.get(TARGET), str) else None
    texts: dict[str, str] = {}
    if isinstance(kind, type):
        texts = {TARGET: inspect.cleandoc(kind.__doc__ or "").partition("\n")[0], **field_texts(kind)}
    for key in [*(name for name in texts if name in tree), *(name for name in tree if name not in texts)]:
        value, comment = tree[key], f" # {texts[key]}" if key in texts else ""
        is_mapping = isinstance(value, dict) and value
        yield f"{indent}{key}:{'' if is_mapping else ' ' + _text(value)}{comment}"
        if is_mapping:
            yield from _lines(value, f"{indent}  ")


def _text(value: Any) -> str:
    style = '"' if isinstance(value, str) and "\n" in value else None
    text = yaml.safe_dump(value, default_flow_style=True, default_style=style, width=sys.maxsize, allow_unicode=True)
    return text.strip().removesuffix("...").strip()
