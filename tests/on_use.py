"""Packages that are imported when a test uses them, and not by every process that collects the tests."""

from typing import Any

import pytest


class OnUse:
    """A module by its name; a test that uses it where it is not installed is skipped."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # pytest asks all that a module holds what it is
            raise AttributeError(attribute)
        return getattr(pytest.importorskip(self._name), attribute)
