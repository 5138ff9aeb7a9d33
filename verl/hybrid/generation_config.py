"""The arguments of `generate` (transformers' GenerationConfig) as a request to the rollout engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.compose.suggestions import key_faults
from verl.errors import ConfigError
from verl.protocol import DataProto

# Defaults of transformers.
DEFAULTS: dict[str, Any] = {
    "max_new_tokens": None,
    "max_length": None,
    "min_new_tokens": 0,
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "num_return_sequences": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
NEW_TOKENS = 20
# Settings of a generation configuration that change sampling and are not supported, with the values that mean "off".
NOT_DONE_HERE: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "typical_p": (None, 1.0),
    "min_p": (None,),
    "bad_words_ids": (None,),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "forced_eos_token_id": (None,),
}


@dataclass(frozen=True)
class GenerateCall:
    """Parsed arguments of a call of `generate`.

    Attributes:
        sampling: fields of `Rollout`.
        stops: token ids that end a response.
        pad: token id for padding of finished rows.
    """

    sampling: dict[str, Any]
    num_samples: int
    greedy: bool
    stops: tuple[int, ...]
    pad: int


def read_call(given: Mapping[str, Any], model: Any, tokenizer: Any, prompt_width: int) -> GenerateCall:
    """Parse arguments of `generate`; missing ones come from the model's generation configuration, then from defaults.

    Args:
        given: keyword arguments of the call.
        model, tokenizer: for their defaults.
        prompt_width: tokens of a prompt with padding.
    Raises:
        ConfigError: an unknown argument, an invalid value, or more tokens than the context length.
    """
    if faults := list(key_faults("generate", given, DEFAULTS)):
        raise ConfigError(faults)
    asked = {name: _chosen(name, given, model.generation_config) for name in DEFAULTS}
    if faults := list(_faults(asked)):
        raise ConfigError(faults)
    stops = _ids(asked["eos_token_id"])
    greedy = not asked["do_sample"]
    cuts = {} if greedy else {name: asked[name] for name in ("temperature", "top_k", "top_p")}
    length = _new_tokens(asked, model, prompt_width)
    least = min(int(asked["min_new_tokens"] or 0), length)
    sampling = {"max_new_tokens": length, "min_new_tokens": least, **{k: v for k, v in cuts.items() if v is not None}}
    return GenerateCall(
        sampling, asked["num_return_sequences"], greedy, stops, _pad_id(asked["pad_token_id"], tokenizer, stops)
    )


def prompt_rows(input_ids: Any, attention_mask: Tensor | None, call: GenerateCall) -> DataProto:
    """Make the batch of prompts [B P] for the engines, padded on the left.

    Without a mask pad tokens are padding, unless the pad token is also an EOS token, as in transformers.

    Raises:
        ConfigError: they are not token ids [B P], or not padded on the left.
    """
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or input_ids.is_floating_point() or not len(input_ids):
        shown = f"{input_ids.dtype} {list(input_ids.shape)}" if isinstance(input_ids, Tensor) else repr(input_ids)
        raise ConfigError(
            f"input_ids is {shown}: expected token ids [B P], such as tokenizer(..., return_tensors='pt')."
        )
    ids = input_ids.detach().to("cpu", torch.int64)
    if attention_mask is None:
        is_pad_distinct = call.pad not in call.stops
        mask = ids != call.pad if is_pad_distinct else torch.ones_like(ids, dtype=torch.bool)
    else:
        mask = attention_mask.detach().to("cpu").bool()
    if mask.shape != ids.shape:
        raise ConfigError(
            f"attention_mask is {list(mask.shape)}: input_ids is {list(ids.shape)}. Both must have the same shape."
        )
    if not bool(mask[:, -1:].all()) or bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise ConfigError(
            "attention_mask is 0 behind or between tokens: generation continues after the last token, so prompts must "
            "be padded on the left. Set tokenizer.padding_side = 'left'."
        )
    rows = torch.arange(len(ids))
    return DataProto.from_dict({"prompts": ids, "prompt_mask": mask, "prompt_ids": rows, "group_ids": rows})


def settings_left_out(model: Any) -> dict[str, Any]:
    """Settings in the model's generation configuration that are not supported here."""
    config = model.generation_config
    found = {name: getattr(config, name, None) for name in NOT_DONE_HERE}
    return {name: value for name, value in found.items() if value not in NOT_DONE_HERE[name]}


