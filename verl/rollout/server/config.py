"""`rollout=server`: its options are in `options.py`."""

from __future__ import annotations

from typing import Any

from verl.component import BuildContext, component
from verl.models.parallel_info import Autocast
from verl.rollout.base import ALONE, RolloutEngine
from verl.rollout.server.options import ServerOptions


@component
class ServerRollout(ServerOptions):
    """Generate on an external server; see `ServerOptions`."""

    def attach(
        self, model: Any, tokenizer: Any, seed: int, autocast: Autocast = None, context: BuildContext = ALONE
    ) -> RolloutEngine:
        from verl.rollout.server.checks import checked_engine  # brings httpx

        return checked_engine(self, model, tokenizer, seed, autocast, context)
