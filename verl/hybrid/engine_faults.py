"""Arguments of `generate` for the rollout engines, and models that an engine cannot reproduce.

Arguments are those of transformers' GenerationConfig. A model cannot be reproduced if its form is another than the one
that the engine was built for; or if the engine has its own copy of the weights, and is sent plain tensors and no code.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

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


def own_weights_faults(model: Any, sends_adapter: bool) -> Iterator[str]:
    """Yield the known reasons why an engine with its own copy of the weights cannot reproduce a model.

    Args:
        sends_adapter: whether the adapter is sent as such (`rollout.lora=adapter`) instead of being merged.
    """
    for path, module in model.named_modules():
        yield from _rotary_faults(path, module, model.dtype)
    if is_quantized(model):
        yield (
            "model is quantized: an engine with weights of its own is sent plain tensors. Set rollout='hf', which "
            "samples from the model itself."
        )
    if hasattr(model, "peft_config") and not hasattr(model, "get_base_model"):
        yield (
            "model has adapter layers (by peft.get_peft_model or model.add_adapter) but is not a PeftModel: set "
            "actor.model to the result of get_peft_model, or set rollout='hf'."
        )
    for path, module in model.named_modules():
        yield from _adapter_faults(path, module, sends_adapter)
    yield from _head_faults(model)


def _rotary_faults(path: str, module: Any, dtype: torch.dtype) -> Iterator[str]:
    """Yield faults of rotary buffers that differ from the configuration: buffers are not sent to the engine."""
    buffers: dict[str, Tensor] = {n: x for n, x in module.named_buffers(recurse=False) if n.endswith("inv_freq")}
    expected = _fresh_buffers(module) if buffers else {}
    for name, x in buffers.items():
        if name.replace("inv_freq", "original_inv_freq") in buffers:  # this one may change with longer rows
            continue
        known = expected.get(name, x)
        equal = torch.allclose(x.float().cpu(), known.float().cpu(), rtol=1e-5, atol=0)
        if x.dtype.itemsize < 4 or not equal:
            kind = str(dtype).removeprefix("torch.")
            yield (
                f"model.dtype is {kind}, and {path}.inv_freq differs from model.config, by which the engine is built: "
                ".half(), .bfloat16() and .to(dtype) round it, an edited configuration does not change it. Load the "
                f"model with dtype='{kind}', or cast only its parameters (`for p in model.parameters(): p.data = "
                "p.data.to(dtype)`), or set rollout='hf'."
            )


def _fresh_buffers(module: Any) -> dict[str, Tensor]:
    """The buffers of a new module of the same class and configuration; empty if it cannot be created."""
    try:
        return dict(type(module)(module.config).named_buffers(recurse=False))
    except Exception:  # noqa: BLE001 - a user-defined constructor may raise anything
        return {}


def is_quantized(model: Any) -> bool:
    """Whether layers of a model have quantized weights."""
    if getattr(model, "is_quantized", False) or getattr(model, "quantization_method", None) is not None:
        return True
    return any(
        not isinstance(value, Tensor) or value.is_quantized
        for name, value in model.state_dict().items()
        if not name.endswith("_extra_state")
    )


def _adapter_faults(path: str, module: Any, sends_adapter: bool) -> Iterator[str]:
    kind = type(module).__name__
    is_layer = all(hasattr(module, name) for name in ("active_adapters", "base_layer", "merged_adapters"))
    replaces_module = kind in ("ModulesToSaveWrapper", "TrainableTokensWrapper")
    if not is_layer and not replaces_module:
        return
    if replaces_module or not _is_plain_lora(module):
        yield (
            f"model has an adapter at {path} that is not plain LoRA ({kind}): an engine with its own weights "
            "receives W + scale B A. Merge it (model.merge_and_unload()), or set rollout='hf'."
        )
    elif module.merged_adapters and (module.disable_adapters or sends_adapter):
        state = "disabled" if module.disable_adapters else "sent to the engine as well"
        yield (
            f"model has an adapter that is merged into {path} and {state}: unmerge it first "
            "(model.unmerge_adapter()), or set rollout='hf'."
        )
    elif sends_adapter and module.disable_adapters:
        yield "model has its adapter disabled, and rollout.lora=adapter samples with it: set rollout.lora=merged."
    elif sends_adapter and sum(name in module.lora_A for name in module.active_adapters) > 1:
        yield f"{path} has several active adapters, and rollout.lora=adapter sends one: set rollout.lora=merged."


def _is_plain_lora(module: Any) -> bool:
    """Whether the active adapters of a peft layer are plain LoRA, W + scale B A."""
    if not hasattr(module, "lora_A"):
        return False
    others = ("lora_embedding_A", "lora_magnitude_vector", "lora_variant")
    flags = ("use_dora", "lora_bias")
    return not any(
        any(adapter in getattr(module, name, ()) for name in others)
        or any(getattr(module, name, {}).get(adapter, False) for name in flags)
        for adapter in module.active_adapters
    )


def _head_faults(model: Any) -> Iterator[str]:
    """Yield faults of an output head that differs from the configuration, by which engines are built."""
    try:
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return
    if not hasattr(head, "weight") or not hasattr(embedding, "weight"):
        return
    config = model.config.get_text_config()
    if getattr(config, "tie_word_embeddings", False) and head.weight is not embedding.weight:
        yield (
            "model.config.tie_word_embeddings is True, but the output head is no longer tied: an engine with its own "
            "weights is built by the configuration. Call model.tie_weights(), or set it to False."
        )
    size = getattr(config, "vocab_size", None)
    if size is not None and len(head.weight) != size:
        yield (
            f"model.config.vocab_size is {size}, and the output head has {len(head.weight)} rows: resize both with "
            "model.resize_token_embeddings(n)."
        )


def prompt_learning_fault(model: Any) -> str | None:
    """The fault of a prompt-learning adapter (virtual tokens before each text), which no engine supports; else None."""
    configs = getattr(model, "peft_config", None)
    for name, config in configs.items() if isinstance(configs, Mapping) else ():
        if getattr(config, "is_prompt_learning", False):
            return (
                f"model has the adapter {name!r} of {type(config).__name__}, which puts virtual tokens before each "
                "text: no rollout engine here supports them. Use LoRA, or model.generate of transformers."
            )
    return None


def modules_with_own_code(model: nn.Module) -> list[str]:
    """Names of modules with an instance attribute `forward` or with forward hooks, which an engine does not run."""
    return [
        path or type(model).__name__
        for path, module in model.named_modules()
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    ]


@contextlib.contextmanager
def naming_quantization(model: Any) -> Iterator[None]:
    """Inside this context refusals of a quantized model name quantization as a possible cause."""
    try:
        yield
    except ConfigError as error:
        if "quantized" in str(error) or not is_quantized(model):
            raise
        cause = "model is quantized: if scales are computed over a batch, a row depends on the other rows."
        raise ConfigError([*error.faults, cause]) from error


def make_contiguous(model: nn.Module, copies: bool) -> None:
    """Refuse (or copy) parameters that are not contiguous; engines and checkpoints copy contiguous memory."""
    scattered = {name: p for name, p in model.named_parameters() if not p.is_contiguous()}
    if not scattered:
        return
    names = ", ".join(list(scattered)[:3]) + (f" and {len(scattered) - 3} more" if len(scattered) > 3 else "")
    if not copies:
        raise ConfigError(
            f"model has parameters that are not contiguous in memory: {names}. Give contiguous=True to have them "
            "copied."
        )
    for parameter in scattered.values():
        parameter.data = parameter.data.contiguous()
    _log.info("made contiguous: %s", names)


Form = dict[str, tuple[Any, ...]]


def form_of(model: nn.Module) -> Form:
    """Modules and parameters, without the weights: all that engines and checks of execution paths are built for.

    Returns:
        By name: the module, with a forward that was set on the object; or shape, dtype and name of the parameter, of
        tied ones the first name.
    """
    form: Form = {name: (module, vars(module).get("forward")) for name, module in model.named_modules()}
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        dtype = str(parameter.dtype).removeprefix("torch.")
        form[name] = list(parameter.shape), dtype, first.setdefault(id(parameter), name)
    return form


def form_difference(before: Form, now: Form) -> str:
    """The first differences between two forms, for messages; empty if they are equal."""
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    shown = [f"{name or 'its forward'} was {_entry(before, name)} and is {_entry(now, name)}" for name in changed[:3]]
    return ", ".join(shown) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")


def _entry(form: Form, name: str) -> str:
    entry = form.get(name)
    if entry is None or not isinstance(entry[0], nn.Module):
        return str(entry)
    return f"{type(entry[0]).__name__} {id(entry[0]):#x}" + (" with a forward of its own" if entry[1] else "")


def unwrapped(model: Any) -> Any:
    """The module inside a `torch.compile` wrapper, with the same weights; other models unchanged."""
    return getattr(model, "_orig_mod", model) if isinstance(model, nn.Module) else model


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
    config = copy.deepcopy(model.generation_config)
    # Not by `update`, which refuses several greedy samples, and logs what it holds to be ineffective.
    for name, default in DEFAULTS.items():
        candidates = (options.get(name), getattr(config, name, None), default)
        setattr(config, name, next((x for x in candidates if x is not None), None))
    if isinstance(config.eos_token_id, int):
        config.eos_token_id = [config.eos_token_id]
    config.eos_token_id = list(config.eos_token_id or ())
    if faults := list(_faults(config)):
        raise ConfigError(faults)
    config.max_new_tokens = _new_tokens(config, model, prompt_width)
    config.min_new_tokens = min(config.min_new_tokens, config.max_new_tokens)
    if config.pad_token_id is None:
        config.pad_token_id = getattr(tokenizer, "pad_token_id", None)
    if config.pad_token_id is None and not config.eos_token_id:
        raise ConfigError("pad_token_id is missing: neither the model nor a tokenizer has one. Pass pad_token_id.")
    if config.pad_token_id is None:
        config.pad_token_id = config.eos_token_id[0]
    return config


def seed_of_call(config: GenerationConfig, seed: int | None, generator: torch.Generator | None) -> int:
    """The seed of a call; greedy calls do not use a generator."""
    if seed is not None or not config.do_sample:
        return seed or 0
    return int(torch.randint(2**62, (), generator=generator, device=None if generator is None else generator.device))


def _faults(config: GenerationConfig) -> Iterator[str]:
    """Yield faults of options that the rollout description does not check."""
    for name in ("max_new_tokens", "num_return_sequences"):
        value = getattr(config, name)
        if value is not None and (not isinstance(value, int) or value < 1):
            yield f"{name} is {value!r}: must be a whole number, at least 1."
    if not isinstance(config.min_new_tokens, int):
        yield f"min_new_tokens is {config.min_new_tokens!r}: expected a number."
    if config.do_sample and config.temperature == 0:
        yield f"temperature is {config.temperature}: must be above 0. For greedy decoding set do_sample=False."
    if any(id_ < 0 for id_ in config.eos_token_id):
        yield f"eos_token_id is {config.eos_token_id}: expected token ids, which are not negative."


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


def unsupported_settings(model: Any) -> str:
    """Settings in the model's generation configuration that are not supported here, as text; empty without any."""
    values = {name: getattr(model.generation_config, name, None) for name in NOT_SUPPORTED}
    return ", ".join(f"{name}={value}" for name, value in values.items() if value not in NOT_SUPPORTED[name])


