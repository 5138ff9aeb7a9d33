"""Overrides of a command line, a script or a short file, as options of groups and values by path.

    words -> Hydra's parser -> aliases -> group=option, composed by Hydra
                                      └-> ++path=value, checked by `validate`

A plain `a.b=c` becomes `++a.b=c`, so that an unknown key reaches our validation, which reports all faults at once with
the nearest known keys. A value that Hydra's grammar refuses is a text; `~` at its start is the home directory.
`ALIASES` has other libraries' spellings of our keys, the only place with second spellings; each use is reported.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from verl.component import hint, nearest
from verl.compose.compose import compose_root, parsed_override, readable, references_above
from verl.compose.schema import CHOOSERS, LISTS, ROOTS, VALUES, group_options, root_keys, set_own_conf_dirs
from verl.errors import ConfigError

OWN_SHARDING = ".sharding"  # of a role: a key that takes an option of the group `sharding`
CURRICULUM = "data.curriculum"  # takes an option of the group `curriculum`

_OFF = {"false": "", "null": "", "none": ""}
_SHARDINGS = ("none", "ddp", "fsdp", "hsdp", "tp", "tp_fsdp", "cp", "pp", "parallel")
_SAVES = (
    "save_dir save_interval keep_last_n keep_best save_async use_safetensors incremental_save incremental_base "
    "cold_storage"
)
# What a key of another library is here: a path that takes its value, after options that go with it unless their group
# is chosen by name; or, for a key that selects, by its lower-case value ("*": any other). {files}: data from files.
ALIASES: dict[str, str | dict[str, str]] = {
    "actor_rollout.model_name_or_path": "actor=pretrained actor.model.path",
    "actor_rollout_ref.model.path": "actor=pretrained actor.model.path",
    "actor_rollout_ref.actor.optim.lr": "actor.optimizer.lr",
    "actor_rollout_ref.rollout.n": "trainer.group_size",
    "rollout.n": "trainer.group_size",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "critic.model_name_or_path": "critic=own_model critic.model.path",
    "critic.optim.lr": "critic.optimizer.lr",
    "actor_rollout.use_vllm": {**_OFF, "true": "rollout=vllm"},
    "actor_rollout.fsdp_config.sharding_strategy": {
        "null": "",
        "none": "sharding=none",
        "no_shard": "sharding=none",
        "full_shard": "sharding=fsdp",
        "hybrid_shard": "sharding=hsdp",
        "shard_grad_op": "sharding=fsdp sharding.strategy=SHARD_GRAD_OP",
    },
    "actor_rollout.fsdp_config.cpu_offload": {**_OFF, "true": "sharding=fsdp sharding.cpu_offload=true"},
    "trainer.backend": {
        **{name: f"sharding={name}" for name in _SHARDINGS},
        "local": "sharding=none",
        "fsdp2": "sharding=fsdp",
    },
    "trainer.save_freq": {
        **dict.fromkeys(("-1", "0", "false"), "checkpoint.save_interval=null"),
        "*": "checkpoint.save_interval",
    },
    "trainer.default_local_dir": "checkpoint.save_dir",
    **{f"checkpoint_config.{key}": f"checkpoint.{key}" for key in _SAVES.split()},
    "trainer.test_freq": "trainer.eval_interval",
    "trainer.total_training_steps": "trainer.total_steps",
    "algorithm.adv_estimator": {
        "gae": "algorithm=ppo",
        **{name: f"algorithm={name}" for name in ("grpo", "rloo", "remax", "opo")},
        "reinforce_plus_plus": "algorithm=reinforce_pp",
        "reinforce_plus_plus_baseline": "algorithm=reinforce_pp_baseline",
    },
    "algorithm.gamma": "algorithm.advantage.gamma",
    "algorithm.lam": "algorithm.advantage.lam",
    "data.train_batch_size": "trainer.prompts_per_step",
    "data.max_response_length": "rollout.max_new_tokens",
    "data.train_files": "data={files} data.train_files",
    "data.val_files": "data={files} data.eval_files",
    "teacher": "reference=teacher reference.model.path",
    "teacher.model.path": "reference=teacher reference.model.path",
    "teacher.sharding": "reference=teacher reference.sharding",
    "use_critic": {"true": "", "false": "critic=none"},
    "use_reference_policy": {"true": "", "false": "reference=none"},
    "use_rm": {**_OFF, "true": "reward=model"},
}
# Names of settings in verl-project/verl, TRL and OpenRLHF, whose errors name the key that has this meaning here
MEANT = {
    "actor.lora.rank": "lora_rank lora_r",
    "actor.lora.alpha": "lora_alpha",
    "actor.lora.target_modules": "lora_target_modules",
    "actor.micro_batch_tokens": "ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu "
    "use_dynamic_bsz log_prob_micro_batch_size_per_gpu per_device_train_batch_size gradient_accumulation_steps",
    "actor.model.path": "model_name_or_path",
    "actor.optimizer.lr": "learning_rate actor_learning_rate",
    "actor.optimizer.max_grad_norm": "grad_clip max_grad_norm max_norm",
    "actor.optimizer.warmup_updates": "lr_warmup_steps warmup_steps",
    "algorithm.advantage.normalize_std": "scale_rewards norm_adv_by_std_in_grpo",
    "algorithm.aggregation": "loss_agg_mode loss_type",
    "algorithm.entropy_coef": "entropy_coeff",
    "algorithm.epochs": "ppo_epochs num_ppo_epochs num_iterations",
    "algorithm.kl.coef": "kl_loss_coef use_kl_loss use_kl_in_reward kl_ctrl kl_coef beta init_kl_coef",
    "algorithm.kl.estimator": "kl_loss_type kl_penalty kl_estimator",
    "algorithm.mini_batches": "ppo_mini_batch_size steps_per_generation num_mini_batches",
    "algorithm.policy_loss.clip_high": "clip_ratio_high epsilon_high",
    "algorithm.policy_loss.clip_low": "clip_ratio clip_ratio_low cliprange epsilon eps_clip",
    "algorithm.selection": "filter_groups",
    "checkpoint.save_dir": "output_dir",
    "checkpoint.save_interval": "save_steps",
    "data.max_prompt_length": "max_prompt_length prompt_max_len",
    "data.truncation": "filter_overlong_prompts",
    "loss.beta": "beta",
    "reward.path": "custom_reward_function reward_funcs",
    "rollout.max_new_tokens": "max_completion_length generate_max_len",
    "rollout.tensor_parallel_size": "tensor_model_parallel_size vllm_tensor_parallel_size",
    "tracker": "logger report_to",
    "trainer.eval_interval": "eval_steps",
    "trainer.group_size": "num_generations n_samples_per_prompt",
    "trainer.total_epochs": "num_train_epochs",
    "trainer.total_steps": "max_steps",
}
SHORT = {
    "tracker=wandb": "[default,wandb]",
    "tracker=[]": "none",
}  # abbreviations of options


@dataclass
class Overrides:
    """Overrides, with aliases translated.

    Attributes:
        options: `group=option` choices, in Hydra's syntax.
        values: by path, in order; texts from a command line are still in Hydra's grammar.
        notes: one line for each alias, with its translation.
        faults: overrides that cannot be composed; they are left out and reported with all other faults.
        is_sweep: whether these are the overrides of a sweep, of all of its jobs.
    """

    options: list[str] = field(default_factory=list)
    values: list[tuple[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    is_sweep: bool = False


def command_line(root: str, arguments: Sequence[str]) -> tuple[list[str], Overrides]:
    """The arguments of a command for Hydra, with aliases translated, and what was found on the way.

    Flags, `hydra.*`, `~key` and `group@package=option` are passed unchanged.
    """
    flags, words = flags_of(arguments)
    if flags.config_dir is not None and not os.path.isdir(flags.config_dir):
        raise ConfigError(f"--config-dir is {flags.config_dir}: no such directory.")
    directories = [directory for directory in (flags.config_dir, flags.config_path) if directory is not None]
    directories += re.findall(r"file://([^,\]'\"]+)", " ".join(w for w in words if w.startswith("hydra.searchpath=")))
    set_own_conf_dirs(Path(directory).absolute() for directory in directories)
    sweeps = flags.multirun or any(word.startswith("sweep=") for word in words)
    parsed, faults = _parsed(words, sweeps=sweeps)
    passed = [x for x in parsed if x.is_hydra_override() or x.package is not None or x.is_delete()]
    pairs = [(x.key_or_group, str(x.input_line).partition("=")[2]) for x in parsed if x not in passed]
    assigned = assign(root, pairs, sweeps=sweeps)
    assigned.faults = [*faults, *assigned.faults]
    chosen = {option.partition("=")[0] for option in assigned.options}
    replaced = [  # by a component, into which Hydra would merge the keys of the default option
        f"~{x.key_or_group}"
        for x in parsed
        if isinstance(x._value, dict) and x.key_or_group in group_options().keys() - {"actor", *chosen}
    ]  # the option of the actor determines that of the critic
    values = [f"++{path}={_text(value)}" for path, value in _with_copies(root, assigned)]
    for_hydra = [*(x.input_line or "" for x in passed), *replaced, *map(readable, assigned.options), *values]
    return [*_flag_words(arguments, words), *for_hydra], assigned


def flags_of(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags among some arguments, and the others, by Hydra's parser, which ends the process at an unknown flag."""
    flags = get_args_parser().parse_intermixed_args([*arguments])
    return flags, flags.overrides


