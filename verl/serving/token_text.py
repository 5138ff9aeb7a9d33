"""Text of sampled tokens: what may be shown before a turn is finished, and where a stop text ends it."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.rollout.base import TurnResult

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")  # a token of SentencePiece for one byte
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
