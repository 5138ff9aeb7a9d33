"""Arguments of `HybridActor.generate`, those of transformers' GenerationConfig, for the rollout engines."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl.component import hint, nearest
from verl.errors import ConfigError
from verl.protocol import DataProto

if TYPE_CHECKING:
    from transformers import GenerationConfig

_log = logging.getLogger(__name__)
# Supported options with the defaults of transformers.
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
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
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


def read_options(options: Mapping[str, Any], model: Any, tokenizer: Any, prompt_width: int) -> GenerationConfig:
    """The configuration of a call; missing options come from the model's generation configuration, then from defaults.

    Args:
        options: keyword arguments of the call.
        model, tokenizer: for their defaults.
        prompt_width: tokens of a prompt with padding.
    Returns:
        With `max_new_tokens`, `min_new_tokens`, `pad_token_id` and a list `eos_token_id`.
    Raises:
        ConfigError: an unknown option, an invalid value, or more tokens than the context length.
    """
    if unknown := [name for name in options if name not in DEFAULTS]:
        known = f" Known: {', '.join(DEFAULTS)}."
        raise ConfigError([f"generate.{x} is not a known key.{hint(nearest(x, DEFAULTS)) or known}" for x in unknown])
    warn_unsupported_settings(model)
    config = copy.deepcopy(model.generation_config)
    # Not by `update`, which refuses several greedy samples, and logs what it holds to be ineffective.
    for name, default in DEFAULTS.items():
        candidates = (options.get(name), getattr(config, name, None), default)
        setattr(config, name, next((x for x in candidates if x is not None), None))
    if isinstance(config.eos_token_id, int):
        config.eos_token_id = [config.eos_token_id]
    config.eos_token_id = list(config.eos_token_id or ())
    if config.num_return_sequences < 1:
        raise ConfigError(f"num_return_sequences is {config.num_return_sequences}: must be at least 1.")
    if any(id_ < 0 for id_ in config.eos_token_id):
        raise ConfigError(f"eos_token_id is {config.eos_token_id}: expected token ids, which are not negative.")
    config.max_new_tokens = _new_tokens(config, model, prompt_width)
    config.min_new_tokens = min(config.min_new_tokens, config.max_new_tokens)
    pads = (config.pad_token_id, getattr(tokenizer, "pad_token_id", None), *config.eos_token_id)
    config.pad_token_id = next((pad for pad in pads if pad is not None), None)
    if config.pad_token_id is None:
        raise ConfigError("pad_token_id is missing: neither the model nor a tokenizer has one. Pass pad_token_id.")
    return config


def seed_of_call(config: GenerationConfig, seed: int | None, generator: torch.Generator | None) -> int:
    """The seed of a call; greedy calls do not use a generator.

    Raises:
        ConfigError: it is no integer of 64 bits.
    """
    if seed is not None and not (isinstance(seed, int) and -(2**63) <= seed < 2**63):
        raise ConfigError(f"seed is {seed!r}: expected an integer of 64 bits.")
    if seed is not None or not config.do_sample:
        return seed or 0
    return int(torch.randint(2**62, (), generator=generator, device=None if generator is None else generator.device))


def _new_tokens(config: GenerationConfig, model: Any, prompt_width: int) -> int:
    entries = model.config.get_text_config()
    context = getattr(entries, "max_position_embeddings", None) or getattr(entries, "n_positions", None)
    length, name = config.max_new_tokens, "max_new_tokens"
    if length is None and config.max_length is not None:
        length, name = config.max_length - prompt_width, "max_length"
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


def sampling_options(config: GenerationConfig) -> dict[str, Any]:
    """The fields of `Rollout` that a call sets."""
    names = ("max_new_tokens", "min_new_tokens", *(("temperature", "top_k", "top_p") if config.do_sample else ()))
    return {name: getattr(config, name) for name in names}


def warn_unsupported_settings(model: Any) -> None:
    """Warn once of settings in the model's generation configuration that are not supported here."""
    values = {name: getattr(model.generation_config, name, None) for name in NOT_SUPPORTED}
    _warn_of(", ".join(f"{name}={value}" for name, value in values.items() if value not in NOT_SUPPORTED[name]))


@functools.cache
def _warn_of(settings: str) -> None:
    if settings:
        _log.warning("the generation configuration of the model has %s, which is not supported here.", settings)


def prompt_rows(input_ids: Any, attention_mask: Tensor | None, config: GenerationConfig) -> DataProto:
    """Make the batch of prompts [B P] for the engines, padded on the left.

    Without a mask pad tokens are padding, unless the pad token is also an EOS token, as in transformers.

    Raises:
        ConfigError: they are not token ids [B P], or not padded on the left.
    """
    are_ids = isinstance(input_ids, Tensor) and input_ids.ndim == 2 and not input_ids.is_floating_point()
    if not are_ids or not input_ids.shape[1]:
        raise ConfigError("input_ids: expected token ids [B P], such as tokenizer(..., return_tensors='pt').")
    ids = input_ids.detach().to("cpu", torch.int64)
    if attention_mask is None:
        mask = (ids != config.pad_token_id) | (config.pad_token_id in config.eos_token_id)
    else:
        mask = attention_mask.detach().to("cpu").bool()
    if mask.shape != ids.shape or not bool(mask[:, -1:].all()) or bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise ConfigError(
            "attention_mask has another shape than input_ids, or 0 behind or between tokens: generation continues "
            "after the last token, so prompts must be padded on the left. Set tokenizer.padding_side = 'left'."
        )
    rows = torch.arange(len(ids))
    return DataProto.from_dict({"prompts": ids, "prompt_mask": mask, "prompt_ids": rows, "group_ids": rows})


class CallTokenizer:
    """A tokenizer, or none, with the pad token of a call and without ends of its own: the call has stop tokens."""

    eos_token_id = chat_template = None

    def __init__(self, tokenizer: Any, pad: int):
        self._tokenizer, self.pad_token_id = tokenizer, pad

    def __getattr__(self, name: str) -> Any:
        if (tokenizer := vars(self).get("_tokenizer")) is None:
            raise ConfigError("tokenizer is missing: this rollout engine needs one. Pass HybridActor(tokenizer=...).")
        return getattr(tokenizer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__getattr__("__call__")(*args, **kwargs)

    def __len__(self) -> int:
        return self.__getattr__("__len__")()
