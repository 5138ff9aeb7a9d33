"""The examples run as a user runs them, and come to what they say."""

import json
import re
import runpy
from pathlib import Path

import pytest
from rich.console import Console

from verl.compose.compose import compose_root
from verl.compose.validate import validate
from verl.compose.warm_start import resolve_warm_starts

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def said_by(name: str, capsys) -> str:
    """What an example prints, run as a script in an empty directory."""
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_the_loop_around_a_hybrid_actor_learns(capsys):
    first, last = map(float, re.findall(r"step \d+: ([\d.]+) of", said_by("hybrid_actor.py", capsys)))
    assert first < 0.3
    assert last > 0.8


def test_steps_are_saved_loaded_and_go_on_with_another_reward(capsys):
    said = said_by("trainer_steps.py", capsys)
    assert "loaded digits_step_20, step 20; the next step is the same again: True" in said
    first, swapped, last = map(float, re.findall(r"([\d.]+) (?:of the characters )?are", said))
    assert first > 0.8
    assert swapped < last
    assert last > 0.75
    assert "finished after 40 steps" in said


@pytest.mark.exhaustive
def test_a_pipeline_is_carried_out(capsys):
    said = said_by("pipeline.py", capsys)
    found = re.search(r"finished after 40 steps: digits ([\d.]+), variety ([\d.]+)", said)
    assert found is not None, said
    assert float(found[1]) > 0.8
    assert float(found[2]) > 0.5


@pytest.mark.exhaustive
def test_the_walk_through_of_the_library_runs_cell_by_cell():
    page = (ROOT / "docs/library.md").read_text()
    walk = page.partition("<!-- walk -->")[2].partition("<!-- /walk -->")[0]
    names: dict = {}
    for cell in re.findall(r"```python\n(.*?)```", walk, flags=re.DOTALL):
        exec(compile(cell, "docs/library.md", "exec"), names)
    assert names["rows"].shape == (2, 6)
    assert names["losses"][-1] < names["losses"][0] / 2
    assert names["switch"]["latency_ms"] < names["reload"]["latency_ms"]
    assert (names["result"].status, names["result"].steps) == ("finished", 6)


def test_every_example_is_named_on_its_page():
    page = (ROOT / "docs/library.md").read_text() + (ROOT / "docs/extending.md").read_text()
    assert [file.name for file in EXAMPLES.glob("*.py") if f"`examples/{file.name}`" not in page] == []


@pytest.mark.exhaustive
def test_the_example_with_a_short_file_learns(tmp_path, monkeypatch):
    """From the model that the quickstart leaves; its reward before and after is what the page claims."""
    policy = resolve_warm_starts(validate(compose_root("ppo", ["actor=tiny"])), Console(quiet=True)).actor.model.path
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/quickstart.md").read_text().partition("From Python, with a short file")[2]
    config = re.search(r"```yaml\n(.*?)```", page, flags=re.DOTALL)[1]  # type: ignore[index]
    assert "outputs/quickstart/sft/actor" in config
    Path("config.yaml").write_text(config.replace("outputs/quickstart/sft/actor", policy))
    names: dict = {}
    exec(compile(re.search(r"```python\n(.*?)```", page, flags=re.DOTALL)[1], "docs/quickstart.md", "exec"), names)  # type: ignore[index]
    lines = (names["trainer"].run_dir / "metrics.jsonl").read_text().splitlines()
    rewards = [record["reward/mean"] for record in map(json.loads, lines) if "reward/mean" in record]
    assert len(rewards) == 100
    assert sum(rewards[:5]) / 5 < 0.35
    assert sum(rewards[-10:]) / 10 > 0.5
