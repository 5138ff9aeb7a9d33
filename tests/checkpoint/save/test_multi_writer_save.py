"""Saves that several participants write: reports, failures, late ones, and who writes what."""

import os

import pytest
import torch
from faults.disks import KILLED, KillingDisk
from faults.scenarios import page_aligned_view

from verl.checkpoint.commit.rank_writer import FileImage
from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.core.manifest import LogicalTensor, SavedSlice
from verl.checkpoint.read.reader import CheckpointReader, open_verified
from verl.checkpoint.save.async_writer import CheckpointWriter
from verl.checkpoint.save.save_executor import execute_save
from verl.checkpoint.save.save_request import (
    MultiWriterSave,
    SaveRequest,
    open_report_directory,
    sees_nonce,
    submit_failure,
)
from verl.checkpoint.save.snapshot import PartialTensor, SavedComponent
from verl.errors import CheckpointIncomplete
from verl.ops.resharding.layout import Layout, Mesh, TensorLayout, volume
from verl.workers.rank_checkpoint import assign_slices

CONTENT = b'{"version": 1}'
VALUES = torch.arange(12.0).view(4, 3)


class Two:
    """A driver and two participants, each with a writer, in one process."""

    def __init__(self, directory, late_s: float = 20.0):
        self.store = CheckpointStore(directory, run_id="r")
        self.claim, self.late_s = self.store.claim_directory(), late_s
        self.main = CheckpointWriter(self.store)

    def staged(self, step: int) -> MultiWriterSave:
        """A save that is begun, of which nothing is written."""
        names = ("rank_0", "rank_1")
        self.transaction = self.store.begin(step, rank_names=names)
        open_report_directory(self.store.disk, self.transaction.directory, "n")
        return MultiWriterSave(directory=self.transaction.directory, name="main", others=names, late_s=self.late_s)

    def begin(self, step: int) -> MultiWriterSave:
        joint = self.staged(step)
        state = SavedComponent(files={"state.json": b"{}"})
        self.main.save(SaveRequest(step=step, components={"scheduler": state}, multi_writer=joint), self.transaction)
        return joint

    def write(self, joint: MultiWriterSave, rank: int, offset: int = 0) -> None:
        """A participant's half of a tensor."""
        start = 2 * rank + offset
        half = PartialTensor(tensor=VALUES[start : start + 2], shape=(4, 3), start=(start, 0))
        component = SavedComponent(tensors={"m": half}, file=f"optim_state_rank_{rank}.safetensors")
        own = MultiWriterSave(directory=joint.directory, name=f"rank_{rank}")
        request = SaveRequest(step=1, components={"optimizer": component}, multi_writer=own)
        store = CheckpointStore(self.store.directory, "r", claim=self.claim)
        with CheckpointWriter(store, mode="sync") as writer:
            writer.save(request)
            writer.drain()


@pytest.fixture
def two(tmp_path):
    made = Two(tmp_path / "c")
    yield made
    made.main.close()


def test_what_all_have_reported_is_published_and_the_reports_are_gone(two):
    joint = two.begin(1)
    for rank in (1, 0):
        two.write(joint, rank)
    (outcome,) = two.main.drain()
    checkpoint = two.store.newest()
    assert outcome.name == checkpoint.name == "global_step_1"
    found = CheckpointReader(checkpoint).tensor("optimizer", "m")
    assert torch.equal(torch.frombuffer(bytearray(found), dtype=torch.float32).view(4, 3), VALUES)
    assert sorted(path.name for path in checkpoint.directory.iterdir() if path.is_dir()) == ["optimizer", "scheduler"]
    assert outcome.num_bytes >= sum(e.size for e in checkpoint.manifest.files if e.path.startswith("optimizer"))


