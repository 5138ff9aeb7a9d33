"""Execution paths that are possible for the families of causal language models in transformers."""

from __future__ import annotations

import difflib
import time
from dataclasses import dataclass
from typing import Any

import torch

from verl.errors import ConfigError
from verl.model_paths.check import examine
from verl.model_paths.paths import PathFinding
from verl.model_paths.twin import crossed_lengths
from verl.models.pretrained import quiet_transformers

EVERY_LENGTH = 10**9  # rows of so many tokens cross whatever a configuration has
# Beside the default configuration of a family: what transformers needs to build it, or the layers that make it a hybrid
SETTINGS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "big_bird": {"is_decoder": True, "attention_type": "original_full"},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [22, 22, 20]}
        }
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "mamba", "mamba", "attention"] * 8},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 4},
    "lfm2": {"layer_types": ["conv", "conv", "conv", "full_attention"] * 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "conv", "full_attention"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp_text": {
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
        "indexer_head_dim": 256,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 16,
    },
    "reformer": {"is_decoder": True},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
}


@dataclass(frozen=True)
class FamilyStatus:
    """Result for a family in its default configuration.

    Attributes:
        family: `model_type` of transformers.
        model: its class; empty where transformers cannot build one.
        finding: for rows of up to `tokens`; None where there is no model.
        tokens: None for rows of any length.
        longer: why longer rows are refused; None where they are not.
        fault: why transformers cannot build it.
        seconds: that finding out took.
    """

    family: str
    model: str = ""
    finding: PathFinding | None = None
    tokens: int | None = None
    longer: str | None = None
    fault: str | None = None
    seconds: float = 0.0


def families() -> list[str]:
    """`model_type` of every family of causal language models of the installed transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def default_model(family: str) -> Any:
    """A model of a family in its default configuration and `SETTINGS`, without weights.

    Raises:
        Exception: whatever transformers has against it.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    with quiet_transformers(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SETTINGS.get(family, {})))


def examine_family(family: str) -> FamilyStatus:
    """Try every way of running the default model of a family; nothing is read from the cache, nor kept there.

    Raises:
        ConfigError: transformers has no such family.
    """
    if family not in (known := families()):
        near = difflib.get_close_matches(family, known, n=3)
        raise ConfigError(
            f"family is {family!r}: transformers has no causal language model of this model_type."
            + (f" Did you mean {' or '.join(near)}?" if near else "")
        )
    start = time.perf_counter()
    try:
        model = default_model(family)
    except Exception as error:  # noqa: BLE001 - whatever transformers has against it
        return FamilyStatus(family, fault=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    finding, tokens, longer = examine(model, EVERY_LENGTH), None, None
    crossed = crossed_lengths(model.config, EVERY_LENGTH)
    if finding.refusal is not None and crossed:
        shorter = examine(model, crossed[0])
        if shorter.refusal is None:
            finding, tokens, longer = shorter, crossed[0], finding.refusal
    seconds = time.perf_counter() - start
    return FamilyStatus(family, type(model).__name__, finding, tokens, longer, seconds=seconds)
