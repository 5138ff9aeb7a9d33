"""The configuration directory, the root keys of a run, and the texts of the fields of components.

By the root keys Hydra rejects others, so that a typing error or a forgotten `# @package _global_` in an experiment file
is an error instead of an unused node. Everything below the root is validated against the components, in
`compose/validate.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hydra._internal import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

import verl
from verl.component import Description
from verl.errors import ConfigError
from verl.models.gguf import hub_or_package
from verl.utils.memory import bfloat16_here


def conf_dir() -> Path:
    """The directory of ppo.yaml and its groups: `conf/` next to the package in a checkout, `verl/conf/` in a wheel.

    Raises:
        FileNotFoundError: neither exists; the installation is broken.
    """
    package = Path(verl.__file__).resolve().parent
    candidates = (package / "conf", package.parent / "conf")  # `conf` next to an installed package is not ours
    for directory in candidates:
        if (directory / "ppo.yaml").is_file():
            return directory
    looked = " and ".join(str(directory) for directory in candidates)
    raise FileNotFoundError(f"no ppo.yaml in {looked}: install verl again, its configuration is missing.")


_own_dirs: list[Path] = []


def set_own_conf_dirs(directories: Iterable[Path]) -> None:
    """Set the user's configuration directories (`--config-dir`) for all compositions of this process."""
    _own_dirs[:] = directories


def own_conf_dirs() -> tuple[Path, ...]:
    """The user's configuration directories."""
    return tuple(_own_dirs)


def group_options() -> dict[str, list[str]]:
    """All groups of `conf_dir` and of `own_conf_dirs` with their options, without Hydra's groups."""
    options: dict[str, set[str]] = {}
    for item in [item for conf in (conf_dir(), *_own_dirs) if conf.is_dir() for item in conf.iterdir()]:
        if item.is_dir() and item.name != "hydra":
            options.setdefault(item.name, set()).update(file.stem for file in item.glob("*.yaml"))
    return {group: sorted(options[group]) for group in sorted(options)}


VALUES = ("resume",)  # root keys that are values, not components chosen from a group
LISTS = ("tracker",)  # groups with several options per run: tracker=[console,jsonl]
CHOOSERS = ("experiment", "sweep", "debug")  # groups that set other nodes and have no node of their own


@dataclass(frozen=True)
class Root:
    """A root configuration `conf/NAME.yaml`, the command that trains with it, and its script `main_NAME.py`.

    Attributes:
        name: of the file.
        run: dotted path of the description of the run, its `_target_`.
        keys: its components and values; one with a question mark starts as null, since a run may do without.
        purpose: one sentence for `--help`.
        examples: commands with a phrase each, for `--help`.
        files: the option of `data` that reads files.
        ray: the option of `trainer` that places the roles in Ray.
    """

    name: str
    run: str
    keys: str
    purpose: str
    examples: str
    files: str
    ray: str

    @property
    def command(self) -> str:
        """The command of `verl` that trains with it."""
        return self.name.replace("_", "-")

    def schema(self) -> type:
        """A dataclass of its keys, by which Hydra rejects others."""
        fields = [(key.rstrip("?"), Any, None if key.endswith("?") else MISSING) for key in self.keys.split()]
        return dataclasses.make_dataclass(f"{self.name.upper()}Root", [("_target_", str, MISSING), *fields])


