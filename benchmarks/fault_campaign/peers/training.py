"""A tiny training whose state after every step is known to the bit, for tools that are told what to save."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

LAST = 3  # step whose save is struck; those before it are whole


@dataclass(frozen=True)
class Gate:
    """What a tool calls: before its last save, and after every save, with the step, once it has returned."""

    before_last: Callable[[], None]
    after: Callable[[int], None]


@dataclass(frozen=True)
class Resumed:
    """What a resume would go on with: the step that it takes itself to be at, and a digest of each part."""

    step: int
    parts: Mapping[str, str]


class Training:
    """A model of two layers, AdamW, a schedule, random data."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.step = 0
        self.model = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, 10)

    def advance(self) -> None:
        """One step."""
        self.model(torch.randn(4, 16)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.step += 1

    def state(self) -> dict[str, Any]:
        """Everything that a resume needs."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": torch.get_rng_state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"])

    def resumed(self) -> Resumed:
        """Where it stands."""
        return Resumed(self.step, digests(self.state()))

    def run(self, save: Callable[[], None], gate: Gate) -> None:
        """Train to the last step, saving after each."""
        while self.step < LAST:
            self.advance()
            if self.step == LAST:
                gate.before_last()
            save()
            gate.after(self.step)


def digests(state: Mapping[str, Any]) -> dict[str, str]:
    """A digest of every part, equal for equal bits."""
    return {name: _digest(part) for name, part in state.items()}


def random_states() -> dict[str, Any]:
    """Of every generator that a training draws from."""
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}


@dataclass
class _Digest:
    """Takes a tree of plain values and tensors in, one leaf after another."""

    hashed: Any = field(default_factory=hashlib.blake2b)

    def add(self, value: Any) -> None:
        if isinstance(value, torch.Tensor | np.ndarray):
            tensor = torch.as_tensor(value).detach().contiguous()
            self._leaf(f"{tensor.dtype} {tuple(tensor.shape)}")
            self.hashed.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, Mapping):
            self._leaf(f"mapping of {len(value)}")
            for key in sorted(value, key=str):
                self._leaf(str(key))
                self.add(value[key])
        elif isinstance(value, Sequence) and not isinstance(value, str):
            self._leaf(f"sequence of {len(value)}")
            for item in value:
                self.add(item)
        else:
            self._leaf(repr(value))

    def _leaf(self, text: str) -> None:
        self.hashed.update(text.encode() + b"\0")


def _digest(value: Any) -> str:
    digest = _Digest()
    digest.add(value)
    return digest.hashed.hexdigest()[:16]