@pytest.mark.first_rows(1)
@pytest.mark.parametrize(
    ("happens", "message"),
    [
        ("late", "rank_1: it has not reported within 0.3 s"),
        ("lost", "rank_1: could not write its part: the worker died"),
        ("wrong half", "overlap"),
    ],
)
def test_a_participant_that_is_late_lost_or_wrong_ends_the_save_and_nothing_else(happens, message, tmp_path):
    two = Two(tmp_path / "c", late_s=0.3 if happens == "late" else 20.0)
    joint = two.begin(1)
    two.write(joint, 0)
    if happens == "lost":
        submit_failure(FileSystem(), joint.directory, "rank_1", "the worker died")
    elif happens == "wrong half":
        two.write(joint, 1, offset=-1)
    with pytest.raises(CheckpointIncomplete, match=message):
        two.main.drain()
    assert two.store.complete() == []
    assert not joint.directory.exists()
    joint = two.begin(2)  # and the next one is whole
    for rank in (0, 1):
        two.write(joint, rank)
    two.main.drain()
    assert two.store.newest().step == 2
    two.main.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "stride"),
    [("before", 4), *(pytest.param(moment, 1, marks=pytest.mark.exhaustive) for moment in ("before", "after"))],
)
def test_a_writer_that_is_killed_anywhere_is_followed_by_one_that_publishes_the_same(moment, stride, tmp_path):
    """Also where reports were read, or the rename was made, before the kill."""
    killed = 0
    for at in range(0, 1000, stride):
        two = Two(tmp_path / f"c{at}")
        two.main.close()
        joint = two.staged(1)
        image = FileImage(path="scheduler/state.json", begin=0, sizes=(len(CONTENT),))
        plan = SaveRequest(step=1, tag=None, num_bytes=len(CONTENT), images=(image,), tensors=(), multi_writer=joint)
        for rank in (0, 1):
            two.write(joint, rank)
        child = os.fork()
        if not child:
            store = CheckpointStore(two.store.directory, "r", KillingDisk(at, moment), two.claim)
            execute_save(store, plan, page_aligned_view(CONTENT))
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0:
            break
        assert status == KILLED
        killed += 1
        store = CheckpointStore(two.store.directory, "r", claim=two.claim)
        report = execute_save(store, plan, page_aligned_view(CONTENT))
        assert report.name == "global_step_1"
        open_verified(store.disk, store.directory / "global_step_1", "full")
        assert not joint.directory.exists()
        assert [one.step for one in store.complete()] == [1]
    assert killed > 15 // stride


def test_a_report_is_kept_and_a_failure_after_it_changes_nothing(tmp_path):
    two = Two(tmp_path / "c")
    joint = two.begin(1)
    two.write(joint, 0)
    submit_failure(FileSystem(), joint.directory, "rank_0", "too late")
    two.write(joint, 1)
    two.main.drain()
    assert two.store.newest().step == 1
    two.main.close()


def test_the_same_path_elsewhere_is_not_taken_for_the_drivers_directory(tmp_path):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        open_report_directory(FileSystem(), tmp_path / name, name)
    assert sees_nonce(FileSystem(), tmp_path / "here", "here")
    assert not sees_nonce(FileSystem(), tmp_path / "there", "here")
    assert not sees_nonce(FileSystem(), tmp_path / "nowhere", "here")


# Who writes what

SHAPES = {"embedding": (50, 8), "weight": (8, 6), "odd": (3, 5), "bias": (7,), "step": ()}
SPLITS = {"sharded": (("shard", 0),), "both": (("shard", 0), ("tensor", 1)), "whole": ()}


@pytest.mark.parametrize("sizes", [(1, 4, 1), (4, 1, 1), (2, 2, 1), (1, 2, 2)])
@pytest.mark.parametrize("split", list(SPLITS))
def test_every_element_is_written_once_by_one_who_holds_it_and_by_all_alike(sizes, split):
    mesh = Mesh(tuple(zip(("replicate", "shard", "tensor"), sizes)))
    cuts = {name: tuple(cut for cut in SPLITS[split] if cut[1] < len(shape)) for name, shape in SHAPES.items()}
    layout = Layout(mesh, {name: TensorLayout(shape, cuts[name]) for name, shape in SHAPES.items()})
    found = assign_slices(layout)
    for name, shape in SHAPES.items():
        slices = [
            SavedSlice(file="f", offset=0, start=tuple(a for a, _ in s.box), extent=tuple(b - a for a, b in s.box))
            for s in found
            if s.name == name
        ]
        assert LogicalTensor(component="o", name=name, dtype="F32", shape=shape, slices=tuple(slices)).faults() == []
    assert len({(share.name, share.rank) for share in found}) == len(found)  # a file holds a name once
    for share in found:
        held = layout.holds(share.rank, share.name)
        assert all(a <= c and d <= b for (a, b), (c, d) in zip(held, share.box))
    load = [sum(volume(share.box) for share in found if share.rank == rank) for rank in range(mesh.size)]
    assert max(load) <= 1.5 * sum(load) / mesh.size
    backwards = Layout(mesh, dict(reversed(layout.tensors.items())))
    assert set(assign_slices(backwards)) == set(found)
