"""Loading a checkpoint into a running trainer.

path ──> which checkpoint ──> hashed ──> actor, critic, optimizer ──> the live tensors of the roles
                                     └─> scheduler, dataloader, rng, replay_buffer ──> the driver
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.checkpoint.read.lazy_tensors import DeviceMap
from verl.checkpoint.read.reader import CheckpointReader
from verl.checkpoint.resolve import ResumePoint, resolve
from verl.component import as_plain
from verl.errors import CheckpointNotFound, ConfigError
from verl.trainer.state.driver_state import load_parts
from verl.trainer.state.training_identity import identity_of, refuse_other_identity
from verl.trainer.train_loop import TrainLoop
from verl.utils.memory import refuse_device
from verl.workers.load_state import CheckpointSelection

COMPONENTS = ("actor", "critic", "optimizer", "scheduler", "dataloader", "rng", "replay_buffer")


def load_checkpoint(
    loop: TrainLoop,
    path: str | Path,
    components: Sequence[str] | None = None,
    mmap: bool = False,
    device_map: DeviceMap = None,
) -> ResumePoint:
    """Load a checkpoint into a running trainer.

    Nothing is changed before all bytes to be loaded have been verified by hash.

    Args:
        path: `latest`, a checkpoint, a directory of checkpoints, or the directory of a run.
        components: some of `COMPONENTS`. `optimizer` includes the position in the learning-rate schedules; `scheduler`
            is the step, the KL control and reward statistics; `dataloader` the position in the data;
            `replay_buffer` replaces the rows of the buffer. None loads everything, and training continues as the saved
            run would have.
        mmap: copy from memory-mapped files, instead of reading them into memory first.
        device_map: device that tensors are read to before they are copied, such as cuda:0; None for main memory.
    Raises:
        ConfigError: there is no such component or device, the checkpoint is of another model, or all components are
            loaded and it is of another training.
        CheckpointNotFound: there is no checkpoint.
        BadCheckpoint: it is damaged.
    """
    trainer: Any = loop.trainer
    chosen = _chosen(trainer, components)
    _refuse_devices(device_map)
    loop.settle()
    point = resolve(str(path), trainer.saving.directory, verify=False, setting="path")
    if point is None:
        raise CheckpointNotFound(f"path is {path!r}: there is no checkpoint in {trainer.saving.directory}")
    if components is None and point.state.get("identity"):
        identity = trainer.saving.identity or identity_of(as_plain(trainer.description), trainer.tokenizer)
        _refuse_with_path(point, identity)
    reader, read = CheckpointReader(point.checkpoint), {*chosen, *["scheduler"] * ("optimizer" in chosen)}
    for component in sorted(read):
        for entry in reader.files(component):
            reader.check(entry.path)
    loop.begin(evaluates=False)
    for name in trainer.trained:
        source = CheckpointSelection(
            point.checkpoint.directory, name in chosen, "optimizer" in chosen, mmap, device_map
        )
        getattr(trainer, name).load(name, source).result()
    trainer.sync()
    load_parts(point, trainer.parts, chosen)
    if "scheduler" in chosen:
        loop.go_on_from(point)
    return point


def _chosen(trainer: Any, components: Sequence[str] | None) -> list[str]:
    replay = getattr(trainer, "replay", None)  # a trainer of supervised fine-tuning has none
    is_own = {"critic": "critic" in trainer.trained, "replay_buffer": replay is not None and replay.buffer is not None}
    known = [name for name in COMPONENTS if is_own.get(name, True)]
    if components is None:
        return known
    if isinstance(components, str):
        raise ConfigError(f"load_components is {components!r}: expected a list, such as [{components!r}].")
    unknown = [name for name in components if name not in known]
    if unknown:
        raise ConfigError(f"load_components has {', '.join(map(repr, unknown))}: this trainer has {', '.join(known)}.")
    return list(components)


def _refuse_devices(device_map: DeviceMap) -> None:
    named = list(device_map.values()) if isinstance(device_map, Mapping) else [device_map]
    for device in named:
        if device is not None:
            refuse_device(device, "device_map")


def _refuse_with_path(point: ResumePoint, identity: Mapping[str, Any]) -> None:
    try:
        refuse_other_identity(point, identity)
    except ConfigError as error:
        hint = "To take over weights alone, give load_components=['actor']."
        raise ConfigError([*error.faults, f"path is {point.checkpoint.directory}: another training. {hint}"]) from error
