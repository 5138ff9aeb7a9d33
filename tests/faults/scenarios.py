"""What is done to a directory of checkpoints while faults strike, and what must hold afterwards."""

import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from checkpoint.rank_tensors import RankTensor, write_model, write_tensors

from verl.checkpoint.commit.rank_writer import PAGE_BYTES, FileImage, ImageSource, RankWriter
from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.checkpoint import Checkpoint, read_state
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.core.manifest import LogicalTensor
from verl.checkpoint.core.safetensors_format import lay_out
from verl.checkpoint.read.reader import CheckpointReader
from verl.checkpoint.remote.commit_log import CommitLog
from verl.checkpoint.remote.remote_store import RemoteStore
from verl.checkpoint.remote.transfer import pull, upload
from verl.checkpoint.retention import Retention, prune
from verl.checkpoint.save import save_executor
from verl.checkpoint.save.save_request import ExistingFile, SaveRequest
from verl.storage.config import LocalStorage

WEIGHT = np.arange(24, dtype=np.float32).reshape(4, 6) + 1
FROZEN = bytes(range(200))
TOKENIZER = b'{"never": "changes"}'


@contextmanager
def fast_directory() -> Iterator[Path]:
    """A directory in memory where there is one: thousands of syncs cost nothing there."""
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def save(store: CheckpointStore, step: int, version: int, tag: str | None = None) -> Checkpoint:
    """A small checkpoint with everything in it: shards, slices of two writers, files shared with an earlier one."""
    earlier = store.complete()
    with store.begin(step, tag, needed_bytes=4096, rank_names=["rank_0", "rank_1"]) as transaction:
        main = transaction.main
        main.write("actor/config.json", [json.dumps({"version": version}).encode()])
        whole = {"component": "actor", "dtype": "F32", "shape": WEIGHT.shape, "data": WEIGHT * version}
        write_model(main, [RankTensor(name=name, **whole) for name in ("first", "second")], WEIGHT.nbytes)
        if earlier:
            main.add_existing("actor/tokenizer.json", earlier[-1])
            main.add_existing("reference_model/frozen.bin", earlier[-1])
        else:
            main.write("actor/tokenizer.json", [TOKENIZER])
            main.write("reference_model/frozen.bin", [FROZEN[:100], FROZEN[100:]])
        reports = []
        for rank, columns in enumerate(np.split(WEIGHT * version, 2, axis=1)):
            part = RankTensor(
                component="optimizer", name="moment", dtype="F32", shape=WEIGHT.shape,
                start=(0, 3 * rank), extent=(4, 3), data=np.ascontiguousarray(columns),
            )  # fmt: skip
            participant = RankWriter(transaction.directory, f"rank_{rank}", store.disk)
            write_tensors(participant, f"optimizer/optim_state_rank_{rank}.safetensors", [part])
            reports.append(participant.report())
        return transaction.commit(reports, state={"version": version}, metrics={"version": float(version)})


def save_images(store: CheckpointStore, step: int, version: int, increment: bool = False) -> Checkpoint:
    """The same content as a trainer's writer saves it: from one piece of memory, past the page cache."""
    memory, images, tensors = bytearray(), [], []

    def place(path: str, *buffers: bytes, is_constant: bool = False) -> None:
        sizes = tuple(map(len, buffers))
        images.append(FileImage(path=path, begin=len(memory), sizes=sizes, is_constant=is_constant))
        memory.extend(b"".join(buffers))
        memory.extend(b"x" * (-len(memory) % PAGE_BYTES))

    place("actor/config.json", json.dumps({"version": version}).encode())
    place("actor/tokenizer.json", TOKENIZER, is_constant=True)
    for component, names in {"actor": ["first", "second"], "optimizer": ["moment"]}.items():
        path = f"{component}/model.safetensors"
        header, records = lay_out(path, [LogicalTensor.of_slice(component, x, "F32", WEIGHT.shape) for x in names])
        place(path, header, *((WEIGHT * version).tobytes() for _ in names))
        tensors += records
    request = SaveRequest(
        step=step, tag=None, num_bytes=len(memory), images=tuple(images), tensors=tuple(tensors),
        existing_files=(ExistingFile(path="reference_model/frozen.bin"),),
        state={"version": version}, increment=increment,
    )  # fmt: skip
    with patch.object(save_executor, "FEWEST_DIRECT_BYTES", 1):
        return store.open(save_executor.execute_save(store, request, page_aligned_view(memory)).name)


def save_increment(store: CheckpointStore, step: int, version: int) -> Checkpoint:
    """The same as what changed since the checkpoint before, which `save` or this has made."""
    if version == 1:
        return save(store, step, version)
    return save_images(store, step, version, increment=True)


def save_before_a_pull(store: CheckpointStore, step: int, version: int) -> Checkpoint:
    """Save; and have the version after it, saved on another machine, lie in a tier beside the directory."""
    checkpoint = save(store, step, version)
    elsewhere, bucket = store.directory.parent / "elsewhere", store.directory.parent / "bucket"
    for left in (elsewhere, bucket):
        shutil.rmtree(left, ignore_errors=True)
    shutil.copytree(store.directory, elsewhere, symlinks=True)
    with LocalStorage(path=str(bucket)).connect() as objects:
        upload(CommitLog(objects), save(CheckpointStore(elsewhere, "first"), step + 100, version + 1))
    return checkpoint


