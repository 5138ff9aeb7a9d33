"""Size of a model from its configuration: parameters, activations, keys and values.

The configuration of a common model on the hub is shipped, so that its size is computed without a network:
`known_shapes.json` has for each shape its number of parameters, those entries of config.json that sizes depend on, and
the context length of every model on the hub that has this shape. No model is loaded by these entries.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from verl.errors import ConfigError
from verl.models.images import ImageCounts, freeze, is_image_text, vision_tower
from verl.models.lora import LoRA
from verl.models.model_files import hub_failure, in_hub_cache, is_local
from verl.models.pretrained import ModelSource, Pretrained, quiet_transformers
from verl.models.structure import expert_layers, routers

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class TowerStats:
    """The vision tower of an image-text model.

    Attributes:
        parameters: number of parameters.
        is_trained: whether some of them are trained.
        layers: its depth.
        layer_elements: elements per patch that a layer keeps for its backward pass, counted as for that of Qwen2.5-VL,
            with more than a plain ViT.
        patch_elements: numbers that the model reads of a patch.
        patches: for each token of an image.
    """

    parameters: int
    is_trained: bool
    layers: int
    layer_elements: int
    patch_elements: int
    patches: int

    @classmethod
    def of(cls, model: Any) -> TowerStats | None:
        """None for a text model, and for a family whose images have no known number of tokens."""
        if (tower := vision_tower(model)) is None or not (patches := ImageCounts(model.config).patches):
            return None
        vision: Any = model.config.vision_config
        patch, frames = vision.patch_size, getattr(vision, "temporal_patch_size", 1)
        return cls(
            parameters=sum(parameter.numel() for parameter in tower.parameters()),
            is_trained=any(parameter.requires_grad for parameter in tower.parameters()),
            layers=getattr(vision, "depth", None) or vision.num_hidden_layers,
            layer_elements=4 * vision.intermediate_size + 16 * vision.hidden_size,
            patch_elements=3 * frames * patch**2,
            patches=patches,
        )


@dataclass(frozen=True)
class ModelStats:
    """Numbers that memory and time are estimated from.

    Attributes:
        parameters: number of parameters, tied ones once.
        trained: number of trained parameters, including those of an adapter.
        layers, hidden, vocabulary: its depth, width and number of tokens.
        attention: width of the queries of a layer: heads x head size.
        keys: width of the keys (and of the values) of a layer.
        mlp: intermediate size of the MLP of a layer.
        tied: whether the output head is the embedding, or there is no output head.
        has_head: whether there is an output head over the vocabulary.
        expert_elements: parameters of the routed experts of all layers.
        expert_layers, experts, top_k: layers with experts, experts per layer, and experts per token.
        are_layers_alike: whether all layers have parameters of the same names and shapes.
        tower: what reads the images; None in a text model.
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
    are_layers_alike: bool = False
    tower: TowerStats | None = None

    @property
    def embedding_elements(self) -> int:
        """Elements of the embedding and the output head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def cache_elements(self) -> int:
        """Elements of the keys and values of one token."""
        return 2 * self.layers * self.keys

    @property
    def layer_elements(self) -> int:
        """Elements per token that a layer keeps for its backward pass.

        Counted for layers of Llama and Qwen: RMSNorm, gated MLP, attention without the score matrix.
        """
        return 4 * self.mlp + 2 * self.keys + 2 * self.attention + int(6.5 * self.hidden)

    def activation_elements(self, tokens: int, recomputed: bool = False) -> int:
        """Elements kept for the backward pass of `tokens` tokens, without the logits.

        With `recomputed` (gradient checkpointing) the input of each layer, and all activations of one layer.
        """
        if recomputed:
            return tokens * (self.layers * self.hidden + self.layer_elements)
        return tokens * self.layers * self.layer_elements


def model_stats(
    config: Any, lora: LoRA | None = None, kind: str = "causal_lm", frozen: Sequence[str] | None = None
) -> ModelStats:
    """Compute the stats of a model by its Hugging Face configuration; parameters are counted on the meta device.

    Args:
        config: the configuration.
        lora: the adapter, if only it is trained.
        kind: `causal_lm`, `backbone` without an output head, or `classifier`.
        frozen: modules that are not trained; see `ModelSource.freeze`.
    """
    if not type(config).model_type:
        raise ValueError("the size of a user-defined module is not known before it is built")
    key = (type(config), settings_text(config), lora, kind, None if frozen is None else tuple(frozen))
    if key not in _counted:
        _counted[key] = _count(config, lora, kind, frozen)
    return _counted[key]


def settings_text(config: Any) -> str:
    """The settings of a Hugging Face configuration, to compare it before and after a save; less time than JSON."""
    names = [name for name in vars(config) if not name.startswith("_") and name != "architectures"]
    return repr([(name, str(vars(config)[name]).removeprefix("torch.")) for name in names])


_counted: dict[tuple[Any, ...], ModelStats] = {}  # a plan needs the same model many times


def _count(config: Any, lora: LoRA | None, kind: str, frozen: Sequence[str] | None) -> ModelStats:
    import torch
    import transformers
    from transformers import AutoModel

    with torch.device("meta"), quiet_transformers():
        causal_lm: Any = "AutoModelForImageTextToText" if is_image_text(config) else "AutoModelForCausalLM"
        names = {"causal_lm": causal_lm, "classifier": "AutoModelForSequenceClassification"}
        classes = {name: getattr(transformers, kind) for name, kind in names.items()}
        try:
            model: Any = classes.get(kind, AutoModel).from_config(config)
        except ValueError:  # no such head for this family
            model = AutoModel.from_config(config)
        mixtures = list(expert_layers(model).values())
        routed = routers(model)
        stacks = [x for x in model.modules() if isinstance(x, torch.nn.ModuleList)]
        stack = next((x for x in stacks if len(x) == config.get_text_config().num_hidden_layers), ())
        shapes = {tuple((name, x.shape) for name, x in layer.named_parameters()) for layer in stack}
        expert_elements = sum(x.numel() for module in mixtures for x in module.parameters())
        freeze(model, frozen, "actor.model")
        tower = TowerStats.of(model)
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
        are_layers_alike=len(shapes) == 1,
        tower=tower,
    )


@functools.cache
def known_shapes() -> dict[str, dict[str, Any]]:
    """Entries of config.json by hub name."""
    entries = json.loads(files("verl.models").joinpath("known_shapes.json").read_text(encoding="utf-8"))
    return {
        name: {**entry["config"], "max_position_embeddings": length}
        for entry in entries
        for name, length in entry["max_position_embeddings"].items()
    }


def sizes_config(source: ModelSource) -> PretrainedConfig:
    """The configuration of a model for computing its size: from a local directory or the cache of the hub, else from
    the shipped shapes, else from the hub.

    Raises:
        ConfigError: it is none of them and the hub cannot be reached, which is found within `CONNECT_S` seconds.
    """
    if not isinstance(source, Pretrained):
        return source.load_config()
    if has_shipped_shapes(source):
        from transformers import AutoConfig

        entries = dict(known_shapes()[source.base_path()])
        return AutoConfig.for_model(entries.pop("model_type"), **entries)
    if not _is_here(source):
        _require_hub(source)
    return source.load_config()


def has_shipped_shapes(source: ModelSource) -> bool:
    """Whether `sizes_config` takes the shipped shapes: not for a revision, nor where config.json is on this machine."""
    if not isinstance(source, Pretrained) or source.revision is not None:
        return False
    return source.base_path() in known_shapes() and not _is_here(source)


def _is_here(source: Pretrained) -> bool:
    """Whether config.json is read without a network."""
    path = source.base_path()
    return is_local(path) or in_hub_cache(path, source.revision)


def _require_hub(source: Pretrained) -> None:
    """One request with a short timeout: the hub's client would try again for a minute."""
    if (reason := hub_failure()) is not None:
        raise ConfigError(
            f"path is {source.base_path()!r}: {reason}, its config.json is not in the hub's cache on this machine, and "
            "verl ships no shapes of it. Set path to a directory with its config.json; no weights are needed for a "
            "plan."
        )
