"""Train by reinforcement learning with plain flags, for those who do not know Hydra.

Each flag is translated into the assignments that main_ppo.py takes; they are printed, and main_ppo.py is run with them.
Any assignment of its own may follow the flags as it is: `python main_ppo.py --help` tells what can be assigned.

examples
  python scripts/train.py --algorithm grpo --total_steps 50
  python scripts/train.py --model ./my-model --train_files train.parquet --reward_function my.py:reward --num_gpus 2
  python scripts/train.py --algorithm grpo --total_steps 100 --resume_from_checkpoint latest
  python scripts/train.py --experiment gsm8k_qwen2_5_0_5b --model ./Qwen2.5-0.5B-Instruct --seed 1 rollout.top_p=0.9
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PLAIN = re.compile(r"[\w./:@+-]+")
ASSIGNMENT = re.compile(r"[+~]{0,2}[A-Za-z_][\w.]*=")
STRATEGIES = {"NO_SHARD": "none", "FULL_SHARD": "fsdp", "HYBRID_SHARD": "hsdp", "SHARD_GRAD_OP": "fsdp"}
FLAGS = {  # what each flag becomes; one without VALUE takes none
    "experiment": "experiment=VALUE",
    "actor": "actor=VALUE",
    "model": "actor=pretrained actor.model.path=VALUE",
    "critic_model": "critic=own_model critic.model.path=VALUE",
    "lora_rank": "actor.lora.rank=VALUE",
    "gradient_checkpointing": "actor.gradient_checkpointing=true",
    "algorithm": "algorithm=VALUE",
    "learning_rate": "actor.optimizer.lr=VALUE",
    "critic_learning_rate": "critic.optimizer.lr=VALUE",
    "prompts_per_step": "trainer.prompts_per_step=VALUE",
    "group_size": "trainer.group_size=VALUE",
    "total_epochs": "trainer.total_epochs=VALUE",
    "total_steps": "trainer.total_steps=VALUE",
    "seed": "trainer.seed=VALUE",
    "train_files": "data=files data.train_files=VALUE",
    "eval_files": "data=files data.eval_files=VALUE",
    "max_prompt_length": "data.max_prompt_length=VALUE",
    "max_response_length": "rollout.max_new_tokens=VALUE",
    "temperature": "rollout.temperature=VALUE",
    "reward_function": "reward=function reward.path=VALUE",
    "reward_model": "reward=model reward.model.path=VALUE",
    "num_gpus": "sharding=ddp trainer.n_gpus_per_node=VALUE",
    "num_nodes": "trainer.nnodes=VALUE",
    "fsdp_sharding_strategy": "sharding=VALUE",
    "project_name": "trainer.project_name=VALUE",
    "experiment_name": "trainer.experiment_name=VALUE",
    "output_dir": "hydra.run.dir=VALUE",
    "eval_interval": "trainer.eval_interval=VALUE",
    "wandb": "tracker=[default,wandb]",
    "resume_from_checkpoint": "resume=VALUE",
    "save_dir": "checkpoint.save_dir=VALUE",
    "save_interval": "checkpoint.save_interval=VALUE",
    "save_interval_s": "checkpoint.save_interval_s=VALUE",
    "save_best": "checkpoint.save_best=VALUE",
    "save_async": "checkpoint=async",
    "save_sync": "checkpoint=sync",
    "save_none": "checkpoint=off",
    "keep_last_n": "checkpoint.keep_last_n=VALUE",
    "keep_best": "checkpoint.keep_best=VALUE",
    "time_limit_s": "checkpoint.time_limit_s=VALUE",
    "buffer_warmup_steps": "replay.buffer_warmup_steps=VALUE",
}


def main(arguments: list[str] | None = None) -> None:
    kind: Any = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind, allow_abbrev=False)
    parser.add_argument("--dry_run", "--dry-run", action="store_true", help="print the assignments and end")
    for name, text in FLAGS.items():
        takes: Any = {"metavar": "VALUE", "nargs": "+"} if name.endswith("_files") else {"metavar": "VALUE"}
        takes = takes if "VALUE" in text else {"action": "store_true", "default": None}
        parser.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), dest=name, help=text, **takes)
    options, own = parser.parse_known_args(arguments)
    chosen, values = [], []
    for name, value in ((name, getattr(options, name)) for name in FLAGS):
        if isinstance(value, list):  # a flag of many values takes what follows it too
            own, value = own + [x for x in value if ASSIGNMENT.match(x)], [x for x in value if not ASSIGNMENT.match(x)]
        for word in FLAGS[name].split() if value is not None else ():
            is_given = "VALUE" in word or value is True
            (values if is_given else chosen).append(word.replace("VALUE", quoted(STRATEGIES.get(str(value), value))))
    if options.fsdp_sharding_strategy == "SHARD_GRAD_OP":
        values.append("sharding.strategy=SHARD_GRAD_OP")
    if unknown := [argument for argument in own if not ASSIGNMENT.match(argument)]:
        parser.error(f"unknown: {' '.join(unknown)}; a flag of the list in --help, or KEY=VALUE, is expected")
    taken = {word.partition("=")[0] for word in [*values, *own]}  # options that go with a flag give way to these
    taken |= {"actor"} if "experiment" in taken else set()
    words = [*(word for word in dict.fromkeys(chosen) if word.partition("=")[0] not in taken), *values, *own]
    sys.argv = ["main_ppo.py", *words]
    print("python " + " ".join(map(shlex.quote, sys.argv)), flush=True)
    if not options.dry_run:
        import main_ppo

        main_ppo.main()


def quoted(value: Any) -> str:
    """A value as the command line of main_ppo.py takes it."""
    if isinstance(value, list):
        return f"[{','.join(map(quoted, value))}]"
    escaped = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return str(value) if PLAIN.fullmatch(str(value)) else f"'{escaped}'"


if __name__ == "__main__":
    main()