def _flag_words(arguments: Sequence[str], words: Sequence[str]) -> list[str]:
    waiting = list(words)
    return [x for x in arguments if not (waiting and x == waiting[0] and waiting.pop(0))]


def parse_overrides(words: Sequence[str]) -> tuple[list[tuple[str, Any]], list[str]]:
    """Parse overrides given by a script: keys with Python values, and faults."""
    parsed, faults = _parsed(words, sweeps=False)
    return [(x.key_or_group, x.value()) for x in parsed], faults


def _parsed(words: Sequence[str], *, sweeps: bool) -> tuple[list[Override], list[str]]:
    """Words in Hydra's grammar; a value that it refuses is quoted. With the faults of the others."""
    parsed, faults = [], []
    for word in words:
        key, sign, text = word.partition("=")
        override = parsed_override(word)
        if override is None and sign:
            text = os.path.expanduser(text)
            in_list = re.sub(r"(?<=[\[,\s])~(?=/)", lambda _: os.path.expanduser("~"), text)
            override = parsed_override(f"{key}={in_list}") if text.startswith("[") else None
            override = override or parsed_override(f"{key}={QuotedString(text, Quote.single).with_quotes()}")
        if override is None or override.key_or_group == "":
            ways = [f"{group}={word}" for group, options in group_options().items() if word in options]
            faults.append(f"{word!r} is not of the form KEY=VALUE.{hint(' or '.join(ways[:3]))}")
        elif override.is_sweep_override() and not sweeps:
            key, ways = key.lstrip("+"), ""
            if key not in group_options():
                ways = f" Quote a text with commas, '{key}=\"{text}\"', or write {key}=[{text}] for a list."
            faults.append(f"{key} is {text}: several values are the jobs of a sweep, which needs -m.{ways}")
        else:
            parsed.append(override)
    return parsed, faults


