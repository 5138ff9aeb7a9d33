"""`verl quickstart` replaces what it wrote itself, and nothing else."""

import pytest
from typer.testing import CliRunner

from verl.cli import train
from verl.cli.main import app


@pytest.mark.parametrize("place", ["thesis.tex", "ppo/notes.txt", "ppo/deep/er/notes.txt"])
def test_a_directory_with_files_of_the_users_is_refused_and_left_as_it_is(tmp_path, place):
    file = tmp_path / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine")
    found = CliRunner().invoke(app, ["quickstart", "--smoke", "--out", str(tmp_path)])
    assert found.exit_code == 2
    assert f"--out is {tmp_path}" in found.stderr
    assert file.read_text() == "mine"


def test_a_file_in_its_place_is_refused(tmp_path):
    (tmp_path / "out").write_text("mine")
    found = CliRunner().invoke(app, ["quickstart", "--out", str(tmp_path / "out")])
    assert found.exit_code == 2
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "is_shortened"),
    [
        ([], True),
        (["trainer.seed=3"], True),
        (["algorithm=grpo"], False),
        (["debug=smoke"], False),
        (["--smoke"], False),
    ],
)
def test_it_is_shortened_unless_another_run_is_chosen(tmp_path, monkeypatch, words, is_shortened):
    class Started(Exception):
        pass

    def run(root, directory, overrides):
        if root == "ppo":
            assert (overrides[2:4] == train.QUICKSTART) == is_shortened
            raise Started
        return {}

    monkeypatch.setattr(train, "_run", run)
    assert isinstance(CliRunner().invoke(app, ["quickstart", *words, "--out", str(tmp_path / "o")]).exception, Started)
