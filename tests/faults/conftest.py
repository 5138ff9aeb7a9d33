"""The number of faults that were tried, after the tests."""

from __future__ import annotations


def pytest_terminal_summary(terminalreporter) -> None:
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    calls = [report for report in reports if getattr(report, "when", None) == "call"]  # a teardown repeats them
    cases = [dict(report.user_properties).get("fault_cases", 0) for report in calls]
    if sum(cases):
        terminalreporter.write_line(f"{sum(cases)} fault cases tried")
