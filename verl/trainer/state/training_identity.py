"""Training identity: model, tokenizer, data and algorithm, which a resume must not change; how two configurations
differ.

Optimizer, seed, sharding and whatever else is not in `IDENTITY` may change at a resume; the run then names each change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from verl.errors import ConfigError
from verl.protocol.user_function import source_file

if TYPE_CHECKING:
    from verl.checkpoint.resolve import ResumePoint

IDENTITY = (
    "actor.model",
    "actor.lora",
    "critic.model",
    "critic.lora",
    "reference.model",
    "data",
    "algorithm",
    "environment",
    "loss",
)
ABSENT = "(not set)"
KIND = "._target_"
# Settings added later; a checkpoint without them behaves as if they had these values.
DEFAULTS_OF_OLDER_CHECKPOINTS = {
    "algorithm.replay_fraction": 0.0,
    "algorithm.replay_max_staleness": 16,
    "data.final_assistant": "error",
    "data.curriculum": None,
    "data.chat_template_kwargs": {},
    "data.images_key": "images",
    "data.max_pixels": None,
    "environment": None,
    "environment.history": "append",
    "environment.images": False,
    "algorithm.advantage.discount": "token",
    "algorithm.final_entropy_coef": None,
    "algorithm.distill": None,
    "algorithm.distill.data_fraction": 0.0,
    "algorithm.distill.completion_key": None,
    "algorithm.proximal": "trainer",
    "rollout.pipeline_parallel_size": 1,
    "rollout.router_replay": False,
    "rollout.sleep": "auto",
    "actor.model.compile": False,
    **{f"{role}.model.freeze": None for role in ("actor", "critic", "reference")},
    **{f"{role}.model.images": False for role in ("actor", "critic", "reference")},
    "sharding.reduce_gradients": "micro_batch",
    "trainer.cpu_matmul": "mkl",
    "trainer.mode": "sync",
    "trainer.max_staleness": 1,
    "rollout.weight_update": "drain",
    "rollout.kv_cache": "keep",
    "trainer.replay_schedule": None,
}
# Settings of a reward that affect how it is called, but not its scores.
REWARD_TRANSPORT_KEYS = {"timeout_s", "num_workers", "on_error", "error_score", "cache_gib", "cache_dir", "batch_size"}
REWARD_TRANSPORT_KEYS |= {"micro_batch_tokens", "endpoint", "sharding"}
SAME_RESULTS = {"actor.model.compile", "critic.model.compile", "reference.model.compile"}  # but for rounding
FUNCTION = re.compile(r"[^\s:]+:[A-Za-z_]\w*")  # file.py:function or module:function
OF_MODELS = ("config.json", "adapter_config.json")  # one of them is in a directory with a model
FUNCTIONS = ("algorithm",)  # settings whose `file.py:function` stands for the content of the file
DIRECTORIES = ("data.dataset",)  # settings whose directories hold data
DIGEST = "blake3"  # only key of the digest of a file or directory


def identity_of(config: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The parts of a configuration that a resume must leave alone, by path, and a digest of the tokenizer.

    A path to a file or a directory of this machine is replaced by a digest of its content: the same data under another
    name is the same data.

    Args:
        tokenizer: None leaves it out.
    """
    flat = dict(_flat(config))
    parts = {path: value for path, value in flat.items() if _below(path, IDENTITY) and path not in SAME_RESULTS}
    tokenizer_identity = {} if tokenizer is None else {"tokenizer": tokenizer_digest(tokenizer)}
    directories = {path: content_of(parts[path], (".",)) for path in DIRECTORIES if path in parts}
    functions = {path: _with_source(x) for path, x in parts.items() if _below(path, FUNCTIONS)}
    return {path: content_of(value) for path, value in parts.items()} | directories | functions | tokenizer_identity


def paths_of_texts(config: Mapping[str, Any], start: str) -> set[str]:
    """The paths of a configuration whose values are texts that start so."""
    return {path for path, value in _flat(config) if isinstance(value, str) and value.startswith(start)}


