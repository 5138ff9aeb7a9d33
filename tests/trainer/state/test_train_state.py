"""Each process goes on with its own random numbers after a resume; one that the checkpoint does not know is told of."""

import json
import logging
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cluster.toy_roles import ToyPlace
from storage.s3_server import BUCKET, Fault

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.resolve import resolve
from verl.checkpoint.save.async_writer import CheckpointWriter
from verl.checkpoint.save.save_request import SaveRequest
from verl.cluster.local_worker_group import LocalWorkerGroup
from verl.cluster.rpc import role_handles
from verl.component import BuildContext, Description, component
from verl.engines.sharding import DDP, Sharding
from verl.errors import StorageUnreachable
from verl.protocol.dispatch import on_each
from verl.storage.config import GCSStorage, OSSStorage, S3Storage
from verl.storage.store import MIB
from verl.trainer.state.driver_state import RNG, CheckpointDraft, GeneratorStates, load_parts
from verl.utils.seeding import rng_state, seed_everything
from verl.workers.base import TrainedWorker

pytestmark = pytest.mark.xdist_group("cluster")


class Dice(TrainedWorker):
    """A trained role's process without a model."""

    @on_each
    def draw(self) -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]


@component
class DiceHost(Description):
    """Builds dice that fall differently on each rank."""

    def worker_types(self) -> dict[str, type]:
        return {"dice": Dice}

    def shardings(self) -> dict[str, Sharding]:
        return {"dice": DDP()}

    def build(self, context: BuildContext) -> ToyPlace:
        seed_everything(context.rank)
        engine: Any = SimpleNamespace(parallel=SimpleNamespace(rank=context.rank))
        return ToyPlace({"dice": Dice(engine, None)})


def start(size: int) -> tuple[LocalWorkerGroup, Any]:
    cluster = LocalWorkerGroup(DiceHost(), BuildContext(), size, num_threads=1)
    return cluster, role_handles(cluster, DiceHost())["dice"]


@pytest.mark.exhaustive
def test_ranks_draw_on_where_they_were_and_a_new_one_is_seeded_anew_and_told(tmp_path, caplog):
    cluster, dice = start(2)
    first = dice.draw().result()
    assert first[0] != first[1]
    state = GeneratorStates(cluster, dice, seed=0).state_dict()
    expected = dice.draw().result()
    save(tmp_path, state)
    cluster.close()

    point = resolve("latest", tmp_path)
    assert point is not None
    with caplog.at_level(logging.INFO):
        cluster, dice = start(3)
        load_parts(point, {"rng": GeneratorStates(cluster, dice, seed=0)})
        drawn = dice.draw().result()
        assert drawn[:2] == expected
        assert drawn[2] not in expected
        load_parts(point, {"rng": GeneratorStates(cluster, dice, seed=0)})
        assert dice.draw().result() == drawn  # the new rank too: by seed, step and rank
        cluster.close()
    assert torch.equal(rng_state()[0]["torch"], state["driver"][0]["torch"])  # the driver's are its own
    told = "with 2 processes of its roles, and this one has 3: the random generators of rank 2 are seeded anew."
    assert told in caplog.text


def save(directory, state) -> None:
    draft = CheckpointDraft()
    RNG.write("rng", state, draft)
    writer = CheckpointWriter(CheckpointStore(directory, "r"), mode="sync")
    writer.save(SaveRequest(step=1, components=draft.components, state={"epoch": 0}))
    writer.drain()
    writer.close()


def test_the_references_of_the_trainer_state_are_files_of_the_checkpoint(tmp_path):
    save(tmp_path, {"driver": rng_state(), "ranks": [rng_state(), rng_state()]})
    references = RNG.references(2)
    assert list(references) == ["torch", "python", "numpy", "rank_0", "rank_1"]
    for file in references.values():
        assert (tmp_path / "global_step_1" / file).is_file()
    assert json.loads((tmp_path / "global_step_1/rng/rank_1.json").read_text()).keys() == {"python", "numpy"}


def test_the_driver_goes_on_with_its_own_state_alone(tmp_path):
    seed_everything(1)
    other = rng_state()
    torch.rand(3)
    save(tmp_path, {"driver": rng_state(), "ranks": [other]})
    expected = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    seed_everything(5)
    point = resolve("latest", tmp_path)
    assert point is not None
    here: Any = SimpleNamespace(shares_memory=True)
    load_parts(point, {"rng": GeneratorStates(here, None, seed=0)})
    assert [random.random(), float(np.random.rand()), float(torch.rand(()))] == expected


def states() -> dict[str, Any]:
    """Of every global generator, comparable."""
    tensors, plain = rng_state()
    return {**{name: x.tolist() for name, x in tensors.items()}, **plain}


def test_retries_of_a_store_draw_from_no_global_generator(proxy, gcs_url, oss_url):
    before = states()
    limits = {"part_mib": 5, "retries": 2, "backoff_s": 0.001, "endpoint_url": proxy.url}
    for kind in (S3Storage, GCSStorage, OSSStorage):
        proxy.misbehave = lambda request: Fault(status=503) if request.method == "PUT" else None
        with kind(bucket=BUCKET, prefix="generators", **limits).connect() as store:
            for size in (10, 11 * MIB):
                with pytest.raises(StorageUnreachable):
                    store.put("refused", bytes(size))
    assert states() == before
