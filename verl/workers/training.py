"""What actor and critic have in common: a model that trains, its optimizer, its cut into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from verl.description import Description
from verl.dispatch import on_all
from verl.engines.engine import Packs, TrainingEngine
from verl.engines.optim import AdamW
from verl.engines.sharding import Parallel
from verl.errors import ConfigError
from verl.models.lora import LoRA
from verl.models.precision import Autocast
from verl.models.pretrained import quiet_transformers
from verl.models.saved_form import SavedForm, load_adapter, saved_form, tokenizer_files
from verl.models.source import ModelSource
from verl.workers.reload import Reload, load_optimizer, load_weights
from verl.workers.state import Restore, RoleState


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

    def load(self, kind: Literal["causal_lm", "backbone"], device: str, restore: Restore | None, component: str) -> Any:
        """The model, from where the role starts or from a checkpoint, with its adapter if it trains one."""
        source = self.model if restore is None or self.lora is not None else restore.model(self.model, component)
        model = getattr(source, f"load_{kind}")(device)
        if self.lora is None:
            return model
        model = self.lora.apply(model, causal_lm=kind == "causal_lm")
        if restore is not None:
            load_adapter(model, restore.adapter(component))
        return model

    def engine(self, model: nn.Module, parallel: Parallel, total_updates: int) -> TrainingEngine:
        """The engine that trains `model` as this role says."""
        if self.gradient_checkpointing:
            enable: Any = model.gradient_checkpointing_enable
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return TrainingEngine(
            model, parallel, self.micro_batch_tokens, self.optimizer, total_updates, self.autocast, self.packing
        )


class TrainedWorker:
    """Base of the running roles that train.

    Attributes:
        engine: that trains the model.
        tokenizer: saved beside the weights.
    """

    def __init__(self, engine: TrainingEngine, tokenizer: Any):
        self.engine, self.tokenizer = engine, tokenizer
        self._tokenizer_files: dict[str, bytes] | None = None

    @on_all
    def save(self, directory: Path) -> None:
        """Write a Hugging Face directory (with LoRA: a peft adapter directory) with the tokenizer; rank 0 writes."""
        if self.engine.parallel.rank == 0:
            model: Any = self.engine.model
            with quiet_transformers():
                model.save_pretrained(directory)
            self.tokenizer.save_pretrained(directory)

    @on_all
    def load(self, component: str, source: Reload) -> None:
        """Take weights, optimizer or both from a checkpoint into the live tensors, which stay where they are.

        Raises:
            ConfigError: it holds another model, or each process has only parts of the weights.
        """
        if getattr(self.engine.parallel, "divides_weights", False):
            raise ConfigError(
                "sharding divides the weights over processes, and a checkpoint is loaded into a running trainer only "
                "where each process holds all of them. Start another run with resume=PATH."
            )
        if source.weights:
            load_weights(self.engine.model, component, source)
        if source.optimizer:
            load_optimizer(self.engine, component, source)

    @on_all
    def state(self, copied: bool) -> RoleState | None:
        """What a checkpoint holds of this role, on rank 0; None on the others, which hold the same.

        Args:
            copied: give copies in main memory, to be sent to another process, instead of the live tensors.
        """
        if self.engine.parallel.rank != 0:
            return None
        if self._tokenizer_files is None:
            self._tokenizer_files = tokenizer_files(self.tokenizer)
        form, optimizer = saved_form(self.engine.model), self.engine.optimizer_tensors()
        if copied:
            form = SavedForm(_in_main_memory(form.tensors), form.file, form.files)
            optimizer = _in_main_memory(optimizer)
        return RoleState(form, optimizer, self.engine.updates, self._tokenizer_files)


def _in_main_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
