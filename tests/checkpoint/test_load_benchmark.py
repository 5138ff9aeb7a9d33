"""The benchmark of loading measures what it says, at a size at which it takes no time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/checkpoint_load.py"


@pytest.mark.exhaustive
def test_it_prints_rows_for_the_table(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, "--small", "--directory", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [len(row) for row in result["rows"]] == [3, 3, 3]
    assert len(result["seconds"]) == 12
    assert list(tmp_path.iterdir()) == []
