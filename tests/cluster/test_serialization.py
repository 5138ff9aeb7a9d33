"""What is sent to another process arrives as it was, and the bytes of tensors are not copied on the way."""

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from verl.cluster.shm_channel import deserialize, serialize
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest


def batch(rows: int = 4) -> DataProto:
    mask = torch.ones(rows, 3, dtype=torch.bool)
    tensors = {"response_mask": mask, "advantages": torch.randn(rows, 3), "number": torch.arange(rows)}
    return DataProto.from_dict(tensors, {"text": [f"row {n}" for n in range(rows)]}, {"pad_token_id": 7})


def test_a_batch_arrives_with_its_rows_columns_facts_and_producers():
    sent = batch()
    found, request, path = deserialize(serialize((sent, GenerationRequest(3, num_samples=2), Path("a/b"))))
    assert (request, path) == (GenerationRequest(3, num_samples=2), Path("a/b"))
    assert {name: x.tolist() for name, x in found.batch.items()} == {name: x.tolist() for name, x in sent.batch.items()}
    assert found["text"].tolist() == sent["text"].tolist()
    assert found.meta_info == sent.meta_info
    assert found.producer("advantages") == sent.producer("advantages")
    with pytest.raises(ValueError, match="read-only"):
        found.batch["number"] = sent["number"]
    with pytest.raises(ValueError, match="dvantages"):
        found.union(DataProto.from_dict({"advantages": torch.zeros(4, 3)}))


def test_the_bytes_of_tensors_are_in_the_buffers_where_they_lay_and_where_they_arrive():
    sent = batch(20000)
    parcel = serialize(sent.select(["advantages"], []))
    (buffer,) = parcel.buffers
    assert len(parcel.head) < 2000
    assert buffer.ctypes.data == sent["advantages"].data_ptr()
    arrived = np.array(buffer)
    found = deserialize((parcel.head, [arrived]))
    assert found["advantages"].data_ptr() == arrived.ctypes.data


def test_nothing_that_was_sent_stays_in_memory_until_the_cyclic_collector_runs():
    sent = batch()
    tensor = weakref.ref(sent["advantages"])
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        serialize(sent)
        del sent
        assert tensor() is None
    finally:
        if was_enabled:
            gc.enable()


def test_a_part_of_a_tensor_weighs_as_much_as_the_part():
    whole = torch.zeros(1000, 100)
    assert serialize(whole[:10]).num_bytes < 5000
    assert serialize(whole[:, :1]).num_bytes < 5000
    assert torch.equal(deserialize(serialize(whole.T[3:5] + 1)), torch.ones(2, 1000))
