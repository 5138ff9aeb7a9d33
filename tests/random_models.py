"""Models of any family, small and random, saved as a user would give them."""

import string
from pathlib import Path
from typing import Any

import torch

from verl.models.pretrained import quiet_transformers
from verl.models.tiny import character_tokenizer

_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
}
_SOME_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
FAMILIES = {
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.2},
    "gemma2": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {**_LATENT, **_SOME_ROUTED, "topk_method": "greedy"},
    "deepseek_v3": {**_LATENT, **_SOME_ROUTED, "n_group": 2, "topk_group": 1},
    "glm4_moe": {**_SOME_ROUTED, "head_dim": 8},
}


def save_random_model(directory: Path, family: str, dtype: torch.dtype, **options: Any) -> Path:
    """A language model with the character tokenizer; weights wide enough that tokens differ much in probability.

    Args:
        family: `model_type` of transformers; `options` are added to its configuration.
    """
    from transformers import AutoModelForCausalLM

    return _save(AutoModelForCausalLM, character_tokenizer(), directory, family, dtype, options)


def save_random_classifier(
    directory: Path, family: str, tokenizer: Any = None, *, num_labels: int = 1, **options: Any
) -> Path:
    """A sequence-classification model in float32, with the character tokenizer unless another is given."""
    from transformers import AutoModelForSequenceClassification

    tokenizer, options = tokenizer or character_tokenizer(), {"num_labels": num_labels, **options}
    return _save(AutoModelForSequenceClassification, tokenizer, directory, family, torch.float32, options)


def word_tokenizer() -> Any:
    """A BERT tokenizer over pieces of words: [CLS] and [SEP] around a text, segments for the texts of a pair."""
    from transformers import BertTokenizer

    symbols = string.digits + string.ascii_lowercase + string.punctuation
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "what", "is", *symbols, *(f"##{x}" for x in symbols)]
    return BertTokenizer(vocab={piece: index for index, piece in enumerate(pieces)})


def _save(auto_class: Any, tokenizer: Any, directory: Path, family: str, dtype: torch.dtype, options: dict) -> Path:
    from transformers import AutoConfig

    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = AutoConfig.for_model(family, **(settings | FAMILIES.get(family, {}) | options))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto_class.from_config(config, dtype=dtype)
    with quiet_transformers():
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
