"""Text and bytes of sampled tokens: what may be shown before a turn is finished, and where a stop text ends it."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.rollout.base import TurnResult

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")  # a token of SentencePiece for one byte
_WORD_START = "▁"  # of SentencePiece, for a space
_PARTIAL = "\ufffd"  # what bytes decode to that are not a whole character


@dataclass(frozen=True)
class TurnText:
    """The text of a turn, which ends before the first of the stop texts in it."""

    tokenizer: Any
    stops: Sequence[str]

    def cut(self, sampled: TurnResult) -> tuple[TurnResult, str, str]:
        """The turn up to the token that completes a stop text, its text, and that stop text; all of it without one."""
        tokens, decode = sampled.tokens[:-1] if sampled.is_complete else sampled.tokens, self.tokenizer.decode
        text = decode(tokens)
        if not self.stops or self._find(text) is None:
            return sampled, text, ""
        count = bisect_left(range(len(tokens)), True, key=lambda n: self._find(decode(tokens[: n + 1])) is not None) + 1
        text = decode(tokens[:count])
        place, stop = self._find(text) or (len(text), "")
        sampled = replace(sampled, tokens=tokens[:count], log_probs=sampled.log_probs[:count], is_complete=False)
        return sampled, text[:place], stop

    def settled(self, text: str, tokens: list[int]) -> str:
        """The beginning of the text of unfinished tokens that later ones do not change: whole characters, and nothing
        that may become a stop text."""
        if getattr(self.tokenizer, "clean_up_tokenization_spaces", False):
            return ""
        if _BYTE_FALLBACK.fullmatch(self.tokenizer.convert_ids_to_tokens(tokens[-1]) or ""):
            return ""  # of a character whose end is not known
        text = text.rstrip(_PARTIAL)
        begun = (size for stop in self.stops for size in range(len(stop)) if text.endswith(stop[:size]))
        return text[: len(text) - max(begun, default=0)]

    def _find(self, text: str) -> tuple[int, str] | None:
        return min(((place, stop) for stop in self.stops if (place := text.find(stop)) >= 0), default=None)


class TokenBytes:
    """Bytes that a token stands for, by its id, also where they are only a part of a character.

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
