"""Overrides of the command line or a short file, as group options and values by path.

The table of aliases has other libraries' spellings of our configuration keys, and keys without an equivalent, each with
a message. It is the only place with a second spelling of a key. Each use of an alias is reported.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import yaml
from hydra.core.override_parser.types import Glob, ValueType
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from verl.component import hint, nearest
from verl.compose.compose import compose_root, parsed_override, readable, references_above
from verl.compose.schema import CHOOSERS, LISTS, ROOTS, VALUES, group_options, option_file, root_keys

_OPTIONS = ("none", "ddp", "fsdp", "hsdp", "tp", "tp_fsdp", "cp", "pp", "parallel")  # of the group `sharding`
_SHARDINGS = f"needs a sharding that this version does not have; it has {', '.join(_OPTIONS)}."
_STRATEGY = "is sharding=fsdp sharding.strategy=SHARD_GRAD_OP here, or a sharding that this version does not have."
_OFFLOAD = "is sharding.cpu_offload=true here, with sharding=fsdp, hsdp or tp_fsdp."
_RAY = "is not a key here; with trainer=ray, trainer.placement.address and the keys beside it place the roles."
_PLAIN_OPTION = re.compile(r"^[\w,]*$")
OWN_SHARDING = ".sharding"  # of a role: a key that takes an option of the group `sharding`
CURRICULUM = "data.curriculum"  # takes an option of the group `curriculum`


@dataclass(frozen=True)
class Alias:
    """Translation of a foreign key.

    Attributes:
        path: the key of verl that takes the value unchanged.
        option: `group=option` to add, unless the group was chosen explicitly; `{files}` stands for the data option for
            files of the root.
        nulls: values, besides null, that mean null.
        choices: for keys that select: `group=option` by lower-case value, or "" for a value that changes nothing.
        refusal: message for every value that `choices` does not list.
    """

    path: str | None = None
    option: str | None = None
    nulls: tuple[str, ...] = ()
    choices: dict[str, str] = field(default_factory=dict)
    refusal: str | None = None


_OFF = {"false": "", "null": "", "none": ""}
_NEVER = ("-1", "0", "false")
_BACKENDS = {name: f"sharding={name}" for name in _OPTIONS}
_BACKENDS |= {"local": "sharding=none", "fsdp2": "sharding=fsdp"}
_STRATEGIES = {"no_shard": "none", "none": "none", "full_shard": "fsdp", "hybrid_shard": "hsdp"}
_SINGLE = {"null": "", **{name: f"sharding={option}" for name, option in _STRATEGIES.items()}}

ALIASES: dict[str, Alias] = {
    "actor_rollout.model_name_or_path": Alias(path="actor.model.path", option="actor=pretrained"),
    "actor_rollout_ref.model.path": Alias(path="actor.model.path", option="actor=pretrained"),
    "actor_rollout_ref.actor.optim.lr": Alias(path="actor.optimizer.lr"),
    "actor_rollout_ref.rollout.n": Alias(path="trainer.group_size"),
    "rollout.n": Alias(path="trainer.group_size"),
    "actor_rollout_ref.rollout.temperature": Alias(path="rollout.temperature"),
    "critic.model_name_or_path": Alias(path="critic.model.path", option="critic=own_model"),
    "critic.optim.lr": Alias(path="critic.optimizer.lr"),
    "actor_rollout.use_vllm": Alias(choices={**_OFF, "true": "rollout=vllm"}, refusal="takes true or false."),
    "actor_rollout.fsdp_config.sharding_strategy": Alias(choices=_SINGLE, refusal=_STRATEGY),
    "actor_rollout.fsdp_config.cpu_offload": Alias(choices=_OFF, refusal=_OFFLOAD),
    "trainer.backend": Alias(choices=_BACKENDS, refusal=_SHARDINGS),
    "trainer.save_freq": Alias(path="checkpoint.save_interval", nulls=_NEVER),
    "trainer.default_local_dir": Alias(path="checkpoint.save_dir"),
    "trainer.resume_from_path": Alias(path="resume"),
    "save_freq": Alias(path="checkpoint.save_interval", nulls=_NEVER),
    **{
        f"checkpoint_config.{key}": Alias(path=f"checkpoint.{key}")
        for key in (
            "save_dir",
            "save_interval",
            "keep_last_n",
            "keep_best",
            "save_async",
            "use_safetensors",
            "incremental_save",
            "incremental_base",
            "cold_storage",
        )
    },
    "storage.type": Alias(
        choices={**_OFF, **{name: f"storage={name}" for name in ("local", "s3", "oss", "gcs")}},
        refusal="names a kind of storage that this version does not have; conf/storage/ lists those that it has.",
    ),
    "trainer.test_freq": Alias(path="trainer.eval_interval"),
    "trainer.total_training_steps": Alias(path="trainer.total_steps"),
    "algorithm.adv_estimator": Alias(
        choices={
            "gae": "algorithm=ppo",
            "grpo": "algorithm=grpo",
            "rloo": "algorithm=rloo",
            "remax": "algorithm=remax",
            "opo": "algorithm=opo",
            "reinforce_plus_plus": "algorithm=reinforce_pp",
            "reinforce_plus_plus_baseline": "algorithm=reinforce_pp_baseline",
        },
        refusal="names an estimator that this version does not have; conf/algorithm/ lists those that it has.",
    ),
    "algorithm.gamma": Alias(path="algorithm.advantage.gamma"),
    "algorithm.lam": Alias(path="algorithm.advantage.lam"),
    "data.train_batch_size": Alias(path="trainer.prompts_per_step"),
    "data.max_response_length": Alias(path="rollout.max_new_tokens"),
    "data.train_files": Alias(path="data.train_files", option="data={files}"),
    "data.val_files": Alias(path="data.eval_files", option="data={files}"),
    "teacher": Alias(path="reference.model.path", option="reference=teacher"),
    "teacher.model.path": Alias(path="reference.model.path", option="reference=teacher"),
    "teacher.sharding": Alias(path="reference.sharding", option="reference=teacher"),
    "use_critic": Alias(choices={"true": "", "false": "critic=none"}, refusal="takes true or false."),
    "use_reference_policy": Alias(choices={"true": "", "false": "reference=none"}, refusal="takes true or false."),
    "use_rm": Alias(choices={**_OFF, "true": "reward=model"}, refusal="takes true or false."),
    "reward_model.enable": Alias(choices={**_OFF, "true": "reward=model"}, refusal="takes true or false."),
    "reward_model.model_name_or_path": Alias(path="reward.model.path", option="reward=model"),
    "reward_model.model.path": Alias(path="reward.model.path", option="reward=model"),
    "use_vllm": Alias(choices={**_OFF, "true": "rollout=vllm"}, refusal="takes true or false."),
    "ray.address": Alias(path="trainer.placement.address", option="trainer=ray"),
    "ray.num_cpus": Alias(path="trainer.placement.num_cpus", option="trainer=ray"),
}

SHORT = {
    **{f"tracker={name}": f"[default,{name}]" for name in ("wandb", "trackio", "mlflow")},
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


def translate(root: str, key: str, value: Any, chosen: set[str]) -> Overrides | None:
    """Translate `key=value`; None if the key is not an alias.

    Args:
        root: a name of `ROOTS`.
        key, value: the assignment.
        chosen: groups that were chosen explicitly, which an alias does not choose again.
    """
    assignment, alias = f"{key}={_text(value)}", ALIASES.get(key)
    if alias is None:
        return Overrides(faults=[f"{assignment} {_RAY}"]) if f"{key}.".startswith("ray.") else None
    if alias.path is not None:
        return _renamed(alias, root, key, value, chosen)
    choice = alias.choices.get(_text(value).lower())
    if choice is None:
        return Overrides(faults=[f"{assignment} {alias.refusal}"])
    became = choice or "nothing: the roles follow from the algorithm"
    return Overrides(options=[choice] if choice else [], notes=[f"{assignment} became {became}"])


def _renamed(alias: Alias, root: str, key: str, value: Any, chosen: set[str]) -> Overrides:
    assert alias.path is not None
    option = alias.option if alias.option and alias.option.split("=")[0] not in chosen else None
    option = option.format(files=ROOTS[root].files) if option else None
    assignment = f"{key}={_text(value)}"
    if _text(value) in alias.nulls:
        value = "null" if isinstance(value, str) else None
    became = " ".join(part for part in (option, f"{alias.path}={_text(value)}") if part)
    notes = [] if became == assignment else [f"{assignment} became {became}"]
    return Overrides([option] if option else [], [(alias.path, value)], notes)


def _text(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value).strip("\"'")


def assign(root: str, pairs: Sequence[tuple[str, Any]], *, sweeps: bool = False) -> Overrides:
    """Sort `key=value` pairs into options and values, translating aliases and collecting what is refused.

    Args:
        root: a name of `ROOTS`.
        pairs: keys with their values.
        sweeps: several values are the jobs of a sweep; otherwise they are a fault.
    """
    groups, keys, out = group_options(), root_keys(root), Overrides(is_sweep=sweeps)
    chosen = {key for key, _ in pairs if key in keys}
    for key, value in pairs:
        if (translated := translate(root, key, value, chosen)) is not None:
            _add(out, translated, pairs, root, f"{key}={value}")
        elif key in VALUES:
            out.values.append((key, value))
        elif (group := _group_of(key, keys)) is not None and _is_option(value):
            fault = _option_fault(group, value, sweeps)
            out.faults += [f"{key}: {fault}"] if fault else []
            out.options += [] if fault else [f"+{group}@{key}={value}"]
        elif (top := key.partition(".")[0]) not in keys:
            out.faults.append(f"{key} is not a known key: {root}.yaml has no {top}.{hint(nearest(top, keys))}")
        elif "." in key or isinstance(value, Mapping) or str(value).startswith("{"):
            out.values.append((key, value))
        elif _is_null(value):
            out.options += [f"{key}=none"] if "none" in groups.get(key, []) else []
            out.faults += (
                [] if "none" in groups.get(key, []) or key in CHOOSERS else [f"{key} is null: a run needs one."]
            )
        elif fault := _option_fault(key, value, sweeps):
            out.faults.append(fault)
        elif (option := f"{key}={_choice(key, value)}") not in out.options:
            out.options.append(option)
    return out


def split_at_commas(text: str) -> list[str]:
    """Split at commas outside of quotes and brackets. A bracket or quote that is not closed is an ordinary character.

    >>> split_at_commas("${processes:${sharding._target_},2},4")
    ['${processes:${sharding._target_},2}', '4']
    """
    pieces, start, position = [], 0, 0
    while position < len(text):
        if text[position] == ",":
            pieces.append(text[start:position])
            start = position + 1
        elif text[position] in _CLOSING:
            position = _end_of_bracket(text, position) or position
        elif text[position] in "'\"" and not text[start:position].strip():
            position = max(position, text.find(text[position], position + 1))
        position += 1
    return [*pieces, text[start:]]


_CLOSING = {"[": "]", "{": "}", "(": ")"}


def _end_of_bracket(text: str, position: int) -> int | None:
    """The position of the bracket that closes the one at `position`; None if there is none."""
    awaited: list[str] = []
    for i in range(position, len(text)):
        if text[i] in _CLOSING:
            awaited.append(_CLOSING[text[i]])
        elif text[i] == awaited[-1]:
            awaited.pop()
            if not awaited:
                return i
    return None


def options_in(choice: str) -> list[str]:
    """All options that a choice names, in a list or for a sweep."""
    pieces = (piece.strip() for piece in split_at_commas(choice))
    listed = (piece[1:-1].split(",") if _is_list(piece) else [piece] for piece in pieces)
    return [option.strip(" '\"") for options in listed for option in options]


def with_copies(root: str, assigned: Overrides) -> list[tuple[str, Any]]:
    """Before a value below a reference, such as `critic.model: ${actor.model}`, set every key of the node to a
    reference of its own. Hydra would otherwise drop all other keys.
    """
    if not any(path.count(".") > 1 for path, _ in assigned.values):
        return assigned.values
    try:
        config = compose_root(root, [split_at_commas(option)[0] for option in assigned.options])
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


def _add(out: Overrides, alias: Overrides, pairs: Sequence[tuple[str, Any]], root: str, source: str) -> None:
    """Add the translation of an alias; an option that contradicts an explicit choice is a fault."""
    out.values += alias.values
    out.notes += alias.notes
    out.faults += alias.faults
    for option in alias.options:
        group = option.partition("=")[0]
        if group not in root_keys(root):
            out.faults.append(f"{source} means {option}, but {group} is not a known key: {root}.yaml has no {group}.")
            continue
        others = [f"{key}={value}" for key, value in pairs if key == group] + out.options
        contrary = [other for other in others if other.startswith(f"{group}=") and other != option]
        if contrary:
            out.faults.append(f"{source} means {option}, but {contrary[0]} is given too. Leave one of them out.")
        elif option not in out.options:
            out.options.append(option)


def _group_of(key: str, root_keys: Iterable[str]) -> str | None:
    """The group whose options a key below a root key takes."""
    if key == CURRICULUM:
        return "curriculum"
    return "sharding" if key.endswith(OWN_SHARDING) and key.removesuffix(OWN_SHARDING) in root_keys else None


def _is_option(value: Any) -> bool:
    return isinstance(value, str) and not _is_null(value) and _PLAIN_OPTION.match(value) is not None


def _is_null(value: Any) -> bool:
    return value is None or str(value).lower() in ("null", "")


def _is_list(text: str) -> bool:
    return text.startswith("[") and text.endswith("]")


def _choice(group: str, value: Any) -> str:
    """An option, several for a sweep, or a list of options, in Hydra's spelling."""
    text = f"[{','.join(map(str, value))}]" if isinstance(value, (list, tuple)) else str(value)
    return ",".join(SHORT.get(f"{group}={piece}", piece) for piece in split_at_commas(text))