def _chosen(name: str, given: Mapping[str, Any], config: Any) -> Any:
    candidates = (given.get(name), getattr(config, name, None), DEFAULTS[name])
    return next((value for value in candidates if value is not None), None)


def _faults(asked: Mapping[str, Any]) -> Iterator[str]:
    for name in ("max_new_tokens", "num_return_sequences"):
        value = asked[name]
        if value is not None and (not isinstance(value, int) or value < 1):
            yield f"{name} is {value!r}: must be a whole number, at least 1."
    for name in ("temperature", "top_p", "top_k", "min_new_tokens"):
        if asked[name] is not None and not isinstance(asked[name], (int, float)):
            yield f"{name} is {asked[name]!r}: expected a number."
            return
    if asked["do_sample"] and not asked["temperature"] > 0:
        yield f"temperature is {asked['temperature']}: must be above 0. For greedy decoding set do_sample=False."
    if any(id_ < 0 for id_ in _ids(asked["eos_token_id"])):
        yield f"eos_token_id is {asked['eos_token_id']}: expected token ids, which are not negative."


def _new_tokens(asked: Mapping[str, Any], model: Any, prompt_width: int) -> int:
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    length, name = asked["max_new_tokens"], "max_new_tokens"
    if length is None and asked["max_length"] is not None:
        length, name = asked["max_length"] - prompt_width, "max_length"
    if length is None:
        length = NEW_TOKENS if context is None else min(NEW_TOKENS, context - prompt_width)
    if length < 1:
        raise ConfigError(f"{name} leaves {length} new tokens after a prompt of {prompt_width}. Raise it.")
    if context is not None and prompt_width + length > context:
        raise ConfigError(
            f"{name} asks for {length} new tokens: with a prompt of {prompt_width} that makes {prompt_width + length}, "
            f"but the context length is {context}. Lower one of them."
        )
    return length


def _pad_id(asked: int | None, tokenizer: Any, stops: tuple[int, ...]) -> int:
    if asked is not None:
        return int(asked)
    own = getattr(tokenizer, "pad_token_id", None)
    if own is None and not stops:
        raise ConfigError("pad_token_id is missing: neither the model nor a tokenizer has one. Pass pad_token_id.")
    return int(stops[0] if own is None else own)


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(id_) for id_ in (value if isinstance(value, (list, tuple)) else [value]))


@contextmanager
def naming_ends(model: Any, tokenizer: Any, call: GenerateCall) -> Iterator[Any]:
    """Inside this context the configurations of model and tokenizer have the stop and pad tokens of the call only."""
    config = model.generation_config
    before = config.eos_token_id
    config.eos_token_id = list(call.stops)
    try:
        yield CallTokenizer(tokenizer, call.pad)
    finally:
        config.eos_token_id = before


class CallTokenizer:
    """A tokenizer, or none, with the pad token of a call and without EOS, since the call has its own stop tokens."""

    eos_token_id = None

    def __init__(self, tokenizer: Any, pad: int):
        self.tokenizer, self.pad_token_id = tokenizer, pad

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "tokenizer":  # not yet set while a copy is made
            raise AttributeError(name)
        return getattr(self.tokenizer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._own()(*args, **kwargs)

    def __len__(self) -> int:
        return len(self._own())

    def _own(self) -> Any:
        if self.tokenizer is None:
            raise ConfigError("tokenizer is missing: this rollout engine needs one. Pass HybridActor(tokenizer=...).")
        return self.tokenizer
