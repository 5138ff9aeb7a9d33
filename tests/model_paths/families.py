"""Every family of causal language models of transformers, small and random, as a user would give it.

`configs.json` has a configuration of each: one layer of each kind, windows, chunks and scalings at 24 tokens and
beyond, so that rows of some hundred tokens cross them, and a context that no row leaves.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from roles import plain_log_probs, start_actor

from verl.errors import ConfigError
from verl.model_paths.families import family_table
from verl.models.pretrained import Pretrained, quiet_transformers
from verl.models.tiny import character_tokenizer
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout

FAST = family_table().paths[family_table().families["qwen2"][0].paths]
PROMPT_TOKENS, NEW_TOKENS, SAMPLES = (5, 30, 75, 90, 20), 24, 3
CONFIGS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("configs.json").read_text())
QUERY_OR_KEY = re.compile(r"(q_|k_|query|key|qkv|c_attn|Wqkv|in_proj_qkvz|kv_a|kv_b)")
STATE = re.compile(r"(conv|A_log|_log|dt_|time_)")  # parameters whose own initial values mean something
WIDTHS = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
SPARSE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
SLIDING = ["full_attention", "sliding_attention", "sliding_attention"]
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
BYTES = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
}
GEMMA4 = {
    **WIDTHS,
    "num_hidden_layers": 4,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 128,
    "num_kv_shared_layers": 2,
}
QWEN4 = {
    **WIDTHS,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "indexer_budget": 32,
    "indexer_compress_ratio": 4,
    "indexer_head_dim": 16,
    "indexer_kv_heads": 1,
    "indexer_n_heads": 4,
    "hc_lowrank": 16,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 200,
    "split_ngram_parts": 4,
    "ple_embed_dim": 64,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def _longrope(original: int) -> dict[str, Any]:
    """Phi-3 with other rotary frequencies in rows of more than `original` tokens."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
        "original_max_position_embeddings": original,
    }
    return {**WIDTHS, "pad_token_id": 0, "original_max_position_embeddings": original, "rope_parameters": rope}


# Of a few families the default configuration cannot be made small, and some are tried with settings beside it: name ->
# family and its whole configuration
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "recurrent_gemma": ("recurrent_gemma", {**WIDTHS, "attention_window_size": 20, "lru_width": 64}),
    "xlstm": (
        "xlstm",
        {
            "vocab_size": 128,
            "hidden_size": 64,
            "num_heads": 4,
            "num_blocks": 2,
            "num_hidden_layers": 2,
            "qk_dim_factor": 1.0,
            "chunk_size": 16,
        },
    ),
    "big_bird": ("big_bird", {**WIDTHS, "is_decoder": True, "attention_type": "original_full"}),
    "reformer": (
        "reformer",
        {
            "vocab_size": 128,
            "is_decoder": True,
            "hidden_size": 64,
            "attention_head_size": 16,
            "num_attention_heads": 4,
            "axial_pos_shape": [16, 32],
            "axial_pos_embds_dim": [16, 48],
            "feed_forward_size": 64,
            "max_position_embeddings": 512,
            "attn_layers": ["local", "local"],
            "local_attn_chunk_length": 16,
        },
    ),
    "dbrx": (
        "dbrx",
        {
            "vocab_size": 128,
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 512,
            "initializer_range": 0.2,
            "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        },
    ),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {**WIDTHS, **SPARSE, "sliding_window": 20, "v_head_dim": 8, "n_routed_experts": 4, "layer_types": SLIDING},
    ),
    "dots1": (
        "dots1",
        {
            **WIDTHS,
            **SPARSE,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "sliding_window": 20,
            "layer_types": SLIDING,
        },
    ),
    "gemma4_text": ("gemma4_text", GEMMA4),
    "gemma4_unified_text": ("gemma4_unified_text", GEMMA4),
    "gemma4": ("gemma4", {"text_config": GEMMA4, "vision_config": None, "audio_config": None}),
    "gemma4_unified": ("gemma4_unified", {"text_config": GEMMA4, "vision_config": None, "audio_config": None}),
    "xmod": ("xmod", {**WIDTHS, "is_decoder": True, "languages": ["en_XX"], "default_language": "en_XX"}),
    "qwen4_exp_text": ("qwen4_exp_text", QWEN4),
    "qwen4_exp": ("qwen4_exp", {"text_config": QWEN4}),
    "cohere_compass_text": (
        "cohere_compass_text",
        {
            **WIDTHS,
            "sliding_window": 20,
            "layer_types": SLIDING,
            "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE},
        },
    ),
    "blt": (
        "blt",
        {
            "vocab_size": 260,
            "max_position_embeddings": 512,
            "encoder_hash_byte_group_vocab": 64,
            "patcher_config": BYTES,
            "encoder_config": {**BYTES, "hidden_size_global": 64},
            "decoder_config": {**BYTES, "hidden_size_global": 64},
            "global_config": {**WIDTHS, "num_hidden_layers": 2},
        },
    ),
    "gpt_oss sparse": ("gpt_oss", {**WIDTHS, "sliding_window": 20, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama dynamic": (
        "llama",
        {**WIDTHS, "max_position_embeddings": 40, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}},
    ),
    "phi3 longrope": ("phi3", _longrope(40)),
    "phi3 longrope, short rows": ("phi3", _longrope(256)),
    "mistral window": ("mistral", {**WIDTHS, "sliding_window": 20}),
    "qwen3 window": ("qwen3", {**WIDTHS, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "falcon alibi": (
        "falcon",
        {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
    ),
    **{
        f"{family} decoder": (family, {**WIDTHS, "is_decoder": True, "bos_token_id": 1})
        for family in (
            *("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert"),
            *("roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl"),
        )
    },
}


def families() -> list[str]:
    """`model_type` of every family of causal language models of the installed transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def names() -> list[str]:
    """Of all models that can be made here: one of each family, and some with other settings."""
    return sorted({*families(), *SMALL})


def save_family(directory: Path, name: str) -> Path:
    """A small model with the character tokenizer.

    Raises:
        Exception: transformers itself cannot make it.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    tokenizer = character_tokenizer()
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        family, settings = SMALL[name] if name in SMALL else _small_config(name)
        small = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**settings))
        if name not in SMALL:
            sharpen(small)
        text = small.config.get_text_config()
        text.eos_token_id, text.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        small.generation_config.eos_token_id = tokenizer.eos_token_id
        small.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _small_config(name: str) -> tuple[str, dict[str, Any]]:
    settings = CONFIGS.get(name, {})
    family = str(settings.get("model_type", name))
    return family, {key: value for key, value in settings.items() if key != "model_type"}


