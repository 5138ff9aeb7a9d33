"""What each role asks of a model, and checks of it before training: outputs, left padding, equal tokenizers.

    actor     forward(input_ids, attention_mask).logits [B S V]     generate(...)
    reward    forward(input_ids, attention_mask).scores [B]
    critic    forward(input_ids, attention_mask).values [B S]

Any Hugging Face model fits: a causal language model is an actor as it is, a sequence-classification model becomes a
reward model through `RewardHeadModel`, a causal language model or a backbone becomes a critic through `ValueHeadModel`.

A model that ignores its attention mask or its positions trains and samples without an error, on wrong numbers.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from verl.errors import ConfigError
from verl.models.pretrained import ModelSource

Role = Literal["actor", "reward", "critic"]

RETURNS = {"actor": "logits", "reward": "scores", "critic": "values"}
MEANT = {
    "actor": "logits [B S V]. Give a causal language model",
    "reward": "scores [B], one for each text. Give a sequence-classification model, or a module that returns scores",
    "critic": "values [B S], one for each token. Give a language model, or a module that returns values",
}
PROBE = 3  # tokens


@runtime_checkable
class ActorModel(Protocol):
    """A policy: logits of the next token, and text that follows a prompt."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any: ...

    def generate(self, *args: Any, **kwargs: Any) -> Any: ...


@runtime_checkable
class ScoringModel(Protocol):
    """A reward model: its forward returns `scores` [B]; a critic's returns `values` [B S]."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any: ...


def check_interface(role: Role, model: Any, name: str | None = None) -> None:
    """Try a model on a text of three tokens.

    Args:
        name: of the argument that it was given as, for messages; else the role's.
    Raises:
        ConfigError: it has no such method, cannot read token ids, or returns something else than the role needs.
    """
    name, kind = name or f"{role} model", type(model).__name__
    if not isinstance(model, nn.Module) or not callable(getattr(model, "forward", None)):
        raise ConfigError(f"{name} is a {kind}: expected a torch module that returns {MEANT[role]}.")
    if role == "actor" and not callable(getattr(model, "generate", None)):
        raise ConfigError(
            f"{name} is a {kind}, which has no generate: an actor offers forward and generate. Give a causal language "
            "model, such as AutoModelForCausalLM loads."
        )
    found = _tried(model, name)
    answer = getattr(found, RETURNS[role], None)
    expected = {"actor": (1, PROBE, None), "reward": (1,), "critic": (1, PROBE)}[role]
    if not isinstance(answer, Tensor) or not _has_shape(answer, expected):
        raise ConfigError(
            f"{name} is a {kind}, which returns {_describe_output(found)} for one text of {PROBE} tokens: "
            f"expected {MEANT[role]}."
        )


def as_reward_model(model: Any, name: str = "reward_model", label: int | None = None, pad_id: int = 0) -> nn.Module:
    """A model that returns `scores`: the one given if it does, else a sequence-classification model read as one.

    Raises:
        ConfigError: it is neither.
    """
    from verl.models.heads import RewardHeadModel, label_fault

    labels = getattr(getattr(model, "config", None), "id2label", None)
    if "SequenceClassification" in type(model).__name__ and labels is not None:
        if (fault := label_fault(label, [str(text) for text in labels.values()])) is not None:
            raise ConfigError(f"{name}: {fault}")
        model = RewardHeadModel(model, label, pad_id)
    check_interface("reward", model, name)
    return model


def as_critic(model: Any, name: str = "critic_model") -> nn.Module:
    """A model that returns `values`: the one given if it does, else a language model with a value head on it.

    Raises:
        ConfigError: it is neither.
    """
    from verl.models.heads import ModelHead, ValueHeadModel

    backbone = getattr(model, "base_model", None)
    if not isinstance(model, ModelHead) and isinstance(backbone, nn.Module) and hasattr(model, "config"):
        model = ValueHeadModel(backbone)
    check_interface("critic", model, name)
    return model


@torch.no_grad()
def _tried(model: nn.Module, name: str) -> Any:
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    ids = torch.arange(1, PROBE + 1, device=device)[None]
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        return model(input_ids=ids, attention_mask=torch.ones_like(ids))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{name} is a {type(model).__name__}, which cannot be asked with input_ids and attention_mask alone "
            f"({reason})."
        ) from error
    finally:
        for module in training:
            module.training = True


def _has_shape(x: Tensor, shape: tuple[int | None, ...]) -> bool:
    return x.ndim == len(shape) and all(wanted in (None, size) for size, wanted in zip(x.shape, shape, strict=True))


def _describe_output(output: Any) -> str:
    """The tensors of an output by name and shape."""
    named = output.items() if hasattr(output, "items") else getattr(output, "__dict__", {}).items()
    tensors = [f"{name} {list(x.shape)}" for name, x in named if isinstance(x, Tensor)]
    return " and ".join(tensors) or f"a {type(output).__name__}"


TOKENIZER_PROBE = "The quick brown fox: 37+58=95, naive cafe?\n\tx"


def reads_alike(one: Any, other: Any) -> bool:
    """Whether two tokenizers give every text the same ids, as far as their vocabulary and a probe tell."""
    return one.get_vocab() == other.get_vocab() and one(TOKENIZER_PROBE).input_ids == other(TOKENIZER_PROBE).input_ids


def tokenizer_fault(name: str, source: ModelSource, tokenizer: Any) -> str | None:
    """What is wrong if a model that is given the actor's token ids was made for others; None if nothing is.

    Args:
        name: config path of the model, for the message.
        source: the model.
        tokenizer: the actor's.
    """
    other = source.load_tokenizer()
    if reads_alike(other, tokenizer):
        return None
    return (
        f"{name} has another tokenizer than actor.model ({len(other)} and {len(tokenizer)} tokens): it is given the "
        "actor's token ids and would read another text. Choose a model of the actor's family."
    )
