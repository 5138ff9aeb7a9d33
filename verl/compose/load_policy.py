"""Finds a trained policy, in a checkpoint or as plain weights, and composes a run that evaluates it or
samples from it.

PATH ──> its weights, and the configuration that trained it ──> overrides ──> a run without training
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.checkpoint.core.manifest import MANIFEST
from verl.checkpoint.read.discovery import FORMAT, LATEST, POLICY_RECORD, CheckpointDirectory
from verl.checkpoint.resolve import SAVED, ResumePoint, resolve
from verl.compose.compose import apply_values, compose_root
from verl.compose.overrides import assign, parse_overrides
from verl.compose.saved_config import OF_TRAINING, AllowedConfig, allowed_config
from verl.compose.schema import root_of_run
from verl.compose.validate import validate
from verl.environments.base import EnvironmentDescription
from verl.errors import CheckpointNotFound, ConfigError
from verl.models.gguf import is_gguf, unpacked
from verl.models.pretrained import Pretrained
from verl.rewards.base import Reward
from verl.rollout.base import Rollout
from verl.tracking.jsonl import json_object
from verl.utils.redact import redact
from verl.workers.load_state import RestoreSource

_log = logging.getLogger(__name__)

UNKNOWN_CONTEXT = 4096  # tokens of prompt and response, for a model without a known context length
MOST_NEW_TOKENS = 1024  # of a response, where neither the model nor a run says how many
OF_RESPONSES = ("reward", "rollout", "environment")  # groups of which an evaluation by loss has none
SAMPLING = ("temperature", "top_k", "top_p", "max_new_tokens", "min_new_tokens", "stop_token_ids")
AGENT_PROGRAM = "verl.serving.agent_program.AgentProgram"
OF_FILES = {"ppo": "verl.data.files.PromptFiles", "sft": "verl.data.files.SFTFiles"}
FILES_OPTION = {"ppo": "files", "sft": "sft_files"}
EVALUATED = {"ppo": "verl.data.files.EvaluatedPrompts", "sft": "verl.data.files.EvaluatedSequences"}
UNTRAINED: dict[str, Any] = {  # replaces the parts that only training needs
    "actor._target_": "verl.workers.actor.EvaluatedActor",
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
        record: `policy.json` of the run that wrote plain weights; empty if the file is missing.
    """

    actor: Path
    point: ResumePoint | None = None
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Training step of the weights; 0 if unknown."""
        step = self.record.get("step", 0) if self.point is None else self.point.step
        return step if type(step) is int and step >= 0 else 0

    def load_reward(self, reward: Reward) -> None:
        """Load the statistics that the reward of the training has learned.

        Raises:
            ConfigError: what was saved is of another form.
        """
        state = self.record if self.point is None else self.point.read_json("scheduler/state.json")
        try:
            reward.load_state_dict(state.get("reward", {}))
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            kind = type(reward).__name__
            raise ConfigError(f"reward of {self.origin} is no state of {kind}: name reward=OPTION.") from error

    @property
    def origin(self) -> Path:
        """The directory that the weights come from; `actor` may be an exported copy."""
        return self.actor if self.point is None else self.point.checkpoint.directory / "actor"

    def saved(self, *path: str) -> Any:
        """The node of the saved configuration at some keys; None if it is missing. It is not trusted."""
        return self.recorded("config", *path)

    def recorded(self, *path: str) -> Any:
        """The node at some keys of the record saved with the weights; None if it is missing."""
        node: Any = self.record if self.point is None else self.point.state
        for key in path:
            node = node.get(key) if isinstance(node, dict) else None
        return node

    @property
    def description(self) -> str:
        """Address for people."""
        return str(self.actor) if self.point is None else f"{self.point.checkpoint.directory}, step {self.step}"


def locate_policy(path: str) -> SavedPolicy:
    """Find the policy at a path.

    Args:
        path: a checkpoint, a directory of checkpoints, the directory of a run, a Hugging Face directory, a GGUF file,
            or `latest`: the newest checkpoint below `checkpoints/`.
    Raises:
        ConfigError: there is no policy at the path.
        BadCheckpoint: the checkpoint is damaged.
    """
    if is_gguf(path):
        return SavedPolicy(Path(unpacked(path, "float32")))
    directory = _last_trained() if path == LATEST else Path(path).expanduser().absolute()
    if not directory.is_dir():
        raise ConfigError(f"PATH is {path!r}: no such directory. Give a checkpoint, a run, or a directory of a model.")
    if directory.name == "actor" and (directory.parent / MANIFEST).exists():
        directory = directory.parent
    if _is_model(directory):
        return SavedPolicy(directory, record=json_object(directory.parent / POLICY_RECORD))
    if not any((directory / name).exists() for name in (SAVED, MANIFEST)) and _is_model(directory / "actor"):
        return locate_policy(str(directory / "actor"))  # of a run without checkpoints
    point = resolve(str(directory), directory, verify=False)  # the files in use are hashed below
    assert point is not None, "only `latest` may find nothing"
    saved = SavedPolicy(point.checkpoint.directory / "actor", point)
    if not saved.actor.is_dir():
        raise ConfigError(
            f"PATH is {path!r}: {saved.description} has no policy, as that of a reward model. Give another."
        )
    return saved


def root_of(saved: SavedPolicy, overrides: Sequence[str] = ()) -> str:
    """The root that evaluates a policy: `sft`, by its loss, if it was trained by that and no reward or rollout is asked
    for; else `ppo`, by its responses."""
    is_by_loss = has_own_config(saved, "sft") and not any(text.startswith(OF_RESPONSES) for text in overrides)
    return "sft" if is_by_loss else "ppo"


def has_own_config(saved: SavedPolicy, root: str) -> bool:
    """Whether a run of this root trained the policy, so that data, reward and sampling are those of the run."""
    return saved.saved() is not None and root_of_run(saved.saved("_target_")) == root


def trained_on_texts(saved: SavedPolicy) -> bool:
    """Whether the prompts of the training were texts, so that its policy has never seen a chat template. An agent
    program talks to an endpoint, which renders chats."""
    has_texts = saved.recorded("progress", "has_chats") is False
    return has_texts and saved.saved("environment", "_target_") != AGENT_PROGRAM


def response_limit(model: Path) -> int:
    """The most tokens of a response of a model: of its `generation_config.json`, or half of its context, at most
    `MOST_NEW_TOKENS`."""
    context = Pretrained(path=str(model)).max_positions() or UNKNOWN_CONTEXT
    named = json_object(model / "generation_config.json").get("max_new_tokens")
    return named if isinstance(named, int) and 0 < named < context else max(1, min(MOST_NEW_TOKENS, context // 2))


def policy_run(saved: SavedPolicy, root: str, overrides: Sequence[str] = (), file: Path | None = None) -> Any:
    """Compose a run that evaluates a policy, from the configuration that trained it without the parts for training.

    Args:
        saved: the policy.
        root: `ppo` or `sft`; if another root trained the policy, the default configuration of `root` is used.
        overrides: as on the command line.
        file: data file that replaces the data of the configuration. Its texts become user messages of the chat
            template, if there is one and the policy was not trained on texts; `data.as_chats` chooses.
    Returns:
        A `PPORun` or an `SFTRun`.
    Raises:
        ConfigError: a fault in the configuration, or a value of the saved configuration that is not on the allow-list
            (`verl.compose.saved_config`) and that `overrides` do not name; or nothing names rows.
        BadCheckpoint: the weights differ from what was written.
    """
    _verify(saved)
    pairs, faults = parse_overrides(overrides)
    assigned = assign(root, pairs)
    options = [(group, text) for group, _, text in (option.partition("=") for option in assigned.options)]
    named = {**dict(options), **dict(assigned.values)}
    used = AllowedConfig()
    if is_own := has_own_config(saved, root):
        replaced = () if file is None else ("data",)
        used = allowed_config(saved.saved(), root, named, saved.description, replaced)
        _warn_of_own_code(saved, named)
    elif file is None and "data" not in named:
        raise ConfigError(
            f"PATH is {str(saved.origin)!r}: it names no rows to answer. Give --data FILE, to `verl generate` --prompt "
            "TEXT, or data=arithmetic for built-in sums."
        )
    if problems := [*used.faults, *_model_faults(saved, named)]:
        raise ConfigError([*faults, *assigned.faults, *problems])
    # Nothing of another run: the option of the built-in sums also sets lengths and a temperature
    data = FILES_OPTION[root] if file is not None else dict(options).get("data", FILES_OPTION[root])
    base = ["actor=pretrained", f"data={data}"]
    config = compose_root(root, base)
    apply_values(config, [*UNTRAINED.items(), *UNTRAINED_OF[root].items(), *_flat(used.components)])
    settings = used.components.get("actor", {}).get("model", {})  # dtype and attention as in training
    target = f"{Pretrained.__module__}.{Pretrained.__name__}"
    apply_values(config, [("actor.model", {"_target_": target, **settings, "path": str(saved.actor)})])
    chosen = compose_root(root, [*base, *(f"{group}={text}" for group, text in options)])
    apply_values(config, [(group, OmegaConf.to_container(chosen, resolve=False)[group]) for group, _ in options])  # type: ignore[index]
    if is_own and "rollout" in dict(options):  # another engine, which samples as the run did
        known = {key: saved.saved("rollout", key) for key in SAMPLING}
        apply_values(config, [(f"rollout.{key}", value) for key, value in known.items() if value is not None])
    if file is not None and root == "ppo" and not is_own:
        apply_values(config, [("rollout.max_new_tokens", response_limit(saved.actor))])
    if file is not None:
        assigned.values = [pair for pair in assigned.values if pair[0] not in ("data", "data._target_")]  # replaced
        apply_values(config, [("data", _data(config, root, file, dict(assigned.values), saved))])
    apply_values(config, assigned.values)
    return validate(config, [*faults, *assigned.faults])


def _flat(parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Values by path: components whole, and the single settings of what stays as composed."""
    for key, node in parts.items():
        if key not in OF_TRAINING:
            yield key, node
        else:
            yield from ((f"{key}.{name}", value) for name, value in node.items() if name != "model")


