"""Roles without a model that tell which GPU their process was given."""

from __future__ import annotations

import os
from typing import Any

from cluster.toy_roles import ToyPlace

from verl.component import BuildContext, Description, component
from verl.engines.sharding import DDP, Sharding
from verl.protocol.dispatch import on_each


class GpuTeller:
    def __init__(self, context: BuildContext):
        self.context = context

    @on_each
    def gpu(self) -> tuple[str, str | None, bool]:
        """The device that the process was told, what it sees, and whether others are there too."""
        return self.context.device, os.environ.get("CUDA_VISIBLE_DEVICES"), self.context.shares_device


@component
class GpuHost(Description):
    """Has roles of these names."""

    names: tuple[str, ...]

    def worker_types(self) -> dict[str, type]:
        return dict.fromkeys(self.names, GpuTeller)

    def shardings(self) -> dict[str, Sharding]:
        return dict.fromkeys(self.names, DDP())

    def only(self, roles: Any, size: int) -> GpuHost:
        return GpuHost(names=tuple(roles))

    def build(self, context: BuildContext) -> ToyPlace:
        return ToyPlace({name: GpuTeller(context) for name in self.names})
