"""Why an engine cannot reproduce a model: its form is another than the one that the engine was built for; or the engine
has its own copy of the weights, and is sent plain tensors and no code.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from verl.errors import ConfigError

_log = logging.getLogger(__name__)


def own_weights_fault(model: Any, sends_adapter: bool) -> str | None:
    """The first reason why an engine with its own copy of the weights cannot reproduce a model; None if none is known.

    Args:
        model: the model.
        sends_adapter: whether the adapter is sent as such (`rollout.lora=adapter`) instead of being merged.
    """
    return next(_own_weights_faults(model, sends_adapter), None)


def _own_weights_faults(model: Any, sends_adapter: bool) -> Iterator[str]:
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
