"""The embedded model: a two-layer Qwen2 over characters, small enough to learn on a laptop's processor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.models.source import ModelSource, without_dropout
from verl.models.tiny_tokenizer import character_tokenizer
from verl.utils.seeding import derive_seed

INITIALIZER_RANGE = 0.06  # std of the first weights: with the usual 0.02 a net this narrow learns far more slowly


@dataclass(frozen=True, kw_only=True)
class TinyModel(ModelSource):
    """A randomly initialised Qwen2 with untied embeddings and a character tokenizer.

    Args:
        hidden_size, intermediate_size: widths.
        num_layers, num_heads: depth, and attention heads (each with its own keys and values).
        context_length: in tokens.
        seed: of the initial weights.
    """

    hidden_size: int = 128
    intermediate_size: int = 512
    num_layers: int = 2
    num_heads: int = 4
    context_length: int = 64
    seed: int = 0

    def faults(self) -> Iterator[str]:
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "context_length"):
            if getattr(self, name) < 1:
                yield f"{name} is {getattr(self, name)}: must be at least 1."
        if self.num_heads > 0 and self.hidden_size % self.num_heads:
            yield f"num_heads is {self.num_heads}: must divide hidden_size {self.hidden_size}."

    def load_causal_lm(self, device: str) -> Any:
        from transformers import AutoModelForCausalLM

        return self._make(AutoModelForCausalLM, device)

    def load_backbone(self, device: str) -> Any:
        return self.load_causal_lm(device).base_model

    def load_tokenizer(self) -> Any:
        tokenizer = character_tokenizer()
        tokenizer.model_max_length = self.context_length
        return tokenizer

    def max_positions(self) -> int | None:
        return self.context_length

    def attention_heads(self) -> tuple[int, int]:
        return self.num_heads, self.num_heads

    def load_config(self) -> Any:
        from transformers import Qwen2Config

        tokenizer = character_tokenizer()
        return Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_heads,
            max_position_embeddings=self.context_length,
            initializer_range=INITIALIZER_RANGE,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )

    def _make(self, auto_class: Any, device: str) -> Any:
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(self.seed, "tiny model"))
            model = auto_class.from_config(self.load_config(), dtype=torch.float32)
        return without_dropout(model).to(device=device, dtype=getattr(torch, self.dtype)).eval()
