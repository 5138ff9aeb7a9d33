"""PPO from a script or a notebook with the roles in Ray actors, one by one or all of them.

trainer = RayPPOTrainer(config_path="./config.yaml", train_dataset=dataset, use_critic=False)
trainer.fit()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.data.rlhf_dataset import RLHFDataset
from verl.trainer.api.trainer import Trainer
from verl.trainer.local_trainer import LocalPPOTrainer


def RayPPOTrainer(
    config_path: str | Path | None = "./config.yaml",
    train_dataset: RLHFDataset | Sequence[Mapping[str, Any]] | str | Path | None = None,
    reward_fn: Callable | None = None,
    use_critic: bool = True,
    use_reference_policy: bool = True,
    use_rm: bool = True,
    overrides: Sequence[str] = (),
) -> Trainer:
    """`LocalPPOTrainer` with its roles in Ray actors: the same loop, data and numbers.

    A way to move to Ray one role at a time. Whether a role is needed at all follows from the algorithm.

    Args:
        use_critic, use_reference_policy, use_rm: False keeps the role in this process; `rm` is a reward that is a
            model. The actor is always in Ray.
        config_path, train_dataset, reward_fn, overrides: as for `LocalPPOTrainer`; `trainer.placement` says which
            cluster, which roles live together, and what a worker is given.
    """
    moved = {"critic": use_critic, "reference": use_reference_policy, "rm": use_rm}
    in_driver = [role for role, is_moved in moved.items() if not is_moved]
    chosen = [] if any(option.startswith("trainer=") for option in overrides) else ["trainer=ray"]
    if in_driver:
        chosen.append(f"trainer.placement.in_driver=[{','.join(in_driver)}]")
    return LocalPPOTrainer(config_path, train_dataset, reward_fn, [*chosen, *overrides])
