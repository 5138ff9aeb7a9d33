"""Tests of a group run in one process of the test runner, so that what they share is made once."""

from __future__ import annotations

import os

import pytest


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="run in one process: pytest without -n")
@pytest.mark.xdist_group("kept together")
def test_the_runner_sees_groups(request):
    assert request.node.nodeid.endswith("@kept together")
