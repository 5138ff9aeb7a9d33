"""Objects of the user in place of configuration: descriptions that carry what no configuration file can hold.

What is carried is no field: configuration and identity name it by what can be written down.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.component import BuildContext, Description
from verl.data.base import DataSplits, PromptOptions
from verl.data.rlhf_dataset import RLHFDataset
from verl.errors import ConfigError
from verl.models.interfaces import as_reward_model
from verl.models.pretrained import ModelSource, without_dropout
from verl.rewards.base import Reward, RewardDescription
from verl.rewards.function import RewardFunction
from verl.rewards.reward_model import ModelReward, RewardTokenizer

MICRO_BATCH_TOKENS = 16384  # of a reward model that was passed as an object


@dataclass(frozen=True, kw_only=True)
class GivenPrompts(PromptOptions):
    """Prompts passed as `train_dataset`, and as `eval_dataset` if those are rows too.

    Args:
        num_rows: of the data that were passed.
        num_eval_rows: likewise; 0 where none were.
        eval_files: paths whose rows are evaluated on; none for no evaluation.
    """

    num_rows: int
    num_eval_rows: int = 0
    eval_files: tuple[str, ...] = ()

    def build(self, context: BuildContext) -> DataSplits:
        train, held_out = carried_by(self)
        options = PromptOptions(**{f.name: getattr(self, f.name) for f in dataclasses.fields(PromptOptions)})
        if self.eval_files:
            held_out = RLHFDataset(self.eval_files, context.tokenizer, options)
        eval_data = None if held_out is None else _dataset(held_out, context.tokenizer, options)
        return DataSplits(train=_dataset(train, context.tokenizer, options), eval=eval_data)


@dataclass(frozen=True, kw_only=True)
class GivenReward(RewardDescription):
    """A function, a running reward, or a reward model of torch.

    Args:
        name: of the function, or of its class.
    """

    name: str

    def build(self, context: BuildContext) -> Reward:
        reward, tokenizer = carried_by(self)
        if isinstance(reward, Reward):
            return reward
        if not _is_module(reward):
            return RewardFunction.wrap(reward)
        model = as_reward_model(reward.to(context.device), self.name, None, context.tokenizer.pad_token_id or 0)
        _refuse_fewer_embeddings(self.name, reward, tokenizer or context.tokenizer)
        form = "tokens" if tokenizer is None else "text"
        return ModelReward(
            model, RewardTokenizer(tokenizer or context.tokenizer, form, None, "error"), MICRO_BATCH_TOKENS
        )


@dataclass(frozen=True, kw_only=True)
class GivenModel(ModelSource):
    """A loaded Hugging Face model. As the actor it is the object itself that trains; other roles take copies of it.

    Args:
        argument: the name that it was passed by.
        kind: its class.
        num_parameters: in all.
        context_length: in tokens, where its configuration tells.
    """

    argument: str
    kind: str
    num_parameters: int
    context_length: int | None = None

    @classmethod
    def of(cls, argument: str, model: Any) -> GivenModel:
        """The description of a model."""
        config = model.config.get_text_config()
        return cls(
            argument=argument,
            kind=type(model).__name__,
            num_parameters=sum(p.numel() for p in model.parameters()),
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
        """The configuration of the model."""
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
        """The object itself for the first who asks, a copy for each later one: the actor trains it, none else may."""
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
    """The same description with what it stands for."""
    made = dataclasses.replace(described)
    object.__setattr__(made, "_carried", value)
    return made


def carried_by(described: Any) -> Any:
    """What `carrying` put there."""
    found = getattr(described, "_carried", None)
    if found is None:
        raise ConfigError(
            f"{type(described).__name__} stands for an object that a script passed, and this process has none. Run it "
            "in the script's own process (sharding=none), or give a path instead of the object."
        )
    return found


def carried_in(described: Any) -> dict[str, Any]:
    """All that a description and those below it carry, by `key_of`."""
    if not isinstance(described, (Description, dict)):
        return {}
    own = getattr(described, "_carried", None)
    found = {} if own is None else {key_of(described): own}  # type: ignore[arg-type]
    below = (
        described.values()
        if isinstance(described, dict)
        else [getattr(described, f.name) for f in dataclasses.fields(described)]
    )
    for item in below:
        found |= carried_in(item)
    return found


def hand_over(run: Any, values: Mapping[str, Any]) -> Any:
    """A run whose descriptions of given objects carry them.

    Args:
        values: what `key_of` names -> what is carried.
    """
    if isinstance(run, (GivenPrompts, GivenReward, GivenModel)) and (key := key_of(run)) in values:
        return carrying(run, values[key])
    if isinstance(run, Description):
        old = {f.name: getattr(run, f.name) for f in dataclasses.fields(run)}
        new = {name: hand_over(item, values) for name, item in old.items()}
        changed = {name: item for name, item in new.items() if item is not old[name]}
        return dataclasses.replace(run, **changed) if changed else run
    if isinstance(run, dict):
        return {name: hand_over(item, values) for name, item in run.items()}
    return run


def key_of(described: GivenPrompts | GivenReward | GivenModel) -> str:
    """The name of what a description carries."""
    if isinstance(described, GivenModel):
        return described.argument
    return f"reward {described.name}" if isinstance(described, GivenReward) else "data"


def _dataset(rows: RLHFDataset | Sequence[Mapping[str, Any]], tokenizer: Any, options: PromptOptions) -> RLHFDataset:
    if not isinstance(rows, RLHFDataset):
        return RLHFDataset.from_rows(rows, tokenizer, options)
    theirs, ours = rows.collate([0]).meta_info["pad_token_id"], tokenizer.pad_token_id
    if theirs != ours:
        raise ConfigError(
            f"train_dataset pads with token {theirs}, the actor's tokenizer with {ours}: use that tokenizer."
        )
    return rows


def _trainable(model: Any) -> Any:
    """The model, of which what the user froze stays frozen, unless that is all of it."""
    return model if any(p.requires_grad for p in model.parameters()) else model.requires_grad_(True)


def _is_module(value: Any) -> bool:
    import torch

    return isinstance(value, torch.nn.Module)


def _refuse_fewer_embeddings(name: str, model: Any, tokenizer: Any) -> None:
    """A token id without an embedding fails deep inside the model, on a GPU without a word of why."""
    if not hasattr(model, "get_input_embeddings"):
        return
    rows = model.get_input_embeddings().weight.shape[0]
    if rows < len(tokenizer):
        raise ConfigError(
            f"{name} knows {rows} tokens, and the tokenizer has {len(tokenizer)}: they do not belong together. Give "
            "the tokenizer that the model was trained with."
        )
