"""A tokenizer of single characters, made in memory, for small models and tests."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>")
CHARACTERS = "\n " + string.digits + string.ascii_letters + string.punctuation
# Byte-level BPE spells the two characters that are not printed as these letters.
BYTE_LEVEL_SYMBOLS = str.maketrans({" ": "\u0120", "\n": "\u010a"})

# Each turn is its role's token, its text, then <eos>; the generation prompt is the assistant's token alone.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<' + message['role'] + '>' + message['content'] + '<eos>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one id per character of printable ASCII and the newline, padding on the left.

    Ids never change: `<pad>` is 0, `<eos>` 1, `<unk>` 2, then the three roles of the chat template, then `CHARACTERS`
    in order. Text of known characters comes back from `decode(encode(text))` as it was; each run of other characters
    becomes one `<unk>`. Nothing is added to a text: `<eos>` is appended by whoever ends a completion.

    It is a byte-level BPE without merges, because `AutoTokenizer` opens any tokenizer that lies beside a Qwen2
    configuration as a byte-level BPE, whatever it was saved as. Opened so, it gives known characters the same ids, and
    leaves unknown ones out.
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
