"""verl: reinforcement-learning post-training of language models, from a laptop to a cluster."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.utils.env_check import check_env

__version__ = "0.1.0"
__all__ = ["DeviceMesh", "__version__", "check_env"]

_EXPORTS = {"DeviceMesh": "verl.cluster.mesh", "check_env": "verl.utils.env_check"}


def __getattr__(name: str) -> Any:
    """Import what is exported here when it is first asked for: `import verl` itself stays light."""
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'verl' has no attribute {name!r}")
