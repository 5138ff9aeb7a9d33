"""Shapes of real models, without weights, and GPUs in numbers."""

from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from verl.utils.memory import DeviceMemory

GIB = 1 << 30
H100 = DeviceMemory(total=int(79.1 * GIB), free=int(78.5 * GIB))


def llama_8b() -> Any:
    """Configuration of Llama 3.1 8B."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )


def save_llama_8b(directory: Path) -> Path:
    """A directory with its configuration alone."""
    llama_8b().save_pretrained(directory)
    return directory


def beside(trainer_gib: float) -> DeviceMemory:
    """An H100 of which a trainer has so much."""
    taken = int(trainer_gib * GIB)
    return DeviceMemory(H100.total, H100.free - taken, own=taken)
