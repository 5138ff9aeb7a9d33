"""A role's state for a checkpoint, and loading it: when the role is built, or into the live tensors of a running
one.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.checkpoint.core.checkpoint import open_checkpoint
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.manager import CheckpointManager
from verl.checkpoint.read.discovery import FETCHED
from verl.checkpoint.read.lazy_tensors import DeviceMap, LazyTensor, lazy_tensors
from verl.checkpoint.read.reader import CheckpointReader
from verl.checkpoint.remote.transfer import fetch_by_manifest
from verl.engines.engine import TrainingEngine
from verl.engines.parallel_dims import Parallelism
from verl.errors import CheckpointCorrupt, CheckpointNotFound, ConfigError, FileFault
from verl.models.heads import head_of
from verl.models.hf_state_dict import ADAPTER_BIN, ADAPTER_FILE, HFStateDict, live_tensors, names_in_files
from verl.models.parallel_info import release_gathered
from verl.models.pretrained import ModelSource, Pretrained
from verl.ops.resharding.dtensor import ReadableTensor, local, own_part
from verl.storage.config import Storage
from verl.utils.external_input import parse_mapping, whole_number
from verl.utils.progress import report


@dataclass(frozen=True)
class RoleState:
    """State of a trained role: live tensors if the role is in the driver's process, else copies.

    Attributes:
        model: weights and small files.
        optimizer: its tensors; see `TrainingEngine.optimizer_tensors`.
        updates: number of optimizer steps, the position in the learning-rate schedule.
        tokenizer: files of the tokenizer, which never change.
    """

    model: HFStateDict
    optimizer: dict[str, Tensor]
    updates: int
    tokenizer: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class RemoteRoleState:
    """Metadata of a trained role whose processes write their tensors themselves.

    Attributes:
        updates: see `RoleState`.
        num_bytes: of its weights and its optimizer's state.
    """

    updates: int
    num_bytes: int


SavedRoleState = RoleState | RemoteRoleState
"""State of a role that a save receives."""


OF_WORKERS = "of_workers"  # subdirectory of FETCHED for downloads on machines other than the driver's


@dataclass(frozen=True)
class RestoreSource:
    """The checkpoint that roles resume from; sent to their processes.

    Args:
        directory: of the published checkpoint.
        verify: check the hash of all data that is read.
        storage: object storage with the checkpoint, for processes that do not see the directory, or None.
        manifest: digest of its manifest, which identifies it in the storage.
    """

    directory: Path
    verify: bool = True
    storage: Storage | None = None
    manifest: str = ""

    def here(self) -> RestoreSource:
        """This source with a path that this process can read; on another machine the checkpoint is downloaded.

        Raises:
            CheckpointNotFound: the checkpoint is neither here nor in the storage.
            StorageError: the storage does not answer.
        """
        if self.directory.is_dir():
            return self
        if self.storage is None:
            raise self._absent("")
        report(f"fetching {self.directory.name}")
        into = self.directory.parent / FETCHED / OF_WORKERS
        checkpoint = fetch_by_manifest(self.storage, self.manifest, into)
        if checkpoint is None:
            raise self._absent(f", nor in {self.storage.address}")
        return RestoreSource(checkpoint.directory, verify=False)  # all of it was hashed during the download

    def _absent(self, more: str) -> CheckpointNotFound:
        host = socket.gethostname()
        return CheckpointNotFound(
            f"{self.directory}, which the run resumes from, is not on the machine {host}{more}: each machine reads the "
            "checkpoint. Put checkpoint.save_dir on a file system that all of them mount at this path, give the run a "
            f"storage to save to, from which each machine fetches it, or copy {self.directory} to {host}."
        )

    def reader(self) -> CheckpointReader:
        """A reader of the checkpoint.

        Raises:
            CheckpointNotFound: this process has no such directory.
        """
        disk = FileSystem()
        if not self.directory.is_dir():
            raise self._absent("")
        return CheckpointReader(open_checkpoint(disk, self.directory), disk, self.verify, writable=True)

    def model(self, described: ModelSource, component: str) -> ModelSource:
        """Model source of a role's saved weights, after their hashes were verified."""
        return described.at(str(self.plain(component)))

    def plain(self, component: str) -> Path:
        """Directory of a component for use by other libraries, after its hashes were verified."""
        reader = self.reader()
        for entry in reader.files(component):
            reader.check(entry.path)
        return reader.checkpoint.directory / component

    def adapter(self, component: str) -> Path:
        """Path of the weights of a component's adapter, in either format."""
        directory = self.plain(component)
        safe = directory / ADAPTER_FILE
        return safe if safe.is_file() else directory / ADAPTER_BIN

    def file(self, component: str, name: str) -> Path:
        """Path of a file of a component, after its hash was verified."""
        self.reader().read(f"{component}/{name}")
        return self.directory / component / name

    def optimizer(self, engine: TrainingEngine, role: str) -> None:
        """Load the optimizer state, of which the engine reads its own shards, and the position in the learning-rate
        schedule."""
        reader = self.reader()
        prefix = f"{role}."
        saved = lazy_tensors(reader, "optimizer").items()
        tensors = {name.removeprefix(prefix): tensor for name, tensor in saved if name.startswith(prefix)}
        engine.load_optimizer(tensors, _updates(self.directory, reader.read("scheduler/state.json"), role))


