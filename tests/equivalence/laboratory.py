"""Worker processes that are started once and then run whole courses, one sharding after the other.

Each process is a driver too, in step with the others: it divides a batch as `verl.cluster.local_worker_group` does,
keeps its own share, and takes the answers of the others.
"""

import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.device_mesh as device_mesh
import torch.distributed.distributed_c10d as distributed_c10d
from cluster.processes_of import LABORATORY
from cluster.toy_roles import ToyPlace
from collective_bytes import bytes_of_update
from equivalence.one_update import one_update
from same_training import Training, run_course
from torch import Tensor, nn
from torch.distributed import ProcessGroupGloo

import verl.trainer.build as build
from verl.cluster.local_worker_group import LocalWorkerGroup
from verl.cluster.rpc import role_handles, row_assignment
from verl.component import BuildContext, Description, component
from verl.engines.parallel_dims import DataParallelism
from verl.engines.sharding import DDP, Sharding
from verl.models.parallel_info import parallel_info_of
from verl.ops.batching import BatchPartition
from verl.ops.resharding.dtensor import is_on_other_stage, local
from verl.protocol import DataProto
from verl.protocol.dispatch import dispatch_of, on_all, on_each
from verl.rollout.proof.fingerprints import adapter_tensors
from verl.rollout.weight_sync.state_dict import weights_of
from verl.rollout.weight_sync.transfer import whole_adapter
from verl.trainer.ppo_config import PPORun
from verl.workers.colocated import RLHost
from verl.workers.load_state import RestoreSource, RoleState


@functools.cache
def gloo_device() -> Any:
    """What all groups of this process send and receive through."""
    return ProcessGroupGloo.create_default_device()


class OfOneDevice(type):
    """Makes groups of gloo that share a device of this process."""

    def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
        options = ProcessGroupGloo._Options()
        options._timeout, options._devices = timeout, [gloo_device()]
        return ProcessGroupGloo(store, rank, size, options)

    def __instancecheck__(cls, group: Any) -> bool:
        return isinstance(group, ProcessGroupGloo)


class GlooOnOneDevice(metaclass=OfOneDevice):
    """Stands in for torch's class, which makes a device with each group."""


class InStep:
    """A cluster whose driver runs in each of its processes."""

    shares_memory = True

    def __init__(self, host: RLHost, context: BuildContext):
        import torch.distributed as dist

        self.step: int | None = None
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.shares = row_assignment(host.shardings(), self.world_size)
        self.types, self.dist = host.worker_types(), dist
        self.host = host.build(dataclasses.replace(context, rank=self.rank, world_size=self.world_size))

    def submit(self, role: str, method: str, args: tuple[Any, ...]) -> Future[Any]:
        dispatch, division, shares = dispatch_of(self.types[role], method), None, self.shares[role]
        if dispatch.splits_rows:
            division = BatchPartition(args[0], len(shares.reporting_ranks))
            args = (division.split_rows(args[0])[shares.of_rank[self.rank]], *args[1:])
        answer = self.host.call(role, method, args)
        if division is not None:
            answers: list[Any] = [None] * self.world_size
            self.dist.all_gather_object(answers, answer)
            spoken = [answers[rank] for rank in shares.reporting_ranks]
            answer = division.join(spoken) if dispatch.concatenates else spoken[0]
        future: Future[Any] = Future()
        future.set_result(answer)
        return future

    def close(self) -> None:
        self.host.close()


