"""Finds a trained policy, in a checkpoint or as plain weights, and composes a run that evaluates it or
samples from it.

PATH ──> its weights, and the configuration that trained it ──> overrides ──> a run without training
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.checkpoint.core.manifest import MANIFEST
from verl.checkpoint.export import plain_directory
from verl.checkpoint.read.discovery import FORMAT, LATEST, POINTER, CheckpointDirectory
from verl.checkpoint.resume_point import ResumePoint, find
from verl.compose.command_line import parse_overrides
from verl.compose.compose import apply_values, compose_root
from verl.compose.overrides import Overrides, assign
from verl.compose.validate import validate
from verl.errors import CheckpointNotFound, ConfigError
from verl.models.pretrained import Pretrained
from verl.workers.load_state import RestoreSource

_log = logging.getLogger(__name__)

UNKNOWN_CONTEXT = 4096  # tokens of prompt and response, for a model without a known context length
OF_FILES = {"ppo": "verl.data.files.PromptFiles", "sft": "verl.data.files.SFTFiles"}
EVALUATED = {"ppo": "verl.data.files.EvaluatedPrompts", "sft": "verl.data.files.EvaluatedSequences"}
KEPT_OF_MODEL = ("dtype", "attention", "tokenizer_path")
TRUST = "trust_remote_code"
FUNCTION = re.compile(r"[^\s:]+:[A-Za-z_]\w*")  # package.module:function or file.py:function
UNTRAINED: dict[str, Any] = {  # replaces the parts that only training needs
    "actor.lora": None,
    "sharding": {"_target_": "verl.engines.sharding.NoSharding"},
    "tracker": {"_target_": "verl.tracking.base.Trackers"},
    "checkpoint": None,
    "resume": None,
    "trainer.n_gpus_per_node": 1,
    "trainer.nnodes": 1,
    "trainer.profile": None,
}
UNTRAINED_OF: dict[str, dict[str, Any]] = {
    "ppo": {
        "critic": None,
        "reference": None,
        "algorithm": {
            "_target_": "verl.algorithms.algorithm.Algorithm",
            "advantage": {"_target_": "verl.algorithms.advantages.GRPO"},
            "policy_loss": {"_target_": "verl.algorithms.losses.PPOClip"},
        },
        "trainer.group_size": 2,
        "trainer.prompts_per_step": 1,
    },
    "sft": {"trainer.batch_size": 1},
}


@dataclass(frozen=True)
class SavedPolicy:
    """Weights of a policy, and their checkpoint.

    Attributes:
        actor: Hugging Face directory of a model or an adapter.
        point: the checkpoint of the weights; None for plain weights.
    """

    actor: Path
    point: ResumePoint | None = None

    @property
    def step(self) -> int:
        """Training step of the weights; 0 if unknown."""
        return 0 if self.point is None else self.point.step

    @property
    def origin(self) -> Path:
        """The directory that the weights come from; `actor` may be an exported copy."""
        return self.actor if self.point is None else self.point.published.directory / "actor"

    @property
    def description(self) -> str:
        """For people."""
        return str(self.actor) if self.point is None else f"{self.point.published.directory}, step {self.step}"


def locate_policy(path: str) -> SavedPolicy:
    """Find the policy at a path.

    Args:
        path: a checkpoint, a directory of checkpoints, the directory of a run, a Hugging Face directory, or `latest`:
            the newest checkpoint below `checkpoints/`.
    Raises:
        ConfigError: there is no policy at the path.
        BadCheckpoint: the checkpoint is damaged.
    """
    directory = _last_trained() if path == LATEST else Path(path).expanduser().absolute()
    if not directory.is_dir():
        raise ConfigError(f"PATH is {path!r}: no such directory. Give a checkpoint, a run, or a directory of a model.")
    if _is_model(directory):
        return SavedPolicy(directory)
    if not any((directory / name).exists() for name in (POINTER, MANIFEST)) and _is_model(directory / "actor"):
        return SavedPolicy(directory / "actor")  # final weights of a run without checkpoints
    point = find(str(directory), directory, verify=False)  # the files in use are hashed below
    assert point is not None, "only `latest` may find nothing"
    return SavedPolicy(plain_directory(point.published, "actor"), point)


def root_of(saved: SavedPolicy) -> str:
    """The root that trained a policy, `ppo` or `sft`; `ppo` for plain weights."""
    target = "" if saved.point is None else str(saved.point.state.get("config", {}).get("_target_"))
    return "sft" if target.endswith("SFTRun") else "ppo"


def policy_run(saved: SavedPolicy, root: str, overrides: Sequence[str] = (), file: Path | None = None) -> Any:
    """Compose a run that evaluates a policy, from the configuration that trained it without the parts for training.

    Args:
        saved: the policy.
        root: `ppo` or `sft`; if another root trained the policy, the default configuration of `root` is used.
        overrides: as on the command line.
        file: data file that replaces the data of the configuration.
    Returns:
        A `PPORun` or an `SFTRun`.
    Raises:
        ConfigError: a fault in the configuration, or user code that only the saved configuration names. Checkpoints are
            not trusted to run code, so the caller must name it in `overrides`.
        BadCheckpoint: the weights differ from what was written.
    """
    _verify(saved)
    pairs, faults = parse_overrides(overrides)
    assigned = assign(root, pairs)
    config = _base(saved, root)
    apply_values(config, [*UNTRAINED.items(), *UNTRAINED_OF[root].items(), ("actor.model", _model(saved, config))])
    apply_values(config, [(group, _option(root, group, text)) for group, text in map(_halves, assigned.options)])
    if file is not None:
        assigned.values = [pair for pair in assigned.values if pair[0] not in ("data", "data._target_")]  # replaced
        apply_values(config, [("data", _data(config, root, file, dict(assigned.values)))])
    apply_values(config, assigned.values)
    if saved.point is not None:
        _trust_nothing(config, saved, assigned, faults)
    return validate(config, [*faults, *assigned.faults])


def _trust_nothing(config: DictConfig, saved: SavedPolicy, assigned: Overrides, others: Sequence[str]) -> None:
    """Refuse code that a saved configuration names and the user does not.

    Args:
        config: the composed configuration.
        saved: the policy.
        assigned: overrides of the user.
        others: faults to be reported too.
    Raises:
        ConfigError: the saved configuration names components or functions outside of verl.
    """
    named = {path for path, _ in assigned.values} | {option.partition("=")[0] for option in assigned.options}
    faults = []
    for path, value in list(_leaves(OmegaConf.to_container(config, resolve=False))):
        if any(path == one or path.startswith(f"{one}.") for one in named):
            continue
        key, text = path.rpartition(".")[2], value if isinstance(value, str) else ""
        if key == TRUST and value not in (False, None):
            apply_values(config, [(path, False)])
            _log.warning(
                "%s was true in training and is now false: Python code in a model directory is run only if you set "
                "%s=true.", path, path,
            )  # fmt: skip
        elif (key == "_target_" and not text.startswith("verl.")) or (
            FUNCTION.fullmatch(text) and not text.startswith("verl.")
        ):
            faults.append(
                f"{path} is {value!r}: the saved configuration of {saved.description} names this code, and "
                f"checkpoints are not trusted to run code. If you trust it, add: '{path}={value}'."
            )
    if faults:
        raise ConfigError([*others, *assigned.faults, *faults])


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else None
    if items is None:
        yield path, node
        return
    for key, value in items:
        yield from _leaves(value, f"{path}.{key}" if path else str(key))


def _verify(saved: SavedPolicy) -> None:
    """Verify the weights and the files beside them by their hashes."""
    if saved.point is not None:
        reader = RestoreSource(saved.point.published.directory).reader()
        for entry in reader.files("actor"):
            reader.check(entry.path)


def _base(saved: SavedPolicy, root: str) -> DictConfig:
    if saved.point is None or root_of(saved) != root:
        return compose_root(root, ["actor=pretrained"])
    config = OmegaConf.create(saved.point.state["config"])
    assert isinstance(config, DictConfig)
    return config


def _model(saved: SavedPolicy, config: DictConfig) -> dict[str, Any]:
    """The model component for the weights, with dtype and attention as in training."""
    before = OmegaConf.to_container(config.actor.model, resolve=False)
    assert isinstance(before, dict), "the actor has a model node"
    kept = {key: before[key] for key in KEPT_OF_MODEL if before.get(key) is not None}
    if any((saved.actor / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        kept.pop("tokenizer_path", None)
    return {"_target_": f"{Pretrained.__module__}.{Pretrained.__name__}", **kept, "path": str(saved.actor)}


def _data(config: DictConfig, root: str, file: Path, assigned: Mapping[str, Any]) -> dict[str, Any]:
    """The data component for a file, read like the former files, with the context length of the model as limit."""
    before: Any = OmegaConf.to_container(config.data, resolve=False)
    own = ("train_files", "eval_files", "weights")
    kept = (
        {key: value for key, value in before.items() if key not in own} if before["_target_"] == OF_FILES[root] else {}
    )
    context = Pretrained(path=config.actor.model.path).max_positions() or UNKNOWN_CONTEXT
    if root == "ppo":
        response = int(assigned.get("rollout.max_new_tokens", config.rollout.max_new_tokens))
        kept["max_prompt_length"] = max(1, context - response)
    else:
        kept["max_length"] = context
    return {**kept, "_target_": EVALUATED[root], "train_files": [str(file)], "eval_files": [str(file)]}


def _option(root: str, group: str, text: str) -> Any:
    """The configuration node of an option."""
    return OmegaConf.to_container(compose_root(root, [f"{group}={text}"])[group], resolve=True)


def _halves(option: str) -> tuple[str, str]:
    group, _, text = option.partition("=")
    return group, text


def _is_model(directory: Path) -> bool:
    return any((directory / name).is_file() for name in ("config.json", "adapter_config.json"))


def _last_trained() -> Path:
    """The newest checkpoint below `checkpoints/`."""
    directories = [file.parent for file in Path("checkpoints").rglob(FORMAT)]
    found = []
    for directory in directories:
        try:
            found.append(CheckpointDirectory(directory).newest().directory)
        except CheckpointNotFound:
            continue
    if not found:
        raise ConfigError("PATH is 'latest': there is no complete checkpoint below checkpoints/. Give a path.")
    return max(found, key=lambda checkpoint: (checkpoint / MANIFEST).stat().st_mtime_ns).absolute()
