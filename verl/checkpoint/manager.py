"""CheckpointManager: the user's access to one checkpoint, or to the newest of a directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from verl.checkpoint.core.checkpoint import Checkpoint, loss_points, read_state
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.core.manifest import FileEntry
from verl.checkpoint.read.discovery import CheckpointDirectory
from verl.checkpoint.read.reader import CheckpointReader, Level
from verl.checkpoint.resolve import resolve_path
from verl.errors import BadCheckpoint, CheckpointNotFound, ConfigError
from verl.storage.config import is_address

if TYPE_CHECKING:
    import torch

    from verl.checkpoint.read.lazy_tensors import DeviceMap

REPLAY_BUFFER = "replay_buffer"


class CheckpointManager:
    """Access to the metadata, files and tensors of a checkpoint.

    The path may be one checkpoint, `latest`, a directory of checkpoints or a run directory; of several, the newest
    complete one is used. It is chosen at the first access and does not change afterwards.

    >>> manager = CheckpointManager("checkpoints")
    >>> manager.is_valid(), manager.step, manager.get_loss()
    (True, 200, 0.375)
    >>> weight = manager.load("actor")["model.norm.weight"]

    Raises:
        ConfigError: the path is an address in object storage.
        CheckpointNotFound: by every method except `is_valid` and `list`, if there is no complete checkpoint.
        BadCheckpoint: by the same methods, if the path names a checkpoint that does not verify.
    """

    def __init__(self, path: str | Path):
        if isinstance(path, str) and is_address(path):
            raise ConfigError(
                f"path is {path!r}: it is in object storage. Fetch it with `verl checkpoint pull {path} DIR`, and give "
                "DIR."
            )
        self.path = Path(path).expanduser().absolute()

    def __repr__(self) -> str:
        return f"CheckpointManager({str(self.path)!r})"

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The opened checkpoint: its directory and its manifest."""
        return resolve_path(self.path).open()

    @cached_property
    def state(self) -> dict[str, Any]:
        """All of `trainer_state.json`."""
        return read_state(FileSystem(), self.checkpoint)

    # -- identity -----------------------------------------------------------------------------------------------------

    def is_valid(self, level: Level = "quick") -> bool:
        """Whether the checkpoint exists and passes verification.

        Args:
            level: `quick` checks sizes and headers, `full` hashes every byte.
        """
        if level not in get_args(Level):
            raise ConfigError(f"level is {level!r}: expected quick or full.")
        try:
            resolve_path(self.path).open(level)
        except (BadCheckpoint, CheckpointNotFound):
            return False
        return True

    @property
    def directory(self) -> Path:
        return self.checkpoint.directory

    @property
    def name(self) -> str:
        return self.checkpoint.name

    @property
    def step(self) -> int:
        """Training steps done."""
        return self.checkpoint.step

    @property
    def epoch(self) -> int | None:
        """The epoch in which it was saved; None if not recorded."""
        return self.state.get("epoch")

    @property
    def metrics(self) -> dict[str, float]:
        """At its step."""
        return dict(self.checkpoint.manifest.metrics)

    @property
    def loss_history(self) -> Sequence[dict[str, float]]:
        """The recorded loss curve, `step` and `loss` of each point."""
        return [{"step": step, "loss": loss} for step, loss in loss_points(self.state)]

    def get_loss(self) -> float | None:
        """The last recorded loss; None if there is none."""
        history = self.loss_history
        return history[-1]["loss"] if history else None

    def buffer_size(self) -> int:
        """Rows in the replay buffer; 0 if the checkpoint has none."""
        shards = [entry.path for entry in self.files(REPLAY_BUFFER) if entry.path.endswith(".arrow")]
        return sum(_arrow_rows(self.reader(verify=False).read(path)) for path in shards)

    # -- others beside it ---------------------------------------------------------------------------------------------

    def list(self) -> Sequence[CheckpointManager]:
        """All complete checkpoints at the path, the newest last; may be empty."""
        try:
            where = resolve_path(self.path)
        except CheckpointNotFound:
            return []
        if where.name is not None:
            return [self]
        complete = CheckpointDirectory(where.directory).complete()
        return [CheckpointManager(checkpoint.directory) for checkpoint in filter(where.covers, complete)]

    # -- content ------------------------------------------------------------------------------------------------------

    def components(self) -> Sequence[str]:
        """Names of its parts, such as `actor` and `optimizer`."""
        manifest = self.checkpoint.manifest
        directories = {entry.path.split("/")[0] for entry in manifest.contents.values() if "/" in entry.path}
        return sorted(directories | {tensor.component for tensor in manifest.tensors})

    def files(self, component: str = "") -> Sequence[FileEntry]:
        """The files of a component, or all of them."""
        return self.reader().files(component)

    def read(self, path: str, verify: bool = True) -> bytes:
        """A file of the checkpoint, such as `actor/config.json`; hashed while it is read.

        Raises:
            CheckpointNotFound: it has no such file.
            CheckpointCorrupt: its bytes differ from what was written.
        """
        return bytes(self.reader(verify).read(path))

    def load(
        self,
        component: str,
        mmap: bool = True,
        device_map: DeviceMap = None,
        strict: bool = True,
        verify: bool = True,
    ) -> Mapping[str, torch.Tensor]:
        """The tensors of a component by name, independent of the number of writers.

        Args:
            mmap: read each tensor when it is accessed, as a view of its file; False: read all tensors now.
            device_map: one device for all, or a mapping from prefixes of names to devices.
            strict: raise if the checkpoint does not have the component; False: return no tensors.
            verify: hash what is read.
        Raises:
            CheckpointNotFound: there is no such component.
            CheckpointCorrupt: bytes differ from what was written; with `mmap`, when the tensor is accessed.
            ConfigError: `device_map` does not cover a tensor.
        """
        from verl.checkpoint.read.lazy_tensors import MappedTensors

        if strict and component not in self.components():
            known = ", ".join(self.components()) or "nothing"
            raise CheckpointNotFound(f"{self.directory} has no component {component}; it has {known}")
        reader = self.reader(verify, writable=True)
        mapped = MappedTensors(reader, reader.tensors(component), device_map)
        if mmap:
            return mapped
        return {name: tensor.clone() if tensor.device.type == "cpu" else tensor for name, tensor in mapped.items()}

    def reader(self, verify: bool = True, writable: bool = False) -> CheckpointReader:
        """A low-level reader of bytes of files and tensors, which does not need torch; see `CheckpointReader`."""
        return CheckpointReader(self.checkpoint, verify=verify, writable=writable)


def _arrow_rows(file: memoryview) -> int:
    """Number of rows of an Arrow file, from its record batch headers, without reading columns."""
    import pyarrow

    with pyarrow.ipc.open_file(pyarrow.py_buffer(file)) as opened:
        return sum(opened.get_batch(number).num_rows for number in range(opened.num_record_batches))
