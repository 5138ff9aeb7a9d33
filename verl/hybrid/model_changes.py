"""The form of a model, which is fixed when an actor is made, and the models that an engine cannot reproduce.

Weights are no part of a form, since engines use the current ones in every call. `ActorLock` serialises calls, since the
model has one mode and the engine one set of options.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from verl.errors import ActorBusy
from verl.model_paths import packed_attention


class ActorLock:
    """A reentrant lock, with a deadline and an error that names the call of the other thread."""

    def __init__(self):
        self._lock = threading.RLock()
        self._holder: tuple[str, str, float] | None = None  # thread, call, since when

    @contextmanager
    def held(self, call: str, timeout_s: float) -> Iterator[None]:
        """Hold the lock inside this context.

        Args:
            call: name of the call, for messages.
            timeout_s: the longest wait.
        Raises:
            ActorBusy: the time has passed; names both calls.
        """
        began = time.monotonic()
        if not self._lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            raise ActorBusy(self._busy_message(call, began))
        outer, self._holder = self._holder, (threading.current_thread().name, call, time.monotonic())
        try:
            yield
        finally:
            self._holder = outer
            self._lock.release()

    def _busy_message(self, call: str, began: float) -> str:
        now, by = time.monotonic(), "another thread"
        if self._holder is not None:
            thread, theirs, since = self._holder
            by = f"thread {thread}, in actor.{theirs} for {now - since:.0f} s"
        return (
            f"actor.{call} of thread {threading.current_thread().name} has waited {now - began:.0f} s for {by}. An "
            "actor runs one call at a time: raise hybrid_config.busy_timeout_s, or use an actor per thread."
        )


# Configuration entries that do not change results and that training scripts toggle or `save_pretrained` writes; the
# dtype of each parameter and the token ids of each call are compared elsewhere.
_WITHOUT_EFFECT = frozenset(
    [
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "architectures",
        "dtype",
        "torch_dtype",
        "_name_or_path",
        "transformers_version",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
    ]
)


Form = dict[str, Any]


def form_of(model: Any) -> Form:
    """What an engine is built for: parameters, classes of modules, and configuration, without the weights.

    Returns:
        By name of the parameter, module or `config.KEY`: shape, dtype and the parameter that it is tied to; the class;
        the entry.
    """
    entries = model.config.to_dict() if hasattr(model.config, "to_dict") else dict(vars(model.config))
    form: Form = {f"config.{key}": value for key, value in _with_effect(entries).items()}
    attention = getattr(model.config, "_attn_implementation", None)
    form["config.attn_implementation"] = "sdpa" if attention == packed_attention.NAME else attention  # set by verl
    form |= {name: type(module).__name__ for name, module in model.named_modules() if name}
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared = first.setdefault(id(parameter), name)
        form[name] = list(parameter.shape), str(parameter.dtype).removeprefix("torch."), shared
    return form


def _with_effect(entries: dict[str, Any]) -> dict[str, Any]:
    """Entries of a configuration, and of those inside it, that change results."""
    kept = ((key, value) for key, value in entries.items() if key not in _WITHOUT_EFFECT)
    return {key: _with_effect(value) if isinstance(value, dict) else value for key, value in kept}


def form_difference(before: Form, now: Form) -> str:
    """The first differences between two forms, for messages; empty if they are equal."""
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    shown = [f"{name} was {before.get(name)!r} and is {now.get(name)!r}" for name in changed[:3]]
    return ", ".join(shown) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")


def behaviour_of(model: nn.Module) -> list[tuple[Any, ...]]:
    """What training scripts switch: hooks, adapters, devices, or a block by another of its class.

    A difference is no fault, but what was checked of the model has to be checked again.
    """
    found: list[tuple[Any, ...]] = [(str(getattr(model, "device", "")),)]
    for module in model.modules():
        peft: Any = module
        adapters = None
        if is_adapted(module):
            adapters = bool(peft.disable_adapters), tuple(peft.active_adapters), tuple(peft.merged_adapters)
        found.append((id(module), vars(module).get("forward"), _num_hooks(module), adapters))
    return found


def _num_hooks(module: nn.Module) -> int:
    return len(module._forward_hooks) + len(module._forward_pre_hooks)


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is a peft layer."""
    return hasattr(module, "active_adapters") and hasattr(module, "base_layer") and hasattr(module, "merged_adapters")


def unwrapped(model: Any) -> Any:
    """The module inside a `torch.compile` wrapper, with the same weights; other models unchanged."""
    return getattr(model, "_orig_mod", model) if isinstance(model, nn.Module) else model


def with_code_of_its_own(model: nn.Module) -> list[str]:
    """Names of modules with an instance attribute `forward` or with forward hooks."""
    modules = model.named_modules()
    return [name or type(model).__name__ for name, x in modules if _num_hooks(x) or "forward" in vars(x)]


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


def own_weights_fault(model: Any, sends_adapter: bool) -> str | None:
    """Why an engine with its own copy of the weights cannot reproduce this model; None if no reason is known.

    Args:
        model: the model.
        sends_adapter: whether the adapter is sent as such (`rollout.lora=adapter`) instead of being merged.
    """
    return next(_own_weights_faults(model, sends_adapter), None)