ROOTS = {
    root.name: root
    for root in (
        Root(
            name="ppo",
            run="verl.trainer.ppo_config.PPORun",
            keys=(
                "actor critic? reference? sandbox? reward rollout environment? sharding algorithm data trainer tracker "
                "checkpoint? replay? storage? resume?"
            ),
            purpose="Trains a language model by reinforcement learning (PPO, GRPO).",
            examples=r"""
    verl ppo                                      the built-in example, offline
    verl ppo algorithm=grpo trainer.group_size=8  another algorithm
    verl ppo sharding=ddp trainer.n_gpus_per_node=2    two processes
    verl ppo sharding=fsdp trainer.n_gpus_per_node=2   each holds a part
    verl ppo actor=pretrained actor.model.path=DIR \
        reward=function reward.path=my.py:score \
        data=files 'data.train_files=[train.parquet]' model, reward and data
    verl ppo -m trainer.seed=0,1,2                a sweep, one run after another
    verl ppo experiment=arithmetic_grpo --cfg job show the configuration""",
            files="files",
            ray="trainer=ray",
        ),
        Root(
            name="sft",
            run="verl.trainer.sft.SFTRun",
            keys="actor sharding data trainer tracker checkpoint? storage? resume?",
            purpose="Trains a language model on written answers (supervised fine-tuning).",
            examples=r"""
    verl sft                                      the built-in example, offline
    verl sft actor=pretrained actor.model.path=DIR \
        data=sft_files 'data.train_files=[train.jsonl]'   your model and data
    verl sft -m actor.optimizer.lr=1e-3,3e-3      a sweep, one run after another
    verl sft experiment=arithmetic_sft --cfg job  show the configuration""",
            files="sft_files",
            ray="trainer=sft_ray",
        ),
        Root(
            name="dpo",
            run="verl.trainer.sft.PreferenceRun",
            keys="actor reference? sharding loss data trainer tracker checkpoint? storage? resume?",
            purpose="Trains a language model on preferences (DPO, IPO, KTO, ORPO, SimPO).",
            examples=r"""
    verl dpo                                      the built-in example, offline
    verl dpo loss=simpo                           a loss without reference
    verl dpo actor=pretrained actor.model.path=DIR \
        data=preference_files \
        'data.train_files=[train.jsonl]'          your model and data
    verl dpo -m loss=sigmoid,ipo                  a sweep, one run after another
    verl dpo experiment=arithmetic_dpo --cfg job  show the configuration""",
            files="preference_files",
            ray="trainer=dpo_ray",
        ),
        Root(
            name="reward_model",
            run="verl.trainer.sft.RewardModelRun",
            keys="actor sharding loss data trainer tracker checkpoint? storage? resume?",
            purpose="Trains a reward model on preferences, for `reward=model`.",
            examples=r"""
    verl reward-model                             the built-in example, offline
    verl reward-model actor=pretrained actor.model.path=DIR \
        data=preference_files \
        'data.train_files=[train.jsonl]'          your model and data
    verl reward-model loss.centre_coef=0.01       scores around zero""",
            files="preference_files",
            ray="trainer=reward_model_ray",
        ),
    )
}


RootName = Literal["ppo", "sft", "dpo", "reward_model"]


def root_of_run(target: object) -> str:
    """The root whose run has this `_target_`, by the name of its class; `ppo` if no root has it."""
    kind = str(target).rpartition(".")[2]
    return next((root.name for root in ROOTS.values() if root.run.endswith(f".{kind}")), "ppo")


def root_keys(root: str) -> list[str]:
    """The keys of a root on the command line: components, values and choosers."""
    keys = (key.rstrip("?") for key in ROOTS[root].keys.split())
    return [*(name for name in keys if name not in VALUES), *CHOOSERS]


