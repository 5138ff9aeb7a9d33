"""Models of several families written as llama.cpp writes them, and read again: they must answer as they did."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from refusals import refused
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from verl.models.pretrained import Pretrained

WORDS = ["<s>", "</s>", *sorted(ByteLevel.alphabet()), "th"]
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 48}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 8192
LINEAR, YARN = ({"rope_type": kind, "rope_theta": 1e6, "factor": 4.0} for kind in ("linear", "yarn"))
YARN["original_max_position_embeddings"] = 1024
GEMMA = {
    "rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "cache"))


def random_model(family: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": len(WORDS), "num_hidden_layers": 2, "max_position_embeddings": 4096}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**sizes, **ids, "initializer_range": 0.3, **settings}), dtype=torch.float32
    )
    for name, weight in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):
            weight.data += 0.1 * torch.randn_like(weight)
    return model.eval()


def alternating(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp has them in its family llama: the two halves of a head alternate."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def tensors_of(model: Any, family: str) -> dict[str, np.ndarray]:
    """Weights by the names of llama.cpp."""
    config, found = model.config, {}
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        weight, layer = tensor.numpy(), name.partition("layers.")[2].partition(".")[0]
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            weight = alternating(weight, config.num_attention_heads if "q_p" in name else config.num_key_value_heads)
        if family == "gemma3" and name.endswith("norm.weight"):
            weight = weight + 1
        if name.endswith("experts.gate_up_proj"):
            halves = np.split(weight, 2, axis=1)
            found |= {f"blk.{layer}.ffn_{x}_exps.weight": half for x, half in zip(("gate", "up"), halves, strict=True)}
        elif name.endswith("experts.down_proj"):
            found[f"blk.{layer}.ffn_down_exps.weight"] = weight
        elif name != "lm_head.weight" or not config.tie_word_embeddings:
            key = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert key is not None, name
            found[key] = weight
    if config.rope_parameters.get("rope_type") == "llama3":
        divided, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        plain = 1 / config.rope_parameters["rope_theta"] ** (torch.arange(len(divided)) / len(divided))
        found["rope_freqs.weight"] = (plain / divided).numpy()
    return found


def written(
    file: Path, model: Any, family: str, without: str = "", rotated: int | None = None, **metadata: float | str | bool
) -> Path:
    """A GGUF file of a model.

    Args:
        without: this tensor.
        rotated: dimensions of a head; as many as it has.
        metadata: further keys below the family's name, `__` for a dot; those of the tokenizer with its name.
    """
    config = model.config
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer = gguf.GGUFWriter(file, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(getattr(config, "head_dim", None) or 16)
    writer.add_rope_dimension_count(rotated or getattr(config, "head_dim", None) or 16)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(WORDS)
    writer.add_token_types([3] * 2 + [1] * (len(WORDS) - 2))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    if rope["rope_type"] in ("linear", "yarn"):
        metadata |= {"rope__scaling__type": rope["rope_type"], "rope__scaling__factor": 4.0}
        metadata |= {"rope__scaling__original_context_length": 1024} if rope["rope_type"] == "yarn" else {}
    if hasattr(config, "num_experts"):
        metadata |= {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 48}
    if getattr(config, "sliding_window", None):
        metadata["attention__sliding_window"] = config.sliding_window
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in metadata.items():
        name = key.replace("__", ".")
        adders[type(value)](name if name.startswith("tokenizer.") else f"{family}.{name}", value)
    for name, weight in tensors_of(model, family).items():
        if name != without:
            writer.add_tensor(name, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.first_rows(2)
@pytest.mark.parametrize(
    ("family", "model_type", "settings"),
    [
        ("llama", "llama", {"head_dim": 32, "attention_bias": True, "rope_parameters": LLAMA3}),
        ("llama", "llama", {"tie_word_embeddings": True, "rope_parameters": LINEAR}),
        ("qwen2", "qwen2", {"rope_parameters": YARN}),
        ("qwen3", "qwen3", {"head_dim": 32}),
        ("qwen3moe", "qwen3_moe", {"head_dim": 32, **MOE}),
        ("gemma3", "gemma3_text", {"num_hidden_layers": 6, "head_dim": 32, "sliding_window": 64, **GEMMA}),
    ],
    ids=["llama3", "linear", "yarn", "qwen3", "moe", "gemma3"],
)  # fmt: skip
def test_a_file_answers_as_its_model(family: str, model_type: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = random_model(model_type, **settings)
    source = Pretrained(path=str(written(tmp_path / "model.gguf", model, family)))
    assert [*source.faults()] == []
    ids = torch.randint(2, len(WORDS), (1, 300))
    with torch.no_grad():
        assert torch.equal(source.load_causal_lm("cpu").eval()(ids).logits, model(ids).logits)


@pytest.mark.parametrize(("metadata", "starts"), [({"tokenizer__ggml__add_bos_token": True}, True), ({}, False)])
def test_a_text_begins_with_the_start_token_where_the_file_says_so(
    metadata: dict[str, Any], starts: bool, tmp_path: Path
) -> None:
    file = written(tmp_path / "model.gguf", random_model("llama"), "llama", **metadata)
    assert (Pretrained(path=str(file)).load_tokenizer()("hat").input_ids[0] == 0) is starts


def loaded(tmp_path: Path, *, rope: dict[str, Any] | None = None, **options: Any) -> Any:
    model = random_model("llama", **({} if rope is None else {"rope_parameters": rope}))
    file = written(tmp_path / "m.gguf", model, "llama", **options)
    return Pretrained(path=str(file)).load_causal_lm("cpu")


test_a_file_that_would_be_read_as_another_model_is_refused = refused(
    ("path", "model.layers.1.mlp.up_proj.weight", lambda tmp_path: loaded(tmp_path, without="blk.1.ffn_up.weight")),
    ("path", "attn_factor", lambda tmp_path: loaded(tmp_path, rope=YARN, rope__scaling__attn_factor=1.3)),
    ("path", "rope_freqs", lambda tmp_path: loaded(tmp_path, rope={**LLAMA3, "high_freq_factor": 2.0})),
    ("path", "size mismatch", lambda tmp_path: loaded(tmp_path, feed_forward_length=80)),
    ("path", "8 dimensions", lambda tmp_path: loaded(tmp_path, rotated=8)),
    varies=True,
)  # fmt: skip
