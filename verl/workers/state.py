"""What a role hands over for a checkpoint, and how it takes it back."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from verl.checkpoint.core.checkpoint import open_checkpoint
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.export import plain_directory
from verl.checkpoint.read.lazy_tensors import lazy_tensors
from verl.checkpoint.read.reader import CheckpointReader
from verl.engines.engine import TrainingEngine
from verl.models.hf_state_dict import ADAPTER_BIN, ADAPTER_FILE, HFStateDict
from verl.models.pretrained import ModelSource, Pretrained


@dataclass(frozen=True)
class RoleState:
    """The state of a trained role: live tensors where the role lives in the driver's process, copies elsewhere.

    Attributes:
        model: weights and small files.
        optimizer: its tensors, see `TrainingEngine.optimizer_tensors`.
        updates: optimizer steps made; they are the position in the learning rate's schedule.
        tokenizer: files that never change.
    """

    model: HFStateDict
    optimizer: dict[str, Tensor]
    updates: int
    tokenizer: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class RemoteState:
    """What is told of a trained role whose processes write their tensors themselves.

    Attributes:
        updates: see `RoleState`.
        num_bytes: of its weights and its optimizer's state.
    """

    updates: int
    num_bytes: int


SavedRole = RoleState | RemoteState
"""What a save is given of a role."""


@dataclass(frozen=True)
class Restore:
    """The checkpoint that roles start from; travels to the processes where they live.

    Args:
        directory: of the published checkpoint.
        verify: hash what is read.
    """

    directory: Path
    verify: bool = True

    def reader(self) -> CheckpointReader:
        disk = FileSystem()
        return CheckpointReader(open_checkpoint(disk, self.directory), disk, self.verify, writable=True)

    def model(self, described: ModelSource, component: str) -> ModelSource:
        """Where a role's weights are now, once every byte of them is what was written."""
        path = str(self.plain(component))
        if isinstance(described, Pretrained):
            return replace(described, path=path, revision=None)
        return Pretrained(path=path, dtype=described.dtype)

    def plain(self, component: str) -> Path:
        """A component as a directory that other libraries open, once every byte of it is what was written."""
        reader = self.reader()
        for entry in reader.files(component):
            reader.check(entry.path)
        return plain_directory(reader.published, component)

    def adapter(self, component: str) -> Path:
        """The weights of a component's adapter, in either form."""
        directory = self.plain(component)
        safe = directory / ADAPTER_FILE
        return safe if safe.is_file() else directory / ADAPTER_BIN

    def file(self, component: str, name: str) -> Path:
        """A file of a component, once it is what was written."""
        self.reader().read(f"{component}/{name}")
        return self.directory / component / name

    def optimizer(self, engine: TrainingEngine, role: str) -> None:
        """Give an engine the optimizer's state, of which it reads what this process keeps, and its place in the
        schedule."""
        reader = self.reader()
        prefix = f"{role}."
        found = lazy_tensors(reader, "optimizer").items()
        tensors = {name.removeprefix(prefix): tensor for name, tensor in found if name.startswith(prefix)}
        schedule = json.loads(bytes(reader.read("scheduler/state.json")))
        engine.load_optimizer(tensors, schedule["updates"][role])
