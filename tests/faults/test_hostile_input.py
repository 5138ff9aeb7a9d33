"""What lies on a disk or in a store may be anybody's: well-signed metadata of other types, names that lead elsewhere,
sizes beyond measure. Every command ends in words, nothing leaves its directory, and no memory is filled."""

import contextlib
import copy
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cases import exhaustive, short_where
from faults.scenarios import save
from typer.testing import CliRunner

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.core.hashing import digest_of
from verl.checkpoint.core.manifest import MANIFEST, STATE, commit_line
from verl.checkpoint.remote.commit_log import CommitLog
from verl.checkpoint.remote.transfer import CheckpointTier, upload
from verl.checkpoint.resolve import resolve
from verl.checkpoint.retention import Retention, prune
from verl.cli.main import app
from verl.errors import VerlError
from verl.storage.config import LocalStorage
from verl.utils.external_input import ExternalInputError, checked_name, checked_path, parse_json

VALUES = (
    None,
    [],
    {},
    "text",
    "../escaped",
    "/absolute",
    -1,
    2**60,
    10**30,
    True,
    1.5,
    [[1, 2]],
    {"a": {"b": 1}},
    "x\0y",
)
NAMES = ("../escaped", "/tmp/verl_hostile_name", "a/../../b", "latest", "pins", "staging", "", ".", "..", "-rf", "x\0y")
COMMANDS = (
    ("ls",),
    ("ls", "--json"),
    ("inspect",),
    ("inspect", "--json", "--tensors"),
    ("verify", "--full"),
    ("health",),
)


THOROUGH = pytest.mark.parametrize("thorough", [False, *exhaustive(True)])


