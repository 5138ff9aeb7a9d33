"""The examples of docs/extending.md work as they stand, and adding each takes three files and changes no other."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALGORITHM = ["verl/algorithms/batch_mean.py", "conf/algorithm/batch_mean.yaml", "tests/algorithms/test_batch_mean.py"]
ENGINE = ["verl/rollout/server/plain.py", "conf/rollout/plain.yaml", "tests/rollout/server/test_plain.py"]
CHOSEN = ["algorithm=batch_mean", "rollout=plain", "rollout.endpoint.base_url=http://localhost:8000"]
RUN = """
import sys
import pytest
from verl.compose.validate import validate
from verl.compose.compose import compose_root
from verl.compose.overrides import command_line

arguments, assigned = command_line("ppo", sys.argv[1:])
run = validate(compose_root("ppo", arguments), assigned.faults)
print(run.algorithm.advantage, type(run.rollout).__name__, flush=True)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests"]))
"""


def files_of_the_page() -> dict[str, str]:
    """The code blocks whose first line is a comment with a path, by that path."""
    blocks = re.findall(r"```\w+\n(# ([\w/.]+)\n.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL)
    return {path: text for text, path in blocks if "/" in path}


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


@pytest.mark.slow
def test_an_algorithm_and_an_engine_are_added_by_three_files_each_and_no_edit(tmp_path):
    for name in ("verl", "conf"):
        # with what is compiled of it, but for files that another test is just writing
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.pyc.*"))
    before = contents(tmp_path)

    page = files_of_the_page()
    assert sorted(page) == sorted(ALGORITHM + ENGINE)
    for path, text in page.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    env = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", RUN, *CHOSEN]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("BatchMean(scale=1.0) PlainRollout\n")
    assert "3 passed" in done.stdout

    after = contents(tmp_path)
    assert after.keys() - before.keys() == set(ALGORITHM + ENGINE)
    assert {path: after.get(path) for path in before} == before
