"""A causal language model without its output head, so that logits can be made a few tokens at a time.

With a vocabulary of 150 000, the logits of a batch are by far its largest tensor, and their gradient another one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from verl.models.call import call_model


class OutputHead:
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
        self.is_separable = self.head is not None and self._is_all_there_is()

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
    def _is_all_there_is(self) -> bool:
        tokens = torch.arange(4, device=next(self.model.parameters()).device).unsqueeze(0)
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