def prompt_rows(input_ids: Any, attention_mask: Tensor | None, config: GenerationConfig) -> DataProto:
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
        is_pad_distinct = config.pad_token_id not in config.eos_token_id
        mask = ids != config.pad_token_id if is_pad_distinct else torch.ones_like(ids, dtype=torch.bool)
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


@contextmanager
def stop_tokens_of_call(model: Any, config: GenerationConfig) -> Iterator[None]:
    """Inside this context the model's generation configuration has the stop tokens of the call only."""
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = config.eos_token_id
    try:
        yield
    finally:
        model.generation_config.eos_token_id = before


class CallTokenizer:
    """A tokenizer, or none, with the pad token of a call and without EOS, since the call has its own stop tokens."""

    eos_token_id = None

    def __init__(self, tokenizer: Any, pad: int):
        self.tokenizer, self.pad_token_id = tokenizer, pad

    def __getattr__(self, name: str) -> Any:
        return getattr(self._present(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._present()(*args, **kwargs)

    def __len__(self) -> int:
        return len(self._present())

    def _present(self) -> Any:
        if (tokenizer := vars(self).get("tokenizer")) is None:
            raise ConfigError("tokenizer is missing: this rollout engine needs one. Pass HybridActor(tokenizer=...).")
        return tokenizer
