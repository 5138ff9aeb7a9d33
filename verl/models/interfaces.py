"""The interface that each role expects of a model, and checks before training: outputs, padding, tokenizers.

    actor     forward(input_ids, attention_mask).logits [B S V]     generate(...)
    reward    forward(input_ids, attention_mask).scores [B]
    critic    forward(input_ids, attention_mask).values [B S]

Any Hugging Face model can be used: a causal language model is an actor, `RewardHeadModel` makes a reward model of a
sequence-classification model, and `ValueHeadModel` makes a critic of a causal language model or a backbone.

The checks matter because a model that ignores its attention mask or positions trains without an error, on wrong values.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from verl.errors import ConfigError, error_text, faults_below
from verl.models.pretrained import ModelSource

Role = Literal["actor", "reward", "critic"]

RETURNS = {"actor": "logits", "reward": "scores", "critic": "values"}
MEANT = {
    "actor": "logits [B S V]. Give a causal language model",
    "reward": "scores [B], one for each text. Give a sequence-classification model, or a module that returns scores",
    "critic": "values [B S], one for each token. Give a language model, or a module that returns values",
}
PROBE = 3  # tokens


def check_interface(role: Role, model: Any, name: str | None = None) -> None:
    """Check the output of a model on a text of three tokens.

    Args:
        role: what the model is used as.
        model: any torch module.
        name: name of the argument, for messages; None for that of the role.
    Raises:
        ConfigError: it lacks a method, cannot be called with token ids, or returns another output than the role needs.
    """
    name, kind = name or f"{role} model", type(model).__name__
    if not isinstance(model, nn.Module) or not callable(getattr(model, "forward", None)):
        raise ConfigError(f"{name} is a {kind}: expected a torch module that returns {MEANT[role]}.")
    if role == "actor" and not callable(getattr(model, "generate", None)):
        raise ConfigError(
            f"{name} is a {kind}, which has no generate: an actor needs forward and generate. Give a causal language "
            "model, such as AutoModelForCausalLM loads."
        )
    output = _tried(model, name)
    answer = getattr(output, RETURNS[role], None)
    expected = {"actor": (1, PROBE, None), "reward": (1,), "critic": (1, PROBE)}[role]
    if not isinstance(answer, Tensor) or not _has_shape(answer, expected):
        raise ConfigError(
            f"{name} is a {kind}, which returns {_describe_output(output)} for one text of {PROBE} tokens: "
            f"expected {MEANT[role]}."
        )


def as_reward_model(model: Any, name: str = "reward_model", label: int | None = None, pad_id: int = 0) -> nn.Module:
    """Make a model that returns `scores`: `model` itself if it does, else a wrapped sequence-classification model.

    Args:
        model: any torch module.
        name: for messages.
        label, pad_id: see `RewardHeadModel`.
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
    """Make a model that returns `values`: `model` itself if it does, else a language model with a value head.

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
        reason = error_text(error)
        raise ConfigError(
            f"{name} is a {type(model).__name__}, which cannot be called with only input_ids and attention_mask "
            f"({reason})."
        ) from error
    finally:
        for module in training:
            module.training = True


def _has_shape(x: Tensor, shape: tuple[int | None, ...]) -> bool:
    return x.ndim == len(shape) and all(wanted in (None, size) for size, wanted in zip(x.shape, shape, strict=True))


def _describe_output(output: Any) -> str:
    """Names and shapes of the tensors of an output, for a message."""
    named = output.items() if hasattr(output, "items") else getattr(output, "__dict__", {}).items()
    tensors = [f"{name} {list(x.shape)}" for name, x in named if isinstance(x, Tensor)]
    return " and ".join(tensors) or f"a {type(output).__name__}"


TOKENIZER_PROBE = "The quick brown fox: 37+58=95, naive cafe?\nx"


def reads_alike(one: Any, other: Any) -> bool:
    """Whether two tokenizers have equal vocabularies and tokenise a test sentence equally."""
    return one.get_vocab() == other.get_vocab() and one(TOKENIZER_PROBE).input_ids == other(TOKENIZER_PROBE).input_ids


def tokenizer_fault(name: str, source: ModelSource, tokenizer: Any) -> str | None:
    """The fault if a model that receives the actor's token ids has another tokenizer; None if it has the same.

    Args:
        name: configuration path of the model, for the message.
        source: the model.
        tokenizer: of the actor.
    """
    with faults_below(name):
        other = source.load_tokenizer()
    if reads_alike(other, tokenizer):
        return None
    return (
        f"{name} has another tokenizer than actor.model ({len(other)} and {len(tokenizer)} tokens), but receives the "
        "actor's token ids. Choose a model of the actor's family."
    )
