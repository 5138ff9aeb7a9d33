"""Progress messages, and results that survive an interruption.

A benchmark of several legs reports progress on stderr, keeps a time budget, and prints a JSON line after each leg; the
last line has all results so far.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

LEAST = 3  # measured rounds of a leg, however little time is left


class Progress:
    """Of one run of a benchmark.

    Args:
        name: of the benchmark.
        settings: printed with the results.
        budget_s: seconds that all legs together are to take; what takes longer is measured in fewer rounds.
    """

    def __init__(self, name: str, settings: dict[str, Any], budget_s: float):
        self.facts = {"benchmark": name, **settings}
        self._began = time.monotonic()
        self._deadline = self._began + budget_s

    def say(self, text: str) -> None:
        """One line on stderr, with the seconds since the start."""
        print(f"[{time.monotonic() - self._began:4.0f} s] {text}", file=sys.stderr, flush=True)

    def rounds(self, leg: str, wanted: int, legs_left: int = 1) -> Iterator[int]:
        """The numbers of a leg's rounds: 0 warms up, then `wanted` are measured, or as many as its time allows.

        Args:
            legs_left: this one included; they share the time that is left.
        """
        began = time.monotonic()
        share = (self._deadline - began) / legs_left
        for number in range(wanted + 1):
            yield number
            taken = time.monotonic() - began
            self.say(f"{leg}: round {number} of {wanted}, {taken / (number + 1):.1f} s each")
            if LEAST <= number < wanted and taken * (number + 2) / (number + 1) > share:
                self.say(f"{leg}: its time is up after {number} rounds")
                return

    def publish(self, found: Any, rows: list[list[str]], *, is_complete: bool) -> None:
        """Print what is known by now."""
        print(json.dumps({**self.facts, "is_complete": is_complete, "found": found, "rows": rows}), flush=True)