def meant(key: str, tops: Iterable[str]) -> str | None:
    """The key below one of `tops` that means what a key of another library means there; None for an unknown one."""
    names = {*key.split(".")}
    return next((path for path, x in MEANT.items() if names & {*x.split()} and path.split(".")[0] in tops), None)


def assign(root: str, pairs: Sequence[tuple[str, Any]], *, sweeps: bool = False) -> Overrides:
    """Sort `key=value` pairs into options and values, translating aliases and collecting what is refused.

    Args:
        root: a name of `ROOTS`.
        pairs: keys with their values, or texts of a command line.
        sweeps: whether several values are the jobs of a sweep.
    """
    groups, keys, out = group_options(), root_keys(root), Overrides(is_sweep=sweeps)
    for key, value in _translated(root, pairs, out):
        top = key.partition(".")[0]
        if key in VALUES:
            out.values.append((key, value))
        elif (group := _group_of(key, keys)) is not None and re.fullmatch(r"(?!null$)[\w,]+", str(value or "")):
            _add_option(out, f"+{group}@{key}", group, value)
        elif top not in keys:
            near = meant(key, keys) or nearest(top, keys)
            out.faults.append(f"{key} is not a known key: {root}.yaml has no {top}.{hint(near)}")
        elif "." in key or isinstance(value, Mapping) or str(value).startswith("{"):
            out.values.append((key, value))
        elif _text(value) not in ("null", ""):
            _add_option(out, key, key, value)
        elif "none" in groups.get(key, []):
            out.options.append(f"{key}=none")
        elif key not in CHOOSERS:
            out.faults.append(f"{key} is null: a run needs one.")
    return out


def _translated(root: str, pairs: Sequence[tuple[str, Any]], out: Overrides) -> Iterable[tuple[str, Any]]:
    """The pairs with aliases translated; an option that contradicts one that is chosen by name is a fault."""
    chosen = {key: _text(value) for key, value in pairs if key in root_keys(root)}
    for key, value in pairs:
        given, alias = f"{key}={_text(value)}", ALIASES.get(key)
        words = alias.get(_text(value).lower(), alias.get("*")) if isinstance(alias, dict) else alias
        selects = isinstance(alias, dict) and " " not in (words or "")
        if alias is None:
            yield key, value
        elif words is None:
            known = ", ".join(choice for choice in alias if choice not in _OFF)
            out.faults.append(f"{given}: this version does not have that; it has {known}.")
        else:
            became, contrary = [], []
            for word in words.format(files=ROOTS[root].files).split():
                path, sign, option = word.partition("=")
                if selects and chosen.get(path, option) != option:
                    contrary.append(
                        f"{given} means {word}, but {path}={chosen[path]} is given too. Leave one of them out."
                    )
                elif not sign or "." in path:
                    new = yaml.safe_load(option) if sign else value
                    became.append(f"{path}={_text(new)}")
                    yield path, new
                elif path not in chosen:
                    chosen |= {path: option} if selects else {}
                    became.append(word)
                    yield path, option
            out.faults += contrary
            if became != [given] and not contrary:
                out.notes.append(f"{given} became {' '.join(became) or 'nothing: it is the default'}")