def register() -> None:
    """Register the schema of each root, such as `schema_ppo`, the resolvers, and the defaults of components with Hydra.

    `${divide:384,8}` is 48; `${processes:${sharding._target_},2}` is 1 with sharding=none, else 2;
    `${experiment_of:${algorithm},${actor.model}}` is a name such as `grpo_qwen2-0.5b-instruct`; `${tokens_of:512,
    ${actor.model}}` is 512, or less where the model holds less; `${hub_or_package:NAME}` is NAME, or a file on this
    machine with the same model (`hub_or_package` of models/gguf); `${bfloat16_here:}` is bfloat16 or null.
    """
    OmegaConf.register_new_resolver("divide", lambda whole, parts: max(1, whole // max(1, parts)), replace=True)
    OmegaConf.register_new_resolver(
        "processes", lambda target, count: 1 if target.endswith(".NoSharding") else count, replace=True
    )
    OmegaConf.register_new_resolver("experiment_of", default_experiment, replace=True)
    OmegaConf.register_new_resolver("hub_or_package", hub_or_package, replace=True)
    OmegaConf.register_new_resolver("bfloat16_here", bfloat16_here, replace=True)
    OmegaConf.register_new_resolver("tokens_of", default_length, replace=True)
    from verl.compose.defaults import WholeConfigLoader

    hydra.ConfigLoaderImpl = WholeConfigLoader  # type: ignore[misc]
    store = ConfigStore.instance()
    for root in ROOTS.values():
        store.store(name=f"schema_{root.name}", node=root.schema(), provider="verl")


def default_length(tokens: int, model: Any) -> int:
    """The default length of a row in tokens: less than the model's context, if its local files give it."""
    held = OmegaConf.select(model, "context_length", throw_on_missing=False)
    if held is None and (path := OmegaConf.select(model, "path", throw_on_missing=False)):
        from verl.models.pretrained import Pretrained  # imports torch

        with contextlib.suppress(ConfigError):
            held = Pretrained(path=str(path)).max_positions()
    return tokens if held is None else max(2, min(tokens, held - 1))


# Names by the class that characterises the algorithm; other algorithms have the name of their class.
_ALGORITHMS = {"GAE": "ppo", "ReinforcePlusPlus": "reinforce_pp", "ReinforcePlusPlusBaseline": "reinforce_pp_baseline"}
_OWN_LOSSES = ("GSPO", "CISPO")


def default_experiment(algorithm: Any, model: Any) -> str:
    """The default name of an experiment, from its algorithm and model.

    Args:
        algorithm: composed node, or a name.
        model: composed node.
    """
    if isinstance(algorithm, str):
        name = algorithm
    elif _class(algorithm, "selection") == "DynamicSampling":
        name = "dapo"
    elif _class(algorithm, "distill"):
        name = "distill"
    elif (loss := _class(algorithm, "policy_loss")) in _OWN_LOSSES:
        name = loss.lower()
    else:
        advantage = _class(algorithm, "advantage")
        name = _ALGORITHMS.get(advantage, advantage.lower())
    path = OmegaConf.select(model, "path", throw_on_missing=False) if OmegaConf.is_config(model) else None
    called = _name_of_model(str(path)) if path else _class(model).lower()
    if str(path).startswith("warm-start:") or called == "tinymodel":
        called = "tiny"
    parts = (re.sub(r"[^a-z0-9._]+", "-", part.lower()).strip("-.") for part in (name, called))
    return "_".join(part for part in parts if part) or "default"


# Directories that say nothing of the model in them: of verl's runs and checkpoints, and of the hub's cache.
_UNNAMED = re.compile(
    r"actor|critic|model|latest|checkpoints?|snapshots|(global_step_|checkpoint-)\d+|[\d_.-]{8,}|[0-9a-f]{40}|\.*"
)


def _name_of_model(path: str) -> str:
    """The last directory of a path that names the model: sft_tiny for `sft_tiny/2026-11-23/10-11-12-123456/actor`."""
    parts = path.rstrip("/").split("/")
    named = next((part for part in reversed(parts) if not _UNNAMED.fullmatch(part)), parts[-1])
    return named.rpartition("--")[2] if named.startswith("models--") else named


def _class(node: Any, key: str = "") -> str:
    """The class name of a component, or of the component at `key`; empty if there is none."""
    where = f"{key}._target_" if key else "_target_"
    target = OmegaConf.select(node, where, throw_on_missing=False) if OmegaConf.is_config(node) else None
    return str(target or "").rpartition(".")[2]


def field_texts(kind: type[Description]) -> dict[str, str]:
    """Descriptions of the fields from `Args:` or `Attributes:` in the docstrings of a class and its bases."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        doc = inspect.cleandoc(base.__doc__ or "")
        section = re.search(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)+)", doc, re.M)
        entries = re.findall(r"^    (\w[\w, ]*): (.*(?:\n(?:     .*|))*)", section[1] if section else "", re.M)
        for names, text in entries:
            texts |= dict.fromkeys(names.split(", "), re.sub(r"\s+", " ", text).strip())
    return texts
