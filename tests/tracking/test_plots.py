"""curves.png is a picture with one panel for each kind of metric that the run logged."""

from __future__ import annotations

import math

import pytest
from refusals import refusal

from verl.component import BuildContext
from verl.tracking.base import Trackers
from verl.tracking.plots import PANELS, Curves, moving_average, panel_of


def drawn(run_dir, steps: int = 80, status: str = "finished", extra: dict | None = None):
    running = Trackers(curves=Curves()).build(BuildContext())
    running.start("project/run", {}, run_dir, steps)
    running.evaluation({"eval/accuracy": 0.6, "eval/mean@4": 0.5, "eval/best@4": 0.7}, 0)
    for step in range(1, steps + 1):
        share = step / steps
        wave = 0.08 * math.sin(step * 1.7)
        metrics = {
            "reward/mean": 0.6 + 0.35 * share + wave,
            "rollout/response_length_tokens": 4 - share + wave,
            "kl/reference_nats": 0.02 * share,
            "actor/loss": 0.1 * wave,
            "critic/loss": 0.3 * math.exp(-3 * share),
            "timing/step_s": 1.2,
        }
        running.log({**metrics, **(extra or {})}, step)
        if step % 20 == 0:
            running.evaluation({"eval/accuracy": 0.6 + 0.35 * share, "eval/mean@4": 0.5, "eval/best@4": 0.9}, step)
    running.close(status)
    return run_dir / "curves.png"


def test_the_picture_is_a_whole_png_that_names_its_panels(tmp_path):
    from PIL import Image

    with Image.open(drawn(tmp_path)) as image:
        image.load()
        assert image.format == "PNG"
        assert image.size[0] > image.size[1] > 500
        titles = [*PANELS]  # without episodes, and without what only other kinds of training log
        assert image.info["Description"].split(", ") == [*titles[:2], *titles[3:7]]
        colors = image.convert("RGB").getcolors(maxcolors=1 << 20)
        assert len(colors) > 100  # lines, text and grid, not an empty sheet


def test_panels_without_data_are_left_out_and_a_short_run_is_drawn_too(tmp_path):
    from PIL import Image

    running = Trackers(curves=Curves()).build(BuildContext())
    running.start("run", {}, tmp_path, 1)
    running.log({"sft/loss": 2.0, "unknown/key": 1.0}, 1)
    running.close("interrupted")
    with Image.open(tmp_path / "curves.png") as image:
        assert image.info["Description"] == "loss (nats per token)"
        assert image.info["Title"] == "run (interrupted)"


PANEL_OF = {
    "reward/mean": "reward", "reward/std": None, "eval/token_accuracy": "accuracy", "eval/best@4": "accuracy",
    "kl/reference_nats": "KL (nats)", "rollout/response_length_tokens": "response length (tokens)",
    "rollout/response_length_max_tokens": None, "actor/loss": "policy loss", "eval/loss": "loss (nats per token)",
}  # fmt: skip


def test_each_metric_belongs_to_the_panel_of_its_kind():
    assert {key: panel_of(key, PANELS) for key in PANEL_OF} == PANEL_OF


def test_panels_can_be_chosen():
    assert panel_of("perf/tokens", Curves(panels={"speed": ["perf/*"]}).panels) == "speed"
    with refusal("panels"):
        Curves(panels={})


def test_the_moving_average_of_a_constant_is_the_constant_and_gaps_stay():
    assert moving_average([2.0] * 100) == pytest.approx([2.0] * 100)
    smooth = moving_average([1.0, math.nan, 1.0, 4.0])
    assert [math.isnan(value) for value in smooth] == [False, True, False, False]
    assert 1.0 <= smooth[2] < 4.0
    assert moving_average([]) == []
    assert moving_average([3.0, 5.0]) == [3.0, 5.0]