def _add_option(out: Overrides, key: str, group: str, value: Any) -> None:
    text = f"[{','.join(map(str, value))}]" if isinstance(value, (list, tuple)) else str(value)
    text = ",".join(SHORT.get(f"{group}={choice}", choice) for choice in re.split(r",(?![^\[(]*[\])])", text))
    known, is_list = group_options().get(group, []), text.startswith("[") and group not in LISTS
    unknown = [] if "(" in text else [option for option in options_in(text) if option not in (*known, "null")]
    if is_list or unknown:
        near = hint(nearest(unknown[0], known)) if unknown else ""
        choice = f"{unknown[0]}: no such option" if unknown else f"{text}: it takes one option"
        out.faults.append(f"{key.partition('@')[2] or key}={choice}; there are {', '.join(known)}.{near}")
    elif f"{key}={text}" not in out.options:
        out.options.append(f"{key}={text}")


def _group_of(key: str, keys: Iterable[str]) -> str | None:
    """The group whose options a key below a root key takes."""
    if key == CURRICULUM:
        return "curriculum"
    return "sharding" if key.endswith(OWN_SHARDING) and key.removesuffix(OWN_SHARDING) in keys else None


def _text(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def options_in(choice: str) -> list[str]:
    """All options that a choice names, in a list or for a sweep."""
    return re.findall(r"[^\s,\[\]'\"]+", choice)


def _with_copies(root: str, assigned: Overrides) -> list[tuple[str, Any]]:
    """Before a value below a reference, such as `critic.model: ${actor.model}`, set every key of the node to a
    reference of its own. Hydra would otherwise drop all other keys.
    """
    if not any(path.count(".") > 1 for path, _ in assigned.values):
        return assigned.values
    try:
        config = compose_root(root, [option.partition(",")[0] for option in assigned.options if "[" not in option])
    except (HydraException, OmegaConfBaseException):
        return assigned.values  # Hydra reports it when it composes for itself
    values: list[tuple[str, Any]] = []
    copied: set[str] = set()
    for path, value in assigned.values:
        for node, target, keys in references_above(config, path):
            if node not in copied:
                copied.add(node)
                values += [(f"{node}.{key}", f"${{{target}.{key}}}") for key in keys]
        values.append((path, value))
    return values


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield the leaves of a nested mapping by path; a component with `_target_` is one leaf."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and "_target_" not in value:
            yield from flatten(value, f"{path}.")
        else:
            yield path, value


def swept_overrides(arguments: Sequence[str], sweeper: Any, overrides: Sequence[str]) -> tuple[str, ...]:
    """The overrides in which a job differs from others of its sweep.

    Args:
        arguments: command-line arguments for Hydra.
        sweeper: configuration of the sweeper, whose `params` may have more.
        overrides: of the job.
    """
    params = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    parsed = [parsed_override(text) for text in (*arguments, *params) if not text.startswith("-")]
    varied = {(x.key_or_group, x.package) for x in parsed if x is not None and x.is_sweep_override()}
    read = [(text, parsed_override(text)) for text in overrides]
    return tuple(text for text, x in read if x is not None and (x.key_or_group, x.package) in varied)


@contextlib.contextmanager
def composition_faults(root: str) -> Iterator[None]:
    """Raises ConfigError with the message of `composition_fault`."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(composition_fault(root, error)) from error


def composition_fault(root: str, error: BaseException) -> str:
    """The messages of Hydra and OmegaConf about a composition that failed, on one line."""
    said: dict[str, None] = {}
    while error is not None:
        said |= dict.fromkeys(line.strip() for line in str(error).splitlines() if line.strip())
        error = error.__cause__  # type: ignore[assignment]
    if lacks := re.search(r"In '((\w+)/[^']*)'.* Key '\2' not in '\w+Root'", text := " ".join(said)):
        return f"{lacks[1]}.yaml lacks the line `# @package _global_`, so that its keys would lie below {lacks[2]}."
    return f"{text.rstrip('.')}. `verl {ROOTS[root].command} --help` lists what can be chosen."
