"""One rank's part of a checkpoint: its slices of the optimizer state, and the full model tensors assigned to it.

slices (optimizer)   each element is written by one rank that holds it; large replicas are split among ranks
whole (a model)      each tensor is gathered and written by one rank; files are numbered over all ranks

driver ── order ──> every rank: gathers the full tensors that it owns   ──> its host buffer ──> its writer process
                                takes the slices that it holds          (while training continues)

`assign_slices` computes the same assignment on every rank.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.core.safetensors_format import INDEX_NAME, MODEL_METADATA, model_files
from verl.checkpoint.save.async_writer import WRITER_TIMEOUT_S, CheckpointWriter
from verl.checkpoint.save.save_request import MultiWriterSave, SaveRequest, sees_nonce, submit_failure
from verl.checkpoint.save.snapshot import PartialTensor, SavedComponent
from verl.engines.engine import TrainingEngine
from verl.engines.parallel_dims import STAGE, TENSOR, Parallelism
from verl.models.hf_state_dict import (
    ADAPTER_BIN,
    as_torch_file,
    live_tensors,
    names_in_files,
    saved_file,
    saved_tensors,
    small_files,
)
from verl.models.parallel_info import release_gathered
from verl.ops.resharding.dtensor import layout_of, local
from verl.ops.resharding.execute import reshard
from verl.ops.resharding.layout import Box, Layout, Mesh, TensorLayout, volume, within
from verl.ops.resharding.plan import reshard_plan
from verl.utils.progress import report
from verl.workers.load_state import RemoteRoleState

FEWEST_CUT_SHARE = 4  # a replica larger than 1/4 of the mean bytes per rank is split among the ranks that hold it


@dataclass(frozen=True)
class AssignedSlice:
    """A slice that one process writes."""

    name: str
    rank: int
    box: Box


def assign_slices(layout: Layout) -> list[AssignedSlice]:
    """Assign every element of every tensor to one process that holds it, balanced by bytes."""
    size, load = layout.mesh.size, [0] * layout.mesh.size
    fair = sum(prod(x.shape) * x.itemsize for x in layout.tensors.values()) / size
    slices = []
    for name, tensor in sorted(layout.tensors.items()):  # a loaded optimizer has its state in another order
        holders: dict[Box, list[int]] = {}
        for rank in range(size):
            if (box := layout.holds(rank, name)) is not None:
                holders.setdefault(box, []).append(rank)
        for box, ranks in holders.items():
            is_large = len(ranks) > 1 and volume(box) * tensor.itemsize * FEWEST_CUT_SHARE > fair
            for part in _rows(box, len(ranks)) if is_large else [box]:
                rank = min(ranks, key=lambda holder: (load[holder], holder))
                ranks = [other for other in ranks if other != rank] if is_large else ranks
                load[rank] += volume(part) * tensor.itemsize
                slices.append(AssignedSlice(name, rank, part))
    return slices


def owners(sizes: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """Name -> rank that writes the full tensor: largest first, each to the rank with the fewest bytes."""
    load, owner_of = [0] * num_ranks, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner_of[name] = min(range(num_ranks), key=lambda rank: (load[rank], rank))
        load[owner_of[name]] += sizes[name]
    return {name: owner_of[name] for name in sizes}


def _rows(box: Box, count: int) -> Sequence[Box]:
    """A box split along its first axis into at most `count` parts; not split if it has no axis."""
    if not box:
        return [box]
    (start, stop), remaining = box[0], box[1:]
    step = -(-(stop - start) // count)
    return [((first, min(first + step, stop)), *remaining) for first in range(start, stop, step)]


def whole_on_first(tensors: Mapping[str, Tensor], parallel: Parallelism) -> dict[str, Tensor]:
    """Full copies in main memory on rank 0, nothing elsewhere; collective."""
    return whole_on_owners(tensors, dict.fromkeys(tensors, 0), parallel)


def whole_on_owners(
    tensors: Mapping[str, Tensor], owner: Mapping[str, int], parallel: Parallelism
) -> dict[str, Tensor]:
    """Full copies in main memory of the tensors that this process owns; collective.

    A process needs memory for the copies and a few more tensors. A tensor with two names, such as a tied output head,
    is gathered once and stays tied.

    Args:
        owner: rank that gets each tensor, by the first of its names.
    """
    names = first_names(tensors)
    once = {name: tensors[name] for name in names.values()}
    source = layout_of(once, parallel.mesh)
    stages = Mesh((("pp", parallel.world_size),))  # a pipeline in which each stage has some full tensors
    target = Layout(
        stages, {n: TensorLayout(t.shape, stage=owner[n], itemsize=t.itemsize) for n, t in source.tensors.items()}
    )
    assigned = {name for name in once if owner[name] == parallel.rank}
    whole = {name: torch.empty(once[name].shape, dtype=once[name].dtype) for name in assigned if not once[name].numel()}
    moves = reshard(
        reshard_plan(source, target),
        lambda name: local(once[name]).to(parallel.device),
        parallel.rank,
        dtypes={name: x.dtype for name, x in once.items()},
        device=parallel.device,
    )
    for name, tensor in moves:
        whole[name] = tensor.cpu()
        report()
    return {name: whole[first] for name, tensor in tensors.items() if (first := names[id(tensor)]) in assigned}


def first_names(tensors: Mapping[str, Tensor]) -> dict[int, str]:
    """First name of each tensor, by `id`."""
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), name)
    return names


_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RankSaveSettings:
    """Settings that are constant for all saves in one directory.

    Attributes:
        store: the driver's store, with its lock.
        is_async: write while training continues.
        first_rank: added to the rank of a process: roles may be in several groups of processes.
    """

    store: CheckpointStore
    is_async: bool
    use_safetensors: bool
    max_shard_bytes: int
    first_rank: int
    increment: bool | Path = False
    writer_timeout_s: float = WRITER_TIMEOUT_S


@dataclass(frozen=True)
class RankInfo:
    """A process that holds roles.

    Attributes:
        roles: roles trained here, as components of a checkpoint.
        host: name of the machine.
        sees: whether it sees the same directory under this path as the driver.
    """

    roles: tuple[str, ...]
    host: str
    sees: bool


class TrainedState(Protocol):
    """A trained role, whose state a checkpoint holds."""

    engine: TrainingEngine

    def constant_files(self) -> dict[str, bytes]: ...


class RankCheckpointWriter:
    """Writes this process's part of checkpoints.

    Args:
        parallel: layout of this process, of any of its roles.
        trained: component -> role, for all roles trained in this process.
    """

    def __init__(self, parallel: Parallelism, trained: Mapping[str, TrainedState]):
        self._parallel, self._trained = parallel, dict(trained)
        self._writer: CheckpointWriter | None = None

    def check_shared_directory(self, directory: Path, nonce: str) -> RankInfo:
        """Identity of this process, and whether it can read the driver's nonce."""
        return RankInfo(tuple(self._trained), socket.gethostname(), sees_nonce(FileSystem(), directory, nonce))

    def states(self) -> dict[str, RemoteRoleState]:
        """Metadata of the roles for the driver."""
        return {
            name: RemoteRoleState(worker.engine.updates, _num_bytes(worker)) for name, worker in self._trained.items()
        }

    def prepare(self, setting: RankSaveSettings) -> None:
        """Allocate host buffers in the background."""
        total = sum(_num_bytes(worker) for worker in self._trained.values())
        self._kept(setting).reserve(int(1.1 * total / self._parallel.world_size) + 2**20)

    def save(self, setting: RankSaveSettings, step: int, transaction: Path, nonce: str) -> bool:
        """Write this rank's part of a save; collective. Failures are reported in this part's report.

        Args:
            transaction: the directory where the driver opened the save.
            nonce: the text that the driver wrote there.
        Returns:
            Whether this process sees the staging directory; if not, nothing was done.
        """
        components = self._components(setting)  # collective: before anything that can fail on a single rank
        disk = setting.store.disk
        if not sees_nonce(disk, transaction, nonce):
            return False
        name = f"rank_{setting.first_rank + self._parallel.rank}"
        part = MultiWriterSave(directory=transaction, name=name)
        try:
            request = SaveRequest(step=step, components=components, multi_writer=part, increment=setting.increment)
            if self._writer is None or setting.store.directory == self._writer.store.directory:
                self._kept(setting).save(request)
            else:  # a save in another directory
                with _writer_of(setting) as writer:
                    writer.save(request)
        except Exception as error:  # noqa: BLE001 - the save fails, not the training
            _log.exception("%s cannot save its part of step %d", name, step)
            submit_failure(disk, transaction, name, f"{type(error).__name__}: {error}")
        for outcome in [] if self._writer is None else self._writer.poll(raises=False):
            if outcome.error is not None:  # the driver learns of it from the report
                _log.error("step %d: this part was not saved: %s", outcome.step, outcome.error)
        return True

    def wait_copied(self) -> None:
        """Wait until weights and optimizer state may be modified."""
        if self._writer is not None:
            self._writer.wait_copied()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _kept(self, setting: RankSaveSettings) -> CheckpointWriter:
        if self._writer is None:
            self._writer = _writer_of(setting)
        return self._writer

    def _components(self, setting: RankSaveSettings) -> dict[str, SavedComponent]:
        optimizer: dict[str, PartialTensor] = {}
        components = {}
        for name, worker in self._trained.items():
            release_gathered(worker.engine.model)
            components[name] = self._model(worker, setting)
            optimizer |= _slices(f"{name}.", worker.engine.optimizer_tensors(), worker.engine.parallel)
        components["optimizer"] = SavedComponent(tensors=optimizer, file=self._file(setting))
        return components

    def _file(self, setting: RankSaveSettings) -> str:
        meshes = [worker.engine.parallel.mesh for worker in self._trained.values()]
        mesh, rank = max(meshes, key=lambda mesh: mesh.extent(TENSOR) * mesh.extent(STAGE)), self._parallel.rank
        tensor, stage = mesh.coordinate(rank, TENSOR), mesh.coordinate(rank, STAGE)
        is_named = mesh.extent(TENSOR) * mesh.extent(STAGE) > 1
        suffix = f"_tp_rank_{tensor}_pp_rank_{stage}" if is_named else ""
        return f"optim_state_rank_{setting.first_rank + rank}{suffix}.safetensors"

    def _model(self, worker: TrainedState, setting: RankSaveSettings) -> SavedComponent:
        """The full tensors of a model that this process writes, and on rank 0 its other files."""
        model, rank = worker.engine.model, self._parallel.rank
        live, file = live_tensors(model), saved_file(model)
        names = names_in_files(model) if setting.use_safetensors and file is None else None
        owner, files, index = _division(live, names, self._parallel.world_size, setting.max_shard_bytes)
        whole = whole_on_owners(live, owner, worker.engine.parallel)
        tensors = saved_tensors(model, whole) if whole else {}
        small: dict[str, bytes] = {}
        if rank == 0:
            small = small_files(model, whole) | ({INDEX_NAME: index} if index else {})
            if not setting.use_safetensors:
                small[ADAPTER_BIN if file else "pytorch_model.bin"] = as_torch_file(tensors)
        if not setting.use_safetensors:
            tensors = {}
        constant = worker.constant_files() if rank == 0 else {}
        return SavedComponent(
            tensors=tensors,
            file=file,
            metadata=MODEL_METADATA,
            files=small,
            constant_files={name: data for name, data in constant.items() if name not in small},
            max_shard_bytes=setting.max_shard_bytes,
            shards=None if files is None else files[rank],
        )


