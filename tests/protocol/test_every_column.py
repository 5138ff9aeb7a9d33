"""Every kind of tensor and column: equal to its own copy and to nothing else, and the same after every journey."""

import contextlib
import copy
import datetime
import pickle
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from any_batches import (
    DTYPES,
    NAMES,
    any_batches,
    assert_identical,
    exact,
    objects,
    of_any_kind,
    rows_of,
    tensors,
    values,
)
from batches import rollout
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from refusals import refusal
from replay.rows_here import scored_rows
from safetensors.torch import load_file

from verl.cluster import shm_channel
from verl.cluster.shm_channel import deserialize, serialize
from verl.errors import DataProtoValidationError
from verl.protocol import DataProto
from verl.replay.arrow_rows import DeviceRows, SelectedRows, rows_from_arrow, rows_to_arrow
from verl.utils.child_process.channel import Channel

few = settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))  # type: ignore[arg-type]


def saved(data: DataProto, directory: Path) -> DataProto:
    data.save(directory / "deep/rows.safetensors")
    return DataProto.load(directory / "deep/rows.safetensors")


def journeys(data: DataProto, directory: Path):
    yield "pickle", pickle.loads(pickle.dumps(data, 5))
    yield "old pickle", pickle.loads(pickle.dumps(data, 2))
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(data, 5, buffer_callback=buffers.append)
    yield "pickle beside its buffers", pickle.loads(head, buffers=[bytes(buffer.raw()) for buffer in buffers])
    yield "file", saved(data, directory)
    yield "parcel", deserialize(serialize({"batch": data}))["batch"]
    yield "copy", copy.copy(data)
    yield "deepcopy", copy.deepcopy(data)
    yield "chunks", DataProto.concat(data.chunk(2))
    yield "every row", data[torch.arange(len(data))]
    yield "there and back", data[::-1][::-1]


@few
@given(any_batches())
def test_a_batch_is_the_same_after_every_journey_and_joins_with_what_arrives(tmp_path_factory, data):
    for journey, found in journeys(data, tmp_path_factory.mktemp("batch")):
        assert_identical(found, data, journey)
        assert all(found.producer(name) == data.producer(name) for name in data.batch), journey
        joined = data.union(found)
        assert_identical(joined, data, journey)
        assert all(joined[name] is data[name] for name in [*data.batch, *data.non_tensor_batch, *data.ragged]), journey


@settings(few, max_examples=20)
@given(any_batches())
def test_a_batch_is_the_same_behind_shared_memory(monkeypatch, data):
    """Through a connection of two processes, whose tensors lie in a shared block however few they are."""
    monkeypatch.setattr(shm_channel, "SMALL", 1)
    here, there = (Channel(end) for end in socket.socketpair())
    with contextlib.closing(here), contextlib.closing(there):
        shm_channel.send(here, shm_channel.pack(data))
        found = shm_channel.receive(there)
        assert_identical(found, data)
        assert_identical(data.union(found), data)


@few
@given(any_batches(min_rows=1), st.data())
def test_rows_are_chosen_repeated_and_joined_as_a_list_of_them_would_be(data, draw):
    rows = draw.draw(st.lists(st.integers(0, len(data) - 1), max_size=6))
    for found, wanted in [(data[rows], rows), (data.repeat(2), [r for r in range(len(data)) for _ in range(2)])]:
        for name in data.batch:
            assert exact(found[name]) == exact(torch.stack([data[name][r] for r in wanted])) if wanted else True, name
        for name, column in data.non_tensor_batch.items():
            assert exact(found[name].tolist()) == exact([column[r] for r in wanted])
        for name, field in data.ragged.items():
            assert [exact(x) for x in rows_of(found[name])] == [exact(field[r]) for r in wanted]


def copied(value):
    """A copy; of a tensor that a computation has made, which torch does not copy, the value itself."""
    try:
        return copy.deepcopy(value)
    except RuntimeError:
        return value


