"""What must be the same in all processes of a run, for they exchange Python objects and numbers."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence

from verl.errors import ConfigError


def versions() -> dict[str, str]:
    """Those of this process."""
    import torch

    import verl

    return {"python": platform.python_version(), "torch": str(torch.__version__), "verl": verl.__version__}


def refuse_mixed(workers: Sequence[Mapping[str, str]], where: str) -> None:
    """Compare the versions of workers, by rank, with those of this process, the driver.

    Args:
        where: the path of what put the workers where they are.
    Raises:
        ConfigError: one of them has another.
    """
    here = versions()
    for rank, found in enumerate(workers):
        for name, version in found.items():
            if version != here[name]:
                raise ConfigError(
                    f"{where}: rank {rank} has {name} {version}, the driver has {here[name]}. Install the same set "
                    "everywhere, and start the run anew if it was replaced meanwhile."
                )
