"""The number of faults that were tried, after the tests."""

from __future__ import annotations


def pytest_terminal_summary(terminalreporter) -> None:
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    cases = [dict(getattr(report, "user_properties", [])).get("fault_cases", 0) for report in reports]
    if sum(cases):
        terminalreporter.write_line(f"{sum(cases)} fault cases tried")
