"""The way of the weights: names and shapes of a checkpoint, one tensor at a time, through two chunks of memory."""

import os
import threading

import pytest
import torch
from rollout.engines import save_family

from verl.models.hf_state_dict import hf_state_dict
from verl.models.lora import LoRA
from verl.rollout.weight_sync.state_dict import weights_of
from verl.rollout.weight_sync.stream import StreamBroken, StreamReader, StreamWriter, plan_chunks

CPU = torch.device("cpu")


def tensors(count=9, rows=50):
    generator = torch.Generator().manual_seed(0)
    return {f"layer.{i}": torch.randn(rows + i, 7, generator=generator) for i in range(count)}


def shapes_of(named):
    return {name: tensor.shape for name, tensor in named.items()}


def through(named, dtype=torch.float32, chunk_bytes=3000, readers=1):
    """What each reader finds."""
    chunks, size = plan_chunks(shapes_of(named), dtype, chunk_bytes)
    stream = StreamWriter(size, readers, CPU)
    stream.begin()
    found = [{} for _ in range(readers)]

    def read(number):
        reader = StreamReader(stream.handle, number)
        for index, places in enumerate(chunks):
            for name, tensor in reader.chunk(index, places, dtype):
                found[number][name] = tensor.clone()
            reader.leave(index)
        reader.close()

    threads = [threading.Thread(target=read, args=(number,)) for number in range(readers)]
    for thread in threads:
        thread.start()
    stream.fill(chunks, iter(named.items()), dtype, lambda: True)
    for thread in threads:
        thread.join()
    stream.close()
    return found, chunks, size


@pytest.mark.parametrize("chunk_bytes", [1, 1000, 3000, 10**6])
def test_tensors_arrive_whole_whatever_the_size_of_a_chunk(chunk_bytes):
    (found,), chunks, size = through(tensors(), chunk_bytes=chunk_bytes)
    assert list(found) == list(tensors())
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors().items())
    assert len(chunks) == {1: sum(range(50, 59)), 1000: 18, 3000: 7, 10**6: 1}[chunk_bytes]
    assert size <= max(chunk_bytes, 7 * 4)  # of a single row


def test_they_are_cast_on_the_way():
    (found,), _, _ = through(tensors(), torch.bfloat16)
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in tensors().items())


def test_several_readers_get_all_of_it():
    found, _, _ = through(tensors(), readers=3)
    for own in found:
        assert all(torch.equal(own[name], tensor) for name, tensor in tensors().items())


def test_a_reader_that_was_kept_knows_another_stream_at_the_path_of_its_own():
    stream = StreamWriter(100, 1, CPU)
    reader, first = StreamReader(stream.handle), stream.handle
    stream.close()
    stream = StreamWriter(100, 1, CPU)
    assert stream.handle.path == first.path
    assert reader.is_of(first, 0)
    assert not reader.is_of(first, 1)
    assert not reader.is_of(stream.handle, 0)
    reader.close()
    stream.close()


def test_a_reader_that_is_gone_ends_the_sending():
    chunks, size = plan_chunks(shapes_of(tensors()), torch.float32, 1)
    stream = StreamWriter(size, 1, CPU)
    stream.begin()
    with pytest.raises(StreamBroken):
        stream.fill(chunks, iter(tensors().items()), torch.float32, lambda: False)
    stream.close()


def test_a_sender_that_gives_up_ends_the_reading():
    chunks, size = plan_chunks(shapes_of(tensors()), torch.float32, 1)
    stream = StreamWriter(size, 1, CPU)
    stream.begin()
    reader = StreamReader(stream.handle)
    stream.abandon()
    with pytest.raises(StreamBroken):
        next(reader.chunk(0, chunks[0], torch.float32))
    reader.close()
    stream.close()


def test_no_file_descriptor_is_left_open():
    before = len(os.listdir("/proc/self/fd"))
    through(tensors())
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("name", ["qwen2", "qwen2_tied", "qwen3_moe"])
def test_names_shapes_and_values_are_those_of_the_checkpoint(tmp_path, name):
    model = save_family(tmp_path / "model", name).load_causal_lm("cpu")
    expected, given = dict(hf_state_dict(model).tensors), {w.name: w for w in weights_of(model)}
    assert given.keys() == expected.keys()
    for key, weight in given.items():
        assert weight.shape == expected[key].shape
        assert torch.equal(weight.make(), expected[key])


@pytest.mark.parametrize("merge", [True, False])
def test_an_adapter_is_folded_in_or_left_out(tmp_path, merge):
    source = save_family(tmp_path / "model", "qwen2_tied")
    model = LoRA(rank=4).apply(source.load_causal_lm("cpu"), causal_lm=True)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_()
    given = {w.name: w.make() for w in weights_of(model, merge=merge)}
    expected = dict(hf_state_dict(model.merge_and_unload() if merge else source.load_causal_lm("cpu")).tensors)
    assert given.keys() == expected.keys()
    for key, tensor in given.items():
        torch.testing.assert_close(tensor, expected[key], rtol=0, atol=1e-5)


def test_nothing_is_made_before_it_is_asked_for(tmp_path):
    model = LoRA(rank=4).apply(save_family(tmp_path / "model", "qwen2").load_causal_lm("cpu"), causal_lm=True)
    live = {p.data_ptr() for p in model.parameters()}
    made = [weight.make() for weight in weights_of(model)]
    copies = [tensor for tensor in made if tensor.data_ptr() not in live]
    assert len(copies) == 14  # the seven adapted matrices of each of two layers
