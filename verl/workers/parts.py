"""What one process of several writes of a checkpoint: its slices of optimizers, and some of the models' whole tensors.

driver ── order ──> every process: gathers the whole tensors that it owns  ──> its own arena ──> its own writer process
                                   takes the slices that it holds           (while training goes on)
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.save.async_writer import WRITER_TIMEOUT_S, CheckpointWriter
from verl.checkpoint.save.save_plan import IncrementalSettings, MultiWriterSave, sees_nonce, submit_failure
from verl.checkpoint.save.save_request import SavedComponent, SaveRequest, TensorItem
from verl.checkpoint.shares import model_files, owners, shares
from verl.engines.parallel_dims import TENSOR, Parallelism
from verl.models.hf_state_dict import (
    ADAPTER_BIN,
    as_torch_file,
    live_tensors,
    names_in_files,
    saved_file,
    saved_tensors,
    small_files,
)
from verl.resharding.dtensor import layout_of, local
from verl.resharding.layout import Box
from verl.workers.gathering import whole_on_owners
from verl.workers.state import RemoteState

if TYPE_CHECKING:
    from verl.workers.training import TrainedWorker

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PartSetting:
    """What is the same for all saves of a run.

    Attributes:
        directory: of the checkpoints.
        claim: of the driver on it.
        disk_type: class of the driver's disk.
        is_async: write while training goes on.
        first_rank: added to the rank of a process: roles may live in several groups of processes.
    """

    directory: Path
    run_id: str
    claim: str
    disk_type: type[FileSystem]
    is_async: bool
    use_safetensors: bool
    max_shard_bytes: int
    first_rank: int
    increment: IncrementalSettings | None = None
    writer_timeout_s: float = WRITER_TIMEOUT_S


@dataclass(frozen=True, kw_only=True)
class PartOrder:
    """One save.

    Attributes:
        staging: where the driver opened it.
        nonce: that lies there.
    """

    setting: PartSetting
    step: int
    staging: Path
    nonce: str


@dataclass(frozen=True)
class Berth:
    """A process that holds roles.

    Attributes:
        roles: that are trained here, as components of a checkpoint.
        host: name of the machine.
        sees: whether it sees the directory that the driver sees under this path.
    """

    roles: tuple[str, ...]
    host: str
    sees: bool


class PartWriter:
    """Writes this process's part of checkpoints.

    Args:
        parallel: this process among its siblings, however they divide a role.
        trained: component -> the role, all of them that are trained in this process.
    """

    def __init__(self, parallel: Parallelism, trained: Mapping[str, TrainedWorker]):
        self._parallel, self._trained = parallel, dict(trained)
        self._setting: PartSetting | None = None
        self._writer: CheckpointWriter | None = None

    def look(self, directory: Path, nonce: str) -> Berth:
        """Who lives here, and whether it sees what the driver has put there."""
        return Berth(tuple(self._trained), socket.gethostname(), sees_nonce(FileSystem(), directory, nonce))

    def states(self) -> dict[str, RemoteState]:
        """What the driver is told of the roles."""
        return {name: RemoteState(worker.engine.updates, _num_bytes(worker)) for name, worker in self._trained.items()}

    def prepare(self, setting: PartSetting) -> None:
        """Have memory for saves allocated in the background."""
        total = sum(_num_bytes(worker) for worker in self._trained.values())
        self._kept(setting).reserve(int(1.1 * total / self._parallel.world_size) + 2**20)

    def save(self, order: PartOrder) -> bool:
        """Take part in a save; all processes do, at the same step. What fails here is told in this part's report.

        Returns:
            Whether this process sees the staging directory; if not, nothing was done.
        """
        setting = order.setting
        components = self._components(setting)  # with exchanges among the processes: before anything can fail alone
        disk = setting.disk_type()
        if not sees_nonce(disk, order.staging, order.nonce):
            return False
        name = f"rank_{setting.first_rank + self._parallel.rank}"
        joint = MultiWriterSave(directory=order.staging, name=name)
        try:
            request = SaveRequest(step=order.step, components=components, joint=joint, increment=setting.increment)
            if setting == self._setting or self._writer is None:
                self._kept(setting).save(request)
            else:  # aside, in another directory
                with _writer_of(setting) as writer:
                    writer.save(request)
        except Exception as error:  # noqa: BLE001 - the save is lost, not the training
            _log.exception("%s cannot save its part of step %d", name, order.step)
            submit_failure(disk, order.staging, name, f"{type(error).__name__}: {error}")
        self._tell()
        return True

    def wait_copied(self) -> None:
        """Wait until weights and optimizer state may change."""
        if self._writer is not None:
            self._writer.wait_copied()

    def close(self) -> None:
        """Finish what is under way."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _kept(self, setting: PartSetting) -> CheckpointWriter:
        if self._writer is None:
            self._setting, self._writer = setting, _writer_of(setting)
        return self._writer

    def _tell(self) -> None:
        """The log of this process; the driver hears of it by the reports."""
        for outcome in [] if self._writer is None else self._writer.poll(raises=False):
            if outcome.error is not None:
                _log.error("step %d: this part was not saved: %s", outcome.step, outcome.error)

    def _components(self, setting: PartSetting) -> dict[str, SavedComponent]:
        self._settle()
        optimizer: list[TensorItem] = []
        components = {}
        for name, worker in self._trained.items():
            components[name] = self._model(worker, setting)
            optimizer += _slices(f"{name}.", worker.engine.optimizer_tensors(), worker.engine.parallel)
        components["optimizer"] = SavedComponent(tensors=optimizer, file=self._file(setting))
        return components

    def _settle(self) -> None:
        for worker in self._trained.values():
            worker.engine.parallel.settle(worker.engine.model)

    def _file(self, setting: PartSetting) -> str:
        meshes = [worker.engine.parallel.mesh for worker in self._trained.values()]
        mesh, rank = max(meshes, key=lambda mesh: mesh.extent(TENSOR)), self._parallel.rank
        place = f"_tp_rank_{mesh.coordinate(rank, TENSOR)}_pp_rank_0" if mesh.extent(TENSOR) > 1 else ""
        return f"optim_state_rank_{setting.first_rank + rank}{place}.safetensors"

    def _model(self, worker: TrainedWorker, setting: PartSetting) -> SavedComponent:
        """The tensors of a model that this process writes, gathered, and on rank 0 what lies beside them."""
        model, rank = worker.engine.model, self._parallel.rank
        live, file = live_tensors(model), saved_file(model)
        names = names_in_files(model) if setting.use_safetensors and file is None else None
        owner, files, index = _division(live, names, self._parallel.world_size, setting.max_shard_bytes)
        whole = whole_on_owners(live, owner, worker.engine.parallel)
        tensors = saved_tensors(model, whole) if whole else {}
        beside: dict[str, bytes] = {}
        if rank == 0:
            beside = small_files(model, whole) | ({"model.safetensors.index.json": index} if index else {})
            if not setting.use_safetensors:
                beside[ADAPTER_BIN if file else "pytorch_model.bin"] = as_torch_file(tensors)
        if not setting.use_safetensors:
            tensors = {}
        constant = worker.constant_files() if rank == 0 else {}
        return SavedComponent(
            tensors=[TensorItem(name=name, tensor=x) for name, x in tensors.items()],
            file=file,
            metadata={"format": "pt"},
            files=beside,
            constant_files={name: data for name, data in constant.items() if name not in beside},
            max_shard_bytes=setting.max_shard_bytes,
            shards=None if files is None else files[rank],
        )


