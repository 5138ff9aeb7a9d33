"""Reads a composed configuration into plain Python; a value that cannot be resolved becomes a fault."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

_DEPTH = 40  # deeper than any real configuration: a node that refers to its own parent has no end


class Unknown:
    """Stands for a value that already has a fault; whoever looks at it stops there."""

    def __repr__(self) -> str:
        return "<unknown>"


UNKNOWN = Unknown()


@dataclass
class Plain:
    """A configuration as nested dicts and lists.

    Attributes:
        tree: the resolved values; `UNKNOWN` where one could not be read.
        borrowed: path of each node that refers to another one, with the path of that other.
        faults: one sentence for each value that could not be read.
    """

    tree: Any = None
    borrowed: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def origin(self, path: str) -> str:
        """Where the value at `path` is written: below a reference, the path in the node referred to."""
        for _ in range(_DEPTH):
            for start, target in self.borrowed.items():
                if path == start or path.startswith(f"{start}."):
                    path = target + path[len(start) :]
                    break
            else:
                return path
        return path


def read_plain(config: DictConfig) -> Plain:
    """Resolve a configuration; faults are collected and the rest is read all the same."""
    plain = Plain()
    plain.tree = _read(config, "", plain)
    plain.faults = list(dict.fromkeys(plain.faults))
    return plain


def join(path: str, key: object) -> str:
    """The path of `key` below `path`."""
    return f"{path}.{key}" if path else str(key)


def _read(node: Any, path: str, plain: Plain) -> Any:
    if path.count(".") > _DEPTH:
        plain.faults.append(f"{path[:60]}...: this reference contains itself.")
        return UNKNOWN
    if isinstance(node, DictConfig):
        return dict(_items(node, list(node.keys()), path, plain))
    if isinstance(node, ListConfig):
        return [value for _, value in _items(node, range(len(node)), path, plain)]
    return node


def _items(node: Any, keys: Any, path: str, plain: Plain) -> Iterator[tuple[Any, Any]]:
    for key in keys:
        below = join(path, key)
        if OmegaConf.is_missing(node, key):
            plain.faults.append(
                f"{plain.origin(below)} is not set: it has no default, so give {plain.origin(below)}=..."
            )
            yield key, UNKNOWN
            continue
        raw = node._get_node(key)
        try:
            value = node[key]
        except (OmegaConfBaseException, RecursionError) as error:
            reason = str(error).partition("\n")[0] or "it refers to itself"
            plain.faults.append(f"{plain.origin(below)} is {_raw(raw)}: {reason}.")
            yield key, UNKNOWN
            continue
        if OmegaConf.is_interpolation(node, key) and OmegaConf.is_config(value) and value._get_full_key(None):
            plain.borrowed[below] = value._get_full_key(None)
        yield key, _read(value, below, plain)


def _raw(node: Any) -> Any:
    return node._value() if hasattr(node, "_value") else node
