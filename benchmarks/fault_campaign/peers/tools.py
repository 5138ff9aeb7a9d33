"""Ways to save a training, each driven as its documentation says, and each asked to go on from what it finds."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed.checkpoint as dcp
from peers.training import Gate, Resumed, Training
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from verl.checkpoint.commit.store import CheckpointStore
from verl.checkpoint.manager import CheckpointManager
from verl.checkpoint.retention import Retention
from verl.checkpoint.save.async_writer import CheckpointWriter
from verl.checkpoint.save.save_request import SaveRequest
from verl.checkpoint.save.snapshot import SavedComponent
from verl.errors import CheckpointNotFound


class Tool(Protocol):
    """One way to save.

    Attributes:
        name: of its row.
        how: what is called, in a sentence.
    """

    name: str
    how: str

    def train(self, root: Path, gate: Gate) -> None:
        """Train, saving into `root` after each of three steps, and call the gate."""
        ...

    def resume(self, root: Path) -> Resumed | None:
        """What a new process would go on with; None where it finds no checkpoint; raises as the tool raises."""
        ...


def by_number(root: Path, pattern: str) -> list[Path]:
    """What lies there under such names, the highest number last."""
    numbered = [(int(found[1]), path) for path in root.iterdir() if (found := re.fullmatch(pattern, path.name))]
    return [path for _, path in sorted(numbered)]


class TorchSave:
    """`torch.save` of one dictionary, to a file for each step."""

    def __init__(self, keep: int | None = None):
        self.keep = keep
        self.name = "torch.save" + (f", {keep} kept" if keep else "")
        self.how = '`torch.save(state, f"step_{step}.pt")`, `torch.load(path, weights_only=True)` of the highest step'

    def train(self, root: Path, gate: Gate) -> None:
        training = Training()

        def save() -> None:
            torch.save(training.state(), root / f"step_{training.step}.pt")
            for path in by_number(root, r"step_(\d+)\.pt")[: -self.keep] if self.keep else []:
                path.unlink()

        training.run(save, gate)

    def resume(self, root: Path) -> Resumed | None:
        paths = by_number(root, r"step_(\d+)\.pt")
        return _loaded(paths[-1]) if paths else None


class TorchSaveLatest:
    """`torch.save` over the file of the step before: straight into it, by a rename, or by a rename with every sync."""

    def __init__(self, way: Literal["written over", "renamed", "synced, renamed, synced"]):
        self.way = way
        self.name = f"torch.save, latest.pt {way}"
        self.how = '`torch.save(state, "latest.pt")`, `torch.load(path, weights_only=True)`'

    def train(self, root: Path, gate: Gate) -> None:
        training = Training()

        def save() -> None:
            if self.way == "written over":
                torch.save(training.state(), root / "latest.pt")
                return
            torch.save(training.state(), root / "latest.pt.tmp")
            if self.way != "renamed":
                _sync(root / "latest.pt.tmp")
            os.replace(root / "latest.pt.tmp", root / "latest.pt")
            if self.way != "renamed":
                _sync(root)

        training.run(save, gate)

    def resume(self, root: Path) -> Resumed | None:
        return _loaded(root / "latest.pt") if (root / "latest.pt").exists() else None


class DistributedCheckpoint:
    """`torch.distributed.checkpoint` in one process, with its own functions for the state of model and optimizer."""

    def __init__(self, keep: int | None = None):
        self.keep = keep
        self.name = "torch.distributed.checkpoint" + (f", {keep} kept" if keep else "")
        self.how = "`get_state_dict`, `dcp.save(state, checkpoint_id=path)`, `dcp.load`, `set_state_dict`"

    def train(self, root: Path, gate: Gate) -> None:
        training = Training()

        def save() -> None:
            dcp.save(self._state(training), checkpoint_id=root / f"step_{training.step}")
            for path in by_number(root, r"step_(\d+)")[: -self.keep] if self.keep else []:
                shutil.rmtree(path)

        training.run(save, gate)

    def resume(self, root: Path) -> Resumed | None:
        paths = [path for path in by_number(root, r"step_(\d+)") if (path / ".metadata").exists()]
        if not paths:
            return None
        training = Training()
        state = self._state(training)
        dcp.load(state, checkpoint_id=paths[-1])
        set_state_dict(
            training.model, training.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        training.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"])
        training.step = state["step"]
        return training.resumed()

    def _state(self, training: Training) -> dict[str, Any]:
        model, optimizer = get_state_dict(training.model, training.optimizer)
        return training.state() | {"model": model, "optimizer": optimizer}


class Ours:
    """`CheckpointWriter`, and `CheckpointManager`, which hashes what it reads."""

    def __init__(self, keep: int | None = None):
        self.keep = keep
        self.name = "verl" + (f", {keep} kept" if keep else "")
        self.how = "`CheckpointWriter.save` and `drain`, `CheckpointManager(directory).load`"

    def train(self, root: Path, gate: Gate) -> None:
        training = Training()
        store = CheckpointStore(root, run_id="first")
        with CheckpointWriter(store, mode="sync", retention=Retention(keep_last_n=self.keep)) as writer:

            def save() -> None:
                writer.save(self._request(training))
                writer.drain()

            training.run(save, gate)

    def resume(self, root: Path) -> Resumed | None:
        manager = CheckpointManager(root)
        try:
            plain = json.loads(manager.read("optimizer/settings.json"))
        except CheckpointNotFound:
            return None
        training, moments = Training(), manager.load("optimizer")
        indices = range(len(plain["param_groups"][0]["params"]))
        keys = ("step", "exp_avg", "exp_avg_sq")
        training.load({
            "step": manager.step,
            "model": dict(manager.load("actor")),
            "optimizer": plain | {"state": {n: {key: moments[f"{n}.{key}"].clone() for key in keys} for n in indices}},
            "scheduler": manager.state["scheduler"],
            "rng": manager.load("rng")["torch"].clone(),
        })  # fmt: skip
        return training.resumed()

    def _request(self, training: Training) -> SaveRequest:
        state = training.state()
        optimizer = state["optimizer"]
        moments = {f"{n}.{key}": value for n, of in optimizer["state"].items() for key, value in of.items()}
        settings = json.dumps({"param_groups": optimizer["param_groups"]}).encode()
        components = {
            "actor": SavedComponent(tensors=state["model"], constant_files={"tokenizer.json": b'{"constant": 1}'}),
            "optimizer": SavedComponent(
                tensors=moments, file="optimizer.safetensors", files={"settings.json": settings}
            ),
            "rng": SavedComponent(tensors={"torch": state["rng"]}, file="rng.safetensors"),
        }
        return SaveRequest(step=training.step, components=components, state={"scheduler": state["scheduler"]})


def _loaded(path: Path) -> Resumed:
    training = Training()
    training.load(torch.load(path, weights_only=True))
    return training.resumed()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