def pull_newest(store: CheckpointStore) -> Checkpoint:
    """Fetch it from there."""
    with LocalStorage(path=str(store.directory.parent / "bucket")).connect() as objects:
        tier = RemoteStore(objects)
        return pull(tier, tier.find(), store)


def page_aligned_view(content: bytes) -> ImageSource:
    memory = mmap.mmap(-1, len(content))
    memory[:] = bytes(content)
    return ImageSource(memoryview(memory))


def version_of(checkpoint: Checkpoint) -> int:
    """Which version a checkpoint holds, all of it; reads and hashes every byte."""
    reader = CheckpointReader(checkpoint)
    for entry in reader.files():
        reader.read(entry.path)
    versions = {json.loads(bytes(reader.read("actor/config.json")))["version"]}
    versions.add(read_state(FileSystem(), checkpoint)["version"])
    for component, name in [("actor", "first"), ("actor", "second"), ("optimizer", "moment")]:
        values = np.frombuffer(reader.tensor(component, name), np.float32).reshape(WEIGHT.shape) / WEIGHT
        versions |= {int(value) for value in np.unique(values)}
    assert len(versions) == 1, f"{checkpoint.name} mixes versions {versions}"
    assert bytes(reader.read("reference_model/frozen.bin")) == FROZEN
    return versions.pop()


@dataclass(frozen=True)
class Scenario:
    """Something done to a directory.

    Args:
        before: versions saved beforehand, at steps 100, 200, ...
        act: what is done.
        after: the version that is the newest once it is done.
        saves: whether it saves; else the staging directory of a dead process lies there.
        prepared_with: how what was there before is saved.
    """

    name: str
    before: int
    act: Callable[[CheckpointStore], object]
    after: int
    saves: bool = True
    prepared_with: Callable[[CheckpointStore, int, int], object] = save

    def prepare(self, root: Path) -> None:
        store = CheckpointStore(root, run_id="first")
        for version in range(1, self.before + 1):
            self.prepared_with(store, 100 * version, version)
        if not self.saves:
            abandoned = root / "staging" / "300-abandoned"
            abandoned.mkdir()
            (abandoned / "half").write_bytes(b"half")

    def __str__(self) -> str:
        return self.name


SCENARIOS = [
    Scenario("first save", 0, lambda store: save(store, 100, 1), 1),
    Scenario("save with links", 2, lambda store: save(store, 300, 3), 3),
    Scenario("same step again", 2, lambda store: save(store, 200, 3), 3),
    Scenario("save from memory", 2, lambda store: save_images(store, 300, 3), 3),
    Scenario("save of an increment", 2, lambda store: save_increment(store, 300, 3), 3, prepared_with=save_increment),
    Scenario("tagged save", 1, lambda store: save(store, 150, 2, tag="loss_0.12_step_150"), 2),
    Scenario("retention", 4, lambda store: prune(store, Retention(keep_last_n=2)), 4, saves=False),
    Scenario(
        "retention of increments",
        4,
        lambda store: prune(store, Retention(keep_last_n=2)),
        4,
        saves=False,
        prepared_with=save_increment,
    ),
    Scenario("pull from a store", 2, pull_newest, 3, prepared_with=save_before_a_pull),
]


def check(root: Path, scenario: Scenario, is_done: bool) -> list[str]:
    """What does not hold in a directory in which the scenario was interrupted, or done."""
    faults = []
    good, bad = CheckpointStore(root).survey("full")
    faults += [f"bad: {error}" for error in bad]
    versions = [version_of(checkpoint) for checkpoint in good]
    if len(versions) < min(2, scenario.before):
        faults.append(f"only {versions} are left of {scenario.before}")
    allowed = {scenario.after} if is_done else {scenario.before, scenario.after}
    if (versions[-1] if versions else 0) not in allowed:
        faults.append(f"the newest is version {versions[-1:]}, not one of {allowed}")
    return faults


def check_next_save(root: Path, disk: FileSystem | None = None, store: CheckpointStore | None = None) -> None:
    """A following save works, is the newest, and nothing is left over."""
    store = store or CheckpointStore(root, run_id="next", disk=disk)
    save(store, 1000, 9)
    assert version_of(CheckpointStore(root).newest()) == 9
    assert [path.name for path in (root / "staging").iterdir()] == []
    assert os.readlink(root / "latest") == "global_step_1000"


def scenarios(*in_part: str) -> list[Any]:
    """Rows of a scenario and whether every fault strikes it, which `make exhaustive` alone shows of each of them."""
    part = [pytest.param(one, False, id=str(one)) for one in SCENARIOS if one.name in in_part]
    return part + [pytest.param(one, True, id=f"{one}, whole", marks=pytest.mark.exhaustive) for one in SCENARIOS]
