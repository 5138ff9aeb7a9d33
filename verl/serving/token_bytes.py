"""The bytes that a token stands for, also where they are only a part of a character."""

from __future__ import annotations

import json
import re
from typing import Any

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")  # a token of SentencePiece for one byte
_WORD_START = "▁"  # of SentencePiece, for a space


class TokenBytes:
    """Bytes of tokens, by id.

    Tokens of byte-level BPE and byte-fallback tokens of SentencePiece may be parts of a character; those of any other
    vocabulary are whole texts.

    Args:
        tokenizer: of Hugging Face.
    """

    def __init__(self, tokenizer: Any):
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self._tokenizer = tokenizer
        self._added = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = {} if backend is None else json.loads(backend.to_str()).get("decoder") or {}
        kinds = {part.get("type") for part in (decoder, *(decoder.get("decoders") or ()))}
        self._byte_of = {char: byte for byte, char in bytes_to_unicode().items()} if "ByteLevel" in kinds else {}
        self._has_fallback = "ByteFallback" in kinds

    def __call__(self, token_id: int) -> bytes:
        """The bytes of a token; those of its decoded text if its vocabulary has no bytes."""
        token = self._tokenizer.convert_ids_to_tokens(int(token_id))
        if token in self._added or token is None:
            return (token or "").encode()
        if self._byte_of and all(char in self._byte_of for char in token):
            return bytes(self._byte_of[char] for char in token)
        if self._has_fallback:
            byte = _BYTE_FALLBACK.fullmatch(token)
            return bytes([int(byte[1], 16)]) if byte else token.replace(_WORD_START, " ").encode()
        return self._tokenizer.decode([int(token_id)]).encode()
