"""Finds a trained policy, in a checkpoint or as plain weights, and composes the run that evaluates it or samples from
it.

PATH ──> where its weights lie, and the configuration that trained it ──> overrides ──> a run without training
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

UNKNOWN_CONTEXT = 4096  # tokens of prompt and response, of a model that does not say how many it holds
OF_FILES = {"ppo": "verl.data.files.PromptFiles", "sft": "verl.data.files.SFTFiles"}
KEPT_OF_MODEL = ("dtype", "attention", "tokenizer_path")
TRUST = "trust_remote_code"
FUNCTION = re.compile(r"[^\s:]+:[A-Za-z_]\w*")  # package.module:function or file.py:function
UNTRAINED: dict[str, Any] = {  # in place of what only training needs
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
    """Weights of a policy, and what is known of them.

    Attributes:
        actor: directory as Hugging Face saves it: a model, or an adapter.
        point: the checkpoint that holds it, or None for plain weights.
    """

    actor: Path
    point: ResumePoint | None = None

    @property
    def step(self) -> int:
        """Training steps done; 0 where nobody recorded them."""
        return 0 if self.point is None else self.point.step

    @property
    def origin(self) -> Path:
        """Where the weights come from; `actor` may be a copy of them in plain files."""
        return self.actor if self.point is None else self.point.published.directory / "actor"

    @property
    def description(self) -> str:
        """For people."""
        return str(self.actor) if self.point is None else f"{self.point.published.directory}, step {self.step}"


def locate_policy(path: str) -> SavedPolicy:
    """The policy that a path means.

    Args:
        path: a checkpoint, a directory of checkpoints, the directory of a run, a Hugging Face directory, or `latest`:
            the newest checkpoint below `checkpoints/`.
    Raises:
        ConfigError: there is no policy.
        BadCheckpoint: the checkpoint is damaged.
    """
    directory = _last_trained() if path == LATEST else Path(path).expanduser().absolute()
    if not directory.is_dir():
        raise ConfigError(f"PATH is {path!r}: no such directory. Give a checkpoint, a run, or a directory of a model.")
    if _is_model(directory):
        return SavedPolicy(directory)
    if not any((directory / name).exists() for name in (POINTER, MANIFEST)) and _is_model(directory / "actor"):
        return SavedPolicy(directory / "actor")  # a run without checkpoints has its last weights there
    point = find(str(directory), directory, verify=False)  # what is used of it is hashed below
    assert point is not None, "only `latest` may find nothing"
    return SavedPolicy(plain_directory(point.published, "actor"), point)


def root_of(saved: SavedPolicy) -> str:
    """What trained it, `ppo` or `sft`; `ppo` for plain weights."""
    target = "" if saved.point is None else str(saved.point.state.get("config", {}).get("_target_"))
    return "sft" if target.endswith("SFTRun") else "ppo"


def policy_run(saved: SavedPolicy, root: str, overrides: Sequence[str] = (), file: Path | None = None) -> Any:
    """The run that evaluates a policy: the one that trained it, without what only training needs.

    Args:
        root: if it is not the one that trained the policy, the default configuration of this root is taken.
        overrides: as on the command line of the main scripts.
        file: of rows that take the place of the data.
    Returns:
        A `PPORun` or an `SFTRun`.
    Raises:
        ConfigError: a fault in the configuration, or code that the saved configuration alone asks for: a checkpoint may
            be anybody's, so whoever gives the command says by name which code is run.
        BadCheckpoint: bytes of the weights are not those that were written.
    """
    _verify(saved)
    pairs, faults = parse_overrides(overrides)
    assigned = assign(root, pairs)
    config = _base(saved, root)
    apply_values(config, [*UNTRAINED.items(), *UNTRAINED_OF[root].items(), ("actor.model", _model(saved, config))])
    apply_values(config, [(group, _option(root, group, text)) for group, text in map(_halves, assigned.options)])
    if file is not None:
        apply_values(config, [("data", _data(config, root, file, dict(assigned.values)))])
    apply_values(config, assigned.values)
    if saved.point is not None:
        _trust_nothing(config, saved, assigned, faults)
    return validate(config, [*faults, *assigned.faults])


def _trust_nothing(config: DictConfig, saved: SavedPolicy, assigned: Overrides, others: Sequence[str]) -> None:
    """Take no code over that the user has not named: what a saved configuration says is not the user's word.

    Args:
        others: faults to be reported with it.
    Raises:
        ConfigError: it names components or functions outside of verl.
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
                "%s was on when this was trained, and is off now: Python that lies with a model runs only where you "
                "say so, with %s=true.", path, path,
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
    """Read and hash every byte of the weights and the files beside them."""
    if saved.point is not None:
        reader = RestoreSource(saved.point.published.directory).reader()
        for entry in reader.files("actor"):
            reader.check(entry.path)


def _base(saved: SavedPolicy, root: str) -> DictConfig:
    if saved.point is None or root_of(saved) != root:
        return compose_root(root, ["actor=pretrained"])
    return OmegaConf.create(saved.point.state["config"])


def _model(saved: SavedPolicy, config: DictConfig) -> dict[str, Any]:
    """The weights, in the type and with the attention that they were trained with."""
    before = OmegaConf.to_container(config.actor.model, resolve=False)
    assert isinstance(before, dict), "a model has fields"
    kept = {key: before[key] for key in KEPT_OF_MODEL if before.get(key) is not None}
    if any((saved.actor / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        kept.pop("tokenizer_path", None)
    return {"_target_": f"{Pretrained.__module__}.{Pretrained.__name__}", **kept, "path": str(saved.actor)}


def _data(config: DictConfig, root: str, file: Path, assigned: Mapping[str, Any]) -> dict[str, Any]:
    """A file in place of the data, read as the files before it were, with as much room as the model has."""
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
    return {**kept, "_target_": OF_FILES[root], "train_files": [str(file)], "eval_files": [str(file)]}


def _option(root: str, group: str, text: str) -> Any:
    """The node that an option of a group puts into the configuration."""
    return OmegaConf.to_container(compose_root(root, [f"{group}={text}"])[group], resolve=True)


def _halves(option: str) -> tuple[str, str]:
    group, _, text = option.partition("=")
    return group, text


def _is_model(directory: Path) -> bool:
    return any((directory / name).is_file() for name in ("config.json", "adapter_config.json"))


def _last_trained() -> Path:
    """The newest checkpoint of all directories of checkpoints below `checkpoints/`."""
    directories = [file.parent for file in Path("checkpoints").rglob(FORMAT)]
    found = []
    for directory in directories:
        try:
            found.append(CheckpointDirectory(directory).newest().directory)
        except CheckpointNotFound:
            continue
    if not found:
        raise ConfigError("PATH is 'latest': no directory below checkpoints/ holds a complete checkpoint. Give one.")
    return max(found, key=lambda checkpoint: (checkpoint / MANIFEST).stat().st_mtime_ns).absolute()
