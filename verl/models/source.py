"""What a description of a model offers: a causal language model, a bare backbone, a tokenizer, the context length."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from verl.component import Description

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# Names of what multiplies hidden states by chance while training (Mixtral, MiniMax, DBRX). `router_jitter_noise` is
# none of them: PhiMoE's modules have a threshold of that name, which counts in evaluation too.
ROUTER_NOISE = ("jitter_noise", "input_jitter_noise", "moe_jitter_eps")

Dtype = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True, kw_only=True)
class ModelSource(Description):
    """Where a language model comes from.

    Dropout and the noise of routers are switched off in every model: the ratio pi_new / pi_old of policy-gradient
    methods compares two forward passes of the same text, and they would make them differ with no change of weights.

    Args:
        dtype: of the parameters.
    """

    dtype: Dtype = "float32"

    def load_causal_lm(self, device: str) -> PreTrainedModel:
        """The model with its language-model head, on `device`, in evaluation mode."""
        raise NotImplementedError

    def load_backbone(self, device: str) -> PreTrainedModel:
        """The model without a head: token ids in, hidden states [B S D] out."""
        raise NotImplementedError

    def load_skeleton(self, kind: Literal["causal_lm", "backbone"]) -> PreTrainedModel | None:
        """The model without its weights, which are then read in slices from its attribute `weight_files`.

        None where weights can only be had whole.
        """
        return None

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, padding on the left, with a pad token."""
        raise NotImplementedError

    def load_config(self) -> PretrainedConfig:
        """The model's configuration, without its weights."""
        raise NotImplementedError

    def max_positions(self) -> int | None:
        """The context length in tokens, or None where it cannot be known without loading."""
        raise NotImplementedError

    def attention_heads(self) -> tuple[int, int] | None:
        """The numbers of attention heads and of key-value heads, or None where they cannot be known without loading."""
        return None

    def policy_fault(self) -> str | None:
        """Why this cannot be a policy nor a value function, by its configuration; None if that tells nothing."""
        return None

    def value_head(self) -> Path | None:
        """The file of a trained value head that lies with the weights, or None."""
        return None


def without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """Set every dropout probability of a model to zero, and the noise that routers of experts add while training."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):  # many families keep the number and call F.dropout
            if isinstance(value, float) and ("drop" in name or name in ROUTER_NOISE):
                setattr(module, name, 0.0)
    return model
