"""Every family of causal language models of the installed transformers, small and random, as a user would give it.

Windows, chunks and scalings lie at 24 tokens and beyond, so that rows of some hundred tokens cross them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from roles import start_actor

from verl.errors import ConfigError
from verl.model_paths.twin import make_twin
from verl.models.pretrained import Pretrained, quiet_transformers
from verl.models.tiny_tokenizer import character_tokenizer
from verl.protocol import DataProto
from verl.rollout.base import Request
from verl.rollout.hf import HFRollout

PROMPT_TOKENS, NEW_TOKENS, SAMPLES = (5, 30, 75, 90, 20), 24, 3
EVERY_LENGTH = 10**9  # rows of so many tokens cross whatever a configuration has
# Settings without which a model of the family cannot be made, or has no attention at all
NEEDED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 3},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 8},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "llama": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "phi3": {
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + i / 40 for i in range(48)],
            "long_factor": [2.0 + i for i in range(48)],
            "original_max_position_embeddings": 4096,
        },
    },
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2},
    "phimoe": {"sliding_window": 2047},
    "reformer": {"is_decoder": True},
    "recurrent_gemma": {"num_hidden_layers": 3},
}


def families() -> list[str]:
    """`model_type` of every one."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def save_family(directory: Path, family: str) -> Path:
    """A small model of a family with the character tokenizer.

    Raises:
        Exception: transformers itself cannot make it.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[family](**NEEDED.get(family, {}))
    with quiet_transformers():
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(config)
        small = make_twin(whole, EVERY_LENGTH).model
        tokenizer = character_tokenizer()
        text = small.config.get_text_config()
        text.eos_token_id, text.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        small.generation_config.eos_token_id = tokenizer.eos_token_id
        small.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


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


def largest_gaps(actor: Any) -> dict[str, float]:
    """Of sampling and of training from a plain forward pass of each row alone, in nats, over every token."""
    rows = actor.generate(prompts(), Request(0, SAMPLES))
    rows = rows.union(actor.compute_log_probs(rows))
    worst = dict.fromkeys(("rollout_log_probs", "old_log_probs"), 0.0)
    for row in range(len(rows)):
        mask = rows["attention_mask"][row].bool()
        ids, width = rows["input_ids"][row][mask], int(rows["prompt_mask"][row].sum())
        with torch.no_grad():
            logits = actor.model(input_ids=ids[None], use_cache=False).logits[0, width - 1 : -1].double()
        plain = logits.log_softmax(-1).gather(-1, ids[width:, None])[:, 0]
        for name in worst:
            found = rows[name][row][rows["response_mask"][row]].double()
            worst[name] = max(worst[name], float((found - plain).abs().max()))
    return worst
