"""Small random image-text models of several families, as directories that a user would give, and images for them."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model_paths.families import WIDTHS, sharpen
from PIL import Image

from verl.models.pretrained import quiet_transformers
from verl.models.tiny import character_tokenizer

# Family -> placeholder in a rendered chat; tokens around the features
PLACEHOLDERS = {
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_5": "<|vision_start|><|image_pad|><|vision_end|>",
    "idefics3": "<image>",
    "smolvlm": "<image>",
    "gemma3": "<start_of_image>",
}
FAMILIES = tuple(PLACEHOLDERS)
QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IDEFICS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
IDEFICS += tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))
GEMMA = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GRIDS = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "depth": 2, "num_heads": 2}
GRIDS |= {"hidden_size": 32, "intermediate_size": 32, "initializer_range": 0.2}
TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TOWER |= {"patch_size": 4, "initializer_range": 0.2}
TEXT = {**WIDTHS, "vocab_size": 136}
CHAT = (
    "{% for message in messages %}<{{ message['role'] }}>{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}PLACE{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def image_tokenizer(family: str) -> Any:
    """The character tokenizer with the special tokens of a family."""
    tokenizer: Any = character_tokenizer()
    special = QWEN if "qwen" in family else GEMMA if "gemma" in family else IDEFICS
    tokenizer.add_tokens(list(special), special_tokens=True)
    tokenizer.chat_template = CHAT.replace("PLACE", PLACEHOLDERS[family])
    if family == "gemma3":
        named = {"image_token": GEMMA[0], "boi_token": GEMMA[1], "eoi_token": GEMMA[2]}
        tokenizer._set_model_specific_special_tokens(special_tokens=named)
    return tokenizer


def _config(family: str, number: Any, head_size: int) -> dict[str, Any]:
    """Arguments of the configuration of a family; `number` maps a special token to its id."""
    width = head_size * TEXT["num_attention_heads"]
    sizes = {**TEXT, "hidden_size": width, "head_dim": head_size}
    if "qwen" in family:
        ids = {"image_token_id": number(QWEN[2]), "video_token_id": number(QWEN[3])}
        ids |= {"vision_start_token_id": number(QWEN[0]), "vision_end_token_id": number(QWEN[1])}
        rope = {**ROPE, "mrope_section": [head_size // 4, head_size // 8, head_size // 8]}
        text = {**sizes, "rope_parameters": {**rope, "mrope_interleaved": True}}
        grids = {**GRIDS, "out_hidden_size": width}
        vision: dict[str, Any] = {**grids, "deepstack_visual_indexes": [0], "num_position_embeddings": 64}
        if family == "qwen2_5_vl":
            text, vision = {**sizes, "rope_parameters": rope}, {**grids, "window_size": 16}
            vision["fullatt_block_indexes"] = [1]
        if family == "qwen3_5":
            layers = ["linear_attention", "full_attention", "linear_attention"]
            text |= {"layer_types": layers, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
            text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
            vision["deepstack_visual_indexes"] = []
            parts = [head_size // 8, head_size // 16, head_size // 16]
            text["rope_parameters"] |= {"mrope_section": parts, "partial_rotary_factor": 0.5}
        return {**ids, "text_config": text, "vision_config": vision}
    if family == "gemma3":
        text = {**sizes, "sliding_window": 20, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
        ids = {"image_token_id": number(GEMMA[0]), "boi_token_index": number(GEMMA[1])}
        ids |= {"eoi_token_index": number(GEMMA[2]), "mm_tokens_per_image": 4}
        return {**ids, "text_config": text, "vision_config": {**TOWER, "image_size": 16}}
    text = {**sizes, "model_type": "llama", "pad_token_id": 0}
    scale = {"scale_factor": 2, "image_token_id": number(IDEFICS[0]), "pad_token_id": 0}
    return {**scale, "text_config": text, "vision_config": {**TOWER, "image_size": 16}}


def image_processor(family: str) -> tuple[str, Any, dict[str, Any]]:
    """The class of the processor of a family, a small image processor, and the other arguments of the processor."""
    sizes: Any
    if "qwen" in family:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 64, "max_pixels": 1024}
        name = "Qwen2_5_VLProcessor" if family == "qwen2_5_vl" else "Qwen3VLProcessor"
        return name, Qwen2VLImageProcessorPil(**sizes), {}
    if family == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        square: Any = {"height": 16, "width": 16}
        return "Gemma3Processor", Gemma3ImageProcessorPil(size=square), {"image_seq_length": 4}
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    sizes = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    return "Idefics3Processor", Idefics3ImageProcessorPil(**sizes), {"image_seq_len": 4}


def save_image_model(directory: Path, family: str, head_size: int = 16) -> Path:
    """A small random model of a family with its tokenizer and its processor."""
    import json

    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    tokenizer = image_tokenizer(family)
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = CONFIG_MAPPING[family](**_config(family, tokenizer.convert_tokens_to_ids, head_size))
        model = AutoModelForImageTextToText.from_config(config)
        sharpen(model)
        text = model.config.get_text_config()
        text.eos_token_id, text.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    name, images, options = image_processor(family)
    images.save_pretrained(directory)
    (directory / "processor_config.json").write_text(json.dumps({"processor_class": name, **options}))
    return directory


def picture(seed: int, width: int = 24, height: int = 16) -> Image.Image:
    """A picture of random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@cache
def reader(family: str = "qwen2_5_vl") -> Any:
    """The tokenizer of a family with its image processor, as a model source loads it."""
    from verl.models.images import ImageProcessor

    tokenizer = image_tokenizer(family)
    name, processor, options = image_processor(family)
    tokenizer.image_processor = ImageProcessor(name, processor, tokenizer, {}, options)
    return tokenizer
