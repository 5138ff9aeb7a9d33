"""What happens to rows that cannot be used: they stop the run, or they are left out and counted."""

from __future__ import annotations

import logging
from typing import Literal

from verl.errors import ConfigError

logger = logging.getLogger(__name__)

OnBadRow = Literal["error", "skip"]
SHOWN = 5


class BadRows:
    """Collects one sentence per unusable row of a data set, each with its file and number.

    Args:
        policy: `error` refuses the data set when all rows were looked at; `skip` leaves the rows out and warns.
    Attributes:
        faults: the sentences, without their final full stop.
    """

    def __init__(self, policy: OnBadRow = "error"):
        self.policy = policy
        self.faults: list[str] = []

    def __len__(self) -> int:
        return len(self.faults)

    def add(self, fault: str) -> None:
        """Note one row."""
        self.faults.append(fault.rstrip("."))

    def settle(self, num_rows: int) -> None:
        """Refuse or report what was collected.

        Args:
            num_rows: of the data set, the bad ones included.
        Raises:
            ConfigError: there are bad rows and the policy is `error`, or no other row is left.
        """
        if not self.faults:
            return
        shown, further = self.faults[:SHOWN], len(self.faults) - SHOWN
        more = [f"and {further} further rows"] if further > 0 else []
        if self.policy == "error":
            *before, last = [f"{fault}." for fault in shown]
            after = f" And {further} further rows of {num_rows}." if further > 0 else ""
            raise ConfigError([*before, f"{last}{after} Mend the data, or set on_bad_row to skip."])
        seen = f"on_bad_row is skip: {len(self.faults)} of {num_rows} rows are left out: {'; '.join(shown + more)}."
        if len(self.faults) >= num_rows:
            raise ConfigError(f"{seen} No row remains.")
        logger.warning("%s", seen)