@dataclass(frozen=True)
class CheckpointSelection:
    """Parts of a verified checkpoint to load; picklable.

    Attributes:
        directory: of the checkpoint.
        weights, optimizer: whether to load each.
        mmap: copy from mapped files, instead of reading them into memory first.
        device_map: device that tensors are read to first; main memory for None and for sharded tensors.
    """

    directory: Path
    weights: bool = True
    optimizer: bool = True
    mmap: bool = False
    device_map: DeviceMap = None

    def tensors(self, component: str) -> Mapping[str, Tensor]:
        """Tensors of a component by name; empty if it has no safetensors file."""
        manager = CheckpointManager(self.directory)
        return manager.load(component, mmap=self.mmap, device_map=self.device_map, strict=False, verify=False)

    def saved(self, component: str) -> dict[str, LazyTensor]:
        """Tensors of a component as lazy tensors, which are read when indexed."""
        reader = CheckpointReader(open_checkpoint(FileSystem(), self.directory), verify=False, writable=True)
        return lazy_tensors(reader, component)


def load_weights(model: Any, component: str, source: CheckpointSelection, parallel: Parallelism) -> None:
    """Copy the weights of a component into a live model, or into its local shards; includes the value head.

    Raises:
        ConfigError: the weights are those of another model.
    """
    release_gathered(model)
    live, names = live_tensors(model), names_in_files(model)
    saved: Mapping[str, ReadableTensor]
    saved = source.saved(component) if parallel.divides_weights else source.tensors(component)
    if not saved and hasattr(head_of(model).backbone, "peft_config"):
        saved = torch.load(source.directory / component / ADAPTER_BIN, map_location="cpu", weights_only=True)
    if not saved or names is None:
        # load a second model, because the file has the weights under other names or in another form
        saved = head_of(model).joined(_loaded(model, component, source).state_dict())
        names = {name: name for name in live if name in saved}
    _refuse_other(component, {name: live[key] for name, key in names.items()}, saved)
    with torch.no_grad():
        for name, key in names.items():
            local(live[key]).copy_(own_part(live[key], saved[name]))
            report()
    head_of(model).load(source.directory / component)


def load_optimizer(engine: TrainingEngine, component: str, source: CheckpointSelection) -> None:
    """Load the optimizer's moments and the position in the learning rate schedule into an engine."""
    assert engine.optimizer is not None
    prefix, is_sharded = f"{component}.", engine.parallel.divides_weights
    saved: Mapping[str, ReadableTensor] = source.saved("optimizer") if is_sharded else source.tensors("optimizer")
    schedule = (source.directory / "scheduler/state.json").read_bytes()
    engine.optimizer.state.clear()
    of_role = {name.removeprefix(prefix): saved[name] for name in saved if name.startswith(prefix)}
    engine.load_optimizer(of_role, _updates(source.directory, schedule, component))


def _updates(checkpoint: Path, schedule: bytes | memoryview, role: str) -> int:
    """Number of optimizer steps of a role, its position in the learning-rate schedule."""
    try:
        return whole_number(parse_mapping(schedule)["updates"][role])
    except (LookupError, TypeError, ValueError) as error:
        problem = f"it does not say how often {role} was updated ({type(error).__name__}: {error})"
        raise CheckpointCorrupt(checkpoint, [FileFault("scheduler/state.json", problem)]) from error


def _refuse_other(component: str, live: Mapping[str, Tensor], saved: Mapping[str, ReadableTensor]) -> None:
    faults = [f"{name} is not in the checkpoint" for name in live if name not in saved]
    faults += [f"{name} is not in the model" for name in saved if name not in live]
    faults += [
        f"{name} is {list(saved[name].shape)} there and {list(tensor.shape)} here"
        for name, tensor in live.items()
        if name in saved and saved[name].shape != tensor.shape
    ]
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise ConfigError(
            f"path: its {component} is another model than the one that trains: {'; '.join(faults[:3])}{more}."
        )


def _loaded(model: Any, component: str, source: CheckpointSelection) -> Any:
    """A second model, or only its backbone, in main memory."""
    dtype: Any = str(next(model.parameters()).dtype).removeprefix("torch.")
    described = Pretrained(path=str(RestoreSource(source.directory, verify=False).plain(component)), dtype=dtype)
    return getattr(described, head_of(model).loader)("cpu")
