"""Batches travel through shared memory that is used again, never while somebody still reads it, and leave nothing."""

import os
import socket

import pytest
import torch
from cluster.toy_roles import ToyHost

import verl
from verl.cluster.local_worker_group import LocalWorkerGroup
from verl.cluster.rpc import role_handles
from verl.cluster.shm_channel import FREE_BLOCKS_KEPT, MessagePacker, ShmChannel
from verl.component import BuildContext
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.utils.child_process.channel import Channel

pytestmark = pytest.mark.xdist_group("cluster")


class Ends:
    """Two ends of a connection within this process."""

    def __init__(self):
        here, there = (Channel(end) for end in socket.socketpair())
        self.posts = MessagePacker(), MessagePacker()
        self.left, self.right = ShmChannel(here, self.posts[0]), ShmChannel(there, self.posts[1])

    def carry(self, value):
        self.left.send(self.posts[0].pack(value))
        return self.right.receive()

    def answer(self, value):
        self.right.send(self.posts[1].pack(value))
        return self.left.receive()


def wide(rows: int, number: float = 0.0) -> DataProto:
    """1 KiB in each row, of which no two are alike."""
    values = torch.arange(rows * 256, dtype=torch.float32).view(rows, 256) + number
    return DataProto.from_dict({"wide": values, "is_odd": torch.arange(rows) % 2 == 1}, {"text": list(range(rows))})


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("count", [0, 1, 100])
@pytest.mark.parametrize("rows", [[], [3], [5, 0, 7]])
def test_chosen_rows_arrive_as_they_are(count, rows):
    batch, chosen = wide(count * 8), torch.tensor(rows if count else [], dtype=torch.int64)
    found, number = Ends().carry((batch[chosen], 7))
    expected = batch[chosen]
    assert number == 7
    assert found.batch.keys() == expected.batch.keys()
    for name, tensor in expected.batch.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert found["text"].tolist() == expected["text"].tolist()
    assert len(found) == len(expected)
    found.check(strict=True)


def test_memory_is_used_again_once_nobody_reads_it_and_never_before():
    ends = Ends()
    kept = ends.carry(wide(100, 1.0))["wide"]
    other = ends.carry(wide(100, 2.0))["wide"]  # while the first is kept
    assert torch.equal(kept, wide(100, 1.0)["wide"])
    part = other[3:5]
    freed, expected = other.data_ptr(), other[3:5].clone()
    del other
    ends.answer("done with nothing: a part is kept")
    assert ends.carry(wide(100, 3.0))["wide"].data_ptr() != freed
    assert torch.equal(part, expected)
    del part
    ends.answer("done with the second")
    before = ends.posts[0].blocks.numbers()
    ends.carry(wide(100, 4.0))
    assert ends.posts[0].blocks.numbers() == before  # no new memory
    assert torch.equal(kept, wide(100, 1.0)["wide"])


def test_many_sizes_leave_few_blocks_and_files():
    ends, before = Ends(), open_files()
    for size in range(40, 3000, 60):
        ends.carry(wide(size))
        ends.answer("done")
    assert len(ends.posts[0].blocks.numbers()) <= FREE_BLOCKS_KEPT + 2
    assert len(ends.right.theirs) <= FREE_BLOCKS_KEPT + 2
    assert open_files() - before <= 3 * (FREE_BLOCKS_KEPT + 2)  # the file, and a mapping at either end
    ends.posts[0].close()
    del ends
    assert open_files() <= before


def start(**options):
    host = ToyHost()
    cluster = LocalWorkerGroup(host, BuildContext(), 2, num_threads=1, **options)
    return cluster, role_handles(cluster, host)["toy"]


def test_a_driver_of_another_version_than_its_workers_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(verl, "__version__", "0.0.1")  # as if it had been replaced on the disk since
    with pytest.raises(ConfigError, match=r"sharding: rank 0 has verl \S+, the driver has 0\.0\.1\. Install the same"):
        start()
