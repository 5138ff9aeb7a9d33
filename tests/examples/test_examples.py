"""The examples run as a user runs them, and come to what they say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def said_by(name: str, capsys) -> str:
    """What an example prints, run as a script in an empty directory."""
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_the_loop_around_a_hybrid_actor_learns(capsys):
    first, last = map(float, re.findall(r"step \d+: ([\d.]+) of", said_by("hybrid_actor.py", capsys)))
    assert first < 0.3
    assert last > 0.8