def reward_identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by which a reward rates, by path: statistics of its scores mean nothing to another one.

    Files of functions and models of this machine are replaced by digests of their content, as in `identity_of`.
    """
    settings = {path: value for path, value in _flat(config) if REWARD_TRANSPORT_KEYS.isdisjoint(path.split("."))}
    return {path: _function_content(value) for path, value in settings.items()}


def _function_content(value: Any) -> Any:
    """`content_of` a value; of `file.py:function` the content of the file, and the function."""
    file, _, function = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return [content_of(file), function] if file and Path(file).is_file() else content_of(value)


def _with_source(value: Any) -> Any:
    """`content_of` a value; of a function in a file or module the content of the file, and the function."""
    if not isinstance(value, str) or not FUNCTION.fullmatch(value):
        return content_of(value)
    module, _, function = value.rpartition(":")
    file, _ = source_file(module)
    return value if file is None else [{DIGEST: _file_digest(file)}, function]


def sources_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The code that a configuration names and that is not verl's own, by path: a digest of the file that holds it.

    A function (`file.py:function`, `module:function`) and a component's class stay under one name when they are edited.
    """
    digests: dict[str, Any] = {}
    for path, value in _flat(config):
        if not isinstance(value, str) or value.startswith("verl."):
            continue
        if path.endswith(KIND):
            module = value.rpartition(".")[0]
        elif FUNCTION.fullmatch(value):
            module = value.rpartition(":")[0]
        else:
            continue
        try:
            file, _ = source_file(module)
        except (ImportError, OSError, KeyError):
            continue
        if file is not None and file.is_file():
            digests[path] = {DIGEST: _file_digest(file)}
    return digests


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Path -> [value before, value now], where two configurations differ.

    Of a component in whose place stands another one, or none, the `_target_` alone: their fields are not comparable.
    """
    old, new = dict(_flat(before)), dict(_flat(now))
    for path, value in DEFAULTS_OF_OLDER_CHECKPOINTS.items():
        if path in new and f"algorithm{KIND}" in old:
            old.setdefault(path, value)
    differing = {
        path: [old.get(path, ABSENT), new.get(path, ABSENT)]
        for path in [*old, *(p for p in new if p not in old)]
        if old.get(path, ABSENT) != new.get(path, ABSENT)
    }
    replaced = [path.removesuffix(KIND) for path in differing if path.endswith(KIND)]
    outermost = [path for path in replaced if not any(path.startswith(f"{other}.") for other in replaced)]
    kinds = {f"{path}{KIND}" for path in outermost}
    return {path: values for path, values in differing.items() if path in kinds or not _below(path, tuple(outermost))}


def identity_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """`differences` of two identities. A critic that only one of them has is one that its algorithm does not use."""
    differing = differences(before, now)
    both = all(any(_below(path, ("critic",)) for path in identity) for identity in (before, now))
    return {path: values for path, values in differing.items() if both or not _below(path, ("critic",))}


def tokenizer_digest(tokenizer: Any) -> str:
    """Digest of vocabulary, special tokens and its own chat template; `data.chat_template` is part of the settings."""
    from verl.data.chat_template import own_template  # loads torch, which commands that only look do without

    vocabulary = sorted(tokenizer.get_vocab().items())
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return _digest(json.dumps([vocabulary, special, own_template(tokenizer)], sort_keys=True).encode())


def content_of(value: Any, named: Sequence[str] = OF_MODELS) -> Any:
    """Replace a path by the digest of its content; other values are unchanged.

    Args:
        named: entries one of which a directory must have for that; `.` is any directory.
    """
    if isinstance(value, (list, tuple)):
        return [content_of(item, named) for item in value]
    if not isinstance(value, str) or "\0" in value or len(value) > 4096:
        return value
    try:
        path = Path(value).expanduser()
        if path.is_file():
            return {DIGEST: _file_digest(path)}
    except (OSError, RuntimeError):  # a text that no path can be, such as a chat template
        return value
    if any((path / name).exists() for name in named):
        names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
        return {DIGEST: _digest("".join(f"{name} {_file_digest(path / name)}\n" for name in names).encode())}
    return value


def _flat(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping) and node and set(node) != {DIGEST}:
        for key, value in node.items():
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, list(node) if isinstance(node, tuple) else node


def _below(path: str, roots: tuple[str, ...]) -> bool:
    return any(path == root or path.startswith(f"{root}.") for root in roots)


def _digest(data: bytes) -> str:
    return blake3(data).hexdigest()


def _file_digest(path: Path) -> str:
    stat = path.stat()
    return _digest_of(str(path.absolute()), stat.st_ino, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4096)
def _digest_of(path: str, *stat: int) -> str:
    return blake3().update_mmap(path).hexdigest()


def refuse_other_identity(point: ResumePoint, identity: Mapping[str, Any]) -> None:
    """Refuse to go on from a checkpoint of another training.

    Raises:
        ConfigError: model, tokenizer, data or algorithm are not those of the checkpoint; names every key.
    """
    differing = identity_differences(point.state.get("identity", {}), identity)
    if differing:
        raise ConfigError(
            [
                f"{path} is {_shown(now)}: the checkpoint {point.checkpoint.name} was trained with {_shown(before)}, "
                "so this would be another training. Set it back, or start without resume."
                for path, (before, now) in differing.items()
            ]
        )


def difference_messages(point: ResumePoint, config: Mapping[str, Any]) -> list[str]:
    """A line for each value that differs from the checkpoint's and may."""
    import torch

    from verl.ops.cpu_matmul import active_library

    differing = training_differences(point.state.get("config", {}), config)
    messages = [f"{path}: {_shown(before)} before, {_shown(now)} now" for path, (before, now) in differing.items()]
    before, now = point.state.get("sources"), sources_of(config)
    if isinstance(before, Mapping):
        edited = [path for path in now if path in before and before[path] != now[path] and path not in differing]
        named = dict(_flat(config))
        messages += [f"{path}: the source of {named[path]} was edited since the save" for path in edited]
    threads, here = point.state.get("num_threads"), torch.get_num_threads()
    if isinstance(threads, int) and threads != here and "trainer.num_threads" not in differing:
        messages.append(
            f"threads of torch: {threads} before, {here} now. Sums may be rounded otherwise; set "
            f"trainer.num_threads={threads} for the same numbers"
        )
    library = point.state.get("cpu_matmul", "mkl")
    if library in ("mkl", "onednn") and library != active_library() and "trainer.cpu_matmul" not in differing:
        messages.append(
            f"float32 products on the CPU: by {library} before, by {active_library()} now. Last bits differ; set "
            f"trainer.cpu_matmul={library} for the same numbers"
        )
    return messages


