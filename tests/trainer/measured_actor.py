"""An actor that counts the bytes of its updates, in whatever process it lives."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl.component import component
from verl.trainer.plan.activations import LiveBytes
from verl.workers.actor import Actor


class ResizedBytes(LiveBytes):
    """Also of storages that are emptied and filled again, and of what lies within distributed tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operations on local tensors come here again
        found = super().__torch_dispatch__(func, types, args, kwargs)
        for storage, size in list(self._known.items()):
            if size and (now := storage.nbytes()) != size:
                self._known[storage] = now or 1
                self.live += now - size
        self.peak = max(self.peak, self.live)
        return found

    def watch(self, module: nn.Module) -> None:
        for parameter in module.parameters():
            self._known.setdefault(local(parameter).untyped_storage(), 0)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def resting_bytes(worker: Any) -> int:
    """Weights that are here, and what the optimizer keeps of them."""
    tensors = list(worker.model.parameters())
    for state in worker.engine.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return sum(local(tensor).nbytes for tensor in tensors if not local(tensor).is_meta)


@component
class MeasuredActor(Actor):
    """Writes resting bytes and the peak of each update beside them to a file per rank."""

    place: str

    def start(self, *args: Any, **kwargs: Any) -> Any:
        worker = super().start(*args, **kwargs)
        update, rank = worker.update, os.environ.get("RANK", "0")

        def measured(*call: Any, **options: Any) -> Any:
            with ResizedBytes() as counted:
                counted.watch(worker.model)
                result = update(*call, **options)
            line = {"rest": resting_bytes(worker), "peak": counted.peak, "threads": torch.get_num_threads()}
            (Path(self.place) / f"{rank}-{os.getpid()}.json").write_text(json.dumps(line))
            return result

        worker.update = measured
        return worker
