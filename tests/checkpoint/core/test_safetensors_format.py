"""What we render, the safetensors library opens; what it writes, we read."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load, save
from safetensors.torch import load as load_torch

from verl.checkpoint.core.hashing import flat_view
from verl.checkpoint.core.manifest import ITEM_BYTES
from verl.checkpoint.core.safetensors_format import TensorBytes, header_bytes, read_header, render, render_shards

ARRAYS = {
    "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
    "scalar": np.array(7, dtype=np.int64),
    "empty": np.zeros((0, 5), dtype=np.float16),
    "bytes": np.arange(3, dtype=np.uint8),
    "flag": np.array([True, False]),
    "unicode ü": np.array([1.5]),
}
NAMES = {"float32": "F32", "int64": "I64", "float16": "F16", "uint8": "U8", "bool": "BOOL", "float64": "F64"}
TENSORS = [TensorBytes(name, NAMES[array.dtype.name], array.shape, array) for name, array in ARRAYS.items()]


def joined(buffers) -> bytes:
    return b"".join(bytes(flat_view(buffer)) for buffer in buffers)


def test_the_library_loads_what_is_rendered(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(joined(render(TENSORS, {"format": "pt"}).buffers))
    with safe_open(tmp_path / "a.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
        for name, array in ARRAYS.items():
            loaded = file.get_tensor(name)
            assert loaded.dtype == array.dtype
            assert np.array_equal(loaded, array)


def test_the_bytes_are_those_that_the_library_writes():
    arrays = {name: array for name, array in ARRAYS.items() if name.isascii()}
    ours = joined(render([t for t in TENSORS if t.name.isascii()]).buffers)
    theirs = save(arrays)
    split, split_theirs = header_bytes(ours), header_bytes(theirs)
    assert ours[split:] == theirs[split_theirs:]
    assert json.loads(ours[8:split]) == json.loads(theirs[8:split_theirs])


def test_no_tensor_is_copied():
    rendered = render(TENSORS)
    (matrix,) = [b for b in rendered.buffers[1:] if len(b) == ARRAYS["matrix"].nbytes]
    ARRAYS["matrix"][0, 0] = 42
    try:
        assert np.frombuffer(matrix, np.float32)[0] == 42
    finally:
        ARRAYS["matrix"][0, 0] = 0


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_every_type_is_known_to_the_library_and_of_its_size(dtype):
    data = bytes(range(2 * ITEM_BYTES[dtype])) if dtype != "BOOL" else b"\0\1"
    content = joined(render([TensorBytes("x", dtype, (2,), data)]).buffers)
    (tensor,) = load_torch(content).values()
    assert tensor.element_size() == ITEM_BYTES[dtype]
    assert bytes(tensor.view(torch.uint8).numpy()) == data


def test_places_are_where_the_bytes_are_and_a_reader_finds_the_same():
    rendered = render(TENSORS, {"format": "pt"})
    content = joined(rendered.buffers)
    assert read_header(content[: header_bytes(content)], len(content)) == rendered.places
    for name, place in rendered.places.items():
        assert content[place.begin : place.end] == ARRAYS[name].tobytes()
        assert place.begin % ITEM_BYTES[place.dtype] == 0


def test_shards_are_those_that_transformers_expects(tmp_path):
    weights = [TensorBytes(f"w{n}", "F32", (10,), np.full(10, n, np.float32)) for n in range(5)]
    files, index = render_shards(weights, max_shard_bytes=80)
    assert list(files) == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert index is not None
    assert json.loads(index)["metadata"] == {"total_size": 200}
    for name, file in json.loads(index)["weight_map"].items():
        assert np.array_equal(load(joined(files[file].buffers))[name], np.full(10, int(name[1]), np.float32))
    files, index = render_shards(weights)
    assert (list(files), index) == (["model.safetensors"], None)
    assert list(render_shards([])[0]) == ["model.safetensors"]


def test_a_tensor_larger_than_a_shard_has_one_of_its_own():
    sizes = {"a": 2, "b": 9, "c": 2}
    files, _ = render_shards([TensorBytes(name, "U8", (size,), bytes(size)) for name, size in sizes.items()], 4)
    assert [list(rendered.places) for rendered in files.values()] == [["a"], ["b"], ["c"]]


def test_bytes_that_do_not_fit_the_shape_are_refused():
    with pytest.raises(ValueError, match=r"x has 7 bytes, not those of F32\[2\]"):
        render([TensorBytes("x", "F32", (2,), bytes(7))])
    with pytest.raises(ValueError, match="dtype 'float32' is not one of BOOL"):
        render([TensorBytes("x", "float32", (2,), bytes(8))])
    with pytest.raises(ValueError, match="same name"):
        render([TensorBytes("x", "U8", (1,), b"1")] * 2)


WHOLE = joined(render(TENSORS).buffers)
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