def _option_fault(group: str, value: Any, sweeps: bool) -> str | None:
    """The fault of a choice: no such option, a list, several without -m, none for a sweep, or an unreadable file."""
    text, known = _choice(group, value), group_options().get(group, [])
    parsed = parsed_override(readable(f"{group}={text}"))
    if re.match(r"(glob|choice|range|sort|shuffle)\(", text):  # sweep syntax
        is_glob = parsed is not None and parsed.value_type == ValueType.GLOB_CHOICE_SWEEP
        if sweeps and is_glob and not cast(Glob, parsed.value()).filter(known):  # type: ignore[union-attr]
            return f"{group}={text}: there is no such option, so the sweep has no jobs; there are {', '.join(known)}."
    elif group not in LISTS and any(map(_is_list, split_at_commas(text))):
        return f"{group}={text}: it takes one option, not a list; there are {', '.join(known)}."
    elif unknown := [option for option in options_in(text) if option not in (*known, "null")]:
        return no_option(group, unknown[0])
    elif parsed is None:
        return no_option(group, text)
    elif fault := next((fault for option in options_in(text) if (fault := _file_fault(group, option))), None):
        return fault
    if not sweeps and (len(split_at_commas(text)) > 1 or (parsed is not None and parsed.is_sweep_override())):
        return f"{group}={text} has several values: add -m for a sweep over them, or give one."
    return None