# Settings of the end of a run and of the checkpoint location, which do not affect training.
OF_THIS_START = ("resume", "trainer.stop_after")
# Settings of what is recorded, saved and evaluated, which do not affect training either.
OF_RECORDS = (
    "checkpoint",
    "storage",
    "tracker",
    "trainer.replay_schedule",
    *(f"trainer.{name}" for name in ("project_name", "experiment_name", "profile", "save_final", "sample_rows")),
    *(f"trainer.{name}" for name in ("eval_before", "eval_interval", "eval_samples", "eval_without_tools")),
    "trainer.strict_data_check",
)


def replay_identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, by path, that a run must share with one whose schedule it replays; files as their contents, and the
    files of functions and components that are not verl's own.
    """
    flat = {path: value for path, value in _flat(config) if not _below(path, (*OF_THIS_START, *OF_RECORDS))}
    code = {f"source of {path}": digest for path, digest in sources_of(config).items() if path in flat}
    return {path: _function_content(value) for path, value in flat.items()} | code


def training_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Differences of what is trained, and how."""
    return {path: values for path, values in differences(before, now).items() if path not in OF_THIS_START}


def _shown(value: Any) -> str:
    if isinstance(value, Mapping) and set(value) == {DIGEST}:
        return f"content {value[DIGEST][:12]}"
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        return ", ".join(map(_shown, value))
    return json.dumps(value) if not isinstance(value, str) else value
