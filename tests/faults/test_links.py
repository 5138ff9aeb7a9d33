"""Links in place of directories, names of others and names that a terminal would interpret: nothing outside is read,
written or removed."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
from faults.scenarios import save
from faults.test_hostile_input import ends_in_words, sign, whole  # noqa: F401 - a fixture

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.retention import Retention, prune
from verl.errors import VerlError


@pytest.fixture
def run(whole, tmp_path) -> Path:  # noqa: F811
    """The directory of a run with checkpoints, samples and a record of its lineage."""
    shutil.copytree(whole, tmp_path / "run/checkpoints", symlinks=True)
    (tmp_path / "run/samples").mkdir()
    (tmp_path / "run/samples/step_1.jsonl").write_text('{"prompt_text": "a", "response_text": "b", "score": 1}\n')
    return tmp_path / "run"


DIRECTORIES = ("staging", "trash", "pins", "uploaded")
OPERATIONS = {
    "a save": lambda store: save(store, 3, 3),
    "pruning": lambda store: prune(store, Retention(keep_last_n=1)),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_link_in_place_of_a_directory_of_the_store_leads_nowhere(name, operation, run, tmp_path):
    directory, outside = run / "checkpoints", tmp_path / "outside"
    (outside / "kept").mkdir(parents=True)
    (outside / "kept/file").write_text("kept")
    (outside / "outside").write_text("{}")
    shutil.rmtree(directory / name, ignore_errors=True)
    (directory / name).symlink_to(outside)
    for step in (3, 4) if operation == "pruning" else ():
        shutil.copytree(directory / "global_step_2", directory / f"global_step_{step}")
    before = {path: path.stat().st_mtime_ns for path in sorted(tmp_path.glob("outside/**/*"))}
    with contextlib.suppress(VerlError):
        OPERATIONS[operation](CheckpointStore(directory, run_id="next"))
    assert {path: path.stat().st_mtime_ns for path in sorted(tmp_path.glob("outside/**/*"))} == before
    assert (directory / name).is_symlink()


def test_the_directory_itself_and_latest_may_be_links(run, tmp_path):
    (tmp_path / "link").symlink_to(run / "checkpoints")
    save(CheckpointStore(tmp_path / "link", run_id="next"), 3, 3)
    assert (run / "checkpoints/global_step_3/COMMIT").is_file()
    assert "complete" in ends_in_words("checkpoint", "verify", tmp_path / "link/latest", "--full")


def test_names_do_not_reach_the_terminal_as_commands_to_it(run):
    (run / "checkpoints/global_step_2/\x1b[31mred\nCOMPLETE").write_text("")
    (run / "checkpoints/global_step_\x1b]0;title\x07").mkdir()
    directory = run / "checkpoints"
    lines = [{"event": "run", "run_id": "\x1b[2J", "time": "1", "run_dir": "\x1b[3J"}]
    lines += [{"event": "end", "run_id": "\x1b[2J", "time": "2", "status": "\x1b[5m", "step": 1}]
    (directory / "lineage.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sample = {"prompt_text": "\x1b[8m", "response_text": "\x9b31m", "table": "\x1b[9m", "\x1b[1m": 1}
    (run / "samples/step_1.jsonl").write_text(json.dumps(sample) + "\n")
    for words in (
        ("checkpoint", "ls", directory),
        ("checkpoint", "verify", directory),
        ("checkpoint", "health", directory),
        ("checkpoint", "inspect", directory / "global_step_2"),
        ("lineage", directory),
    ):
        said = ends_in_words(*words)
        assert not {"\x1b", "\x07", "\x9b"} & set(said), words
        assert "\nCOMPLETE" not in said, words
