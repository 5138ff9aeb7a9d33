"""Heads on a backbone: the critic's value head, a reward model's score, and the LM head apart from its backbone.

With a vocabulary of 150 000, the logits of a batch are by far its largest tensor: the LM head is applied to a few
tokens at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from verl.errors import ConfigError
from verl.models.call import call_model
from verl.models.parallel_info import compute_device, layers_gathered, release_gathered
from verl.models.pretrained import VALUE_HEAD_FILE, quiet_transformers
from verl.ops.masking import last_true


@dataclass(frozen=True)
class ValueHeadOutput:
    """What a critic returns.

    Attributes:
        values: [B S] the value of the text up to and including each position.
    """

    values: Tensor


class ModelHead(nn.Module):
    """A head of our own on a Hugging Face backbone, as everything sees it that shards, saves or loads a model.

    The backbone is saved as the Hugging Face directory that it is, with the head in a file of its own beside it. A
    subclass adds its layers beside `backbone`, and a `forward`; nothing that saves or loads needs to know of it.

    Args:
        backbone: what stands below the head.
    Attributes:
        file: that holds the head.
        loader: method of `ModelSource` that makes the backbone.
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
        """What is named like the tensors of this model, of the backbone by its own names, and of the head."""
        below = {name.removeprefix(_BELOW): x for name, x in tensors.items() if name.startswith(_BELOW)}
        return below, {name: x for name, x in tensors.items() if not name.startswith(_BELOW)}

    def joined(self, backbone: Mapping[str, Any]) -> dict[str, Any]:
        """What is named like the backbone's tensors, by their names in this model."""
        return {_BELOW + name: x for name, x in backbone.items()}

    def files(self, tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
        """What `save` writes, by file name, from the head's tensors made whole."""
        whole = {name: p.detach().cpu().contiguous() for name, p in tensors.items()}
        return {self.file: save({name.removeprefix(_OWN): whole[name] for name in sorted(whole)})}

    def save(self, directory: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Write the head's file.

        Args:
            tensors: of the head made whole, for a model that has only parts of them.
        """
        own = self.split(self.state_dict())[1] if tensors is None else tensors
        for name, data in self.files(own).items():
            (Path(directory) / name).write_bytes(data)

    def load(self, directory: Path) -> None:
        """Take the head from a directory that has its file.

        Raises:
            ConfigError: it is the head of another model.
        """
        saved = load_file(directory / self.file)
        own = [name for name in self.state_dict() if not name.startswith(_BELOW)]
        missing = {name.removeprefix(_OWN) for name in own} ^ saved.keys()
        if missing:
            raise ConfigError(f"{directory / self.file} is the head of another model ({', '.join(sorted(missing))}).")
        self.load_state_dict({name: saved[name.removeprefix(_OWN)] for name in own}, strict=False)

    def save_pretrained(self, directory: Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Write the backbone as a Hugging Face directory and the head beside it.

        Args:
            state_dict: whole weights, for a model that has only parts of them.
        """
        backbone, head = self.split(self.state_dict() if state_dict is None else state_dict)
        with quiet_transformers():
            self.backbone.save_pretrained(directory, state_dict=backbone)
        self.save(directory, head)


class NoHead:
    """What `head_of` says of a model that is a Hugging Face model as a whole: nothing is above its backbone."""

    loader: ClassVar[str] = "load_causal_lm"

    def __init__(self, model: Any):
        self.backbone = model

    def split(self, tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return dict(tensors), {}

    def joined(self, backbone: Mapping[str, Any]) -> dict[str, Any]:
        return dict(backbone)

    def files(self, tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
        return {}

    def save(self, directory: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
        """There is nothing to write."""

    def load(self, directory: Path) -> None:
        """There is nothing to take."""


def head_of(model: Any) -> ModelHead | NoHead:
    """The head of a model that trains: itself, if it is one."""
    return model if isinstance(model, ModelHead) else NoHead(model)


_BELOW, _OWN = "backbone.", "head."  # names in the state of a model; a file of a head leaves the latter out


class ValueHeadModel(ModelHead):
    """A backbone and a linear head that reads one value from each hidden state.

    The head starts at zero, so an untrained critic predicts no reward anywhere and its first advantages are the plain
    returns. It is kept in float32 at least, whatever the backbone's dtype.
    """

    def __init__(self, backbone: Any):
        super().__init__(backbone)
        config = backbone.config.get_text_config()
        dtype = torch.float64 if backbone.dtype == torch.float64 else torch.float32
        device = (
            "cpu" if backbone.device.type == "meta" else backbone.device
        )  # the backbone's weights are still to come
        self.head = nn.Linear(config.hidden_size, 1, device=device, dtype=dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def computes_in_own_type(self) -> tuple[nn.Module, ...]:
        """Values are regressed on in the head's own precision; see `verl.models.parallel_info`."""
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
        """Values of each position, [B S]; `others` are the backbone's own.

        Args:
            probe: give what a fixed random head reads from hidden states of unit size, since an untrained one sees
                nothing of them.
        """
        given = {"attention_mask": attention_mask, "position_ids": position_ids}
        others |= {name: x for name, x in given.items() if x is not None}
        hidden = call_model(self.backbone, input_ids=input_ids, use_cache=False, **others).last_hidden_state
        hidden = hidden.to(self.head.weight.dtype)
        return ValueHeadOutput(values=_probed(hidden) if probe else self.head(hidden).squeeze(-1))


def _probed(hidden: Tensor) -> Tensor:
    """[B S D] to [B S], numbers of about unit size."""
    size = hidden.shape[-1]
    direction = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=hidden.dtype).to(hidden.device)
    return hidden / hidden.square().mean(dim=-1, keepdim=True).sqrt().clamp_min(1e-12) @ direction / size**0.5


@dataclass(frozen=True)
class RewardHeadOutput:
    """What a reward model returns.

    Attributes:
        scores: [B] float32 at least, one for each text.
    """

    scores: Tensor


class RewardHeadModel(nn.Module):
    """A Hugging Face sequence-classification model, whose logit of one label is the score.

    A decoder (a backbone and a linear `score`) is read at the last token that the attention mask shows. Its own forward
    looks for the last token that is no pad token instead, so it would miss an end-of-text token that also pads, and
    would refuse a batch where the configuration names no pad token. Any other model, such as an encoder with a
    classifier on its first token, is asked as it is.

    Args:
        classifier: the model.
        label: which logit; None for a model with one.
        pad_id: fills padding where the configuration of the model names no pad token.
    """

    def __init__(self, classifier: Any, label: int | None = None, pad_id: int = 0):
        super().__init__()
        self.classifier, self.label = classifier, label or 0
        config = classifier.config.get_text_config()
        config.use_cache = False
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = pad_id
        self.pad_id = config.pad_token_id
        own_code = type(classifier).__module__.startswith("transformers.")  # code of others may pool in its own way
        self.reads_last_token = own_code and isinstance(getattr(classifier, "score", None), nn.Linear)
        self._rotary = [m for m in classifier.modules() if "dynamic" in str(getattr(m, "rope_type", ""))]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> RewardHeadOutput:
        """Score B texts, [B S], padded on either side; each has a token at least."""
        for module in self._rotary:
            forget_lengths(module)
        order = attention_mask.long().argsort(dim=1, descending=True, stable=True)  # padding to the right
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
    """Let dynamic rotary frequencies be those of the next texts alone; transformers keeps those of the longest one."""
    for name in [*vars(rotary), *rotary._buffers]:
        if name.endswith("max_seq_len_cached"):
            setattr(rotary, name, rotary.original_max_seq_len)
        elif name.endswith("original_inv_freq"):
            setattr(rotary, name.replace("original_inv_freq", "inv_freq"), getattr(rotary, name))


def label_fault(label: int | None, labels: list[str]) -> str | None:
    """What is wrong with the choice of a label among those of a model; None if nothing is."""
    listed = ", ".join(f"{index} ({name})" for index, name in enumerate(labels))
    if label is None and len(labels) != 1:
        return (
            f"label is null: the model has {len(labels)} labels, {listed}. Set label to the one whose logit is the "
            "score, or give a model with one."
        )
    if label is not None and not 0 <= label < len(labels):
        return f"label is {label}: the labels of the model are {listed}."
    return None


class LMHead:
    """The output head of a causal language model, apart from what comes before it.

    Whether head(hidden states) are the logits is found by trying. Some models cap their logits after it (Gemma 2);
    those are not separable, and their logits have to be made whole. A factor on the logits (Cohere) does no harm: it is
    applied to the hidden states instead, and the head is linear.

    Attributes:
        is_separable: whether head(hidden states) are the model's logits.
    """

    def __init__(self, model: Any):
        self.model = model
        self.head: nn.Module | None = model.get_output_embeddings()
        with layers_gathered(model):
            self.is_separable = self.head is not None and self._is_whole_state()
        release_gathered(model)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [... V] of hidden states [... D]."""
        assert self.head is not None
        return self.head(hidden)

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Within, the model gives hidden states where it would give logits."""
        assert self.head is not None
        before = vars(self.head).get("forward")  # tensor parallelism has one of its own there
        self.head.forward = _as_it_is
        try:
            yield
        finally:
            if before is None:
                del self.head.forward
            else:
                self.head.forward = before

    @torch.no_grad()
    def _is_whole_state(self) -> bool:
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