@few
@given(st.data(), st.integers(1, 4))
def test_a_column_that_differs_in_one_row_is_refused_with_the_row_and_both_values(draw, rows):
    column = draw.draw(st.lists(values(), min_size=rows, max_size=rows))
    row, other = draw.draw(st.integers(0, rows - 1)), draw.draw(values())
    assume(exact(column[row]) != exact(other))
    changed = [other if number == row else copied(value) for number, value in enumerate(column)]
    mine, theirs = (DataProto.from_dict(non_tensors={"x": objects(some)}) for some in (column, changed))
    for one, another in ((mine, theirs), (theirs, mine)):
        with refusal("x", row, kind=DataProtoValidationError, varies=True):
            one.union(another)


@few
@given(st.data(), st.integers(1, 4))
def test_a_tensor_that_differs_in_one_entry_is_refused_with_the_row(draw, rows):
    tensor = draw.draw(tensors(rows))
    assume(tensor.numel())
    changed = tensor.detach().clone(memory_format=torch.contiguous_format)
    place = tuple(draw.draw(st.integers(0, size - 1)) for size in tensor.shape)
    changed[place] = ~changed[place] if tensor.dtype == torch.bool else torch.tensor(7.0).to(tensor.dtype)
    mine, theirs = DataProto.from_dict({"x": tensor}), DataProto.from_dict({"x": changed})
    with refusal("x", place[0], kind=DataProtoValidationError, varies=True):
        mine.union(theirs)


@pytest.mark.exhaustive
@few
@given(st.data())
def test_rows_of_the_replay_buffer_are_the_same(draw):
    rows = scored_rows(4, seed=draw.draw(st.integers(0, 3)))
    names = draw.draw(st.lists(st.sampled_from([*NAMES, "x"]), max_size=3, unique=True))
    extra = {n: draw.draw(tensors(4) | st.lists(values(), min_size=4, max_size=4).map(objects)) for n in names}
    batch = rows.union(of_any_kind(extra))
    index = dict.fromkeys(("group", "step", "score", "advantage"), np.zeros(4))
    record = rows_to_arrow(batch, index)  # type: ignore[arg-type]
    chosen, on_device = np.array([2, 0]), DeviceRows(record, torch.device("cpu"))
    for found, wanted in [
        (rows_from_arrow([SelectedRows(record, chosen)], 0), batch[[2, 0]]),
        (rows_from_arrow([SelectedRows(record.slice(2), np.arange(2))], 0), batch[2:]),
        (rows_from_arrow([on_device.select(chosen)], 0), batch[[2, 0]]),
    ]:
        for name in extra:
            assert exact(found[name].tolist() if name in batch.non_tensor_batch else found[name]) == exact(
                wanted[name].tolist() if name in batch.non_tensor_batch else wanted[name]
            )


# What was taken for equal, and for unequal


def column(*rows: Any) -> DataProto:
    return DataProto.from_dict(non_tensors={"x": objects(list(rows))})


UNEQUAL = [
    (True, 1), (1, 1.0), (True, 1.0), ("1", 1), (None, 0), (None, float("nan")), ([1, [2]], [1, [True]]), ([1], [1, 1]),
    ({"a": 1}, {"a": True}), ({"a": 1}, {"a": 1, "b": None}), ({"a": 1}, {"b": 1}), ([], {}), (float("nan"), 0.0),
    ([1.0, float("nan")], [float("nan"), 1.0]),
]  # fmt: skip


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(("one", "other"), UNEQUAL, ids=map(repr, UNEQUAL))
def test_values_of_another_kind_shape_or_number_are_not_the_same(one, other, swap):
    one, other = (other, one) if swap else (one, other)
    with refusal("x", 1, kind=DataProtoValidationError):
        column("same", one).union(column("same", other))
    with refusal(kind=DataProtoValidationError, value="`t`"):
        DataProto.from_dict(meta_info={"t": [one]}).union(DataProto.from_dict(meta_info={"t": [other]}))


def test_equal_values_join_whatever_object_they_are():
    rows = [[n, str(n), {"a": n / 3, "b": [None, float("nan")]}] for n in range(100)]
    ours, theirs = column(*rows), column(*pickle.loads(pickle.dumps(rows)))
    assert ours.union(theirs)["x"] is ours["x"]
    DataProto.from_dict(meta_info={"t": rows}).union(DataProto.from_dict(meta_info={"t": copy.deepcopy(rows)}))


