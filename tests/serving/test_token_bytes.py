"""The bytes of tokens, one by one, are the bytes of the text."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from verl.serving.token_text import TokenBytes

TEXT = "naïve 日本語 👩‍🚀 and ▁ <0x41>"


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(["and then"], trainers.BpeTrainer(initial_alphabet=alphabet, vocab_size=260))
    return made


def byte_fallback() -> Tokenizer:
    letters = [*"naïved", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(letters)}, [], byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


@pytest.mark.parametrize("made", [byte_level, byte_fallback])
def test_bytes_of_partial_characters_join_to_the_text(made):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made(), eos_token="<eos>")
    text = TEXT if made is byte_level else TEXT.replace("▁ ", "")
    ids = tokenizer(text, add_special_tokens=False).input_ids
    token_bytes = TokenBytes(tokenizer)
    found = [token_bytes(i) for i in ids]
    assert b"".join(found) == text.encode()
    assert any(b"\xf0" in part and len(part) < 4 for part in found)
    assert token_bytes(tokenizer.eos_token_id) == b"<eos>"


def test_tokens_of_whole_characters_have_the_bytes_of_their_text(model32):
    tokenizer = model32.load_tokenizer()
    token_bytes = TokenBytes(tokenizer)
    assert [token_bytes(i) for i in tokenizer("1+2=", add_special_tokens=False).input_ids] == [b"1", b"+", b"2", b"="]
