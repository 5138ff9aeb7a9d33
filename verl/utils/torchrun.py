"""Runs that torchrun has started, which are refused: the driver starts the processes of a run itself."""

from __future__ import annotations

import os

from verl.errors import ConfigError


def refuse_copies() -> None:
    """Refuse several processes of torchrun, each of which would train the whole run.

    Raises:
        ConfigError: there are several.
    """
    count = int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    if count > 1:
        raise ConfigError(
            f"torchrun has started this run {count} times, and each would train all of it. Start it once, without "
            f"torchrun, with trainer.n_gpus_per_node={os.environ.get('LOCAL_WORLD_SIZE', count)}: it starts its "
            "processes itself. Several machines are joined by Ray (docs/scaling.md)."
        )
