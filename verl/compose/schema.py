"""The configuration directory, the root keys of a run as dataclasses that make Hydra reject any other, and the JSON
schema of a run, by which an editor completes and checks a YAML file.

With the root keys an unknown one in an experiment file, or a forgotten `# @package _global_`, is an error and not a
silent extra node. Everything below the root is validated against the components themselves, in `compose/validate.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf
from pydantic import TypeAdapter

import verl
from verl.component import Description


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
    sandbox: Any = None
    reward: Any = MISSING
    rollout: Any = MISSING
    environment: Any = None
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


# The JSON schema

RUNS = {"ppo": "verl.trainer.ppo_config.PPORun", "sft": "verl.trainer.sft.SFTRun"}


def json_schema(root: str) -> dict[str, Any]:
    """The JSON schema of a run: of a whole configuration, of an experiment file and of a short file of the user.

    Nothing is required, since such a file is laid over others. A node is one of the components that the package has
    for its place, known by `_target_`, or another component by its dotted path.

    Args:
        root: `ppo` or `sft`.
    """
    kinds, run = known_components(), _import(RUNS[root])
    schema = _component_schema(run)
    for group, options in group_options(conf_dir()).items():
        place = schema["properties"].setdefault(group, {"anyOf": []})
        place["anyOf"].append({"enum": options, "description": f"an option of conf/{group}/"})
    schema["properties"]["defaults"] = {"type": "array", "description": "Options of groups, in a file of Hydra."}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"A run of main_{root}.py",
        **schema,
        "$defs": {
            "reference": {"type": "string", "pattern": r"^(.*\$\{.*\}.*|\?\?\?)$"},
            "other": {
                "description": "A component of your own, by the dotted path of its class.",
                "type": "object",
                "properties": {"_target_": {"type": "string", "not": {"enum": [_target(kind) for kind in kinds]}}},
                "required": ["_target_"],
            },
            **{kind.__name__: _component_schema(kind) for kind in kinds},
            **{f"any {name}": _any_of(name, kinds) for name in _places([run, *kinds])},
        },
    }


@functools.cache
def known_components() -> tuple[type[Description], ...]:
    """The classes of components that the options name, and those beside them that have no subclass."""
    texts = [path.read_text() for path in conf_dir().glob("**/*.yaml")]
    named = {_import(target) for text in texts for target in re.findall(r"_target_: ?(verl[\w.]+)", text)}
    kinds, rest = set(), [Description]
    while rest:
        kind = rest.pop()
        rest += kind.__subclasses__()
        if kind.__module__.startswith("verl.") and (kind in named or not kind.__subclasses__()):
            kinds.add(kind)
    return tuple(sorted(kinds, key=_target))


def _import(target: str) -> Any:
    module, _, name = target.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _target(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@functools.cache
def _raw_schema(kind: type[Description]) -> dict[str, Any]:
    """What pydantic makes of a component; another one in a field is `{"x-component": NAME}`."""
    return TypeAdapter(kind).json_schema()


def _places(kinds: Iterable[type[Description]]) -> list[str]:
    """The names of the classes that some field takes, of which there may be subclasses."""
    return sorted(set(re.findall(r"'x-component': '(\w+)'", str([_raw_schema(kind) for kind in kinds]))))


def _any_of(base: str, kinds: Iterable[type[Description]]) -> dict[str, Any]:
    known = (kind for kind in kinds if base in (parent.__name__ for parent in kind.__mro__))
    return {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in (*(kind.__name__ for kind in known), "other")]}


def _component_schema(kind: type[Description]) -> dict[str, Any]:
    descriptions, fields = _field_texts(kind), {}
    own = _raw_schema(kind).get("properties", {})
    for name, raw in own.items():
        schema = _with_places({key: value for key, value in raw.items() if key not in ("title", "default")})
        fields[name] = {"anyOf": [*schema.get("anyOf", [schema]), {"$ref": "#/$defs/reference"}]}
        fields[name] |= {"description": descriptions[name]} if name in descriptions else {}
        fields[name] |= {"default": raw["default"]} if "default" in raw else {}
    return {
        "description": inspect.cleandoc(kind.__doc__ or kind.__name__).partition("\n")[0],
        "type": "object",
        "properties": {"_target_": {"const": _target(kind)}, **fields},
        "additionalProperties": kind.other_keys is not None
        and _with_places(own[kind.other_keys]["additionalProperties"]),
    }


def _with_places(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_places(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "x-component" in schema:
        return {"$ref": f"#/$defs/any {schema['x-component']}"}
    return {key: _with_places(value) for key, value in schema.items()}


def _field_texts(kind: type[Description]) -> dict[str, str]:
    """What the docstrings of a class and its bases say of each field, below `Args:` or `Attributes:`."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        doc = inspect.cleandoc(base.__doc__ or "")
        section = re.search(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)+)", doc, re.M)
        entries = re.findall(r"^    (\w[\w, ]*): (.*(?:\n(?:     .*|))*)", section[1] if section else "", re.M)
        for names, text in entries:
            found |= dict.fromkeys(names.split(", "), re.sub(r"\s+", " ", text).strip())
    return found
