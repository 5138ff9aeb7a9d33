"""The Trainer of transformers as a way to save: it trains a tiny Llama, and goes on with `resume_from_checkpoint`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from peers.training import LAST, Gate, Resumed, digests, random_states
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class _Reached(Exception):
    """A resumed training stands before its first step."""


class _Gates(TrainerCallback):
    """Opens the gate."""

    def __init__(self, gate: Gate):
        self.gate = gate

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == LAST:
            self.gate.before_last()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.gate.after(state.global_step)


class _Looks(TrainerCallback):
    """Stops before the first step and notes with what it would have gone on."""

    def __init__(self) -> None:
        self.found: Resumed | None = None

    def on_step_begin(
        self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, lr_scheduler: Any, **kwargs: Any
    ) -> None:
        parts = {
            "step": state.global_step,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": lr_scheduler.state_dict(),
            "rng": random_states(),
        }
        self.found = Resumed(state.global_step, digests(parts))
        raise _Reached


class HuggingFaceTrainer:
    """`transformers.Trainer` with a save after every step."""

    def __init__(self, keep: int | None = None):
        self.keep = keep
        self.name = "transformers.Trainer" + (f", {keep} kept" if keep else "")
        self.how = "`Trainer.train()` with `save_steps=1`, `Trainer.train(resume_from_checkpoint=True)`"

    def train(self, root: Path, gate: Gate) -> None:
        self._trainer(root, _Gates(gate)).train()

    def resume(self, root: Path) -> Resumed | None:
        if get_last_checkpoint(str(root)) is None:
            return None
        looks = _Looks()
        with contextlib.suppress(_Reached):
            self._trainer(root, looks).train(resume_from_checkpoint=True)
        assert looks.found is not None, "a resumed training has a step left"
        return looks.found

    def _trainer(self, root: Path, callback: TrainerCallback) -> Trainer:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=16,
        )  # fmt: skip
        tokens = torch.arange(16 * 8).reshape(16, 8) % 31
        args = TrainingArguments(
            output_dir=str(root), max_steps=LAST + 1, save_strategy="steps", save_steps=1, save_total_limit=self.keep,
            per_device_train_batch_size=2, learning_rate=1e-2, logging_strategy="no", report_to=[], disable_tqdm=True,
            use_cpu=True, dataloader_pin_memory=False,
        )  # fmt: skip
        data: Any = [{"input_ids": row, "labels": row} for row in tokens]
        return Trainer(LlamaForCausalLM(config), args, train_dataset=data, callbacks=[callback])
