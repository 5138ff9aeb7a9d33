"""FIFOs, devices and links in place of files and directories: nothing waits, nothing outside is read, written or
removed, and every command ends with a sentence."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cases import each_value_once
from faults.scenarios import save
from faults.test_hostile_input import sign, whole  # noqa: F401 - a fixture
from omegaconf import OmegaConf
from typer.testing import CliRunner

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.hashing import digest_of
from verl.checkpoint.resolve import resolve
from verl.checkpoint.retention import Retention, clean, pin, pins, prune, unpin
from verl.cli.main import app
from verl.compose.load_policy import locate_policy
from verl.compose.run_start import save_config
from verl.errors import ConfigError, VerlError
from verl.models.pretrained import Pretrained
from verl.tracking import sweep_table
from verl.tracking.jsonl import JsonLinesTracker
from verl.tracking.logging_setup import setup_logging
from verl.trainer.state.lineage import Lineage, read_events
from verl.utils.external_input import open_regular, write_text

LIMIT_S = 120  # against hangs


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError(f"it waited for {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def replace(path: Path, kind: str) -> None:
    """Put a FIFO, or a link to a device, in place of a file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")


def command(*arguments: object) -> str:
    with in_time():
        result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exception is None or isinstance(result.exception, SystemExit), (arguments, result.exception)
    assert "Traceback" not in result.output
    return result.output


@pytest.fixture
def run(whole, tmp_path) -> Path:  # noqa: F811
    """The directory of a run with checkpoints, samples and a record of its lineage."""
    shutil.copytree(whole, tmp_path / "run/checkpoints", symlinks=True)
    (tmp_path / "run/samples").mkdir()
    (tmp_path / "run/samples/step_1.jsonl").write_text('{"prompt_text": "a", "response_text": "b", "score": 1}\n')
    return tmp_path / "run"


OWN = ("format.json", "run.lock", "cold.json", "lineage.jsonl", "pins/global_step_1", "uploaded/global_step_1")
OF_ONE = ("COMMIT", "manifest.json", "trainer_state.json", "actor/config.json", "actor/tokenizer.json")
FILES = [
    *(f"checkpoints/{name}" for name in OWN),
    *(f"checkpoints/global_step_2/{name}" for name in OF_ONE),
    "checkpoints.json",
    "samples/step_1.jsonl",
    "replay/rows_0.arrow",
]


@pytest.mark.parametrize(("kind", "file"), each_value_once(["fifo", "device"], FILES))
def test_a_fifo_or_a_device_in_place_of_a_file_is_not_read(file, kind, run):
    replace(run / file, kind)
    directory = run / "checkpoints"
    for words in (("checkpoint", "verify", directory, "--full"), ("lineage", directory)):
        command(*words)
    with in_time(), contextlib.suppress(VerlError):
        resolve("latest", directory)
    with in_time(), contextlib.suppress(VerlError):
        locate_policy(str(run))
    with in_time(), contextlib.suppress(VerlError):
        store = CheckpointStore(directory, run_id="next")
        save(store, 3, 3)
        pin(store, "global_step_3")
        prune(store, Retention(keep_last_n=2))
        store.remove_leftovers()