@torch.no_grad()
def sharpen(model: Any) -> None:
    """Random weights of the size at which tokens and positions matter, so that a fault of attention shows."""
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    head = None if output is None else getattr(output, "weight", None)
    for name, parameter in model.named_parameters():
        if STATE.search(name) or not parameter.is_floating_point():
            continue
        if parameter is head:
            parameter.normal_(0.0, 2.0 * parameter.shape[-1] ** -0.5)
        elif parameter.ndim >= 2:
            fan_in = 1 if "embed" in name or "wte" in name or "wpe" in name else parameter.shape[-1]
            parameter.normal_(0.0, (2.0 if QUERY_OR_KEY.search(name) else 1.0) * fan_in**-0.5)
        elif name.endswith("bias"):
            parameter.normal_(0.0, 0.1)


def prompts() -> DataProto:
    """Prompts of many lengths, padded on the left."""
    width, generator = max(PROMPT_TOKENS), torch.Generator().manual_seed(0)
    mask = torch.arange(width) >= width - torch.tensor(PROMPT_TOKENS)[:, None]
    tokens = torch.randint(20, 100, mask.shape, generator=generator)
    numbers = torch.arange(len(PROMPT_TOKENS))
    made = {"prompts": tokens * mask, "prompt_mask": mask, "prompt_ids": numbers, "group_ids": numbers}
    return DataProto.from_dict(made)


def start_family(path: Path) -> Any:
    """The actor; with eager attention where transformers has no other for the family."""
    rollout = HFRollout(max_new_tokens=NEW_TOKENS)
    try:
        return start_actor(Pretrained(path=str(path)), rollout, micro_batch_tokens=700)
    except ConfigError as error:
        if "attention=eager" not in str(error):
            raise
        return start_actor(Pretrained(path=str(path), attention="eager"), rollout, micro_batch_tokens=700)


def plain_model(path: Path, attention: str) -> Any:
    """The model as transformers loads it; nothing of ours has touched it."""
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention)
    return model.eval()


def largest_gaps(actor: Any, path: Path) -> dict[str, float]:
    """Of sampling and of training from plain forward passes, in nats, over every token of every row."""
    rows = actor.generate(prompts(), GenerationRequest(0, SAMPLES))
    rows = rows.union(actor.compute_log_probs(rows))
    is_eager = actor.model.config._attn_implementation == "eager"
    model = plain_model(path, "eager" if is_eager else "sdpa")
    worst = dict.fromkeys(("rollout_log_probs", "old_log_probs"), 0.0)
    for row in range(len(rows)):
        plain = plain_log_probs(model, rows, row)
        for name in worst:
            found = rows[name][row][rows["response_mask"][row]].double()
            worst[name] = max(worst[name], float((found - plain).abs().max()))
    return worst
