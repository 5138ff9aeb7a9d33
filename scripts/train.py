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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verl.compose.overrides import assign
from verl.errors import ConfigError

PLAIN = re.compile(r"[\w./:@+-]+")
ASSIGNMENT = re.compile(r"[+~]{0,2}[A-Za-z_][\w.]*=")
Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class Flag:
    """A plain flag.

    Attributes:
        meaning: for --help.
        pairs: the assignments that a value of the flag becomes, in verl's spelling or one of its aliases.
        kind: of the value: `str`, `int`, `float`, `list` (several texts) or `bool` (none).
    """

    meaning: str
    pairs: Callable[[Any], Pairs]
    kind: type = str


def to(key: str, meaning: str, kind: type = str) -> Flag:
    """A flag whose value one key takes."""
    return Flag(meaning, lambda value: [(key, quoted(value))], kind)


def _gpus(count: int) -> Pairs:
    return [("sharding", "ddp" if count > 1 else "none"), ("trainer.n_gpus_per_node", str(count))]


def _sharding(strategy: str) -> Pairs:
    return [("actor_rollout.fsdp_config.sharding_strategy", strategy)]


def _lora(rank: int) -> Pairs:
    return [("actor.lora", f"{{_target_:verl.models.lora.LoRA,rank:{rank}}}")]


