"""Batches travel through shared memory, which is freed with its last reader."""

import contextlib
import os
import socket

import pytest
import torch
from cluster.toy_roles import ToyHost

import verl
from verl.cluster.local_worker_group import LocalWorkerGroup
from verl.cluster.rpc import role_handles
from verl.cluster.shm_channel import pack, receive, send
from verl.component import BuildContext
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.utils.child_process.channel import Channel

pytestmark = pytest.mark.xdist_group("cluster")


@pytest.fixture
def ends():
    """Two ends of a connection within this process."""
    here, there = (Channel(end) for end in socket.socketpair())
    with contextlib.closing(here), contextlib.closing(there):
        yield here, there


def carry(ends, value):
    send(ends[0], pack(value))
    return receive(ends[1])


def wide(rows: int, number: float = 0.0) -> DataProto:
    """1 KiB in each row, of which no two are alike."""
    values = torch.arange(rows * 256, dtype=torch.float32).view(rows, 256) + number
    return DataProto.from_dict({"wide": values, "is_odd": torch.arange(rows) % 2 == 1}, {"text": list(range(rows))})


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("count", [0, 1, 100])
@pytest.mark.parametrize("rows", [[], [3], [5, 0, 7]])
def test_chosen_rows_arrive_as_they_are(ends, count, rows):
    batch, chosen = wide(count * 8), torch.tensor(rows if count else [], dtype=torch.int64)
    found, number = carry(ends, (batch[chosen], 7))
    expected = batch[chosen]
    assert number == 7
    assert found.batch.keys() == expected.batch.keys()
    for name, tensor in expected.batch.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert found["text"].tolist() == expected["text"].tolist()
    assert len(found) == len(expected)
    found.check(strict=True)


def test_receivers_keep_and_change_what_is_theirs_alone(ends):
    sent = wide(100)
    message = pack(sent)
    sent["wide"].zero_()
    received = []
    for _ in range(2):
        send(ends[0], message)
        received.append(receive(ends[1]))
    received[0]["wide"].zero_()
    assert torch.equal(received[1]["wide"], wide(100)["wide"])


def test_no_file_and_no_memory_stays():
    ends, before = [Channel(end) for end in socket.socketpair()], open_files()
    part = carry(ends, wide(100))["wide"][3:5]
    assert open_files() <= before + 1  # that of the mapping
    assert torch.equal(part, wide(100)["wide"][3:5])
    del part
    assert open_files() == before
    pack(wide(100))
    assert open_files() == before
    for end in ends:
        end.close()


def start(**options):
    host = ToyHost()
    cluster = LocalWorkerGroup(host, BuildContext(), 2, num_threads=1, **options)
    return cluster, role_handles(cluster, host)["toy"]


def test_a_driver_of_another_version_than_its_workers_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(verl, "__version__", "0.0.1")  # as if it had been replaced on the disk since
    with pytest.raises(ConfigError, match=r"sharding: rank 0 has verl \S+, the driver has 0\.0\.1\. Install the same"):
        start()
