"""PPO from a script or a notebook with the roles in Ray actors, one by one or all of them.

trainer = RayPPOTrainer(config_path="./config.yaml", train_dataset=dataset, use_critic=False)
trainer.fit()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from verl.trainer.api.trainer import Trainer
from verl.trainer.local_trainer import LocalPPOTrainer


def RayPPOTrainer(
    config_path: str | Path | None = "./config.yaml",
    train_dataset: Any = None,
    reward_fn: Callable | None = None,
    use_critic: bool = True,
    use_reference_policy: bool = True,
    use_rm: bool = True,
    overrides: Sequence[str] = (),
) -> Trainer:
    """`LocalPPOTrainer` with its roles in Ray actors: same loop, data, numbers and arguments.

    Args:
        use_critic, use_reference_policy, use_rm: False keeps the role in this process, to move to Ray one role at a
            time; `rm` is a reward model. The actor is always in Ray.
    """
    moved = {"critic": use_critic, "reference": use_reference_policy, "rm": use_rm}
    in_driver = ",".join(role for role, is_moved in moved.items() if not is_moved)
    chosen = [] if any(option.startswith("trainer=") for option in overrides) else ["trainer=ray"]
    chosen += [f"trainer.placement.in_driver=[{in_driver}]"] if in_driver else []
    return LocalPPOTrainer(config_path, train_dataset, reward_fn, [*chosen, *overrides])