Files = list[dict[str, list[str]]] | None


def _division(
    live: Mapping[str, Tensor], names: Mapping[str, str] | None, num_ranks: int, max_bytes: int
) -> tuple[dict[str, int], Files, bytes | None]:
    """Who gathers each tensor of a model, under the first of its names, and the files of each process.

    What is in no file of tensors, such as a value head, is rank 0's. So is a whole model whose tensors transformers
    cuts or joins when it saves it.
    """
    owner = dict.fromkeys(live, 0)
    if names is None:
        return owner, None, None
    sizes = {name: live[own].numel() * live[own].element_size() for name, own in names.items()}
    writes = owners(sizes, num_ranks)
    owner |= {names[name]: rank for name, rank in writes.items()}
    files, index = model_files(sizes, writes, num_ranks, max_bytes)
    return owner, files, index


def _slices(prefix: str, tensors: Mapping[str, Tensor], parallel: Parallelism) -> list[TensorItem]:
    """What this process writes of tensors that it holds in part, or as others do."""
    items, layout = [], layout_of(tensors, parallel.mesh)
    for share in shares(layout):
        if share.rank == parallel.rank:
            x, held = tensors[share.name], layout.holds(parallel.rank, share.name)
            assert held is not None
            part = local(x)[_within(share.box, held)] if share.box else local(x)
            start = tuple(first for first, _ in share.box)
            items.append(TensorItem(name=prefix + share.name, tensor=part, shape=tuple(x.shape), start=start))
    return items


def _within(part: Box, held: Box) -> tuple[slice, ...]:
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(part, held, strict=True))


def _num_bytes(worker: TrainedWorker) -> int:
    live: dict[int, Any] = {id(x): x for x in live_tensors(worker.engine.model).values()}
    moments = worker.engine.optimizer_tensors().values()
    return sum(x.numel() * x.element_size() for x in (*live.values(), *moments))


def _writer_of(setting: PartSetting) -> CheckpointWriter:
    store = CheckpointStore(setting.directory, setting.run_id, setting.disk_type(), setting.claim)
    mode = "async" if setting.is_async else "sync"
    return CheckpointWriter(store, mode=mode, timeout_s=setting.writer_timeout_s)