@pytest.mark.parametrize(
    ("kind", "name"),
    each_value_once(
        ["fifo", "device"], ["config.json", "model.safetensors", "tokenizer.json", "adapter_config.json", "x.bin"]
    ),
)
def test_a_fifo_or_a_device_in_the_directory_of_a_model_is_named(name, kind, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    replace(tmp_path / name, kind)
    with in_time(), pytest.raises(ConfigError, match="not a regular file"):
        Pretrained(path=str(tmp_path))


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_only_regular_files_are_opened(kind, tmp_path):
    replace(tmp_path / "file", kind)
    with in_time(), pytest.raises(OSError, match="not a regular file"):
        open_regular(tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with in_time(), pytest.raises(OSError, match="symbolic link"):
        open_regular(tmp_path / "link", follow=False)


DIRECTORIES = ("staging", "trash", "pins", "uploaded")
OPERATIONS = {
    "a save": lambda store: save(store, 3, 3),
    "gc": CheckpointStore.remove_leftovers,
    "pruning": lambda store: prune(store, Retention(keep_last_n=1)),
    "cleaning": lambda store: clean(store, Retention(keep_last_n=1)),
    "a pin": lambda store: pin(store, "global_step_1"),
    "the pins": lambda store: unpin(store, next(iter(pins(store)), "outside")),
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
    for step in (3, 4) if operation in ("pruning", "cleaning") else ():
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
    assert "complete" in command("checkpoint", "verify", tmp_path / "link/latest", "--full")


@pytest.mark.parametrize("name", ["../../outside.safetensors", "/etc/passwd", "absent.safetensors", 3])
def test_an_index_names_files_of_its_own_checkpoint(name, run):
    checkpoint = run / "checkpoints/global_step_2"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    data = json.dumps({"weight_map": {"first": name}}).encode()
    path = "actor/model.safetensors.index.json"
    manifest["files"] = [entry for entry in manifest["files"] if entry["path"] != path]
    digest = digest_of(data)
    manifest["files"].append({"path": path, "size": len(data), "blake3": digest, "leaves": [[len(data), digest]]})
    (checkpoint / path).unlink(missing_ok=True)
    (checkpoint / path).write_bytes(data)
    sign(checkpoint, manifest)
    said = command("checkpoint", "verify", checkpoint, "--full")
    assert f"it names {name!r}, which the manifest does not list" in said.replace("\n", " ")


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_the_record_of_runs_is_left_out_where_it_is_no_file(kind, tmp_path):
    replace(tmp_path / "lineage.jsonl", kind)
    with in_time():
        assert read_events(tmp_path) == []


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
        said = command(*words)
        assert not {"\x1b", "\x07", "\x9b"} & set(said), words
        assert "\nCOMPLETE" not in said, words


@pytest.mark.parametrize("kind", ["fifo", "device"])
@pytest.mark.parametrize(
    "name",
    [
        "config.yaml",
        "run.log",
        "metrics.jsonl",
        "plan.txt",
        "sweep.csv",
    ],
)
def test_a_file_of_the_run_directory_is_written_only_where_it_is_regular(name, kind, tmp_path):
    replace(tmp_path / name, kind)
    tracker = JsonLinesTracker()
    writes = {
        "config.yaml": lambda: save_config(OmegaConf.create({}), [], tmp_path),
        "run.log": lambda: setup_logging(tmp_path),
        "metrics.jsonl": lambda: tracker.start("run", {}, tmp_path, None),
        "plan.txt": lambda: write_text(tmp_path / name, "plan"),
        "sweep.csv": lambda: sweep_table.write(tmp_path, []),
    }  # fmt: skip
    with in_time(), pytest.raises(OSError, match="not a regular file"):
        writes[name]()
    assert (tmp_path / name).exists()


@pytest.mark.parametrize("kind", ["fifo", "device"])
@pytest.mark.parametrize("name", ["samples", "evals"])
def test_a_table_whose_file_is_not_regular_is_counted_as_lost(name, kind, tmp_path):
    replace(tmp_path / name / "step_1.jsonl", kind)
    tracker = JsonLinesTracker()
    with in_time():
        tracker.start("run", {}, tmp_path, None)
        with contextlib.suppress(OSError):  # at once, where its thread is quick
            tracker.samples([{"prompt": "1"}], 1, "train") if name == "samples" else tracker.evaluated_rows([{}], 1)
        tracker.close("")
    assert tracker.num_lost == 1


def test_a_log_of_runs_that_is_no_regular_file_costs_its_lines(tmp_path, caplog):
    replace(tmp_path / "lineage.jsonl", "fifo")
    with in_time():
        Lineage(tmp_path, "run").add("end")
    assert "not a regular file" in caplog.text
