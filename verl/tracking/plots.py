"""`curves.png` of a run, written at its end."""

from __future__ import annotations

import fnmatch
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from verl.component import BuildContext, component
from verl.tracking.base import Tracker, TrackerDescription
from verl.utils.external_input import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS: dict[str, list[str]] = {
    "reward": ["reward/mean"],
    "accuracy": ["*accuracy", "*/accuracy_*_call", "*/accuracy_without_tools", "*/mean@*", "*/best@*"],
    "episodes": ["*/call_share", "*/turns"],
    "KL (nats)": ["kl/*_nats", "actor/approx_kl*"],
    "response length (tokens)": ["*response_length_tokens"],
    "policy loss": ["actor/loss"],
    "value loss": ["critic/loss"],
    "loss (nats per token)": ["sft/loss", "eval/loss"],
    "entropy (nats)": ["rollout/entropy_nats", "actor/entropy"],
    "clip share": ["*/clip_fraction"],
    "gradient norm": ["*/grad_norm"],
    "gap of log-probs (nats)": ["rollout/log_prob_gap_nats", "rollout/off_policy_gap_nats", "sync/probe_gap_nats"],
    "effective share": ["*/effective_share"],
    "staleness (versions)": ["*staleness*"],
    "samples per second": ["perf/samples_per_s"],
}  # of `curves.png` and of the page of a run
COLORS = ("#2458a6", "#c8553d", "#3f8f5b", "#8a5fa8", "#b8862b", "#4a4a4a")
_SMOOTH_FROM = 60  # points; longer series are drawn faint under their moving average


@dataclass
class MetricSeries:
    """The values of one metric. Points that are not finite are gaps."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    evaluated: bool = False  # from evaluations; drawn with markers


@component
class Curves(TrackerDescription):
    """Writes `curves.png` to the run directory when the run ends, also after an error.

    Args:
        panels: metric keys of each panel, by title, with `*` as wildcard. A panel without data is left out; a key that
            matches several panels is drawn in the first.
    """

    package: ClassVar[str] = "matplotlib"

    panels: Annotated[dict[str, list[str]], Field(min_length=1)] = field(
        default_factory=lambda: {title: list(keys) for title, keys in PANELS.items()}
    )

    def build(self, context: BuildContext) -> CurvesTracker:
        return CurvesTracker(self)


class CurvesTracker(Tracker):
    """Keeps the series of all panels in memory, and draws them at the end."""

    def __init__(self, settings: Curves):
        self._panels = settings.panels
        self._series: dict[str, MetricSeries] = {}
        self._panel_of: dict[str, str | None] = {}

    def start(self, run_name: str, config: dict[str, Any], run_dir: Path, total_steps: int | None) -> None:
        self._title, self._path = run_name, run_dir / "curves.png"

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._add(metrics, step, evaluated=False)

    def evaluation(self, metrics: dict[str, float], step: int) -> None:
        self._add(metrics, step, evaluated=True)

    def close(self, status: str) -> None:
        if self._series:
            title = self._title if status == "finished" else f"{self._title} ({status})"
            draw(self._grouped(), self._path, title)

    def _add(self, metrics: Mapping[str, float], step: int, evaluated: bool) -> None:
        for key, value in metrics.items():
            if key not in self._panel_of:
                self._panel_of[key] = panel_of(key, self._panels)
            if self._panel_of[key] is not None:
                series = self._series.setdefault(key, MetricSeries(evaluated=evaluated))
                series.steps.append(step)
                series.values.append(float(value) if math.isfinite(value) else math.nan)

    def _grouped(self) -> dict[str, dict[str, MetricSeries]]:
        keys = {title: [key for key in self._series if self._panel_of[key] == title] for title in self._panels}
        return {title: {key: self._series[key] for key in of_panel} for title, of_panel in keys.items() if of_panel}


def panel_of(key: str, panels: Mapping[str, Sequence[str]]) -> str | None:
    """The title of the first panel that shows this metric, or None."""
    return next((t for t, patterns in panels.items() if any(fnmatch.fnmatchcase(key, p) for p in patterns)), None)


def draw(panels: Mapping[str, Mapping[str, MetricSeries]], path: Path, title: str) -> None:
    """Draw one panel per entry, at most three in a row, and write them to `path` as PNG.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width = min(3, len(panels))
    height = math.ceil(len(panels) / width)
    # A figure without pyplot, whose state and backend (in notebooks) are left alone.
    figure = Figure(figsize=(5.0 * width, 3.4 * height + 0.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, fontweight="bold", parse_math=False)
    for number, (name, series) in enumerate(panels.items(), start=1):
        _panel(figure.add_subplot(height, width, number), name, series)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Title": title, "Description": ", ".join(panels)})
    write_whole(path, picture.getvalue())


def _panel(axes: Axes, name: str, series: Mapping[str, MetricSeries]) -> None:
    from matplotlib.ticker import MaxNLocator

    for number, (key, metric) in enumerate(series.items()):
        _draw_series(axes, metric, key, COLORS[number % len(COLORS)])
    axes.set_title(name, fontsize=11)
    axes.set_xlabel("step", fontsize=9)
    axes.grid(visible=True, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes.legend(fontsize=7.5, frameon=False)


def _draw_series(axes: Axes, metric: MetricSeries, label: str, color: str) -> None:
    """Draw a series: with markers if it comes from evaluations, smoothed over faint raw values if it is long."""
    label = label.replace("$", r"\$")  # not a formula
    if metric.evaluated:
        axes.plot(metric.steps, metric.values, "o-", color=color, label=label, linewidth=1.6, markersize=5, zorder=3)
    elif len(metric.steps) >= _SMOOTH_FROM:
        axes.plot(metric.steps, metric.values, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(metric.steps, moving_average(metric.values), color=color, label=label, linewidth=1.6)
    else:
        marker = "." if len(metric.steps) <= 3 else None  # a line needs two points to be seen
        axes.plot(metric.steps, metric.values, color=color, label=label, linewidth=1.4, marker=marker)


def moving_average(values: Sequence[float]) -> list[float]:
    """Centred mean over about a sixth of the series; gaps stay gaps."""
    import numpy as np

    raw = np.array(values, dtype=np.float64)
    reach = min(max(1, len(raw) // 12), (len(raw) - 1) // 2)
    if reach < 1:
        return list(values)
    is_there, window = np.isfinite(raw), np.ones(2 * reach + 1)
    total, count = (np.convolve(x, window, "same") for x in (np.where(is_there, raw, 0.0), is_there.astype(float)))
    return np.where(is_there, total / np.maximum(count, 1.0), np.nan).tolist()
