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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PLAIN = re.compile(r"[\w./:@+-]+")
ASSIGNMENT = re.compile(r"[+~]{0,2}[A-Za-z_][\w.]*=")
STRATEGIES = {"NO_SHARD": "none", "FULL_SHARD": "fsdp", "HYBRID_SHARD": "hsdp"}
LORA = "actor.lora={_target_:verl.models.lora.LoRA,rank:VALUE}"
FLAGS: dict[str, dict[str, tuple[str, str, Any]]] = {  # assignments, help, and the type of the value; bool takes none
    "what is trained": {
        "experiment": ("experiment=VALUE", "a whole run by name, which the other flags change", str),
        "actor": ("actor=VALUE", "the policy by name, with rates for its size: tiny, qwen2_0_5b, llama8b, ...", str),
        "model": ("actor=pretrained actor.model.path=VALUE", "directory or hub name of the policy to start from", str),
        "critic_model": ("critic=own_model critic.model.path=VALUE", "of the critic; the policy's by default", str),
        "lora_rank": (LORA, "train a low-rank adapter of this rank in place of all weights", int),
        "gradient_checkpointing": ("actor.gradient_checkpointing=true", "less memory, about a third more time", bool),
    },
    "how it learns": {
        "algorithm": ("algorithm=VALUE", "ppo, grpo or another by name", str),
        "learning_rate": ("actor.optimizer.lr=VALUE", "of the policy, at its peak", float),
        "critic_learning_rate": ("critic.optimizer.lr=VALUE", "of the critic, at its peak", float),
        "prompts_per_step": ("trainer.prompts_per_step=VALUE", "different prompts of a step", int),
        "group_size": ("trainer.group_size=VALUE", "responses to each prompt", int),
        "total_epochs": ("trainer.total_epochs=VALUE", "passes over the prompts", int),
        "total_steps": ("trainer.total_steps=VALUE", "ends the run at this step", int),
        "seed": ("trainer.seed=VALUE", "all randomness of the run derives from it", int),
    },
    "data, responses and reward": {
        "train_files": ("data=files data.train_files=VALUE", "parquet or JSONL files of prompts", list),
        "eval_files": ("data=files data.eval_files=VALUE", "for evaluation; goes with --train_files", list),
        "max_prompt_length": ("data.max_prompt_length=VALUE", "tokens", int),
        "max_response_length": ("rollout.max_new_tokens=VALUE", "tokens", int),
        "temperature": ("rollout.temperature=VALUE", "of sampling", float),
        "reward_function": ("reward=function reward.path=VALUE", "file.py:function or package.module:function", str),
        "reward_model": ("reward=model reward.model.path=VALUE", "a sequence-classification model", str),
    },
    "where it runs and what it leaves": {
        "num_gpus": ("sharding=ddp trainer.n_gpus_per_node=VALUE", "processes here, each with a GPU if there are", int),
        "num_nodes": ("trainer.nnodes=VALUE", "machines", int),
        "fsdp_sharding_strategy": ("sharding=VALUE", "how several processes share a model", dict),
        "project_name": ("trainer.project_name=VALUE", "part of the run's directory", str),
        "experiment_name": ("trainer.experiment_name=VALUE", "likewise", str),
        "output_dir": ("hydra.run.dir=VALUE", "the run's directory itself", str),
        "eval_interval": ("trainer.eval_interval=VALUE", "steps between evaluations", int),
        "wandb": ("tracker=[default,wandb]", "log to W&B too", bool),
    },
    "checkpoints": {
        "resume_from_checkpoint": ("resume=VALUE", "a checkpoint, a directory of them, a run, or latest", str),
        "save_dir": ("checkpoint.save_dir=VALUE", "checkpoints/PROJECT/EXPERIMENT by default", str),
        "save_interval": ("checkpoint.save_interval=VALUE", "steps between checkpoints", int),
        "save_interval_s": ("checkpoint.save_interval_s=VALUE", "seconds between them", float),
        "save_best": ("checkpoint.save_best=VALUE", "a metric, such as eval/accuracy: save each new best", str),
        "save_async": ("checkpoint=async", "write while training goes on, the default", bool),
        "save_sync": ("checkpoint=sync", "stop training while one is written", bool),
        "save_none": ("checkpoint=off", "save the final weights alone", bool),
        "keep_last_n": ("checkpoint.keep_last_n=VALUE", "newest checkpoints to keep", int),
        "keep_best": ("checkpoint.keep_best=VALUE", "a metric: where it was best is kept too", str),
        "time_limit_s": ("checkpoint.time_limit_s=VALUE", "of the job, in seconds: save and end before", float),
        "buffer_warmup_steps": ("replay.buffer_warmup_steps=VALUE", "that only fill the buffer of replay=tiered", int),
    },
}


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser()
    options, own = parser.parse_known_args(arguments)
    for name in ("train_files", "eval_files"):  # a flag of many values takes what follows it too
        values = getattr(options, name) or []
        own += [value for value in values if ASSIGNMENT.match(value)]
        setattr(options, name, [value for value in values if not ASSIGNMENT.match(value)] or None)
    if unknown := [argument for argument in own if not ASSIGNMENT.match(argument)]:
        parser.error(f"unknown: {' '.join(unknown)}; a flag of the list in --help, or KEY=VALUE, is expected")
    sys.argv = ["main_ppo.py", *assignments(vars(options), own), *own]
    print("python " + " ".join(map(shlex.quote, sys.argv)), flush=True)
    if not options.dry_run:
        import main_ppo

        main_ppo.main()


def make_parser() -> argparse.ArgumentParser:
    """Every flag, spelled with underscores or hyphens."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="%(prog)s [flags] [KEY=VALUE ...]",
    )
    parser.add_argument("--dry_run", "--dry-run", action="store_true", help="print the assignments and end")
    takes: dict[Any, dict[str, Any]] = {
        list: {"nargs": "+", "metavar": "PATH"},
        bool: {"action": "store_true", "default": None},
        dict: {"choices": [*STRATEGIES]},
    }
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for name, (_, meaning, kind) in flags.items():
            typed = takes.get(kind) or {"type": kind, "metavar": kind.__name__.upper()}
            spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
            group.add_argument(*spellings, dest=name, help=meaning, **typed)
    return parser


def assignments(given: dict[str, Any], own: Sequence[str] = ()) -> list[str]:
    """What the flags that were given stand for. The option of a group that another flag or assignment chooses is left
    out, that of the actor where an experiment chooses it too."""
    options, values = [], []
    for name, (text, _, kind) in ((name, flag) for flags in FLAGS.values() for name, flag in flags.items()):
        if (value := given.get(name)) is None:
            continue
        value = STRATEGIES[value] if kind is dict else value
        text = text.removeprefix("sharding=ddp ") if value == 1 else text  # a single process needs none
        for word in text.split():
            (values if "VALUE" in word or kind is bool else options).append(word.replace("VALUE", quoted(value)))
    chosen = {word.partition("=")[0] for word in [*values, *own]}
    chosen |= {"actor"} if "experiment" in chosen else set()
    return [*(word for word in dict.fromkeys(options) if word.partition("=")[0] not in chosen), *values]


def quoted(value: Any) -> str:
    """A value as the command line of main_ppo.py takes it."""
    if isinstance(value, list):
        return f"[{','.join(map(quoted, value))}]"
    escaped = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return str(value) if PLAIN.fullmatch(str(value)) else f"'{escaped}'"


if __name__ == "__main__":
    main()