@pytest.mark.parametrize("value", [torch.ones(2), np.ones(2), (1, "a"), Path("a"), datetime.date(2020, 1, 1)], ids=repr)
def test_facts_may_be_other_objects_that_say_whether_they_are_equal(value):
    ours, theirs = (DataProto.from_dict(meta_info={"t": v}) for v in (value, copy.deepcopy(value)))
    ours.union(theirs)
    with refusal(kind=DataProtoValidationError, value="`t`"):
        ours.union(DataProto.from_dict(meta_info={"t": 3}))


def test_numbers_and_arrays_of_numpy_become_those_of_python_and_tuples_lists():
    given = [np.int8(1), np.float64(1.5), np.bool_(True), np.str_("a"), np.arange(2), ({"a": np.float32(0.5)},)]
    column_of_them = column(*given)["x"].tolist()
    assert exact(column_of_them) == exact([1, 1.5, True, "a", [0, 1], [{"a": 0.5}]])
    assert DataProto.from_dict(non_tensors={"x": np.ones((2, 1))})["x"].tolist() == [[1.0], [1.0]]


contains_itself: list[Any] = [1]
contains_itself.append(contains_itself)
REFUSED = {  # value, and the place of what is refused
    "tensor": (torch.ones(2), ""),
    "bytes": ([b"a"], "[0]"),
    "complex": (1j, ""),
    "set": ({"a": [1, {2}]}, "['a'][1]"),
    "keys": ([{1: 2}], "[0]"),
    "date": (datetime.date(2020, 1, 1), ""),
    "date of NumPy": (np.datetime64("2020-01-01"), ""),
    "dates of NumPy": (np.array(["NaT"], "M8[s]"), ""),
    "object": (Path("a"), ""),
    "function": ({"f": len}, "['f']"),
    "itself": (contains_itself, ""),
}


@pytest.mark.parametrize(("value", "place"), REFUSED.values(), ids=REFUSED)
def test_a_column_of_other_values_is_refused_with_row_place_and_kind(value, place):
    with refusal("x", 1, value=f"x[1]{place}", kind=DataProtoValidationError):
        column("a", value)


def test_a_column_of_other_kind_or_length_is_refused_without_a_row():
    with refusal("x", kind=DataProtoValidationError) as caught:
        column(1).union(column(1, 1))
    assert "offending row" not in str(caught.value)


# What travels


def test_slices_and_chunks_share_the_memory_of_the_batch():
    data = rollout(6)
    assert data[2:4]["values"].data_ptr() == data["values"][2:].data_ptr()
    assert data.union(DataProto())["values"] is data["values"]
    assert data.to("cpu")["values"] is data["values"]


def test_what_arrives_is_writable(tmp_path):
    data = DataProto.from_dict({"x": torch.ones(2, 3).t()})
    for again in (pickle.loads(pickle.dumps(data, 5)), saved(data, tmp_path), copy.copy(data)):
        again["x"].zero_()
        assert not again["x"].any()


def test_no_pickle_is_in_the_file_and_nothing_unfinished_stays(tmp_path):
    rollout().save(tmp_path / "rows")
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]
    assert "values" in load_file(tmp_path / "rows")


def test_a_missing_foreign_or_damaged_file_is_refused_by_name(tmp_path):
    with refusal(kind=DataProtoValidationError, value=tmp_path / "rows"):
        DataProto.load(tmp_path / "rows")
    rollout().save(tmp_path / "whole")
    (tmp_path / "cut").write_bytes((tmp_path / "whole").read_bytes()[:-10])
    (tmp_path / "foreign").write_bytes(b"PK not ours")
    for name in ("cut", "foreign"):
        with refusal(kind=DataProtoValidationError, value=tmp_path / name):
            DataProto.load(tmp_path / name)


