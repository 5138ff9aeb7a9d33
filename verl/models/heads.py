"""Heads on a backbone: the critic's value head, a reward model's score, and the separate LM head.

With a vocabulary of 150 000 the logits of a batch are by far its largest tensor, so the LM head is applied to chunks
of tokens.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from verl.errors import ConfigError
from verl.models.parallel_info import compute_device, layers_gathered, release_gathered
from verl.models.pretrained import VALUE_HEAD_FILE, quiet_transformers
from verl.models.structure import call_model, unwrapped
from verl.ops.masking import last_true

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ValueHeadOutput:
    """Output of a critic.

    Attributes:
        values: [B S], estimated return after the tokens up to and including each position.
    """

    values: Tensor


class ModelHead(nn.Module):
    """Base class of models with a custom head on a Hugging Face backbone.

    The backbone is saved as a Hugging Face directory, with the head in a separate file there. A subclass adds layers
    and a `forward`; sharding, saving and loading work without changes.

    Args:
        backbone: Hugging Face model without head.
    Attributes:
        file: file name of the head.
        loader: method of `ModelSource` that loads the backbone.
    """

    file: ClassVar[str] = VALUE_HEAD_FILE
    loader: ClassVar[str] = "load_backbone"

    def __init__(self, backbone: Any):
        super().__init__()
        self.backbone = backbone

    @property
    def config(self) -> Any:
        return self.backbone.config

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        self.backbone.gradient_checkpointing_enable(**options)

    def split(self, tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split a mapping by tensor names of this model into that of the backbone, by the backbone's names, and of
        the head.
        """
        below = {name.removeprefix(_BELOW): x for name, x in tensors.items() if name.startswith(_BELOW)}
        return below, {name: x for name, x in tensors.items() if not name.startswith(_BELOW)}

    def joined(self, backbone: Mapping[str, Any]) -> dict[str, Any]:
        """Rename a mapping by tensor names of the backbone to names of this model."""
        return {_BELOW + name: x for name, x in backbone.items()}

    def in_weight_file(self, backbone: Mapping[str, Any], head: Mapping[str, Any]) -> dict[str, Any]:
        """Content of the weight file, from a mapping by names in the backbone's file, and one of the head."""
        return dict(backbone)

    def files(self, tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
        """Content of the files that `save` writes, from unsharded tensors of the head."""
        whole = {name: p.detach().cpu().contiguous() for name, p in tensors.items()}
        return {self.file: save({name.removeprefix(_OWN): whole[name] for name in sorted(whole)})}

    def save(self, directory: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Write the file of the head.

        Args:
            directory: of the backbone.
            tensors: unsharded tensors of the head, for a sharded model; None for those of this model.
        """
        saved = self.split(self.state_dict())[1] if tensors is None else tensors
        for name, data in self.files(saved).items():
            (Path(directory) / name).write_bytes(data)

    def load_initial(self, directory: Path) -> None:
        """Load the head from the directory of a model, if it has one."""
        if (directory / self.file).is_file():
            self.load(directory)

    def load(self, directory: Path) -> None:
        """Load the head from its file in a directory.

        Raises:
            ConfigError: the file is the head of another model.
        """
        saved = load_file(directory / self.file)
        names = [name for name in self.state_dict() if not name.startswith(_BELOW)]
        missing = {name.removeprefix(_OWN) for name in names} ^ saved.keys()
        if missing:
            raise ConfigError(f"{directory / self.file} is the head of another model ({', '.join(sorted(missing))}).")
        self.load_state_dict({name: saved[name.removeprefix(_OWN)] for name in names}, strict=False)

    def save_pretrained(self, directory: Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Write the backbone as a Hugging Face directory, and the head to a file in it.

        Args:
            directory: created if missing.
            state_dict: unsharded weights, for a sharded model; None for those of this model.
        """
        backbone, head = self.split(self.state_dict() if state_dict is None else state_dict)
        with quiet_transformers():
            self.backbone.save_pretrained(directory, state_dict=backbone)
        self.save(directory, head)


class NoHead:
    """Result of `head_of` for a plain Hugging Face model, which has no separate head."""

    loader: ClassVar[str] = "load_causal_lm"

    def __init__(self, model: Any):
        self.backbone = model

    def split(self, tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return dict(tensors), {}

    def joined(self, backbone: Mapping[str, Any]) -> dict[str, Any]:
        return dict(backbone)

    def in_weight_file(self, backbone: Mapping[str, Any], head: Mapping[str, Any]) -> dict[str, Any]:
        return dict(backbone)

    def files(self, tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
        return {}

    def save(self, directory: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Does nothing."""

    def load(self, directory: Path) -> None:
        """Does nothing."""


def head_of(model: Any) -> ModelHead | NoHead:
    """The model itself if it is a `ModelHead`, else `NoHead`."""
    return model if isinstance(model, ModelHead) else NoHead(model)


@torch.no_grad()
def state_size(backbone: Any) -> int:
    """The size of the last hidden states of a backbone.

    In some models, such as OPT-350m, it is not that of the states between layers, `hidden_size`. Where the model's
    language-model head reads states of another size, one layer is tried.
    """
    from transformers import AutoModelForCausalLM

    base = unwrapped(backbone)
    hidden: int = base.config.get_text_config().hidden_size
    try:
        with quiet_transformers(), torch.random.fork_rng(devices=[]):
            with torch.device("meta"):
                head = AutoModelForCausalLM.from_config(copy.deepcopy(base.config)).get_output_embeddings()
            if head.weight.shape[1] == hidden:
                return hidden
            config = copy.deepcopy(base.config)
            config.num_hidden_layers = 1
            return type(base)(config).eval()(input_ids=torch.ones(1, 2, dtype=torch.int64))[0].shape[-1]
    except Exception:  # noqa: BLE001 - a class without a language model, or one that needs more than its configuration
        return hidden


SCORE = "score.weight"  # of the head of a decoder's sequence-classification model
HEADS = ("score", "v_head.summary", "value_head")  # of reward models and critics of verl and OpenRLHF, and of TRL
PEFT = "base_model.model."  # before every name in the file of an adapter
_PARTS = ("weight", "bias")
_BELOW, _OWN = "backbone.", "head."  # prefixes in the state dict; the file of a head omits the second


class ValueHeadModel(ModelHead):
    """A backbone with a linear value head.

    A head of a reward model or critic in the files of the backbone, see `HEADS`, is where training begins. Otherwise it
    is initialised to zero, so an untrained critic predicts 0 and its first advantages are the returns. Its weights are
    at least float32, for any dtype of the backbone.
    """

    has_bias: ClassVar[bool] = True

    def __init__(self, backbone: Any):
        super().__init__(backbone)
        dtype = torch.float64 if backbone.dtype == torch.float64 else torch.float32
        # the backbone may still be on the meta device
        device = "cpu" if backbone.device.type == "meta" else backbone.device
        self.head = nn.Linear(state_size(backbone), 1, bias=self.has_bias, device=device, dtype=dtype)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)

    def load_initial(self, directory: Path) -> None:
        super().load_initial(directory)
        found = {} if (directory / self.file).is_file() else tensors_in(directory, HEADS)
        if (weight := found.get("weight")) is not None and weight.shape == self.head.weight.shape:
            _log.info("the value head begins as that in the weights of %s", directory)
            self.head.load_state_dict({"bias": self.head.bias, **found})

    @property
    def computes_in_own_type(self) -> tuple[nn.Module, ...]:
        """Modules that ignore autocast: the head computes in its own dtype; see `verl.models.parallel_info`."""
        return (self.head,)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        probe: bool = False,
        **others: Any,
    ) -> ValueHeadOutput:
        """Values of each position, [B S].

        Args:
            input_ids, attention_mask, position_ids: [B S].
            probe: use a fixed random head on normalised hidden states, for checks: the output of an untrained head does
                not depend on them.
            others: further inputs of the backbone.
        """
        inputs = {"attention_mask": attention_mask, "position_ids": position_ids}
        others |= {name: x for name, x in inputs.items() if x is not None}
        hidden = call_model(self.backbone, input_ids=input_ids, use_cache=False, **others).last_hidden_state
        hidden = hidden.to(self.head.weight.dtype)
        return ValueHeadOutput(values=_probed(hidden) if probe else self.head(hidden).squeeze(-1))


def _probed(hidden: Tensor) -> Tensor:
    """Fixed random projection of hidden states [B S D] to [B S], of about unit size."""
    size = hidden.shape[-1]
    direction = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=hidden.dtype).to(hidden.device)
    return hidden / hidden.square().mean(dim=-1, keepdim=True).sqrt().clamp_min(1e-12) @ direction / size**0.5


class ScoreHeadModel(ValueHeadModel):
    """A backbone with a linear score head, saved as the sequence-classification model of its family with one label.

    So its directory is read by `AutoModelForSequenceClassification`, and by `reward=model`. With an adapter it is that
    of an adapter of such a model for peft, whose head is saved whole (`modules_to_save`).

    Raises:
        ConfigError: transformers has no such model of the family, or one with another head than a linear `score`.
    """

    has_bias: ClassVar[bool] = False

    def __init__(self, backbone: Any):
        super().__init__(backbone)
        from transformers import AutoModelForSequenceClassification

        config = copy.deepcopy(unwrapped(backbone).config)
        config.num_labels, config.dtype = 1, backbone.dtype
        try:
            with quiet_transformers(), torch.device("meta"), torch.random.fork_rng(devices=[]):
                classifier: Any = AutoModelForSequenceClassification.from_config(config)
            score = classifier.score
        except (ValueError, AttributeError) as error:
            raise ConfigError(
                f"actor.model is a {type(unwrapped(backbone)).__name__}: transformers has no classification model of "
                "its family with a linear head `score`. Choose another model."
            ) from error
        if not isinstance(score, nn.Linear) or score.bias is not None or score.in_features != self.head.in_features:
            raise ConfigError(f"actor.model: the head of a {type(classifier).__name__} is not one linear layer.")
        config.architectures, self._prefix = [type(classifier).__name__], classifier.base_model_prefix
        self._config, self._before = config, ""
        if hasattr(backbone, "peft_config"):
            adapter, self._before = backbone.peft_config[backbone.active_adapter], PEFT
            adapter.task_type, adapter.modules_to_save = "SEQ_CLS", [SCORE.split(".")[0]]

    def in_weight_file(self, backbone: Mapping[str, Any], head: Mapping[str, Any]) -> dict[str, Any]:
        before = self._before
        named = {f"{before}{self._prefix}.{name.removeprefix(before)}": x for name, x in backbone.items()}
        # no head in a process that saves other tensors
        return named | dict(zip((before + SCORE,), head.values(), strict=False))

    def files(self, tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
        return {"config.json": self._config.to_json_string().encode()}

    def head_in(self, directory: Path | str) -> Tensor | None:
        """The weights of the head [1, hidden] in the files of a saved model, or adapter; None if there are none."""
        return tensors_in(Path(directory), HEADS[:1]).get("weight")

    def load(self, directory: Path | str) -> None:
        if (weight := self.head_in(directory)) is None:
            raise ConfigError(f"{directory} has no reward model: there is no tensor {SCORE} in its weights.")
        if weight.shape != self.head.weight.shape:
            raise ConfigError(f"{directory} has a {SCORE} of {len(weight)} labels: a reward model has one.")
        with torch.no_grad():
            self.head.weight.copy_(weight)

    def save_pretrained(self, directory: Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
        backbone, head = self.split(self.state_dict() if state_dict is None else state_dict)
        with quiet_transformers():
            self.backbone.save_pretrained(
                directory, state_dict=backbone if self._before else self.in_weight_file(backbone, head)
            )
        if self._before:  # peft names tensors by its own model
            file = Path(directory) / "adapter_model.safetensors"
            file.write_bytes(save(self.in_weight_file(load_file(file), head), metadata={"format": "pt"}))
        self.save(directory, head)


def tensors_in(directory: Path, modules: Collection[str]) -> dict[str, Tensor]:
    """Tensors of one of the modules in the files of a saved model, or adapter, by the rest of their names."""
    named = {f"{before}{module}.{part}": part for before in ("", PEFT) for module in modules for part in _PARTS}
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as saved:
            found |= {named[name]: saved.get_tensor(name) for name in named.keys() & set(saved.keys())}
    for file in sorted(directory.glob("*_model.bin")):  # of checkpoint.use_safetensors=false
        state = torch.load(file, map_location="cpu", weights_only=True)
        found |= {named[name]: state[name] for name in named.keys() & state.keys()}
    return found


@dataclass(frozen=True)
class RewardHeadOutput:
    """Output of a reward model.

    Attributes:
        scores: [B], at least float32, one per text.
    """

    scores: Tensor


class RewardHeadModel(nn.Module):
    """A Hugging Face sequence-classification model; the score is the logit of one label.

    For a decoder (a backbone with a linear `score`) the score is read at the last token of the attention mask. The
    forward of transformers instead uses the last token that is not the pad token, which is wrong where the end-of-text
    token is also the pad token, and fails without a configured pad token. Other models, such as encoders with a
    classifier on the first token, are called unchanged.

    Args:
        classifier: the model.
        label: index of the logit; None for a model with one.
        pad_id: token id for padding if the configuration has no pad token.
    """

    def __init__(self, classifier: Any, label: int | None = None, pad_id: int = 0):
        super().__init__()
        self.classifier, self.label = classifier, label or 0
        config = classifier.config.get_text_config()
        config.use_cache = False
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = pad_id
        self.pad_id = config.pad_token_id
        own_code = type(classifier).__module__.startswith("transformers.")  # other code may pool differently
        self.reads_last_token = own_code and isinstance(getattr(classifier, "score", None), nn.Linear)
        self._rotary = [m for m in classifier.modules() if "dynamic" in str(getattr(m, "rope_type", ""))]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> RewardHeadOutput:
        """Score B texts [B S], padded on either side, each with at least one token."""
        for module in self._rotary:
            forget_lengths(module)
        order = attention_mask.long().argsort(dim=1, descending=True, stable=True)  # moves padding to the right
        mask = attention_mask.gather(1, order)
        ids = input_ids.gather(1, order).masked_fill(~mask.bool(), self.pad_id)
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids.gather(1, order)}
        if self.reads_last_token:
            hidden = self.classifier.base_model(input_ids=ids, attention_mask=mask, **types).last_hidden_state
            rows = torch.arange(len(ids), device=ids.device)
            logits = self.classifier.score(hidden[rows, last_true(mask.bool())])
        else:
            logits = self.classifier(input_ids=ids, attention_mask=mask, **types).logits
        chosen = logits[:, self.label]
        return RewardHeadOutput(chosen if chosen.dtype == torch.float64 else chosen.float())


def forget_lengths(rotary: nn.Module) -> None:
    """Reset dynamic rotary frequencies, which transformers keeps for the longest text so far."""
    for name in [*vars(rotary), *rotary._buffers]:
        if name.endswith("max_seq_len_cached"):
            setattr(rotary, name, rotary.original_max_seq_len)
        elif name.endswith("original_inv_freq"):
            setattr(rotary, name.replace("original_inv_freq", "inv_freq"), getattr(rotary, name))


def label_fault(label: int | None, labels: list[str]) -> str | None:
    """The fault of the setting `label` for a model with these labels; None if it is valid."""
    listed = ", ".join(f"{index} ({name})" for index, name in enumerate(labels))
    if label is None and len(labels) != 1:
        return (
            f"label is null: the model has {len(labels)} labels, {listed}. Set label to the one whose logit is the "
            "score, or use a model with one label."
        )
    if label is not None and not 0 <= label < len(labels):
        return f"label is {label}: the labels of the model are {listed}."
    return None


class LMHead:
    """The output head of a causal language model, called separately from the model.

    Whether head(hidden states) equals the logits is tested on a small input. Models that cap their logits afterwards
    (Gemma 2) are not separable, and all their logits must be computed at once. A factor on the logits (Cohere) is
    applied to the hidden states instead, since the head is linear.

    Attributes:
        is_separable: whether head(hidden states) equals the logits of the model.
    """

    def __init__(self, model: Any):
        self.model = model
        self.head: nn.Module | None = model.get_output_embeddings()
        with layers_gathered(model):
            self.is_separable = self.head is not None and self.is_whole_state()
        release_gathered(model)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [... V] of hidden states [... D]."""
        assert self.head is not None
        return self.head(hidden)

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Inside this context the model returns hidden states in place of logits."""
        assert self.head is not None
        before = vars(self.head).get("forward")  # tensor parallelism may have replaced it
        self.head.forward = _as_it_is
        try:
            yield
        finally:
            if before is None:
                del self.head.forward
            else:
                self.head.forward = before

    @torch.no_grad()
    def is_whole_state(self) -> bool:
        """Whether the logits come from the last hidden state of all layers by the head alone."""
        tokens = torch.arange(4, device=compute_device(self.model)).unsqueeze(0)
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "use_cache": False}
        was_training = self.model.training
        self.model.eval()
        whole = call_model(self.model, **inputs).logits
        with self.left_out():
            hidden = call_model(self.model, **inputs).logits
        self.model.train(was_training)
        return hidden.shape[-1] != whole.shape[-1] and torch.allclose(self(hidden), whole, atol=1e-5, rtol=1e-3)


def _as_it_is(hidden: Tensor) -> Tensor:
    return hidden