def some_of(number: int, thorough: bool) -> tuple[tuple[str, ...], ...]:
    """All commands, or one of them in turn."""
    return COMMANDS if thorough else COMMANDS[number % len(COMMANDS) :][:1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Two small checkpoints with slices of two writers, links, and what a trainer records."""
    directory = tmp_path_factory.mktemp("whole") / "checkpoints"
    store = CheckpointStore(directory, run_id="testing")
    for step in (1, 2):
        save(store, step, step)
    return directory


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    shutil.copytree(whole, tmp_path / "run/checkpoints", symlinks=True)
    return tmp_path / "run/checkpoints"


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value; of a list the first item alone."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths_in(item, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    changed = copy.deepcopy(value)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return changed


def sign(checkpoint: Path, manifest: Any) -> None:
    """Give a checkpoint a manifest, with the COMMIT that vouches for it."""
    data = json.dumps(manifest).encode()
    (checkpoint / MANIFEST).write_bytes(data)
    (checkpoint / "COMMIT").write_bytes(commit_line(data))


def signed_state(checkpoint: Path, data: bytes) -> None:
    """Give a checkpoint a `trainer_state.json`, for which its manifest vouches."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    (entry,) = [entry for entry in manifest["files"] if entry["path"] == STATE]
    (checkpoint / STATE).chmod(0o644)
    (checkpoint / STATE).write_bytes(data)
    entry |= {"size": len(data), "blake3": digest_of(data), "leaves": [[len(data), digest_of(data)]]}
    sign(checkpoint, manifest)


def ends_in_words(*arguments: object) -> str:
    """What a command says; it must not end with an error that nobody raised on purpose."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), (arguments, result.exception)
    assert "Traceback" not in result.output
    return result.output


def resumes_in_words(directory: Path, tier: CheckpointTier | None = None) -> None:
    for is_own in (None, lambda state: state.get("identity", {}) == {}):
        with contextlib.suppress(VerlError):
            resolve("latest", directory, tier=tier, is_own=is_own)


def listing(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*")}


# -- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_one_function_takes_names_and_refuses_those_that_lead_elsewhere(name):
    from verl.checkpoint.read.discovery import RESERVED

    with pytest.raises(ExternalInputError):
        checked_name(name, RESERVED)


@pytest.mark.parametrize("path", ["", "/a", "a/../b", "../a", "a//b", "a/", "./a", "a\\b", "a\0", 3, None, "x" * 5000])
def test_paths_lead_downwards(path):
    with pytest.raises(ExternalInputError):
        checked_path(path)


@pytest.mark.parametrize(
    "name", short_where(NAMES, {"../escaped", "/tmp/verl_hostile_name", "latest", ".."}.__contains__)
)
def test_a_record_of_a_store_cannot_name_a_place_outside(name, whole, tmp_path):
    storage = LocalStorage(path=str(tmp_path / "bucket"), retries=0)
    with storage.connect() as objects:
        record = upload(CommitLog(objects), newest(whole))[0]
    log = tmp_path / "bucket/log/000000000001.json"
    log.write_text(json.dumps({**vars(record), "name": name}))
    (tmp_path / "here").mkdir()
    ends_in_words("checkpoint", "pull", storage.address, tmp_path / "here/in")
    ends_in_words("checkpoint", "ls", storage.address)
    resumes_in_words(tmp_path / "here/in", CheckpointTier(storage=storage))
    assert listing(tmp_path / "here") <= {"in", "in/staging", "in/format.json", "in/run.lock"}
    assert not (tmp_path / "escaped").exists()
    assert not Path("/tmp/verl_hostile_name").exists()


def newest(directory: Path) -> Checkpoint:
    return CheckpointStore(directory).newest()


# -- types and sizes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [37, *exhaustive(1)])
def test_every_place_of_a_well_signed_manifest_may_hold_anything(copied, every):
    checkpoint = copied / "global_step_2"
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    tried = 0
    for path in paths_in(manifest):
        for value in VALUES[tried % every :: every]:
            sign(checkpoint, replaced(manifest, path, value))
            for command in COMMANDS if tried % 29 == 0 else COMMANDS[tried % len(COMMANDS) :][:1]:
                ends_in_words("checkpoint", *command, copied)
            tried += 1
            if tried % 17 == 0:
                ends_in_words("checkpoint", "inspect", checkpoint)
                resumes_in_words(copied)
    assert tried > 450 / every
    before = listing(copied.parent)
    with contextlib.suppress(VerlError):
        prune(CheckpointStore(copied), Retention(keep_last_n=2))
    assert {name for name in before if "global_step_1" in name} <= listing(copied.parent)


KEYS = (
    "epoch",
    "lineage",
    "identity",
    "config",
    "progress",
    "best",
    "trackers",
    "loss_history",
    "wall_clock_s",
    "code",
)
OTHERS = ("text", [1], {"a": 1}, {"ancestors": [1]}, {"evaluations": {"x": 1}})
STATES = [b"", b"[]", b"null", b'"text"', b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000, b'{"step": 1e999}']
STATES += [json.dumps({key: value}).encode() for key in KEYS for value in OTHERS]


@pytest.mark.first_rows(5)
@pytest.mark.parametrize(
    ("thorough", "number"),
    [(False, number) for number in range(0, len(STATES), 3)]
    + [pytest.param(True, number, marks=pytest.mark.exhaustive) for number in range(len(STATES))],
)
def test_a_well_signed_state_may_hold_anything(thorough, number, copied):
    signed_state(copied / "global_step_2", STATES[number])
    for command in some_of(number, thorough):
        ends_in_words("checkpoint", *command, copied)
    resumes_in_words(copied)


EVENTS = b"""{"event": "run"}
{"event": ["run"], "time": 3}
{"event": "checkpoint", "run_id": "a", "time": "b", "checkpoint": "../../x", "step": 1}
"""
CONTENTS = [b"", b"[]", b"3", b"\xff", b"{" * 10_000, EVENTS, b'{"reason": {}, "address": "x", "keep_waiting": -3}']
CONTENTS += [b'{"claim": [], "epoch": "x", "upload_interval": 0, "address": 3}']
BESIDE = ("format.json", "cold.json", "run.lock", "pins/global_step_1", "lineage.jsonl")


@pytest.mark.first_rows(2)
@THOROUGH
@pytest.mark.parametrize("file", BESIDE)
def test_the_files_beside_may_hold_anything(file, thorough, copied):
    (copied / "pins").mkdir(exist_ok=True)
    for number, content in enumerate(CONTENTS if thorough else CONTENTS[::3]):
        (copied / file).write_bytes(content)
        for command in some_of(number, thorough):
            ends_in_words("checkpoint", *command, copied)
        ends_in_words("lineage", copied)
        store = CheckpointStore(copied, run_id="later")
        if file != "format.json":
            assert store.claim_directory()


FIRST, SECOND = "log/000000000001.json", "log/000000000002.json"
RECORDS: list[tuple[str, Any]] = [("log/stray", b"x"), ("log/stray.json", b"x"), ("log/-1.json", b"{}")]
RECORDS += [("log/999999999999.json", b"{}"), ("log/1e3.json", b"{}"), (SECOND, b"[]"), (SECOND, b"\xff")]
RECORDS += [(SECOND, b"{" * 60_000), (SECOND, b" " * 10**6), (SECOND, b'{"kind": "other"}'), (SECOND, b'{"kind": [1]}')]
RECORDS += [
    (FIRST, {"manifest": "../../x"}),
    (FIRST, {"manifest": 3}),
    (FIRST, {"step": "1"}),
    (FIRST, {"sequence": -1}),
]
RECORDS += [(FIRST, {"manifest_bytes": value}) for value in (2**60, "9")]
RECORDS += [(FIRST, {"kind": None}), (FIRST, {"by": []})]


@pytest.mark.first_rows(5)
@THOROUGH
@pytest.mark.parametrize("number", range(len(RECORDS)))  # records would be names of tests of a megabyte
def test_the_log_of_a_store_may_hold_anything(number, thorough, whole, tmp_path):
    key, data = RECORDS[number]
    storage = LocalStorage(path=str(tmp_path / "bucket"), retries=0)
    with storage.connect() as objects:
        record = upload(CommitLog(objects), newest(whole))[0]
    changed = json.dumps({**vars(record), **data}).encode() if isinstance(data, dict) else data
    (tmp_path / "bucket" / key).write_bytes(changed)
    for command in COMMANDS[:5] if thorough else COMMANDS[number % 5 :][:1]:
        ends_in_words("checkpoint", *command, storage.address)
    resumes_in_words(tmp_path / "wiped", CheckpointTier(storage=storage))


@pytest.mark.parametrize("every", [59, *exhaustive(3)])
def test_every_place_of_a_manifest_in_a_store_may_hold_anything(every, whole, tmp_path):
    storage = LocalStorage(path=str(tmp_path / "bucket"), retries=0)
    with storage.connect() as objects:
        record = upload(CommitLog(objects), newest(whole))[0]
    manifest = json.loads((newest(whole).directory / MANIFEST).read_text())
    for number, path in enumerate(paths_in(manifest)):
        for value in VALUES[number % every :: every]:
            data = json.dumps(replaced(manifest, path, value)).encode()
            told = {**vars(record), "manifest": digest_of(data), "manifest_bytes": len(data)}
            (tmp_path / f"bucket/manifests/{digest_of(data)}.json").write_bytes(data)
            (tmp_path / "bucket/log/000000000001.json").write_text(json.dumps(told))
            ends_in_words("checkpoint", *COMMANDS[number % 5], storage.address)
            if number % 5 == 0:
                resumes_in_words(tmp_path / f"wiped/{number}", CheckpointTier(storage=storage))


# -- links --------------------------------------------------------------------------------------------------------


def test_a_link_in_place_of_a_file_or_of_a_checkpoint_takes_nothing_outside_along(copied, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("mine")
    os.symlink(outside, copied / "global_step_9")
    os.symlink(outside, copied / "staging/linked")
    (copied / "trash").mkdir(exist_ok=True)
    os.symlink(outside, copied / "trash/linked")
    weights = copied / "global_step_2/actor/config.json"
    weights.unlink()
    os.symlink(outside / "kept", weights)
    for command in COMMANDS:
        ends_in_words("checkpoint", *command, copied)
    assert "it is not a regular file" in ends_in_words("checkpoint", "verify", copied)
    with contextlib.suppress(VerlError):
        prune(CheckpointStore(copied), Retention(keep_last_n=1))
    with contextlib.suppress(VerlError), CheckpointStore(copied, run_id="later").begin(10):
        pass
    assert (outside / "kept").read_text() == "mine"


def test_parsing_says_what_is_wrong_and_never_how_python_fails():
    for data in (b"", b"{", b"[" * 10**5, b"\xff", b"1" * 10**5):
        with pytest.raises(ExternalInputError, match="it is not JSON"):
            parse_json(data)
