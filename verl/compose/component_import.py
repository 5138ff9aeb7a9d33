"""Imports a component by the `_target_` of its node."""

from __future__ import annotations

import importlib

from verl.component import Description
from verl.utils.signals import RAISED_BY_CODE, as_component_exit

TARGET = "_target_"


def import_component(target: str) -> type[Description] | str:
    """Import a component class; returns a message if that fails."""
    module_name, _, name = target.rpartition(".")
    if not module_name:
        return "expected the dotted path of a component class"
    try:
        kind = getattr(importlib.import_module(module_name), name, None)
    except ModuleNotFoundError as error:
        return f"there is no module {error.name}"
    except ImportError as error:
        return f"it cannot be imported ({error})"
    except RAISED_BY_CODE as error:  # the user's module runs here and may raise anything
        cause = error if isinstance(error, Exception) else as_component_exit(error)
        return f"importing it raised {type(cause).__name__}: {cause}"
    if kind is None:
        return f"{module_name} has no {name}"
    if not (isinstance(kind, type) and issubclass(kind, Description)):
        return "it is not a component; give a class that inherits verl.component.Description, decorated by `component`"
    return kind
