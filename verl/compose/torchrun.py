"""The main scripts under torchrun: the first of the processes that it started drives, and the others leave to it.

    torchrun --nproc_per_node=2 main_ppo.py sharding=fsdp   is   main_ppo.py sharding=fsdp trainer.n_gpus_per_node=2

A driver starts its workers itself. Were each of torchrun's processes one, each would train, and save, the whole run.
"""

from __future__ import annotations

from verl.compose.overrides import Assignments
from verl.errors import ConfigError
from verl.utils import torchrun

COUNT = "trainer.n_gpus_per_node"


def take_over(arguments: list[str], assigned: Assignments) -> None:
    """Let the run have as many processes as torchrun has started, and forget the places that it gave them.

    Args:
        arguments: for Hydra; the number of processes is added to them.
    Raises:
        ConfigError: they are on several machines.
    """
    count, here = torchrun.counts()
    if count > here:
        raise ConfigError(
            f"torchrun has started {count} processes on {count // here} machines: without Ray a run stays on one. "
            f"Start it once, with python and trainer=ray {COUNT}={here} trainer.nnodes={count // here} (docs/ray.md)."
        )
    torchrun.forget()
    wanted = [str(value) for key, value in assigned.values if key == COUNT]
    if count == 1 or wanted[-1:] == [str(count)]:
        return
    if wanted:
        assigned.faults.append(f"{COUNT} is {wanted[-1]}: torchrun has started {count} processes. Leave it out.")
    else:
        assigned.notes.append(f"torchrun has started {count} processes: {COUNT}={count}")
        arguments.append(f"++{COUNT}={count}")
