"""A batch travels to other processes and to the disk, without pickle on the disk."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from batches import assert_same, batches, rollout
from hypothesis import given, settings

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


def test_a_missing_foreign_or_damaged_file_is_refused_by_name(tmp_path):
    with pytest.raises(DataProtoValidationError, match=r"no saved batch at .*rows"):
        DataProto.load(tmp_path / "rows")
    rollout().save(tmp_path / "whole")
    (tmp_path / "cut").write_bytes((tmp_path / "whole").read_bytes()[:-10])
    (tmp_path / "foreign").write_bytes(b"PK not ours")
    for name in ("cut", "foreign"):
        with pytest.raises(DataProtoValidationError, match=f"{name} is not a batch"):
            DataProto.load(tmp_path / name)
