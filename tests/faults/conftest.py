"""The library that interposes, and the number of faults that were tried, after the tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.calls import build, refusal, why_not


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What stands between a process and its system calls."""
    if reason := why_not():
        pytest.skip(reason)
    built = build(tmp_path_factory.mktemp("interposer"))
    if reason := refusal(built):
        pytest.skip(f"system calls cannot be interposed here: {reason}")
    return built


def pytest_terminal_summary(terminalreporter) -> None:
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    calls = [report for report in reports if getattr(report, "when", None) == "call"]  # a teardown repeats them
    cases = [dict(report.user_properties).get("fault_cases", 0) for report in calls]
    if sum(cases):
        terminalreporter.write_line(f"{sum(cases)} fault cases tried")
