"""A checkpoint taken into a role that is running: straight into its live tensors, without a second model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.checkpoint.core.checkpoint import open_checkpoint
from verl.checkpoint.core.filesystem import FileSystem
from verl.checkpoint.manager import CheckpointManager
from verl.checkpoint.read.lazy_tensors import DeviceMap, LazyTensor, lazy_tensors
from verl.checkpoint.read.reader import CheckpointReader
from verl.engines.engine import TrainingEngine
from verl.engines.parallel_dims import Parallelism
from verl.errors import ConfigError
from verl.models.heads import ValueHeadModel
from verl.models.hf_state_dict import ADAPTER_BIN, hf_state_dict, live_tensors, load_adapter, names_in_files
from verl.models.pretrained import VALUE_HEAD_FILE, Pretrained
from verl.resharding.dtensor import ReadableTensor, local, own_part
from verl.utils.progress import report
from verl.workers.state import Restore


@dataclass(frozen=True)
class Reload:
    """What is taken from a checkpoint, every byte of which has been hashed; travels to the processes of the roles.

    Attributes:
        directory: of the checkpoint.
        weights, optimizer: which of them.
        mmap: copy from the mapped files, instead of reading them into memory first.
        device_map: where tensors are put on their way; None is main memory, and so it is for what is divided.
    """

    directory: Path
    weights: bool = True
    optimizer: bool = True
    mmap: bool = False
    device_map: DeviceMap = None

    def tensors(self, component: str) -> Mapping[str, Tensor]:
        """Of a component by name; none where they lie in no safetensors file."""
        manager = CheckpointManager(self.directory)
        return manager.load(component, mmap=self.mmap, device_map=self.device_map, strict=False, verify=False)

    def saved(self, component: str) -> dict[str, LazyTensor]:
        """The same, to be read where they are indexed."""
        reader = CheckpointReader(open_checkpoint(FileSystem(), self.directory), verify=False, writable=True)
        return lazy_tensors(reader, component)


def load_weights(model: Any, component: str, source: Reload, parallel: Parallelism) -> None:
    """Copy the weights of a component into a live model, a value head included; of a divided one, what is kept here.

    Raises:
        ConfigError: they are not those of this model.
    """
    if parallel.divides_weights:
        parallel.settle(model)
        _load_parts(model, component, source)
        return
    live, found = hf_state_dict(model).tensors, source.tensors(component)
    if found and _are_own(live, model):
        _refuse_other(component, live, found)
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.copy_(found[name])
    elif hasattr(model, "peft_config"):
        load_adapter(model, Restore(source.directory, verify=False).adapter(component))
    else:
        _copy_whole(model, component, source)
    if isinstance(model, ValueHeadModel):
        model.load_head(source.directory / component / VALUE_HEAD_FILE)


def _load_parts(model: Any, component: str, source: Reload) -> None:
    """Every process reads of each tensor what it keeps of it."""
    live, names = live_tensors(model), names_in_files(model)
    found: Mapping[str, ReadableTensor] = source.saved(component)
    if not found and hasattr(model, "peft_config"):
        found = torch.load(source.directory / component / ADAPTER_BIN, map_location="cpu", weights_only=True)
    if not found or names is None:
        backbone = isinstance(model, ValueHeadModel)
        loaded = _loaded(model, component, source).state_dict()
        found = {f"backbone.{name}" if backbone else name: x for name, x in loaded.items()}
        names = {name: name for name in live if name in found}
    _refuse_other(component, {name: live[own] for name, own in names.items()}, found)
    with torch.no_grad():
        for name, own in names.items():
            local(live[own]).copy_(own_part(live[own], found[name]))
            report()
    if isinstance(model, ValueHeadModel):
        model.load_head(source.directory / component / VALUE_HEAD_FILE)


def load_optimizer(engine: TrainingEngine, component: str, source: Reload) -> None:
    """Give an engine the moments of the optimizer and its place in the learning rate's schedule."""
    assert engine.optimizer is not None
    prefix, divided = f"{component}.", engine.parallel.divides_weights
    found: Mapping[str, ReadableTensor] = source.saved("optimizer") if divided else source.tensors("optimizer")
    schedule = json.loads((source.directory / "scheduler/state.json").read_text())
    engine.optimizer.state.clear()
    own = {name.removeprefix(prefix): found[name] for name in found if name.startswith(prefix)}
    engine.load_optimizer(own, schedule["updates"][component])


def _are_own(live: Mapping[str, Tensor], model: Any) -> bool:
    """Whether the tensors under their names in the file are the model's, and not made for saving."""
    places = {x.data_ptr() for x in model.state_dict().values()}
    return all(x.data_ptr() in places for x in live.values())


def _refuse_other(component: str, live: Mapping[str, Tensor], found: Mapping[str, ReadableTensor]) -> None:
    faults = [f"{name} is not in the checkpoint" for name in live if name not in found]
    faults += [f"{name} is not in the model" for name in found if name not in live]
    faults += [
        f"{name} is {list(found[name].shape)} there and {list(tensor.shape)} here"
        for name, tensor in live.items()
        if name in found and found[name].shape != tensor.shape
    ]
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise ConfigError(
            f"path: its {component} is another model than the one that trains: {'; '.join(faults[:3])}{more}."
        )


def _copy_whole(model: Any, component: str, source: Reload) -> None:
    """By way of a second model, where the file knows the weights under other names or in another form."""
    target = model.backbone if isinstance(model, ValueHeadModel) else model
    target.load_state_dict(_loaded(model, component, source).state_dict())


def _loaded(model: Any, component: str, source: Reload) -> Any:
    """A second model, or backbone of one, in main memory."""
    dtype: Any = str(next(model.parameters()).dtype).removeprefix("torch.")
    described = Pretrained(path=str(Restore(source.directory, verify=False).plain(component)), dtype=dtype)
    return described.load_backbone("cpu") if isinstance(model, ValueHeadModel) else described.load_causal_lm("cpu")
