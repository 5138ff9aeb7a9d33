"""Two checkpoints differ in what differs between them, and in nothing else."""

from __future__ import annotations

import json

import numpy as np
import pytest
from checkpoint.rank_tensors import RankTensor, write_tensors

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.checkpoint import Checkpoint
from verl.checkpoint.core.manifest import LogicalTensor, SavedSlice
from verl.checkpoint.read.compare import CheckpointDifference, compare

VALUES = np.arange(12, dtype=np.float32).reshape(4, 3)


def saved(directory, step=1, values=VALUES, num_writers=1, dtype="F32", files=None, state=None) -> Checkpoint:
    """A tensor `actor/weight`, cut by rows among writers, and some files."""
    store = CheckpointStore(directory)
    with store.begin(step) as transaction:
        first = 0
        for rank, rows in enumerate(np.array_split(values, num_writers)):
            part = RankTensor(
                component="actor", name="weight", dtype=dtype, shape=values.shape, start=(first, 0),
                extent=rows.shape, data=np.ascontiguousarray(rows),
            )  # fmt: skip
            write_tensors(transaction.main, f"actor/part_{rank}.safetensors", [part])
            first += len(rows)
        for path, content in (files or {}).items():
            transaction.main.write(path, [content])
        return transaction.commit(state=state or {})


def found(differences: list[CheckpointDifference]) -> list[tuple]:
    return [(d.kind, f"{d.component}/{d.name}", d.first, d.second) for d in differences]


def test_the_same_content_does_not_differ_however_it_was_cut(tmp_path):
    whole = saved(tmp_path / "a")
    assert compare(whole, whole) == []
    for num_writers in (1, 2, 4):
        cut = saved(tmp_path / str(num_writers), num_writers=num_writers)
        assert compare(whole, cut) == compare(cut, whole) == []


@pytest.mark.parametrize("num_writers", [1, 3])
def test_a_changed_element_names_its_tensor_and_says_by_how_much(num_writers, tmp_path):
    other = VALUES.copy()
    other[3, 1] -= 2.5
    one, two = saved(tmp_path / "a"), saved(tmp_path / "b", values=other, num_writers=num_writers)
    assert found(compare(one, two)) == [("tensor", "actor/weight", "F32[4, 3]", "other values")]
    assert compare(one, two)[0].max_abs is None
    assert compare(one, two, numbers=True)[0].max_abs == 2.5


def test_a_tensor_that_shares_a_leaf_with_another_differs_alone(tmp_path):
    """As in a file that was not written tensor by tensor."""

    def shared_leaf(directory, second: bytes) -> Checkpoint:
        store = CheckpointStore(directory)
        with store.begin(1) as transaction:
            transaction.main.write("c/both.bin", [bytes(4) + second])
            for number, name in enumerate(("one", "two")):
                part = SavedSlice(file="c/both.bin", offset=4 * number, start=(0,), extent=(4,))
                transaction.main.record(LogicalTensor(component="c", name=name, dtype="U8", shape=(4,), slices=(part,)))
            return transaction.commit()

    differences = compare(shared_leaf(tmp_path / "a", b"1234"), shared_leaf(tmp_path / "b", b"1235"))
    assert [difference.name for difference in differences] == ["two"]


def test_numbers_that_are_none_are_told_apart_from_numbers(tmp_path):
    special = VALUES.copy()
    special[0] = [np.inf, -np.inf, np.nan]
    moved = special.copy()
    moved[1, 0] += 1
    one, two = saved(tmp_path / "a", values=special), saved(tmp_path / "b", values=moved)
    assert compare(one, two, numbers=True)[0].max_abs == 1
    three = saved(tmp_path / "c")
    assert np.isnan(compare(one, three, numbers=True)[0].max_abs)
    special[0, 2] = 2
    assert compare(saved(tmp_path / "d", values=special), three, numbers=True)[0].max_abs == np.inf


def test_another_type_or_shape_is_said(tmp_path):
    one, two = saved(tmp_path / "a"), saved(tmp_path / "b", values=VALUES.astype(np.float16), dtype="F16")
    three = saved(tmp_path / "c", values=VALUES[:2])
    assert found(compare(one, two)) == [("tensor", "actor/weight", "F32[4, 3]", "F16[4, 3]")]
    assert compare(one, two, numbers=True)[0].max_abs == 0
    assert found(compare(one, three, numbers=True)) == [("tensor", "actor/weight", "F32[4, 3]", "F32[2, 3]")]


def test_files_differ_by_digest_and_settings_by_key(tmp_path):
    def files(rank: int, vocabulary: bytes) -> dict[str, bytes]:
        return {
            "actor/config.json": json.dumps({"hidden": 8, "rope": {"theta": rank}}).encode(),
            "config.yaml": f"trainer:\n  group_size: {rank}\n  seed: 1\n".encode(),
            "actor/vocabulary.txt": vocabulary,
            "actor/broken.json": b"{" * rank,
        }

    one, two = saved(tmp_path / "a", files=files(1, b"a")), saved(tmp_path / "b", files=files(2, b"b") | {"more": b""})
    differences = {name: (kind, a, b) for kind, name, a, b in found(compare(one, two))}
    assert differences["actor/config.json/rope.theta"] == ("key", 1, 2)
    assert differences["config.yaml/trainer.group_size"] == ("key", 1, 2)
    assert differences["actor/vocabulary.txt"][0] == "file"
    assert differences["/more"][:2] == ("file", "absent")
    assert differences["actor/broken.json/"][0] == "key"
    assert len(differences) == 5


def test_state_differs_by_key_but_not_by_what_no_two_saves_share(tmp_path):
    one = saved(tmp_path / "a", state={"epoch": 1, "loss_history": [1], "lineage": {"parent": "x"}, "wall_clock": 1})
    two = saved(tmp_path / "b", step=2, state={"loss_history": [2], "lineage": {"parent": "y"}, "wall_clock": 2})
    assert [(d.name, d.first, d.second) for d in compare(one, two)] == [
        ("epoch", 1, "absent"), ("lineage.parent", "x", "y"), ("step", 1, 2),
    ]  # fmt: skip