FLAGS: dict[str, dict[str, Flag]] = {
    "what is trained": {
        "experiment": to("experiment", "a whole run by name, which the other flags change"),
        "actor": to("actor", "the policy by name, with rates for its size: tiny, qwen2_0_5b, llama8b, ..."),
        "model": to(
            "actor_rollout.model_name_or_path", "a Hugging Face directory or hub name: the policy to start from"
        ),
        "critic_model": to("critic.model_name_or_path", "the same for the critic; the policy's by default"),
        "lora_rank": Flag("train a low-rank adapter of this rank in place of all weights", _lora, int),
        "gradient_checkpointing": to("actor.gradient_checkpointing", "less memory, about a third more time", bool),
    },
    "how it learns": {
        "algorithm": to("algorithm", "ppo, grpo or another by name"),
        "learning_rate": to("actor_rollout_ref.actor.optim.lr", "of the policy, at its peak", float),
        "critic_learning_rate": to("critic.optim.lr", "of the critic, at its peak", float),
        "prompts_per_step": to("data.train_batch_size", "different prompts of a step", int),
        "group_size": to("actor_rollout_ref.rollout.n", "responses to each prompt", int),
        "total_epochs": to("trainer.total_epochs", "passes over the prompts", int),
        "total_steps": to("trainer.total_training_steps", "ends the run at this step", int),
        "seed": to("trainer.seed", "all randomness of the run derives from it", int),
    },
    "data, responses and reward": {
        "train_files": to("data.train_files", "parquet or JSONL files of prompts", list),
        "eval_files": to("data.eval_files", "the same for evaluation; goes with --train_files", list),
        "max_prompt_length": to("data.max_prompt_length", "tokens", int),
        "max_response_length": to("data.max_response_length", "tokens", int),
        "temperature": to("actor_rollout_ref.rollout.temperature", "of sampling", float),
        "reward_function": Flag(
            "file.py:function or package.module:function",
            lambda path: [("reward", "function"), ("reward.path", quoted(path))],
        ),
        "reward_model": to("reward_model.model.path", "directory or hub name of a sequence-classification model"),
    },
    "where it runs and what it leaves": {
        "num_gpus": Flag("processes on this machine, each with a GPU where there are GPUs", _gpus, int),
        "num_nodes": to("trainer.nnodes", "machines", int),
        "fsdp_sharding_strategy": Flag("NO_SHARD, FULL_SHARD or HYBRID_SHARD", _sharding),
        "project_name": to("trainer.project_name", "part of the run's directory"),
        "experiment_name": to("trainer.experiment_name", "likewise"),
        "output_dir": to("hydra.run.dir", "the run's directory itself"),
        "eval_interval": to("trainer.test_freq", "steps between evaluations", int),
        "wandb": Flag("log to W&B too", lambda _: [("tracker", "wandb")], bool),
    },
    "checkpoints": {
        "resume_from_checkpoint": to("resume", "continue from a checkpoint, a directory of them, a run, or latest"),
        "save_dir": to("checkpoint.save_dir", "where checkpoints lie; checkpoints/PROJECT/EXPERIMENT by default"),
        "save_interval": to("checkpoint.save_interval", "steps between checkpoints", int),
        "save_interval_s": to("checkpoint.save_interval_s", "seconds between them", float),
        "save_best": to("checkpoint.save_best", "a metric of evaluations, such as eval/accuracy: save each new best"),
        "save_async": Flag("write while training goes on, the default", lambda _: [("checkpoint", "async")], bool),
        "save_sync": Flag("stop training while one is written", lambda _: [("checkpoint", "sync")], bool),
        "save_none": Flag("save the final weights alone", lambda _: [("checkpoint", "off")], bool),
        "keep_last_n": to("checkpoint.keep_last_n", "newest checkpoints to keep", int),
        "keep_best": to("checkpoint.keep_best", "a metric: where it was best is kept too"),
        "time_limit_s": to("checkpoint.time_limit_s", "of the job, in seconds: save and end before", float),
    },
    "replay buffer": {
        "buffer_warmup_steps": to(
            "replay.buffer_warmup_steps", "steps that only fill the buffer; needs one, such as by replay=tiered", int
        ),
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
    try:
        overrides = [*translated(vars(options), own), *own]
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print("python main_ppo.py " + " ".join(map(shlex.quote, overrides)), flush=True)
    if options.dry_run:
        return
    sys.argv = ["main_ppo.py", *overrides]
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
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for name, flag in flags.items():
            spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
            if flag.kind is bool:
                group.add_argument(*spellings, dest=name, action="store_true", default=None, help=flag.meaning)
            else:
                kind, nargs = (str, "+") if flag.kind is list else (flag.kind, None)
                shown = "PATH" if flag.kind is list else kind.__name__.upper()
                group.add_argument(*spellings, dest=name, type=kind, nargs=nargs, metavar=shown, help=flag.meaning)
    return parser


def translated(given: dict[str, Any], own: Sequence[str] = ()) -> list[str]:
    """The assignments that stand for the flags that were given, in verl's spelling.

    Args:
        own: assignments that follow the flags.
    Raises:
        ConfigError: a flag has a value that means nothing here, or contradicts another.
    """
    faults, pairs, asked = [], [], {}
    for name, flag in ((name, flag) for flags in FLAGS.values() for name, flag in flags.items()):
        value = given.get(name)
        if value is not None:
            found = flag.pairs(value)
            if name == "model" and given.get("experiment") is not None:  # which has chosen the actor and its rates
                found = [("actor.model.path", quoted(value))]
            if name == "num_gpus" and (given.get("fsdp_sharding_strategy") or "NO_SHARD") != "NO_SHARD":
                found = [pair for pair in found if pair[0] != "sharding"]  # the strategy chooses it
            pairs += found
            asked |= {f"{key}={text}": f"--{name} {value}" for key, text in found}
    outside = [(key, value) for key, value in pairs if key.startswith("hydra.")]
    assigned = assign("ppo", [pair for pair in pairs if pair not in outside])
    faults += [_by_flag(fault, asked) for fault in assigned.faults]
    if (steps := given.get("buffer_warmup_steps")) is not None and not has_buffer([*assigned.options, *own]):
        faults.append(
            f"--buffer_warmup_steps {steps} needs a replay buffer to fill, and none is chosen. Add `replay=tiered "
            "algorithm.replay_fraction=0.5`, or leave the flag out."
        )
    if faults:
        raise ConfigError(faults)
    return [*assigned.options, *(f"{key}={value}" for key, value in [*assigned.values, *outside])]


def has_buffer(overrides: Sequence[str]) -> bool:
    """Whether assignments choose a replay buffer, by its group or with an experiment."""
    from verl.compose.compose import compose_root

    return compose_root("ppo", [x for x in overrides if re.match(r"(experiment|replay)=", x)]).replay is not None


def quoted(value: Any) -> str:
    """A value as the command line of main_ppo.py takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(quoted, value))}]"
    text = str(value)
    if PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _by_flag(fault: str, asked: dict[str, str]) -> str:
    """A fault that speaks of an assignment, speaking of the flag that made it."""
    for assignment, flag in asked.items():
        if fault.startswith(assignment):
            fault = flag + fault.removeprefix(assignment)
        fault = fault.replace(f"but {assignment} is given", f"but {flag} is given")
    return fault


if __name__ == "__main__":
    main()
