"""What became of each sample that a server was asked about, in words for the sample tables and in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl.http_client.request import Kind, RequestReport


@dataclass
class Sample:
    """One response on its way to a score.

    Attributes:
        row: in the batch.
        texts: `prompt`, `response` and the columns of the data, of this row.
        question: what is sent for it.
        key: of its answer in the cache.
        text: of the answer that gave the score.
        cached: whether it was not asked for.
        failure: in words, why it has no score.
        is_not_finite: the last answer gave a number that is not finite.
        report: what became of the question that it was a part of.
    """

    row: int
    texts: dict[str, Any]
    question: Any
    key: str
    score: float | None = None
    text: str | None = None
    cached: bool = False
    failure: str | None = None
    kind: Kind | None = None
    is_not_finite: bool = False
    report: RequestReport | None = None

    @property
    def outcome(self) -> str:
        """`scored in 0.41 s`, `scored in 0.38 s, asked 3 times`, `cached`, `failed, asked 6 times: HTTP 500`."""
        if self.cached and self.score is not None:
            return "cached"
        if self.report is None:
            return "not asked"
        attempts = self.report.attempts
        again = f", asked {attempts} times" if attempts > 1 else ""
        if self.score is None:
            return f"failed{again}: {self.failure}"
        return f"scored in {self.report.seconds[-1]:.2f} s{again}"


@dataclass
class Tally:
    """Counts over the questions of a training step."""

    requests: int = 0
    retries: int = 0
    failures: int = 0
    cache_hits: int = 0
    seconds: list[float] = field(default_factory=list)

    def add(self, reports: list[RequestReport | None], samples: list[Sample]) -> None:
        """Count what was asked, and what became of the samples."""
        asked = [report for report in reports if report is not None]
        self.requests += sum(report.attempts for report in asked)
        self.retries += sum(max(0, report.attempts - 1) for report in asked)
        self.seconds += [second for report in asked for second in report.seconds]
        self.failures += sum(sample.score is None for sample in samples)
        self.cache_hits += sum(sample.cached and sample.score is not None for sample in samples)

    def metrics(self) -> dict[str, float]:
        """By name; latencies are of single requests, where any was sent."""
        counts = {
            "remote_requests": float(self.requests),
            "remote_retries": float(self.retries),
            "remote_failures": float(self.failures),
            "remote_cache_hits": float(self.cache_hits),
        }
        if not self.seconds:
            return counts
        middle, late = np.percentile(self.seconds, [50, 95])
        return counts | {"remote_latency_p50_s": float(middle), "remote_latency_p95_s": float(late)}
