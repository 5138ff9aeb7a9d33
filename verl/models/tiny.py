"""The built-in models, small enough to train on a CPU: a two-layer Qwen2 with a character tokenizer, and an Idefics3
that sees images.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from pydantic import PositiveInt

from verl.component import component
from verl.models.images import PROCESSOR_FILES, ImageProcessor
from verl.models.pretrained import LENGTH_WARNING, ModelSource, without_dropout
from verl.utils.seeding import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>")
CHARACTERS = "\n " + string.digits + string.ascii_letters + string.punctuation
# Byte-level BPE represents space and newline by these letters.
BYTE_LEVEL_SYMBOLS = str.maketrans({" ": "\u0120", "\n": "\u010a"})

# A turn is the token of its role, its text and <eos>; the generation prompt is the token of the assistant.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<' + message['role'] + '>' + message['content'] + '<eos>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one id per character of printable ASCII and the newline, padding on the left.

    Ids never change: `<pad>` is 0, `<eos>` 1, `<unk>` 2, then the three roles of the chat template, then `CHARACTERS`
    in order. `decode(encode(text))` returns known characters unchanged; each run of other characters becomes one
    `<unk>`. No special tokens are added to a text; the caller appends `<eos>` to a completion.

    It is a byte-level BPE without merges, because `AutoTokenizer` loads any tokenizer with a Qwen2 configuration as
    byte-level BPE. Loaded that way it gives known characters the same ids and drops unknown ones.
    """
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    symbols = CHARACTERS.translate(BYTE_LEVEL_SYMBOLS)
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *symbols))}
    tokenizer = Tokenizer(BPE(vocabulary, merges=[], unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<system>", "<user>", "<assistant>"],
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


INITIALIZER_RANGE = 0.06  # std of the initial weights: a model this narrow learns far more slowly with the usual 0.02


@component
class TinyModel(ModelSource):
    """A randomly initialised Qwen2 with untied embeddings and a character tokenizer.

    Args:
        hidden_size, intermediate_size: widths.
        num_layers, num_heads: depth, and attention heads (each with its own keys and values).
        context_length: in tokens.
        seed: of the initial weights.
    """

    hidden_size: PositiveInt = 128
    intermediate_size: PositiveInt = 512
    num_layers: PositiveInt = 2
    num_heads: PositiveInt = 4
    context_length: PositiveInt = 64
    seed: int = 0

    def faults(self) -> Iterator[str]:
        if self.hidden_size % self.num_heads:
            yield f"num_heads is {self.num_heads}: must divide hidden_size {self.hidden_size}."

    def load_causal_lm(self, device: str) -> Any:
        from transformers import AutoModelForCausalLM

        return self._make(AutoModelForCausalLM, device)

    def load_backbone(self, device: str) -> Any:
        return self.load_causal_lm(device).base_model

    def load_tokenizer(self) -> Any:
        tokenizer = character_tokenizer()
        tokenizer.model_max_length = self.context_length
        tokenizer.deprecation_warnings[LENGTH_WARNING] = True  # limits of the data have messages of their own
        return tokenizer

    def max_positions(self) -> int | None:
        return self.context_length

    def attention_heads(self) -> tuple[int, int]:
        return self.num_heads, self.num_heads

    def layer_count(self) -> int:
        return self.num_layers

    def experts(self) -> tuple[str, int | None]:
        return "qwen2", None

    def load_config(self) -> Any:
        from transformers import Qwen2Config

        tokenizer = cast(Any, character_tokenizer())  # whose ids are of any type by its annotations
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


IMAGE_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>")  # of Idefics3
IMAGE_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}{{ '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@component
class TinyImageText(TinyModel):
    """A randomly initialised Idefics3, with a Llama as its text model and the character tokenizer. Nothing of it is
    frozen unless `freeze` says so.

    Args:
        image_size: images are scaled to squares of so many pixels.
        patch_size: side of the squares that are read as one; each makes one token of the prompt.
        vision_size, vision_layers: width and depth of the vision tower.
    """

    freeze: tuple[str, ...] | None = ()
    num_layers: PositiveInt = 2
    image_size: PositiveInt = 48
    patch_size: PositiveInt = 16
    vision_size: PositiveInt = 96
    vision_layers: PositiveInt = 1

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if self.image_size % self.patch_size:
            yield f"patch_size is {self.patch_size}: must divide image_size {self.image_size}."
        if self.vision_size % self.num_heads:
            yield f"num_heads is {self.num_heads}: must divide vision_size {self.vision_size}."

    def load_causal_lm(self, device: str) -> Any:
        from transformers import AutoModelForImageTextToText

        return self._make(AutoModelForImageTextToText, device)

    def load_tokenizer(self) -> Any:
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

        tokenizer, side = super().load_tokenizer(), {"longest_edge": self.image_size}
        tokenizer.add_tokens(list(IMAGE_TOKENS), special_tokens=True)
        tokenizer.chat_template = IMAGE_CHAT_TEMPLATE
        images = Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
        options = {"image_seq_len": (self.image_size // self.patch_size) ** 2}
        whole = {"processor_class": "Idefics3Processor", **options}
        files = {PROCESSOR_FILES[0]: json.dumps(whole).encode(), PROCESSOR_FILES[1]: images.to_json_string().encode()}
        tokenizer.image_processor = ImageProcessor("Idefics3Processor", images, tokenizer, files, options)
        return tokenizer

    def experts(self) -> tuple[str, int | None]:
        return "idefics3", None

    def load_config(self) -> Any:
        from transformers import Idefics3Config

        text = {**super().load_config().to_dict(), "model_type": "llama"}
        tokens = len(text_tokens := cast(Any, character_tokenizer()))
        vision = {
            "hidden_size": self.vision_size,
            "intermediate_size": 4 * self.vision_size,
            "num_hidden_layers": self.vision_layers,
            "num_attention_heads": self.num_heads,
            "image_size": self.image_size,
            "patch_size": self.patch_size,
            "initializer_range": INITIALIZER_RANGE,
        }
        text["vocab_size"] = tokens + len(IMAGE_TOKENS)
        return Idefics3Config(
            text_config=text,
            vision_config=vision,
            scale_factor=1,
            image_token_id=tokens,
            pad_token_id=text_tokens.pad_token_id,
        )
