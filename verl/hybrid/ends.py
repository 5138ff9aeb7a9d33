"""How a call of `generate` wants responses to end, in the words that every rollout engine reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from verl.errors import ConfigError
from verl.hybrid.call import Call


@contextmanager
def naming_ends(model: Any, tokenizer: Any, call: Call) -> Iterator[Any]:
    """Within, the model and the tokenizer that is given name the stop and pad tokens of a call, and no others."""
    config = model.generation_config
    before = config.eos_token_id
    config.eos_token_id = list(call.stops)
    try:
        yield EndsOfCall(tokenizer, call.pad)
    finally:
        config.eos_token_id = before


class EndsOfCall:
    """A tokenizer, or none, with the pad token of a call and no end of text of its own: the call names those."""

    eos_token_id = None

    def __init__(self, tokenizer: Any, pad: int):
        self.tokenizer, self.pad_token_id = tokenizer, pad

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "tokenizer":  # not there yet, while a copy of this is being made
            raise AttributeError(name)
        return getattr(self.tokenizer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._own()(*args, **kwargs)

    def __len__(self) -> int:
        return len(self._own())

    def _own(self) -> Any:
        if self.tokenizer is None:
            raise ConfigError("tokenizer is missing: this rollout engine needs one. Give HybridActor(tokenizer=).")
        return self.tokenizer
