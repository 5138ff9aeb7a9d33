"""The configuration directory, and the root keys of a run as dataclasses that make Hydra reject any other.

With them an unknown root key in an experiment file, or a forgotten `# @package _global_`, is an error and not a silent
extra node. Everything below the root is validated against the components themselves, in `compose/validate.py`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

import verl


def conf_dir() -> Path:
    """The directory of ppo.yaml and its groups: `conf/` beside the package in a checkout, `verl/conf/` in a wheel.

    Raises:
        FileNotFoundError: neither is there, so the installation is broken.
    """
    package = Path(verl.__file__).resolve().parent
    candidates = (package / "conf", package.parent / "conf")  # what stands beside an installed package is another's
    for directory in candidates:
        if (directory / "ppo.yaml").is_file():
            return directory
    looked = " and ".join(str(directory) for directory in candidates)
    raise FileNotFoundError(f"no ppo.yaml in {looked}: install verl again, its configuration is missing.")


_own_dirs: list[Path] = []


def set_own_conf_dirs(directories: Iterable[Path]) -> None:
    """Set the directories of the user's own groups, given by `--config-dir`, for all compositions of this process."""
    _own_dirs[:] = directories


def own_conf_dirs() -> tuple[Path, ...]:
    """The directories of the user's own groups."""
    return tuple(_own_dirs)


def group_options(directory: Path) -> dict[str, list[str]]:
    """Every config group of a configuration directory with its options, Hydra's own groups left out; those of
    `own_conf_dirs` are added."""
    found: dict[str, set[str]] = {}
    for item in [item for conf in (directory, *_own_dirs) if conf.is_dir() for item in conf.iterdir()]:
        if item.is_dir() and item.name != "hydra":
            found.setdefault(item.name, set()).update(file.stem for file in item.glob("*.yaml"))
    return {group: sorted(found[group]) for group in sorted(found)}


VALUES = ("resume",)  # root keys that are values, not components chosen from a group
LISTS = ("tracker",)  # groups of which a run takes several options: tracker=[console,jsonl]
CHOOSERS = ("experiment", "sweep", "debug")  # groups that write into the other nodes and have none of their own


@dataclass
class PPORoot:
    """Root keys of ppo.yaml; a component that an algorithm may do without starts as null."""

    _target_: str = MISSING
    actor: Any = MISSING
    critic: Any = None
    reference: Any = None
    reward: Any = MISSING
    rollout: Any = MISSING
    sharding: Any = MISSING
    algorithm: Any = MISSING
    data: Any = MISSING
    trainer: Any = MISSING
    tracker: Any = MISSING
    checkpoint: Any = None
    replay: Any = None
    storage: Any = None
    resume: Any = None


@dataclass
class SFTRoot:
    """Root keys of sft.yaml."""

    _target_: str = MISSING
    actor: Any = MISSING
    sharding: Any = MISSING
    data: Any = MISSING
    trainer: Any = MISSING
    tracker: Any = MISSING
    checkpoint: Any = None
    storage: Any = None
    resume: Any = None


ROOTS: dict[str, type] = {"ppo": PPORoot, "sft": SFTRoot}


def root_keys(root: str) -> list[str]:
    """The keys that may stand alone on the command line of a root: its components and the choosers."""
    own = (f.name for f in dataclasses.fields(ROOTS[root]))
    return [*(name for name in own if name not in ("_target_", *VALUES)), *CHOOSERS]


def register() -> None:
    """Make the schemas known to Hydra under `schema_ppo` and `schema_sft`, and what interpolations may ask.

    `${divide:384,8}` is a whole number; `${processes:${sharding._target_},2}` is 1 under sharding=none, which has one;
    `${experiment_of:${algorithm},${actor.model}}` is such as `grpo_qwen2-0.5b-instruct`.
    """
    OmegaConf.register_new_resolver("divide", lambda whole, parts: max(1, whole // max(1, parts)), replace=True)
    OmegaConf.register_new_resolver(
        "processes", lambda target, count: 1 if target.endswith(".NoSharding") else count, replace=True
    )
    OmegaConf.register_new_resolver("experiment_of", default_experiment, replace=True)
    store = ConfigStore.instance()
    for root, schema in ROOTS.items():
        store.store(name=f"schema_{root}", node=schema, provider="verl")


# By the class that makes the algorithm another one; of the others the class's own name.
_ALGORITHMS = {"GAE": "ppo", "ReinforcePlusPlus": "reinforce_pp", "ReinforcePlusPlusBaseline": "reinforce_pp_baseline"}
_OWN_LOSSES = ("GSPO", "CISPO")


def default_experiment(algorithm: Any, model: Any) -> str:
    """The name of an experiment that was given none: its algorithm and its model.

    Args:
        algorithm: as composed, or the name of one.
        model: as composed.
    """
    if isinstance(algorithm, str):
        name = algorithm
    elif _class(algorithm, "selection") == "DynamicSampling":
        name = "dapo"
    elif (loss := _class(algorithm, "policy_loss")) in _OWN_LOSSES:
        name = loss.lower()
    else:
        advantage = _class(algorithm, "advantage")
        name = _ALGORITHMS.get(advantage, advantage.lower())
    path = OmegaConf.select(model, "path", throw_on_missing=False) if OmegaConf.is_config(model) else None
    called = str(path).rstrip("/").rpartition("/")[2] if path else _class(model).lower()
    if str(path).startswith("warm-start:") or called == "tinymodel":
        called = "tiny"
    parts = (re.sub(r"[^a-z0-9._]+", "-", part.lower()).strip("-.") for part in (name, called))
    return "_".join(part for part in parts if part) or "default"


def _class(node: Any, key: str = "") -> str:
    """The name of the class of a component, or of one below it; empty where there is none."""
    where = f"{key}._target_" if key else "_target_"
    found = OmegaConf.select(node, where, throw_on_missing=False) if OmegaConf.is_config(node) else None
    return str(found or "").rpartition(".")[2]
