import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cluster.processes_of import temporary_directories, wait_until_gone
from cluster.toy_roles import ToyHost

from verl.cluster.local_worker_group import InlineWorkerGroup, LocalWorkerGroup
from verl.cluster.rpc import role_handles
from verl.component import BuildContext
from verl.errors import WorkerDied
from verl.protocol import DataProto

pytestmark = pytest.mark.xdist_group("cluster")


@pytest.fixture
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for temporary files that nobody else uses; short, for a socket's path is limited."""
    with tempfile.TemporaryDirectory(prefix="t_") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


def rows(count: int) -> DataProto:
    """Rows of different length, so that the order of the parts is not the order of the rows."""
    mask = torch.arange(count) <= torch.arange(count)[:, None] * 7 % max(count, 1)
    texts = [f"row {row}" for row in range(count)]
    return DataProto.from_dict({"attention_mask": mask.long(), "number": torch.arange(count)}, {"text": texts})


def start(size: int, run_dir: Path | None = None, timeout_s: float = 1800.0, **options):
    host = ToyHost(**options)
    cluster = LocalWorkerGroup(host, BuildContext(run_dir=run_dir), size, num_threads=1, call_timeout_s=timeout_s)
    return cluster, role_handles(cluster, host)["toy"]


@pytest.mark.slow
def test_a_worker_killed_while_idle_fails_the_next_call(own_tmp):
    cluster, toy = start(1)
    pid = toy.where().result()["pid"]
    os.kill(pid, signal.SIGUSR1)
    assert wait_until_gone([pid]) == []
    try:
        with pytest.raises(WorkerDied, match="SIGUSR1") as caught:
            toy.where().result(timeout=120)
        assert caught.value.rank == 0
        assert caught.value.call in ("idle", "toy.where")
    finally:
        cluster.close()
    assert temporary_directories(own_tmp) == []


def test_a_call_in_this_process_fails_where_its_result_is_asked_for():
    host = ToyHost()
    cluster = InlineWorkerGroup(host, BuildContext())
    toy = role_handles(cluster, host)["toy"]
    assert toy.double(rows(3)).result()["doubled"].tolist() == [0, 2, 4]
    future = toy.fail_on(0)
    with pytest.raises(ZeroDivisionError):
        future.result()
    cluster.close()
    cluster.close()
