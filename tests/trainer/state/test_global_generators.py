"""What lies beside a training (retries of a storage, trackers, uploads, resumes) draws from no global generator."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from same_training import course
from storage.s3_server import BUCKET, Fault, Request
from trainer.runs import fit

from verl.component import BuildContext, component
from verl.errors import StorageUnreachable
from verl.storage.config import GCSStorage, OSSStorage, S3Storage
from verl.storage.store import MIB, RetryPolicy, TransientError
from verl.tracking.base import Tracker, TrackerDescription, Trackers
from verl.tracking.console import Console
from verl.tracking.jsonl import JsonLines
from verl.tracking.plots import Curves
from verl.tracking.tensorboard import TensorBoard
from verl.utils.seeding import rng_state


def states() -> dict[str, Any]:
    """Of every global generator, comparable."""
    tensors, plain = rng_state()
    return {**{name: x.tolist() for name, x in tensors.items()}, **plain}


class Drawing(Tracker):
    """Draws from every global generator whenever it is called."""

    def __getattribute__(self, name: str) -> Any:
        random.random(), np.random.rand(), torch.rand(1)
        return super().__getattribute__(name)

    def start(self, *_: Any) -> None:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)


@component
class DrawingTracker(TrackerDescription):
    def build(self, context: BuildContext) -> Tracker:
        return Drawing()


def test_a_request_that_is_made_again_draws_from_a_generator_of_its_own():
    before = states()

    def refuse() -> None:
        raise TransientError("not now")

    with pytest.raises(StorageUnreachable, match="failed 4 times"):
        RetryPolicy(retries=3, backoff_s=0.001)("put it", refuse)
    assert states() == before


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


@pytest.fixture
def unreliable(proxy, tmp_path) -> S3Storage:
    """Every third request is refused, once."""
    seen = 0

    def decide(request: Request) -> Fault | None:
        nonlocal seen
        seen += 1
        return Fault(status=503) if seen % 3 == 0 else None

    proxy.misbehave = decide
    limits = {"part_mib": 5, "retries": 6, "backoff_s": 0.01}
    return S3Storage(bucket=BUCKET, prefix=f"generators/{tmp_path.name}", endpoint_url=proxy.url, **limits)


@pytest.mark.exhaustive
def test_a_run_with_all_of_it_ends_with_the_random_numbers_of_one_with_none(model32, unreliable, proxy, tmp_path):
    def ended(name: str, resume: str | None, **options: Any) -> dict[str, Any]:
        run = course(model32, tmp_path / name, resume=resume, **options)
        if name == "all":
            run = dataclasses.replace(run, storage=unreliable)
        fit(run, tmp_path / name / f"run_{resume}")
        return states()

    trackers = Trackers(
        console=Console(), jsonl=JsonLines(), curves=Curves(), tensorboard=TensorBoard(), wandb=DrawingTracker()
    )
    plain = ended("none", None, tracker=Trackers())
    first = ended("all", None, tracker=trackers, stop_after=2)
    assert sum(request.method == "PUT" for request in proxy.seen) > 10, "it was uploaded"
    (tmp_path / "all/checkpoints").rename(tmp_path / "all/lost")
    assert ended("all", "latest", tracker=trackers) == plain == first
    for name in ("python.json", "numpy.json"):
        here, there = (tmp_path / run / "checkpoints/global_step_4/rng" / name for run in ("none", "all"))
        assert here.read_bytes() == there.read_bytes()
