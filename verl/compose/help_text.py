"""The text of `verl ppo --help` and `verl sft --help`: usage, examples, and the options of every group."""

from __future__ import annotations

import textwrap
from typing import Any

from verl.compose.schema import group_options, root_keys

_PURPOSE = {
    "ppo": "Trains a language model by reinforcement learning (PPO, GRPO).",
    "sft": "Trains a language model on written answers (supervised fine-tuning).",
}
_EXAMPLES = {
    "ppo": r"""
    verl ppo                                      the built-in example, offline
    verl ppo algorithm=grpo trainer.group_size=8  another algorithm
    verl ppo sharding=ddp trainer.n_gpus_per_node=2    two processes
    verl ppo sharding=fsdp trainer.n_gpus_per_node=2   each holds a part
    verl ppo actor=pretrained actor.model.path=DIR \
        reward=function reward.path=my.py:score \
        data=files 'data.train_files=[train.parquet]' model, reward and data
    verl ppo -m trainer.seed=0,1,2                a sweep, one run after another
    verl ppo experiment=arithmetic_grpo --cfg job show the configuration""",
    "sft": r"""
    verl sft                                      the built-in example, offline
    verl sft actor=pretrained actor.model.path=DIR \
        data=sft_files 'data.train_files=[train.jsonl]'   your model and data
    verl sft -m actor.optimizer.lr=1e-3,3e-3      a sweep, one run after another
    verl sft experiment=arithmetic_sft --cfg job  show the configuration""",
}
_GROUPS = {
    "actor": "The model that is trained, with its optimizer and LoRA.",
    "algorithm": "Advantages, loss, KL penalty, number of updates.",
    "checkpoint": "When the whole training state is saved, and how.",
    "critic": "The model that estimates values, for algorithms that need it.",
    "data": "Prompts or texts to train on, and held-out ones.",
    "debug": "Small variations that work with every experiment.",
    "environment": "Episodes of several turns, with tools or a world.",
    "experiment": "A whole run as one file.",
    "reference": "The frozen model of the KL penalty, or a teacher.",
    "replay": "Whether scored rows are kept and used again.",
    "reward": "How a response is scored.",
    "rollout": "The engine that samples responses.",
    "sandbox": "Where programs run that the model wrote.",
    "sharding": "How the model and its work are divided over processes.",
    "storage": "A second place for checkpoints, in object storage.",
    "sweep": "Several runs from one command, compared in a table.",
    "tracker": "Where metrics, samples and tables go.",
    "trainer": "Length of the run, batch sizes, evaluation, devices.",
}


def help_text(root: str) -> str:
    """The help of a root, with the options of the user's directories. Hydra would take seconds to list them.

    Args:
        root: `ppo` or `sft`.
    """
    options, indent = group_options(), " " * 6
    wrap: Any = {"width": 80, "initial_indent": indent, "subsequent_indent": indent, "break_on_hyphens": False}
    groups = "\n".join(
        f"  {group}: {_GROUPS.get(group, '')}\n{textwrap.fill(', '.join(options[group]), **wrap)}"
        for group in sorted(root_keys(root))
    )
    return f"""{_PURPOSE[root]}

  usage: verl {root} [GROUP=OPTION ...] [PATH.TO.KEY=VALUE ...] [-m] [--cfg job]

  examples{_EXAMPLES[root]}

  groups
{groups}

  Every key is explained in conf/<group>/<option>.yaml.
  Results go to outputs/<project>/<experiment>/<time>.
"""
