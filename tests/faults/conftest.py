"""The server that starts trainers; and after the tests the number of faults that were tried, and what of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from faults.fork_server import ForkServer


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """Starts trainers; one for all tests of the group `fork server`."""
    with ForkServer() as started:
        yield started


def pytest_terminal_summary(terminalreporter) -> None:
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    calls = [report for report in reports if getattr(report, "when", None) == "call"]  # the teardown has them again
    properties = [dict(report.user_properties) for report in calls]
    cases = [found.get("fault_cases", 0) for found in properties]
    if sum(cases):
        terminalreporter.write_line(f"{sum(cases)} fault cases tried")
    for told in dict.fromkeys(found["told"] for found in properties if "told" in found):
        terminalreporter.write_line(told)
