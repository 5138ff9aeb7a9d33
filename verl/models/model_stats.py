"""Size of a model from its configuration alone: parameters, activations, keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.models.experts import expert_layers, routers
from verl.models.lora import LoRA


@dataclass(frozen=True)
class ModelStats:
    """What memory and time are counted from.

    Attributes:
        parameters: of the whole model, tied ones once.
        trained: of those, and of an adapter if there is one.
        layers, hidden, vocabulary: its depth, width and number of tokens.
        attention: width of the queries of a layer; heads times their size.
        keys: width of the keys of a layer, and of its values.
        mlp: inner width of a layer's MLP.
        tied: the output head is the embedding, or there is none over the vocabulary.
        has_head: there is an output head over the vocabulary.
        expert_elements: numbers in the routed experts of all layers.
        expert_layers, experts, top_k: layers that have experts, how many each, and how many of them a token is sent to.
    """

    parameters: int
    trained: int
    layers: int
    hidden: int
    vocabulary: int
    attention: int
    keys: int
    mlp: int
    tied: bool = False
    has_head: bool = True
    expert_elements: int = 0
    expert_layers: int = 0
    experts: int = 0
    top_k: int = 0

    @property
    def embedding_elements(self) -> int:
        """Numbers in the embedding and the output head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def cache_elements(self) -> int:
        """Numbers that keys and values of one token take."""
        return 2 * self.layers * self.keys

    @property
    def layer_elements(self) -> int:
        """Numbers that a layer keeps of each token for its backward pass.

        Counted on the layers of Llama and Qwen: RMSNorm, gated MLP, attention without its matrix of scores.
        """
        return 4 * self.mlp + 2 * self.keys + 2 * self.attention + int(6.5 * self.hidden)

    def activation_elements(self, tokens: int, recomputed: bool = False) -> int:
        """Numbers kept for the backward pass of `tokens` tokens, without the logits.

        With `recomputed` only each layer's input is kept, and all of one layer at a time.
        """
        if recomputed:
            return tokens * (self.layers * self.hidden + self.layer_elements)
        return tokens * self.layers * self.layer_elements


def model_stats(config: Any, lora: LoRA | None = None, kind: str = "causal_lm") -> ModelStats:
    """Of a model with this Hugging Face configuration, its parameters counted on the meta device.

    Args:
        lora: the adapter that is trained in place of the weights.
        kind: `causal_lm`, `backbone` without an output head, or `classifier`.
    """
    if not type(config).model_type:
        raise ValueError("the sizes of a module of one's own are not known without making it")
    key = (type(config), config.to_json_string(), lora, kind)
    if key not in _counted:
        _counted[key] = _count(config, lora, kind)
    return _counted[key]


_counted: dict[tuple[type, str, LoRA | None, str], ModelStats] = {}  # a plan asks many times for the same model


def _count(config: Any, lora: LoRA | None, kind: str) -> ModelStats:
    import torch
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

    from verl.models.pretrained import quiet_transformers

    with torch.device("meta"), quiet_transformers():
        wanted = {"causal_lm": AutoModelForCausalLM, "classifier": AutoModelForSequenceClassification}
        try:
            model: Any = wanted.get(kind, AutoModel).from_config(config)
        except ValueError:  # a family without such a head
            model = AutoModel.from_config(config)
        mixtures = list(expert_layers(model).values())
        routed = routers(model)
        expert_elements = sum(x.numel() for module in mixtures for x in module.parameters())
        if lora is not None:
            model = lora.apply(model, causal_lm=kind == "causal_lm")
    text = config.get_text_config()
    heads = text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // heads
    return ModelStats(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        attention=heads * head,
        keys=(getattr(text, "num_key_value_heads", None) or heads) * head,
        mlp=getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * text.hidden_size,
        tied=kind != "causal_lm" or bool(getattr(config, "tie_word_embeddings", False)),
        has_head=kind == "causal_lm",
        expert_elements=expert_elements,
        expert_layers=len(mixtures),
        experts=mixtures[0].num_experts if mixtures else 0,
        top_k=routed[0].top_k if routed else 0,
    )