class Bench:
    """What is done in each process; rank 0 answers."""

    def __init__(self, context: BuildContext):
        # calls share meshes and all groups one device: the thread of a device wakes a hundred times a second
        distributed_c10d.ProcessGroupGloo = GlooOnOneDevice
        device_mesh.init_device_mesh = functools.cache(device_mesh.init_device_mesh)
        self.context, self.group = context, DataParallelism(context, timeout_s=120.0)

    @contextmanager
    def _in_step(self, directory: Path) -> Iterator[Path]:
        """Runs that are built within are among all processes; gives the directory of this one."""
        before, build.start_cluster = build.start_cluster, lambda host, settings, context, *_: InStep(host, context)
        try:
            (own := directory / str(self.context.rank)).mkdir(parents=True)
            yield own
        finally:
            build.start_cluster = before

    @contextmanager
    def _trainer(self, run: PPORun, directory: Path) -> Iterator[Any]:
        with self._in_step(directory) as own, run.build(BuildContext(run_dir=own)) as trainer:
            yield trainer

    @on_all
    def course(self, run: PPORun, prompts: Sequence[Sequence[int]], directory: Path) -> Training | None:
        """`run_course`, among all processes."""
        with self._in_step(directory) as own:
            return run_course(run, prompts, own)

    @on_each
    def held(self, run: PPORun, prompts: Sequence[int], directory: Path) -> dict[str, int]:
        """Bytes of the actor in this process once it has been updated."""
        with self._trainer(run, directory) as trainer:
            trainer.step(trainer.train_data.collate(prompts), 1)
            engine = trainer.cluster.host.workers["actor"].engine
            tensors = {"weights": engine.parameters, "optimizer": engine.optimizer_tensors()}
            of_this = {kind: [x for x in held.values() if not is_on_other_stage(x)] for kind, held in tensors.items()}
            return {kind: sum(local(x).nbytes for x in held) for kind, held in of_this.items()}

    @on_each
    def drawn(self, run: PPORun, prompts: Sequence[int], directory: Path) -> list[int]:
        """How many prompts this process has drawn responses to, call by call, in a step of a run."""
        with self._trainer(run, directory) as trainer:
            generator = trainer.cluster.host.workers["actor"].generator
            counts, sample = [], generator.sample
            generator.sample = lambda turns, parts, request: (
                counts.append(sum(map(len, parts))) or sample(turns, parts, request)
            )
            trainer.step(trainer.train_data.collate(prompts), 1)
            return counts

    @on_each
    def updated(self, source: Any, sharding: Sharding, rows: DataProto, options: dict[str, Any]) -> dict[str, Tensor]:
        """See `one_update`."""
        parallel = sharding.build(self.context)
        degrees = sharding.degrees(self.context.world_size)
        shares = {"share": degrees.row_share(self.context.rank), "shares": degrees.row_shares}
        return one_update(source, parallel, rows, **shares, **options)

    @on_each
    def sent_in_update(self, source: Any, sharding: Sharding, rows: DataProto, tokens: int) -> Any:
        """See `bytes_of_update`."""
        parallel, degrees = sharding.build(self.context), sharding.degrees(self.context.world_size)
        own = BatchPartition(rows, degrees.row_shares).rows[degrees.row_share(self.context.rank)]
        return bytes_of_update(source.load_causal_lm("cpu"), parallel, rows[own], tokens)

    @on_each
    def summed(self, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Gradients of these shapes, added up: each process gives its rank, and every second one none for the last."""
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        for parameter in parameters[: len(parameters) - self.context.rank % 2]:
            parameter.grad = torch.full(parameter.shape[::-1], float(self.context.rank)).T
        self.group.sum_gradients(parameters)
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    @on_all
    def sent(self, run: PPORun, prompts: Sequence[int], directory: Path) -> dict[str, Tensor]:
        """What an engine in a process of its own is given of an actor that has been updated, and is saved then."""
        with self._trainer(run, directory) as trainer:
            trainer.step(trainer.train_data.collate(prompts), 1)
            model = trainer.cluster.host.workers["actor"].model
            given = {weight.name: weight.make().detach() for weight in weights_of(model)}
            if hasattr(model, "peft_config"):
                given |= dict(adapter_tensors(model, whole_adapter(model, parallel_info_of(model))))
            trainer.save(directory / str(self.context.rank))
            return given

    @on_all
    def loaded(self, run: PPORun, checkpoint: Path) -> dict[str, RoleState] | None:
        """The state of the roles, once they were started from a checkpoint."""
        context = dataclasses.replace(self.context, tokenizer=run.actor.model.load_tokenizer())
        host = RLHost(
            actor=run.actor,
            critic=run.critic,
            reference=None,
            rollout=run.rollout,
            algorithm=run.algorithm,
            sharding=run.sharding,
            total_updates=10,
            restore=RestoreSource(checkpoint),
        ).build(context)
        try:
            states = {name: host.call(name, "state", (True,)) for name in ("actor", "critic")}
        finally:
            host.close()
        return states if self.context.rank == 0 else None

    @on_all
    def pid(self) -> int:
        return os.getpid()


class Room(ToyPlace):
    """A process of the laboratory."""

    def close(self) -> None:
        self.workers["bench"].group.close()


@component
class Laboratory(Description):
    """The processes of the laboratory."""

    def worker_types(self) -> dict[str, type]:
        return {"bench": Bench}

    def shardings(self) -> dict[str, Sharding]:
        return {"bench": DDP()}

    def build(self, context: BuildContext) -> Room:
        return Room({"bench": Bench(context)})


@contextmanager
def laboratory(world_size: int) -> Iterator[Any]:
    """A bench in so many processes, which `workers_of` leaves out."""
    host = Laboratory()
    os.environ[LABORATORY] = "1"
    try:
        cluster = LocalWorkerGroup(host, BuildContext(), world_size, num_threads=1)
    finally:
        del os.environ[LABORATORY]
    try:
        yield role_handles(cluster, host)["bench"]
    finally:
        cluster.close()
