"""Counts what would make a process wait for its GPU, on a CPU: questions about values of tensors that lie on a device.

A tensor counts as one of the device if it was put there (`on_device`) or if an operation made it of one that was.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

import verl
from verl.model_paths.micro_batch import MicroBatch

PACKAGE = Path(verl.__file__).resolve().parent
DATA_DEPENDENT = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
NOT_LAUNCHED = {"_local_scalar_dense", "empty_like", "new_empty", "empty_strided", "detach", "alias"}
TO_HOST = {"cpu", "numpy", "tolist"}


class DeviceSyncs(TorchDispatchMode):
    """Within, `counts` has how often each kind of question was asked, and `launches` all operations on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.names: Counter[str] = Counter()
        self.launches = 0
        self._there = WeakTensorKeyDictionary()
        self._calls = _Calls(self)

    def on_device(self, value: Any) -> Any:
        """From here on these tensors count as some of the device."""
        for x in tree_leaves(value):
            if isinstance(x, Tensor):
                self._there[x] = True
        return value

    def is_there(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x in self._there

    def __enter__(self) -> DeviceSyncs:
        self._calls.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._calls.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        is_there = any(self.is_there(x) for x in leaves)
        if is_there:
            name = func.overloadpacket.__name__
            is_view = torch.Tag.core in func.tags and func.is_view
            is_launch = not is_view and name not in NOT_LAUNCHED
            self.launches += is_launch
            self.names[name] += is_launch
            if name == "_local_scalar_dense":
                self.counts["item"] += 1
            elif name in DATA_DEPENDENT:
                self.counts[name] += 1
            elif name in ("index", "index_put", "index_put_", "_index_put_impl_"):
                chosen = [x for x in tree_leaves(args[1]) if isinstance(x, Tensor)]
                self.counts["boolean index"] += any(x.dtype in (torch.bool, torch.uint8) for x in chosen)
            elif name == "repeat_interleave" and "output_size" not in (kwargs or {}):
                self.counts["repeat_interleave"] += 1
        made = func(*args, **(kwargs or {}))
        return self.on_device(made) if is_there else made


class _Calls(TorchFunctionMode):
    """Copies to main memory: on a CPU they are not operations."""

    def __init__(self, syncs: DeviceSyncs) -> None:
        super().__init__()
        self.syncs = syncs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if args and self.syncs.is_there(args[0]):
            targets = [x for x in (*args[1:], (kwargs or {}).get("device")) if isinstance(x, torch.device)]
            if name in TO_HOST or (name == "to" and targets and _asked_by_verl()):
                self.syncs.counts[name] += 1
        return func(*args, **(kwargs or {}))


def _asked_by_verl() -> bool:
    """Whether the call comes from code of the project itself: models, and torch, move tensors to the device that they
    are on."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame is not None and is_in_package(frame.f_code.co_filename)


def is_in_package(file: str, package: Path = PACKAGE) -> bool:
    """Whether a file of code belongs to the package: the checkout and its environment may be below a `verl` too."""
    return Path(file).resolve().is_relative_to(package)


def pretend_micro_batches(monkeypatch: Any) -> DeviceSyncs:
    """What `MicroBatch.to` puts on a device counts as there, from then on."""
    syncs = DeviceSyncs()

    def to(micro: MicroBatch, device: torch.device) -> MicroBatch:
        packing: Any = micro.packing
        if packing is not None:
            how, slots = packing.predictors, packing.slots()
            packing = replace(
                packing,
                tokens=packing.tokens.clone(),
                positions=packing.positions.clone(),
                predictors=replace(how, index=how.index.clone(), uses=tuple(x.clone() for x in how.uses)),
            )
            syncs.on_device([packing.tokens, packing.positions])
            for taken in (packing.predictors, slots.queries, slots.keys, slots.out):
                syncs.on_device((taken.index, *taken.uses))
        places = tuple(syncs.on_device(x.clone()) for x in micro.on_mask)
        tensors = {name: syncs.on_device(x.clone()) for name, x in micro.tensors.items()}
        return replace(micro, tensors=tensors, packing=packing, positions=places)

    monkeypatch.setattr(MicroBatch, "to", to)
    return syncs