Files = list[dict[str, list[str]]] | None


def _division(
    live: Mapping[str, Tensor], names: Mapping[str, str] | None, num_ranks: int, max_bytes: int
) -> tuple[dict[str, int], Files, bytes | None]:
    """The rank that gathers each tensor of a model (by first name), the files of each rank, and the index.

    Rank 0 writes tensors that are in no model file, such as a value head, and the whole model if transformers splits or
    merges its tensors in files.
    """
    owner = dict.fromkeys(live, 0)
    if names is None:
        return owner, None, None
    # Sorted by name: the parameters of a built model are in another order than those of a loaded one.
    sizes = {name: live[key].numel() * live[key].element_size() for name, key in sorted(names.items())}
    writes = owners(sizes, num_ranks)
    owner |= {names[name]: rank for name, rank in writes.items()}
    by_rank = [{name: sizes[name] for name in sizes if writes[name] == rank} for rank in range(num_ranks)]
    return owner, *model_files(by_rank, max_bytes)


def _slices(prefix: str, tensors: Mapping[str, Tensor], parallel: Parallelism) -> dict[str, PartialTensor]:
    """The slices of sharded and replicated tensors that this process writes."""
    slices, layout = {}, layout_of(tensors, parallel.mesh)
    for share in assign_slices(layout):
        if share.rank == parallel.rank:
            x, held = tensors[share.name], layout.holds(parallel.rank, share.name)
            assert held is not None
            part = local(x)[within(share.box, held)] if share.box else local(x)
            start = tuple(first for first, _ in share.box)
            slices[prefix + share.name] = PartialTensor(tensor=part, shape=tuple(x.shape), start=start)
    return slices


def _num_bytes(worker: TrainedState) -> int:
    live: dict[int, Any] = {id(x): x for x in live_tensors(worker.engine.model).values()}
    moments = worker.engine.optimizer_tensors().values()
    return sum(x.numel() * x.element_size() for x in (*live.values(), *moments))


def _writer_of(setting: RankSaveSettings) -> CheckpointWriter:
    mode = "async" if setting.is_async else "sync"
    return CheckpointWriter(setting.store, mode=mode, timeout_s=setting.writer_timeout_s)
