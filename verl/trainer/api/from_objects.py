"""User objects in place of configuration: models, rewards and data.

object ──*_from_object──> placeholder ──compose, validate──> run of placeholders ──run_with_objects──> run

A placeholder is a component with the serializable properties of an object, which enter configuration and training
identity. The objects themselves are attached once to the placeholders of the run, after it was composed and checked.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

from blake3 import blake3
from pydantic import Field
from torch import nn

from verl.component import BuildContext, Description, component, components_in
from verl.compose.from_yaml import ComposedConfig
from verl.compose.validate import validate
from verl.data.base import DataSplits, PromptOptions, PromptSource
from verl.data.files import PromptFiles
from verl.data.rlhf_dataset import RLHFDataset
from verl.errors import ConfigError, faults_below
from verl.models.interfaces import as_reward_model, check_interface
from verl.models.pretrained import ModelSource, Pretrained, without_dropout
from verl.protocol.user_function import signature_of
from verl.rewards.base import Reward, RewardDescription, in_time
from verl.rewards.deadline import BATCH_TIMEOUT_S
from verl.rewards.function import CallableReward, RewardFunction
from verl.rewards.reward_model import ModelReward, RewardModel, RewardTokenizer
from verl.rewards.weighted_sum import TAKEN, WeightedSum

MICRO_BATCH_TOKENS = 16384  # of a reward model that was passed as an object


@component
class PromptsObject(PromptOptions):
    """Prompts passed as `train_dataset`, and as `eval_dataset` if those are rows too.

    Args:
        num_rows: number of rows.
        rows_digest: hash of the content of all rows.
        num_eval_rows: number of evaluation rows; 0 without.
        eval_files: paths whose rows are evaluated on; none for no evaluation.
    """

    num_rows: int
    rows_digest: str
    num_eval_rows: int = 0
    eval_files: tuple[str, ...] = ()

    def build(self, context: BuildContext) -> DataSplits:
        train, held_out = carried_by(self)
        options = PromptOptions(**{f.name: getattr(self, f.name) for f in dataclasses.fields(PromptOptions)})
        theirs = train.options if isinstance(train, RLHFDataset) else options
        pairs = ((f.name, getattr(options, f.name), getattr(theirs, f.name)) for f in dataclasses.fields(options))
        if other := [f"{name} is {own!r}: train_dataset was made with {x!r}." for name, own, x in pairs if own != x]:
            raise ConfigError([f"{fault} Leave one out." for fault in other])
        if self.eval_files:
            held_out = RLHFDataset(self.eval_files, context.tokenizer, options)
        eval_data = None if held_out is None else _dataset(held_out, context.tokenizer, options)
        return DataSplits(train=_dataset(train, context.tokenizer, options), eval=eval_data)


@component
class RewardObject(RewardDescription):
    """A function, a running reward, or a reward model of torch.

    Args:
        name: of the function, or of its class.
        content_digest: of the source of the function or class, or of the tensors of a model; empty if unknown.
        timeout_s: seconds for one call of a function or of your own `Reward`, after which the run ends and names the
            current line; null is 60. A reward model has none.
    """

    name: str
    content_digest: str = ""
    timeout_s: Annotated[float, Field(gt=0, lt=1e6)] | None = None

    def columns_read(self) -> Iterator[tuple[str, str]]:
        reward, _ = getattr(self, "_carried", (None, None))
        if not callable(reward) or isinstance(reward, (Reward, nn.Module)):
            return
        signature = signature_of(reward)
        for name in signature.required:
            if not signature.takes_batch and name not in ("prompts", "responses"):
                yield f"{self.name}() takes {name}", name

    def build(self, context: BuildContext) -> Reward:
        reward, tokenizer = carried_by(self)
        timeout_s = BATCH_TIMEOUT_S if self.timeout_s is None else self.timeout_s
        if isinstance(reward, Reward):
            return in_time(reward, self.timeout_s)
        if not isinstance(reward, nn.Module):
            return CallableReward(reward, timeout_s=timeout_s)
        model = as_reward_model(reward.to(context.device), self.name, None, context.tokenizer.pad_token_id or 0)
        _refuse_fewer_embeddings(self.name, reward, tokenizer or context.tokenizer)
        form = "tokens" if tokenizer is None else "text"
        return ModelReward(
            model, RewardTokenizer(tokenizer or context.tokenizer, form, None, "error"), MICRO_BATCH_TOKENS
        )


@component
class ModelObject(ModelSource):
    """A loaded Hugging Face model. The actor trains the object itself; other roles get copies.

    Args:
        argument: name of the argument.
        kind: its class.
        num_parameters: total number of parameters.
        weights_digest: of its tensors as they were passed.
        context_length: in tokens, if its configuration has it.
    """

    argument: str
    kind: str
    num_parameters: int
    weights_digest: str
    context_length: int | None = None

    @classmethod
    def of(cls, argument: str, model: Any) -> ModelObject:
        config = model.config.get_text_config()
        return cls(
            argument=argument,
            kind=type(model).__name__,
            num_parameters=sum(p.numel() for p in model.parameters()),
            weights_digest=_weights_digest(model),
            context_length=getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None),
            dtype=str(next(model.parameters()).dtype).removeprefix("torch."),  # type: ignore[arg-type]
        )

    def load_causal_lm(self, device: str) -> Any:
        model: Any = without_dropout(self._handed_out())
        return model.to(device).eval()

    def load_backbone(self, device: str) -> Any:
        model = self._handed_out() if self.argument == "critic_model" else self._copied()
        backbone: Any = model.base_model if hasattr(model, "lm_head") or hasattr(model, "score") else model
        without_dropout(backbone)
        return backbone.to(device).eval()

    def load_config(self) -> Any:
        return carried_by(self)[0].config

    def load_tokenizer(self) -> Any:
        _, tokenizer = carried_by(self)
        if tokenizer is None:
            raise ConfigError(
                f"tokenizer is missing: {self.argument} is a loaded {self.kind}, which brings none. Give tokenizer=."
            )
        return tokenizer

    def max_positions(self) -> int | None:
        return self.context_length

    def _handed_out(self) -> Any:
        """Return the object itself at the first call and copies afterwards, because only the actor may train it."""
        model, tokenizer = carried_by(self)
        if getattr(self, "_is_taken", False):
            return self._copied()
        object.__setattr__(self, "_is_taken", True)
        if tokenizer is not None:
            _refuse_fewer_embeddings(self.argument, model, tokenizer)
        return _trainable(model)

    def _copied(self) -> Any:
        model, _ = carried_by(self)
        if any("lora_" in name for name, _ in model.named_parameters()):
            raise ConfigError(
                f"{self.argument} is a loaded model with an adapter in it by now, so no other role can start from it. "
                "Give critic_model= or ref_model= a path."
            )
        return _trainable(copy.deepcopy(model))


def carrying(described: Any, value: Any) -> Any:
    """A copy of the description with its object attached."""
    described = dataclasses.replace(described)
    object.__setattr__(described, "_carried", value)
    return described


def carried_by(described: Any) -> Any:
    value = getattr(described, "_carried", None)
    if value is None:
        raise ConfigError(
            f"{type(described).__name__} stands for an object that a script passed, and this process has none. Run it "
            "in the script's own process (sharding=none), or give a path instead of the object."
        )
    return value


def run_with_objects(composed: ComposedConfig, replacements: Mapping[str, Description]) -> Any:
    """The checked run of a configuration with placeholders, which then get their objects.

    Args:
        replacements: placeholders and other components that replace configuration nodes, by path.
    Raises:
        ConfigError: with all faults of the configuration.
    """
    run = validate(composed.config, composed.faults)
    objects = {key_of(item): carried_by(item) for item in _placeholders(replacements)}
    for item in _placeholders(run):  # created by this composition, so nothing else refers to them
        object.__setattr__(item, "_carried", objects.get(key_of(item)))
    return dataclasses.replace(run)  # checked again, now that the columns of the reward are known


def _placeholders(value: Any) -> list[PromptsObject | RewardObject | ModelObject]:
    return [item for _, item in components_in(value) if isinstance(item, (PromptsObject, RewardObject, ModelObject))]


def key_of(described: PromptsObject | RewardObject | ModelObject) -> str:
    if isinstance(described, ModelObject):
        return described.argument
    return f"reward {described.name}" if isinstance(described, RewardObject) else "data"


def _dataset(rows: RLHFDataset | Sequence[Mapping[str, Any]], tokenizer: Any, options: PromptOptions) -> RLHFDataset:
    if not isinstance(rows, RLHFDataset):
        return RLHFDataset.from_rows(rows, tokenizer, options)
    theirs, ours = rows.collate([0]).meta_info["pad_token_id"], tokenizer.pad_token_id
    if theirs != ours and theirs not in tokenizer.all_special_ids:
        raise ConfigError(
            f"train_dataset pads with token {theirs}, the actor's tokenizer with {ours}: use that tokenizer."
        )
    tokenizer.pad_token_id = theirs  # chosen by the user, such as by `tokenizer.pad_token = tokenizer.eos_token`
    return rows


def _trainable(model: Any) -> Any:
    """The model with trainable parameters; parameters that the user froze stay frozen, unless all are."""
    return model if any(p.requires_grad for p in model.parameters()) else model.requires_grad_(True)


def _refuse_fewer_embeddings(name: str, model: Any, tokenizer: Any) -> None:
    """Refuse models with fewer embeddings than token ids, which fail inside the model with an obscure error on a
    GPU."""
    if not hasattr(model, "get_input_embeddings"):
        return
    rows = model.get_input_embeddings().weight.shape[0]
    if rows < len(tokenizer):
        raise ConfigError(
            f"{name} knows {rows} tokens, and the tokenizer has {len(tokenizer)}: they do not belong together. Give "
            "the tokenizer that the model was trained with."
        )


REWARDS = (
    "a function of prompts and responses, `file.py:function`, a reward model (a module, or the path of one), or a "
    "description such as ExactMatch()"
)
PART_KEYS = ("reward", "weight", "name")


def model_from_object(argument: str, model: Any, tokenizer: Any = None) -> ModelSource:
    """A model that is a path, a hub name, a description, or loaded.

    Raises:
        ConfigError: it is of another kind, or does not have the interface that its role needs.
    """
    if isinstance(model, ModelSource):
        return model
    if isinstance(model, (str, Path)):
        with faults_below(argument):
            return Pretrained(path=str(model))
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise ConfigError(
            f"{argument} is a {type(model).__name__}: expected a Hugging Face model, or the path or hub name of one."
        )
    if argument != "critic_model":
        check_interface("actor", model, argument)
    with faults_below(argument):
        return carrying(ModelObject.of(argument, model), (model, tokenizer))


def reward_from_object(reward: Any, tokenizer: Any = None, argument: str = "reward_model") -> RewardDescription:
    """A reward in any form.

    Args:
        tokenizer: of a reward model that is passed as a module; None is that of the policy.
    Raises:
        ConfigError: it is not a reward.
    """
    if isinstance(reward, RewardDescription):
        return reward
    if isinstance(reward, (str, Path)):
        with faults_below(argument):
            if re.search(r":\w+$", str(reward)):
                return RewardFunction(path=str(reward))
            return RewardModel(model=Pretrained(path=str(reward)))
    if isinstance(reward, type):
        raise ConfigError(f"{argument} is the class {reward.__name__}: expected {REWARDS}. Give one of its objects.")
    if not isinstance(reward, (Reward, nn.Module)) and not callable(reward):
        raise ConfigError(f"{argument} is {reward!r}: expected {REWARDS}.")
    name = getattr(reward, "__qualname__", type(reward).__name__)
    digest = _weights_digest(reward) if isinstance(reward, nn.Module) else _source_digest(reward)
    return carrying(RewardObject(name=name, content_digest=digest), (reward, tokenizer))


def with_timeout_of(described: RewardDescription, before: RewardDescription) -> RewardDescription:
    """The new reward with the deadline of the previous one."""
    if not isinstance(described, RewardObject) or not isinstance(before, RewardObject):
        return described
    return carrying(dataclasses.replace(described, timeout_s=before.timeout_s), carried_by(described))


def summed_rewards(rewards: Sequence[Any]) -> RewardDescription:
    """The weighted sum of several rewards; a single reward with weight 1 is returned unchanged.

    Args:
        rewards: each in any form, or `{"reward": ..., "weight": 0.5, "name": "style"}`. The default weight is 1.
    Raises:
        ConfigError: the list is empty, or an entry is not a reward.
    """
    if not isinstance(rewards, (list, tuple)):
        raise ConfigError(f"reward_models is {rewards!r}: expected a list, such as [{rewards!r}].")
    parts: dict[str, RewardDescription] = {}
    weights: dict[str, float] = {}
    for index, item in enumerate(rewards):
        part = dict(item) if isinstance(item, Mapping) else {"reward": item}
        argument = f"reward_models[{index}]"
        if unknown := [key for key in part if key not in PART_KEYS]:
            raise ConfigError(f"{argument}.{unknown[0]} is not a known key. Known: {', '.join(PART_KEYS)}.")
        if "reward" not in part:
            raise ConfigError(f"{argument}.reward is missing: expected {REWARDS}.")
        described = reward_from_object(part["reward"], argument=argument)
        name = part.get("name") or _part_name(part["reward"], index, parts)
        if isinstance(described, RewardObject):
            described = carrying(dataclasses.replace(described, name=name), described._carried)  # type: ignore[attr-defined]
        parts[name], weights[name] = described, part.get("weight", 1.0)
    if not parts:
        raise ConfigError("reward_models is empty: give at least one reward.")
    if len(parts) == 1 and next(iter(weights.values())) == 1:
        return next(iter(parts.values()))
    with faults_below("reward_models"):
        return WeightedSum(parts=dict(parts), weights=weights)


def data_from_object(train: Any, held_out: Any = None, options: PromptOptions | None = None) -> PromptSource:
    """Training data, and data to evaluate on: rows, a data set, a file, or a list of files.

    Raises:
        ConfigError: training data are files and the others rows, or there are none.
    """
    if isinstance(train, PromptSource):
        return train
    settings = _fields_of(options or PromptOptions())
    eval_files = _files(held_out)
    if (files := _files(train)) is not None:
        if held_out is not None and eval_files is None:
            raise ConfigError("eval_dataset has rows and train_dataset is a file: give both as rows, or both as files.")
        with faults_below("train_dataset"):
            return PromptFiles(train_files=files, eval_files=eval_files or (), **settings)
    if isinstance(train, RLHFDataset):
        settings |= _fields_of(train.options)
    if not hasattr(train, "__len__") or isinstance(train, Mapping):
        raise ConfigError(f"train_dataset is a {type(train).__name__}: expected rows, an RLHFDataset, or a file.")
    rows = None if eval_files is not None else held_out
    counts = {"num_rows": len(train), "num_eval_rows": 0 if rows is None else len(rows)}
    both: tuple[Any, ...] = (train, () if rows is None else rows)
    passed = (x if hasattr(x, "__iter__") else map(x.__getitem__, range(len(x))) for x in both)
    prompts = PromptsObject(
        rows_digest=_digest(itertools.chain(*passed)), eval_files=eval_files or (), **counts, **settings
    )
    return carrying(prompts, (train, rows))


def _digest(items: Iterable[Any]) -> str:
    """The BLAKE3 of values as JSON; see `_plain` for what JSON lacks."""
    digest = blake3()
    for item in items:
        digest.update(json.dumps(item, skipkeys=True, default=_plain).encode())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """Tensors and arrays as lists, images as digests, dates, decimals, bytes and paths as texts, others as classes."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "tobytes"):
        return f"{getattr(value, 'size', '')} {blake3(value.tobytes()).hexdigest()}"
    return str(value) if isinstance(value, (date, time, Decimal, bytes, Path)) else type(value).__name__


def _weights_digest(module: Any) -> str:
    from verl.workers.rollout_worker import weight_digests

    return _digest(weight_digests(dict(itertools.chain(module.named_parameters(), module.named_buffers()))).items())


def _source_digest(reward: Any) -> str:
    try:
        return _digest([inspect.getsource(reward if inspect.isroutine(reward) else type(reward))])
    except (OSError, TypeError):  # of a built-in, or typed into an interpreter
        return ""


def _fields_of(options: PromptOptions) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}


def _files(data: Any) -> tuple[str, ...] | None:
    """The paths in the argument; None if it contains no paths."""
    if isinstance(data, (str, Path)):
        return (str(data),)
    if isinstance(data, (list, tuple)) and data and all(isinstance(item, (str, Path)) for item in data):
        return tuple(map(str, data))
    return None


def _part_name(reward: Any, index: int, taken: Mapping[str, Any]) -> str:
    kind = reward.rpartition(":")[2] if isinstance(reward, str) else getattr(reward, "__name__", type(reward).__name__)
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(kind)).lower()
    is_free = name.isidentifier() and name not in TAKEN and name not in taken
    return name if is_free else f"reward_{index + 1}"