def no_option(group: str, option: str) -> str:
    """The fault of an option that a group does not have, or of a group that does not exist."""
    groups = group_options()
    if group.startswith("hydra/"):
        return f"{group}={option}: Hydra has no such option; a plugin that brings it may not be installed."
    if not (known := groups.get(group)):
        return f"{group}/{option}: there is no such group of options.{hint(nearest(group, groups))}"
    return f"{group}={option}: no such option; there are {', '.join(known)}.{hint(nearest(option, known))}"


def _file_fault(group: str, option: str) -> str | None:
    if (file := option_file(group, option)) is None:
        return None
    text = file.read_text(encoding="utf-8", errors="replace")
    if (fault := _yaml_fault(text)) is not None:
        return f"{group}={option}: {file}{fault}."
    if group in CHOOSERS and not re.search(r"^#\s*@package\s+_global_\s*$", text, re.MULTILINE):
        return f"{group}={option}: {file} does not begin with the line `# @package _global_`. {WITHOUT_PACKAGE}"
    return None


@functools.lru_cache(maxsize=256)
def _yaml_fault(text: str) -> str | None:
    try:
        yaml.safe_load(text)
    except yaml.YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        where = "" if line is None else f" line {line + 1}"
        return f"{where} is not readable as YAML: {getattr(error, 'problem', None) or error}"
    return None


WITHOUT_PACKAGE = (
    "Without it the keys of the file are placed below its group instead of at the root. Add it as first line."
)
