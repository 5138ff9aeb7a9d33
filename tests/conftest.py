"""Models small enough to run in milliseconds, in directories as a user would give them, and prompts for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from verl.models.pretrained import Pretrained, quiet_transformers
from verl.models.tiny_tokenizer import character_tokenizer
from verl.protocol import DataProto

FAMILIES = {
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.2},
    "gemma2": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gptj": {"rotary_dim": 4},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


@pytest.fixture(autouse=True)
def torch_state() -> Iterator[None]:
    """What a test sets in torch's global state ends with the test."""
    is_deterministic, is_warning = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        yield
    torch.use_deterministic_algorithms(is_deterministic, warn_only=is_warning)
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tokenizer():
    """The character tokenizer."""
    return character_tokenizer()


@pytest.fixture(scope="session")
def dir64(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random float64 Starcoder2, hidden 32, two layers, context 64, with the character tokenizer.

    Its layer norms stay in float64. The RMS norms of Llama, Qwen and most others pass through float32, where a last
    bit that differs by the shape of a batch can grow to 1e-8.
    """
    return save_random_model(tmp_path_factory.mktemp("models") / "float64", "starcoder2", torch.float64)


@pytest.fixture(scope="session")
def dir32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random float32 Qwen2 of the same size."""
    return save_random_model(tmp_path_factory.mktemp("models") / "float32", "qwen2", torch.float32)


@pytest.fixture(scope="session")
def model64(dir64: Path) -> Pretrained:
    """The description of the float64 model."""
    return Pretrained(path=str(dir64), dtype="float64")


@pytest.fixture(scope="session")
def model32(dir32: Path) -> Pretrained:
    """The description of the float32 model."""
    return Pretrained(path=str(dir32))


@pytest.fixture(scope="session")
def prompts(tokenizer) -> Callable[..., DataProto]:
    """Make a batch of prompts [b P] from texts, with prompt and group numbers, as the loop hands it to the actor."""

    def make(*texts: str, ids: list[int] | None = None, groups: list[int] | None = None) -> DataProto:
        texts = texts or ("1+2=", "34+5=", "what is 6*7? ", "9-")
        encoded = tokenizer(list(texts), padding=True, return_tensors="pt")
        numbers = list(range(len(texts)))
        return DataProto.from_dict(
            {
                "prompts": encoded["input_ids"],
                "prompt_mask": encoded["attention_mask"].bool(),
                "prompt_ids": torch.tensor(numbers if ids is None else ids),
                "group_ids": torch.tensor(numbers if groups is None else groups),
            }
        )

    return make


def save_random_model(directory: Path, family: str, dtype: torch.dtype, **options: Any) -> Path:
    """A model with the character tokenizer; weights wide enough that tokens differ much in probability.

    Args:
        family: `model_type` of transformers; `options` are added to its configuration.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = character_tokenizer()
    config = AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **FAMILIES.get(family, {}),
        **options,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with quiet_transformers():
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
