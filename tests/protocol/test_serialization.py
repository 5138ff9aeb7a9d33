"""A batch travels to other processes and to the disk, without pickle on the disk."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
import torch
from batches import assert_same, batches, rollout
from hypothesis import given, settings
from safetensors.torch import save_file

from verl.errors import DataProtoValidationError
from verl.protocol import DataProto


@settings(deadline=None, max_examples=40)
@given(batches())
def test_a_batch_survives_pickling_and_the_disk(tmp_path_factory, data):
    assert_same(pickle.loads(pickle.dumps(data)), data)
    path = tmp_path_factory.mktemp("batch") / "deep" / "rows.safetensors"
    data.save(path)
    again = DataProto.load(path)
    assert_same(again, data)
    assert again.producer("values") == data.producer("values")


def test_slices_and_chunks_share_the_memory_of_the_batch():
    data = rollout(6)
    assert data[2:4]["values"].data_ptr() == data["values"][2:].data_ptr()
    assert data.union(DataProto())["values"] is data["values"]
    assert data.to("cpu")["values"] is data["values"]


def test_a_part_weighs_its_share_when_pickled():
    data = DataProto.from_dict({"hidden": torch.zeros(1000, 100)})
    assert len(pickle.dumps(data[:10])) < 10_000


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.int64, torch.uint8, torch.float8_e4m3fn]
)
def test_every_dtype_travels_and_arrives_writable(dtype, tmp_path):
    tensor = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    data = DataProto.from_dict({"x": tensor.t()})
    data.save(tmp_path / "x")
    for again in (pickle.loads(pickle.dumps(data, 5)), DataProto.load(tmp_path / "x"), copy.copy(data)):
        assert again["x"].dtype == dtype
        assert torch.equal(again["x"].double(), tensor.t().double())
        again["x"].zero_()


def test_no_pickle_is_in_the_file_and_nothing_unfinished_stays(tmp_path):
    rollout().save(tmp_path / "rows")
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]
    from safetensors.torch import load_file

    assert "values" in load_file(tmp_path / "rows")


@pytest.mark.parametrize(
    ("columns", "meta", "place"),
    [
        ({"tree": ["a", {"x": {1, 2}}]}, {}, r"column `tree`\[1\]\['x'\] is a set"),
        ({"tree": [{1: 2}]}, {}, r"column `tree`\[0\] is a dict whose keys"),
        ({}, {"fn": print}, r"meta_info\['fn'\] is a builtin_function_or_method"),
    ],
)
def test_what_json_cannot_hold_is_named_by_its_place_and_nothing_is_written(columns, meta, place, tmp_path):
    with pytest.raises(DataProtoValidationError, match=place):
        DataProto.from_dict(non_tensors=columns, meta_info=meta).save(tmp_path / "rows")
    assert not list(tmp_path.iterdir())


def test_what_json_has_no_form_for_comes_back_with_its_type(tmp_path):
    row = [np.float32(0.5), np.arange(2, dtype="i2"), (1, b"x"), 1j, torch.ones(2, dtype=torch.bfloat16)]
    DataProto.from_dict(non_tensors={"n": [row]}, meta_info={"t": (1, 2)}).save(tmp_path / "rows")
    again = DataProto.load(tmp_path / "rows")
    found = again["n"][0]
    assert [type(x) for x in found] == [np.float32, np.ndarray, tuple, complex, torch.Tensor]
    assert (found[0], found[1].tolist(), found[1].dtype, found[2], found[3]) == (0.5, [0, 1], np.int16, (1, b"x"), 1j)
    assert found[4].dtype == torch.bfloat16
    assert again.meta_info == {"t": (1, 2)}


def test_a_file_of_an_earlier_version_is_read(tmp_path):
    """Whose columns and producers lay in objects, and whose fields all had their own names."""
    rest = {
        "columns": {"answer": ["a", None]},
        "meta_info": {"step": 3},
        "sources": {"x": ["made", 1, "here.py"], "answer": ["made", 1, "here.py"]},
        "order": ["x"],
    }
    text = torch.from_numpy(np.frombuffer(bytearray(json.dumps(rest).encode()), dtype=np.uint8))
    save_file({"x": torch.tensor([1.0, 2.0]), "__rest__": text}, tmp_path / "rows")
    found = DataProto.load(tmp_path / "rows")
    assert (found["x"].tolist(), found["answer"].tolist(), found.meta_info) == ([1.0, 2.0], ["a", None], {"step": 3})
    assert found.producer("answer").function == "made"


def test_a_missing_foreign_or_damaged_file_is_refused_by_name(tmp_path):
    with pytest.raises(DataProtoValidationError, match=r"no saved batch at .*rows"):
        DataProto.load(tmp_path / "rows")
    rollout().save(tmp_path / "whole")
    (tmp_path / "cut").write_bytes((tmp_path / "whole").read_bytes()[:-10])
    (tmp_path / "foreign").write_bytes(b"PK not ours")
    for name in ("cut", "foreign"):
        with pytest.raises(DataProtoValidationError, match=f"{name} is not a batch"):
            DataProto.load(tmp_path / name)
