"""A reward model: any sequence-classification model as one that reads token ids and returns `scores`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verl.ops.masking import last_true


@dataclass(frozen=True)
class ScoreOutput:
    """What a reward model returns.

    Attributes:
        scores: [B] float32 at least, one for each text.
    """

    scores: Tensor


class ScoreModel(nn.Module):
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

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> ScoreOutput:
        """Score B texts, [B S], padded on either side; each has a token at least."""
        for module in self._rotary:
            _forget_lengths(module)
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
        return ScoreOutput(chosen if chosen.dtype == torch.float64 else chosen.float())


def _forget_lengths(rotary: nn.Module) -> None:
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
