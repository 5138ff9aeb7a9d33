"""Processes that several files of tests share."""

from collections.abc import Iterator
from typing import Any

import pytest
from equivalence.laboratory import laboratory


@pytest.fixture(scope="session")
def two_processes() -> Iterator[Any]:
    """A laboratory of two."""
    with laboratory(2) as bench:
        yield bench


@pytest.fixture(scope="session")
def four_processes() -> Iterator[Any]:
    """A laboratory of four."""
    with laboratory(4) as bench:
        yield bench
