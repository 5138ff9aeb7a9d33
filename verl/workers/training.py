"""What actor and critic have in common: a model that trains, its optimizer, its cut into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from verl.description import Description
from verl.engines.engine import Packs, TrainingEngine
from verl.engines.optim import AdamW
from verl.engines.sharding import Parallel
from verl.models.lora import LoRA
from verl.models.precision import Autocast
from verl.models.source import ModelSource


@dataclass(frozen=True, kw_only=True)
class TrainedRole(Description):
    """A role whose weights are updated.

    Args:
        model: where it starts from.
        lora: train a low-rank adapter and leave the model frozen; null trains all weights.
        optimizer: and the schedule of its learning rate.
        micro_batch_tokens: tokens of one forward and backward pass, padding included. Bounds memory; changes no
            result but by rounding.
        autocast: `bfloat16` computes in it, forward and backward, generation included, while weights, gradients and
            optimizer state stay in `model.dtype`; null computes in that.
        packing: `auto` runs rows as one line of tokens, a prompt shared by several of them once, where the model can
            and it leaves clearly fewer tokens; `off` pads. Changes no result but by rounding.
        gradient_checkpointing: recompute activations in the backward pass: less memory, about a third more time.
    """

    model: ModelSource
    optimizer: AdamW
    lora: LoRA | None = None
    micro_batch_tokens: int = 16384
    autocast: Autocast = None
    packing: Packs = "auto"
    gradient_checkpointing: bool = False

    def faults(self) -> Iterator[str]:
        if self.micro_batch_tokens < 1:
            yield f"micro_batch_tokens is {self.micro_batch_tokens}: must be at least 1."
        if self.lora is None and self.model.dtype in ("bfloat16", "float16"):
            yield (
                f"model.dtype is {self.model.dtype}: training all weights in it silently loses updates that are small "
                "beside their weight. Set model.dtype=float32 and autocast=bfloat16, or train a lora adapter."
            )

    def engine(self, model: nn.Module, parallel: Parallel, total_updates: int) -> TrainingEngine:
        """The engine that trains `model` as this role says."""
        if self.gradient_checkpointing:
            enable: Any = model.gradient_checkpointing_enable
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return TrainingEngine(
            model, parallel, self.micro_batch_tokens, self.optimizer, total_updates, self.autocast, self.packing
        )