def _own_weights_faults(model: Any, sends_adapter: bool) -> Iterator[str]:
    yield from _rotary_faults(model)
    if is_quantized(model):
        yield (
            "model is quantized: an engine with weights of its own is sent plain tensors. Set rollout='hf', which "
            "samples from the model itself."
        )
    yield from _adapter_faults(model, sends_adapter)
    yield from _head_faults(model)


def _rotary_faults(model: Any) -> Iterator[str]:
    """Yield faults of rotary buffers that differ from the configuration: buffers are not sent to the engine."""
    for path, module in model.named_modules():
        own = {name: x for name, x in module.named_buffers(recurse=False) if name.endswith("inv_freq")}
        if not own:
            continue
        at = f"{path}.inv_freq"
        wanted = _fresh_buffers(module)
        for name, found in own.items():
            is_first = name.replace("inv_freq", "original_inv_freq") in own  # may change with longer rows
            known = None if is_first else wanted.get(name)
            is_rounded = found.dtype.itemsize < 4
            differs = known is not None and not torch.allclose(
                found.float().cpu(), known.float().cpu(), rtol=1e-5, atol=0
            )
            if is_rounded or (differs and _was_rounded(found)):
                dtype = _short(found.dtype if is_rounded else model.dtype)
                how = "rounded to" if is_rounded else "rounded on its way to"
                yield (
                    f"model.dtype is {_short(model.dtype)}, and {at} was {how} {dtype} by .half(), .bfloat16() or "
                    ".to(dtype): the engine has it in float32, so that their results would differ. Load the "
                    f"model with dtype='{_short(model.dtype)}', or cast only its parameters (`for p in "
                    "model.parameters(): p.data = p.data.to(dtype)`), or set rollout='hf'."
                )
            elif differs:
                yield (
                    f"{at} differs from model.config, by which the engine is built. Make them equal, "
                    "or set rollout='hf'."
                )


def _fresh_buffers(module: Any) -> dict[str, Tensor]:
    """The buffers of a new module of the same class and configuration; empty if it cannot be created."""
    try:
        return dict(type(module)(module.config).named_buffers(recurse=False))
    except Exception:  # noqa: BLE001 - a user-defined constructor may raise anything
        return {}


def _was_rounded(x: Tensor) -> bool:
    """Whether all values are representable in 16 bits."""
    return any(bool((x == x.to(dtype).to(x.dtype)).all()) for dtype in (torch.float16, torch.bfloat16))


def is_quantized(model: Any) -> bool:
    """Whether layers of a model have quantized weights."""
    if getattr(model, "is_quantized", False) or getattr(model, "quantization_method", None) is not None:
        return True
    return any(
        not isinstance(value, Tensor) or value.is_quantized
        for name, value in model.state_dict().items()
        if not name.endswith("_extra_state")
    )


def _adapter_faults(model: Any, sends_adapter: bool) -> Iterator[str]:
    if hasattr(model, "peft_config") and not hasattr(model, "get_base_model"):
        yield (
            "model has adapter layers (by peft.get_peft_model or model.add_adapter) but is not a PeftModel: set "
            "actor.model to the result of get_peft_model, or set rollout='hf'."
        )
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in ("ModulesToSaveWrapper", "TrainableTokensWrapper"):
            yield (
                f"model has an adapter that replaces {name} as a whole (modules_to_save): an engine with its own "
                "weights receives LoRA layers only. Merge it (model.merge_and_unload()), or set rollout='hf'."
            )
        if not is_adapted(module):
            continue
        used = [adapter for adapter in module.active_adapters if adapter in getattr(module, "lora_A", ())]
        if not _is_plain_lora(module):
            yield (
                f"model has an adapter at {name} that is not plain LoRA ({kind}): an engine with its own weights "
                "receives W + scale B A. Merge it (model.merge_and_unload()), or set rollout='hf'."
            )
        elif module.merged_adapters and (module.disable_adapters or sends_adapter):
            way = "disabled" if module.disable_adapters else "sent to the engine as well"
            yield (
                f"model has an adapter that is merged into {name} and {way}: unmerge it first "
                "(model.unmerge_adapter()), or set rollout='hf'."
            )
        elif module.disable_adapters and sends_adapter:
            yield (
                "model has its adapter disabled, and rollout.lora=adapter samples with it: enable it, or set "
                "rollout.lora=merged."
            )
        elif sends_adapter and len(used) > 1:
            yield (
                f"model has {len(used)} active adapters at {name}, and rollout.lora=adapter sends one: set "
                "rollout.lora=merged."
            )


def _is_plain_lora(module: Any) -> bool:
    """Whether the active adapters of a peft layer are plain LoRA, W + scale B A."""
    if not hasattr(module, "lora_A"):
        return False
    others = ("lora_embedding_A", "lora_magnitude_vector", "lora_variant")
    active = module.active_adapters
    if any(adapter in getattr(module, name, ()) for name in others for adapter in active):
        return False
    return not any(
        getattr(module, name, {}).get(adapter, False) for name in ("use_dora", "lora_bias") for adapter in active
    )


def _head_faults(model: Any) -> Iterator[str]:
    """Yield faults of an output head that differs from the configuration, by which engines are built."""
    try:
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return
    if head is None or embedding is None or not hasattr(head, "weight") or not hasattr(embedding, "weight"):
        return
    config = model.config.get_text_config()
    ties, are_one = bool(getattr(config, "tie_word_embeddings", False)), head.weight is embedding.weight
    if ties and not are_one:
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


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