def test_a_part_weighs_what_its_rows_do_and_no_more():
    big = torch.zeros(10_000, 100)
    held = DataProto.from_dict(
        {"x": big, "t": big.T.contiguous().T, "e": torch.zeros(1, 100).expand(10_000, 100)}, {"list": big.tolist()}
    )
    part = held[5:7]
    nbytes = 2 * 100 * (4 * 3 + 9)
    assert len(pickle.dumps(part)) < nbytes + 6000
    assert serialize(part).num_bytes < nbytes + 6000
    assert_identical(copy.deepcopy(part), part)


def test_a_fact_or_a_changed_value_that_json_cannot_hold_is_named_when_it_is_saved(tmp_path):
    for value in ({1}, {1: 2}, [lambda: 0], contains_itself, torch.eye(2)):
        with refusal(kind=DataProtoValidationError, value="meta_info"):
            DataProto.from_dict(meta_info={"t": value}).save(tmp_path / "rows")
    changed = scored_rows(2).union(column("a", []))
    changed["x"][1].append({1})
    with refusal(kind=DataProtoValidationError, value="set"):
        changed.save(tmp_path / "rows")
    with refusal(kind=DataProtoValidationError, value="row 1 of the columns ['x'][0]"):
        rows_to_arrow(changed, dict.fromkeys(("group", "step", "score", "advantage"), np.zeros(2)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_copy_has_memory_and_facts_of_its_own_and_requires_gradients_where_its_original_does(dtype):
    x = torch.ones(3, 4, dtype=torch.float32).to(dtype)[::2].T
    x = x.detach().requires_grad_() if dtype == torch.float32 else x
    data = DataProto.from_dict({"x": x.T}, {"c": [[1], [2]]}, {"m": [1]})
    shallow, deep = copy.copy(data), copy.deepcopy(data)
    shallow.meta_info["new"] = 1
    deep["c"][0].append(3)
    deep.meta_info["m"].append(2)
    assert data.meta_info == {"m": [1]}
    assert data["c"].tolist() == [[1], [2]]
    assert shallow["x"] is data["x"]
    assert deep["x"].requires_grad == data["x"].requires_grad
    assert deep["x"].data_ptr() != data["x"].data_ptr()


# What is not a field, and no index


def test_tensors_that_are_no_rows_of_numbers_are_refused_when_a_batch_is_made():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    others = [torch.empty(2, dtype=kind) for kind in (torch.uint4, torch.uint16, torch.complex64)]  # type: ignore[attr-defined]
    for tensor in (torch.eye(2).to_sparse(), nested, *others):
        with refusal("x", kind=DataProtoValidationError):
            DataProto.from_dict({"x": tensor})
    for name in (3, None, "\ud800"):
        with pytest.raises(DataProtoValidationError):
            DataProto.from_dict(non_tensors={name: [1]})  # type: ignore[arg-type]


@pytest.mark.parametrize("key", [True, np.bool_(True), torch.tensor(1.5), np.float64(1.0), torch.tensor(True)])
def test_what_is_no_row_number_is_refused(key):
    with pytest.raises(DataProtoValidationError):
        column(1, 2)[key]


def test_indices_of_any_array_choose_rows():
    data = column(*"abc")
    assert data[np.arange(3)[::-1]]["x"].tolist() == ["c", "b", "a"]
    assert data[np.array([2, 0], dtype=">i4")]["x"].tolist() == ["c", "a"]
    assert data[objects([np.int64(1), 2])]["x"].tolist() == ["b", "c"]
    assert data[range(2)]["x"].tolist() == ["a", "b"]
    for empty in (
        torch.zeros(0, dtype=torch.bool),
        np.zeros((0, 2), dtype=np.int64),
        objects(["a"]),
        ["a"],
        objects([1.5]),
    ):
        with pytest.raises(DataProtoValidationError):
            data[empty]  # type: ignore[arg-type]


def test_one_name_may_stand_for_a_list_of_one():
    data = DataProto.from_dict({"values": torch.zeros(1, 1), "v": torch.zeros(1)}, {"answer": ["a"]})
    assert list(data.select("values", "answer").batch) == ["values"]
    assert list(data.pop("values").batch) == ["values"]
