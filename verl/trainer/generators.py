"""Random generators in a checkpoint: those of the driver, and of each process that holds roles where that is another.

rng/torch.safetensors          torch, cuda_I (the driver's); rank_R.torch, rank_R.cuda_I
rng/python.json  numpy.json    the driver's
rng/rank_R.json                python and numpy of rank R
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from torch import Tensor

from verl.checkpoint.read.reader import CheckpointReader
from verl.checkpoint.save.save_request import SavedComponent, TensorItem
from verl.cluster.rpc import WorkerGroup
from verl.trainer.resume import ResumePoint
from verl.utils.seeding import RngState, derive_seed, rng_state, set_rng_state

FILE = "torch.safetensors"
PLAIN = ("python", "numpy")

_log = logging.getLogger(__name__)


def references(num_ranks: int) -> dict[str, str]:
    """Which generator's state lies where, for `trainer_state.json`."""
    own = {"torch": f"rng/{FILE}", **{name: f"rng/{name}.json" for name in PLAIN}}
    return own | {f"rank_{rank}": f"rng/rank_{rank}.json" for rank in range(num_ranks)}


def component(ranks: Sequence[RngState]) -> SavedComponent:
    """The states of this process, and of the ranks of the roles if they are elsewhere."""
    tensors, plain = rng_state()
    files = {f"{name}.json": plain[name] for name in PLAIN}
    for rank, (theirs, values) in enumerate(ranks):
        tensors |= {f"rank_{rank}.{name}": tensor for name, tensor in theirs.items()}
        files[f"rank_{rank}.json"] = values
    items = [TensorItem(name=name, tensor=tensor) for name, tensor in tensors.items()]
    return SavedComponent(tensors=items, file=FILE, files={name: _json(value) for name, value in files.items()})


def ranks_of(cluster: WorkerGroup, role: Any) -> list[RngState]:
    """The states of the processes that hold a role; none where that is the driver's own."""
    return [] if cluster.shares_memory else role.rng_states().result()


def restore_driver(point: ResumePoint) -> None:
    """Let this process draw on from where the checkpoint was made."""
    plain = {name: point.read_json(f"rng/{name}.json") for name in PLAIN}
    set_rng_state({name: x for name, x in _tensors(point).items() if not name.startswith("rank_")}, plain)


def restore_ranks(point: ResumePoint, cluster: WorkerGroup, role: Any, seed: int) -> None:
    """The same for the processes that hold a role; a rank that the checkpoint knows nothing of is seeded anew."""
    if cluster.shares_memory:
        return
    states = _saved_ranks(point)
    if len(states) != cluster.world_size:
        new = [str(rank) for rank in range(len(states), cluster.world_size)]
        told = f"of rank {', '.join(new)} are seeded anew" if new else "of its further ranks are left out"
        _log.info(
            "The checkpoint has the random generators of %d processes, and this run %d: those %s.",
            len(states), cluster.world_size, told,
        )  # fmt: skip
    role.set_rng_states(states, derive_seed(seed, "resumed", point.step)).result()


def _saved_ranks(point: ResumePoint) -> list[RngState]:
    names = [PurePosixPath(entry.path).name for entry in CheckpointReader(point.published).files("rng")]
    count, tensors = sum(name.startswith("rank_") for name in names), _tensors(point)
    return [(_below(tensors, f"rank_{rank}."), point.read_json(f"rng/rank_{rank}.json")) for rank in range(count)]


def _tensors(point: ResumePoint) -> dict[str, Tensor]:
    return point.read_tensors("rng")


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def _json(value: Any) -> bytes:
    return (json.dumps(value) + "\n").encode()
