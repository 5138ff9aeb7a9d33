"""The text of `verl ppo --help` and `verl sft --help`: usage, examples, and the options of every group."""

from __future__ import annotations

from verl.compose.schema import group_options, root_keys

_PURPOSE = {
    "ppo": "Trains a language model by reinforcement learning (PPO, GRPO).",
    "sft": "Trains a language model on written answers (supervised fine-tuning).",
}
_EXAMPLES = {
    "ppo": r"""
    verl ppo                                        the built-in example, on any laptop, without network
    verl ppo algorithm=grpo trainer.group_size=8    another algorithm
    verl ppo sharding=ddp trainer.n_gpus_per_node=2 two processes, the same numbers
    verl ppo sharding=fsdp trainer.n_gpus_per_node=2 each holds a part of the model
    verl ppo actor=pretrained actor.model.path=DIR reward=function reward.path=my.py:score \
        data=files 'data.train_files=[train.parquet]'         your model, reward and data
    verl ppo -m trainer.seed=0,1,2                  a sweep, one run after another
    verl ppo experiment=arithmetic_grpo --cfg job   show the composed configuration and stop""",
    "sft": """
    verl sft                                        the built-in example, on any laptop, without network
    verl sft actor=pretrained actor.model.path=DIR data=sft_files 'data.train_files=[train.jsonl]'
    verl sft -m actor.optimizer.lr=1e-3,3e-3        a sweep, one run after another
    verl sft experiment=arithmetic_sft --cfg job    show the composed configuration and stop""",
}


def help_text(root: str) -> str:
    """The help of a root, with the options of the user's directories. Hydra would take seconds to list them.

    Args:
        root: `ppo` or `sft`.
    """
    options = group_options()
    groups = "\n".join(f"  {group}: {', '.join(options[group])}" for group in sorted(root_keys(root)))
    return f"""{_PURPOSE[root]}

  usage: verl {root} [GROUP=OPTION ...] [PATH.TO.KEY=VALUE ...] [-m] [--cfg job]

  examples{_EXAMPLES[root]}

  groups
{groups}

  Every key is explained in conf/<group>/<option>.yaml. Results go to outputs/<project>/<experiment>/<time>.
"""