def _warn_of_own_code(saved: SavedPolicy, named: Mapping[str, Any]) -> None:
    is_trusted = saved.saved("actor", "model", "trust_remote_code")
    if is_trusted and "actor.model.trust_remote_code" not in named:
        _log.warning(
            "actor.model.trust_remote_code was true in training and is now false: Python code in a model directory is "
            "run only if you set actor.model.trust_remote_code=true."
        )


def _verify(saved: SavedPolicy) -> None:
    """Verify the weights and the files next to them by their hashes."""
    if saved.point is not None:
        reader = RestoreSource(saved.point.checkpoint.directory).reader()
        for entry in reader.files("actor"):
            reader.check(entry.path)


def _model_faults(saved: SavedPolicy, named: Mapping[str, Any]) -> Iterator[str]:
    """Faults of files of the model that name something outside of the checkpoint."""
    if saved.point is None or "actor.model" in named or "actor.model.path" in named:
        return
    tokenizer = saved.saved("actor", "model", "tokenizer_path")
    has_own = any((saved.actor / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    if tokenizer is not None and not has_own and "actor.model.tokenizer_path" not in named:
        yield (
            f"actor.model.tokenizer_path is {redact(repr(tokenizer))}: {saved.description} has no tokenizer of its "
            "own, and its saved configuration is not trusted to name one. Add actor.model.tokenizer_path=DIRECTORY."
        )
    adapter = Pretrained(path=str(saved.actor)).adapter()
    if adapter is None:
        return
    file, kind, base = saved.actor / "adapter_config.json", adapter.get("peft_type"), adapter["base_model_name_or_path"]
    if kind != "LORA":
        yield f"peft_type of {file} is {kind!r}: verl saves LORA only."
    if not isinstance(base, str) or not (Path(base).is_dir() or _is_cached(base)):
        yield (
            f"base_model_name_or_path of {file} is {base!r}: neither a directory of this machine nor a model in the "
            "cache of the hub, and a checkpoint is not trusted to choose what is downloaded. If you trust it, fetch "
            "the model yourself: hf download NAME."
        )


def _is_cached(name: str) -> bool:
    """Whether the user has downloaded this model of the hub before."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return False


def _data(config: DictConfig, root: str, file: Path, assigned: Mapping[str, Any], saved: SavedPolicy) -> dict[str, Any]:
    """The data component for a file, read like the former files, with the context length of the model as limit."""
    before: Any = OmegaConf.to_container(config.data, resolve=False)
    of_files = ("train_files", "eval_files", "weights")
    settings = (
        {key: value for key, value in before.items() if key not in of_files}
        if before["_target_"] == OF_FILES[root]
        else {}
    )
    context = Pretrained(path=config.actor.model.path).max_positions() or UNKNOWN_CONTEXT
    if root == "ppo":
        settings["as_chats"] = not trained_on_texts(saved)
        after = [assigned.get("rollout.max_new_tokens", config.rollout.get("max_new_tokens", Rollout.max_new_tokens))]
        if config.get("environment") is not None and assigned.get("environment", "") is not None:
            episode = config.environment.get("max_tokens", EnvironmentDescription.max_tokens)
            after.append(assigned.get("environment.max_tokens", episode))
        settings["max_prompt_length"] = max(
            1, context - max(number for number in (0, *after) if isinstance(number, int))
        )
    else:
        settings["max_length"] = context
    return {**settings, "_target_": EVALUATED[root], "train_files": [str(file)], "eval_files": [str(file)]}


def _is_model(directory: Path) -> bool:
    return any((directory / name).is_file() for name in ("config.json", "adapter_config.json"))


def _last_trained() -> Path:
    """The newest checkpoint below `checkpoints/`."""
    directories = [file.parent for file in Path("checkpoints").rglob(FORMAT)]
    newest = []
    for directory in directories:
        try:
            newest.append(CheckpointDirectory(directory).newest().directory)
        except CheckpointNotFound:
            continue
    if not newest:
        raise ConfigError("PATH is 'latest': there is no complete checkpoint below checkpoints/. Give a path.")
    return max(newest, key=lambda checkpoint: (checkpoint / MANIFEST).stat().st_mtime_ns).absolute()
