"""Spike detector: a running band around a metric, and values beyond it."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAD_TO_DEVIATION = 1.4826  # of a normal distribution: standard deviation over median absolute deviation
LEAST_SHARE = 0.1  # of the median: a metric that hardly moves has a deviation of at least this
LEAST = 1e-3  # and of this, since a loss may be zero but for rounding


@dataclass(frozen=True)
class Spike:
    """A value beyond its band.

    Attributes:
        value: of the metric.
        median: of the sizes before it.
        limit: above which a size counts as a spike.
        steps: that the band was made of.
    """

    metric: str
    value: float
    median: float
    limit: float
    steps: int

    def __str__(self) -> str:
        return f"{self.metric} {self.value:.4g} (median {self.median:.4g}, limit {self.limit:.4g}, {self.steps} steps)"


class SpikeDetector:
    """Median and median absolute deviation of the size of a metric over the last steps.

        spike:  |x| > median + factor * max(1.4826 * MAD, 0.1 * median, 0.001)

    Both are robust: a spike joins the history and hardly moves the band. A metric that stays beyond is reported once,
    until it has been back; after half a window beyond, the band has followed.

    Args:
        factor: see above.
        history: number of values before the first spike can be reported.
        window: values that are remembered.
    """

    def __init__(self, metric: str, factor: float, history: int, window: int):
        self.metric, self.factor, self.history = metric, factor, history
        self._sizes: deque[float] = deque(maxlen=window)
        self._is_beyond = False

    def add(self, value: float) -> Spike | None:
        """Take in the next value; returns a spike if it left the band with it. Values that are not finite are none."""
        if not math.isfinite(value):
            return None
        spike = self._spike(value)
        is_news, self._is_beyond = spike is not None and not self._is_beyond, spike is not None
        self._sizes.append(abs(value))
        return spike if is_news else None

    def state_dict(self) -> dict[str, Any]:
        """The sizes remembered, and whether the last was beyond the band."""
        return {"sizes": list(self._sizes), "is_beyond": self._is_beyond}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._sizes.clear()
        self._sizes.extend(state["sizes"])
        self._is_beyond = state["is_beyond"]

    def _spike(self, value: float) -> Spike | None:
        if len(self._sizes) < self.history:
            return None
        median = statistics.median(self._sizes)
        mad = statistics.median(abs(size - median) for size in self._sizes)
        limit = median + self.factor * max(MAD_TO_DEVIATION * mad, LEAST_SHARE * median, LEAST)
        return Spike(self.metric, value, median, limit, len(self._sizes)) if abs(value) > limit else None
