"""The server that starts trainers, what stands under file calls, and after the tests the number of faults tried."""

from collections import Counter
from pathlib import Path

import pytest
from faults.calls import build, refusal, why_not
from faults.fork_server import ForkServer


@pytest.fixture(scope="session")
def server(fork_server: ForkServer) -> ForkServer:
    """Starts trainers."""
    return fork_server


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
    calls = [report for report in reports if getattr(report, "when", None) == "call"]  # the teardown has them again
    properties = [dict(report.user_properties) for report in calls]
    cases = [found.get("fault_cases", 0) for found in properties]
    if sum(cases):
        terminalreporter.write_line(f"{sum(cases)} fault cases tried")
    struck = Counter(found["struck"] for found in properties if "struck" in found)
    for what, count in sorted(struck.items()):
        terminalreporter.write_line(f"{count} x {what}")
    for told in dict.fromkeys(found["told"] for found in properties if "told" in found):
        terminalreporter.write_line(told)
