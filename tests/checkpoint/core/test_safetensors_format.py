"""What we render, the safetensors library opens; what it writes, we read."""

import json

import numpy as np
import pytest
import torch
from checkpoint.rank_tensors import RankTensor, render
from safetensors.numpy import save
from safetensors.torch import load as load_torch

from verl.checkpoint.core.hashing import flat_view
from verl.checkpoint.core.manifest import ITEM_BYTES
from verl.checkpoint.core.safetensors_format import header_bytes, read_header

ARRAYS = {
    "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
    "scalar": np.array(7, dtype=np.int64),
    "empty": np.zeros((0, 5), dtype=np.float16),
    "bytes": np.arange(3, dtype=np.uint8),
    "flag": np.array([True, False]),
    "unicode ü": np.array([1.5]),
}
NAMES = {"float32": "F32", "int64": "I64", "float16": "F16", "uint8": "U8", "bool": "BOOL", "float64": "F64"}
TENSORS = [RankTensor(name=n, dtype=NAMES[x.dtype.name], shape=x.shape, data=x) for n, x in ARRAYS.items()]


def joined(buffers) -> bytes:
    return b"".join(bytes(flat_view(buffer)) for buffer in buffers)


def test_the_bytes_are_those_that_the_library_writes():
    arrays = {name: array for name, array in ARRAYS.items() if name.isascii()}
    ours = joined(render([t for t in TENSORS if t.name.isascii()])[0])
    theirs = save(arrays)
    split, split_theirs = header_bytes(ours), header_bytes(theirs)
    assert ours[split:] == theirs[split_theirs:]
    assert json.loads(ours[8:split]) == json.loads(theirs[8:split_theirs])


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_every_type_is_known_to_the_library_and_of_its_size(dtype):
    data = bytes(range(2 * ITEM_BYTES[dtype])) if dtype != "BOOL" else b"\0\1"
    content = joined(render([RankTensor(name="x", dtype=dtype, shape=(2,), data=data)])[0])
    (tensor,) = load_torch(content).values()
    assert tensor.element_size() == ITEM_BYTES[dtype]
    assert bytes(tensor.view(torch.uint8).numpy()) == data


def test_places_are_where_the_bytes_are_and_a_reader_finds_the_same():
    buffers, records = render(TENSORS, metadata={"format": "pt"})
    content = joined(buffers)
    places = {x.slices[0].key: (x.dtype, x.slices[0].extent, x.slices[0].offset) for x in records}
    assert read_header(content[: header_bytes(content)], len(content)) == places
    for name, (dtype, _, begin) in places.items():
        assert content[begin : begin + ARRAYS[name].nbytes] == ARRAYS[name].tobytes()
        assert begin % ITEM_BYTES[dtype] == 0


WHOLE = joined(render(TENSORS)[0])
BROKEN = {
    "too short": WHOLE[:5],
    "a header longer than the file": (10**6).to_bytes(8, "little") + WHOLE[8:],
    "a header of absurd length": (2**63).to_bytes(8, "little") + WHOLE[8:],
    "no JSON": WHOLE[:8] + b"x" + WHOLE[9:],
    "bytes left over": WHOLE + b"1",
    "bytes missing": WHOLE[:-1],
    "an unknown type": WHOLE.replace(b'"F32"', b'"X32"'),
    "a tensor elsewhere": WHOLE.replace(b"[0,8]", b"[1,9]"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_refused(kind):
    assert BROKEN[kind] != WHOLE
    with pytest.raises(ValueError, match=r"safetensors"):
        read_header(BROKEN[kind], len(BROKEN[kind]))
