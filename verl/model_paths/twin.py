"""The twin: a small model of the same class, code and kinds of layers, on which ways of running a model are tried.

A probe of the model itself with a few tokens reaches no window, chunk or change of rotary scaling, and one with many
tokens costs too much. The twin has one layer of each kind, a small width and random float32 weights under which
attention is peaked. Lengths at which something changes (windows, chunks, scalings) lie so that rows of `ROW_TOKENS`
tokens cross those that the rows of the run cross, and stop short of the others.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verl.model_paths.small_config import FIRST_ORDINARY_TOKEN, SmallConfig, layer_counts
from verl.models.call import call_model, layers_around, unwrapped
from verl.models.pretrained import quiet_transformers
from verl.models.source import without_dropout

MAX_PARAMETERS = 20_000_000
SMALL = 3_000_000  # parameters, up to which the twin keeps the widths of the model
QUERY_OR_KEY = re.compile(r"(q_|k_|query|key|qkv|c_attn|Wqkv|in_proj_qkvz|kv_a|kv_b)")
STATE = re.compile(r"(conv|A_log|_log|dt_|time_)")  # parameters whose own initial values mean something


class NoTwin(Exception):
    """A model has no twin; the text says why."""


@dataclass(frozen=True)
class Twin:
    """A small model that stands for another.

    Attributes:
        model: in evaluation mode, float32, on the CPU.
        lengths: of at most `ROW_TOKENS` tokens, at which something changes in it.
        parts: those of them at which only the way of computing changes.
        token_ids: the first ordinary token id, and the first one beyond the vocabulary.
        sharpness: of its weights.
    """

    model: Any
    lengths: tuple[int, ...]
    parts: tuple[int, ...]
    token_ids: tuple[int, int]
    sharpness: float


def make_twin(model: Any, row_tokens: int, moved: tuple[int, int] | None = None, sharpness: float = 1.0) -> Twin:
    """The twin of a Hugging Face model for rows of up to so many tokens.

    Args:
        moved: one of its `lengths`, and by how many tokens to move it; to plant a fault.
        sharpness: of its weights, 1 where attention is peaked.
    Raises:
        NoTwin: none can be made.
    """
    kind = model_class(model)
    whole = _on_meta(kind, model.config)  # the model itself may carry an adapter, or be divided
    kinds, reasons = layer_kinds(whole), []
    is_small = sum(p.numel() for p in whole.parameters()) <= SMALL
    for is_narrow in (False, True) if is_small else (True, False):
        for layers in _layer_choices(kinds):
            config = copy.deepcopy(model.config)
            if "flash" in str(config._attn_implementation):  # runs on GPUs alone; the first real batch tries it
                config._attn_implementation = "sdpa"
            try:
                kept = None if layers is None else (layers, len(kinds or ()))
                small = SmallConfig(config, row_tokens, kept, is_narrow=is_narrow, moved=moved)
                first = FIRST_ORDINARY_TOKEN if is_narrow else 1
                tokens = (first, config.get_text_config().vocab_size)
                twin = Twin(_built(kind, config, sharpness), small.lengths, small.parts, tokens, sharpness)
                _try_out(twin)
            except Exception as error:  # noqa: BLE001 - whatever a model's own code has against it
                reasons.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
                continue
            if kinds is None or set(layer_kinds(twin.model) or ()) == set(kinds):
                return twin
            reasons.append("its kinds of layers differ")
    raise NoTwin(reasons[0])


def model_class(model: Any) -> type:
    """The class that a model was made of; torch's FSDP2 puts one of its own before it."""
    from torch.distributed.fsdp import FSDPModule

    kind = type(model)
    return kind.__mro__[2] if issubclass(kind, FSDPModule) else kind


def has_own_code(model: Any) -> str | None:
    """What of a model is not what its class and configuration make of it, so that no other model has its code.

    Accelerate's forward, which moves weights, is no other; nor are adapters around a layer, or what transformers itself
    has put in to load quantized weights.
    """
    if any("forward" in vars(layer) and not hasattr(layer, "_hf_hook") for layer in layers_around(model)):
        return "its forward was replaced on the object"
    model = unwrapped(model)
    if getattr(model.config, "quantization_config", None) is not None:
        return None
    try:
        made = {name: type(module) for name, module in _on_meta(model_class(model), model.config).named_modules()}
    except Exception:  # noqa: BLE001 - whatever a class of its own needs to be made
        return "its class cannot be made from its configuration"
    for name, module in model.named_modules():
        kind = model_class(module)
        if name in made and kind is not made[name] and not hasattr(module, "base_layer"):
            return f"its part {name} is a {kind.__name__}, where its class has a {made[name].__name__}"
    return None


def _on_meta(kind: type, config: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]), quiet_transformers(), torch.device("meta"):
        return kind(copy.deepcopy(config))


@torch.no_grad()
def _try_out(twin: Twin) -> None:
    first, end = twin.token_ids
    found = call_model(twin.model, input_ids=first + torch.arange(32)[None] % (end - first), use_cache=False)
    if not torch.isfinite(found[0] if isinstance(found[0], Tensor) else found.logits).all():
        raise NoTwin("its numbers are not finite")


def _built(kind: type, config: Any, sharpness: float) -> Any:
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        size = sum(p.numel() for p in _on_meta(kind, config).parameters())
        if size > MAX_PARAMETERS:
            raise NoTwin(f"it would have {size / 1e6:.0f} million parameters")
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            twin = without_dropout(kind(config).float()).eval()
        finally:
            torch.set_default_dtype(before)
        _sharpen(twin, sharpness)
    return twin.requires_grad_(False)


@torch.no_grad()
def _sharpen(model: Any, sharpness: float) -> None:
    """Random weights of the size at which tokens and positions matter."""
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    head = None if output is None else getattr(output, "weight", None)
    for name, parameter in model.named_parameters():
        if STATE.search(name) or not parameter.is_floating_point():
            continue
        if parameter is head:
            parameter.normal_(0.0, 2.0 * parameter.shape[-1] ** -0.5)
        elif parameter.ndim >= 2:
            fan_in = 1 if "embed" in name or "wte" in name or "wpe" in name else parameter.shape[-1]
            gain = sharpness * (2.0 if QUERY_OR_KEY.search(name) else 1.0)
            parameter.normal_(0.0, gain * fan_in**-0.5)
        elif name.endswith("bias"):
            parameter.normal_(0.0, 0.1)


def layer_kinds(model: nn.Module) -> list[tuple] | None:
    """What kind of layer each is: its parts, and what is switched on in them; None where they are not found."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    for count in layer_counts(model.config):
        if count and (found := [layers for layers in lists if len(layers) == count]):
            return [_kind(layer) for layer in found[0]]
    return None


def _kind(layer: nn.Module) -> tuple:
    parts = []
    for name, module in layer.named_modules():
        if re.search(r"\.\d+(\.|$)", name):  # one of many experts
            continue
        settings = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        switches = [
            (key, value if isinstance(value, bool | str) else value is None)
            for key, value in sorted(settings.items())
            if key not in ("training", "config") and (isinstance(value, bool | str) or value is None or "window" in key)
        ]
        parts.append((name, type(module).__name__, tuple(switches)))
    return tuple(parts)


def _layer_choices(kinds: list[tuple] | None) -> Iterator[list[int] | None]:
    """Which layers the twin has: one of each kind if that can be, else the first few, else all."""
    if kinds is None:
        yield None
        return
    firsts = sorted(kinds.index(kind) for kind in set(kinds))
    lasts = sorted(len(kinds) - 1 - kinds[::-1].index(kind) for kind in set(kinds))
    tried = [firsts, sorted({*firsts, *lasts}), *(list(range(n)) for n in (2, 4, 6, 8, 12, 16, len(kinds)))]
    for index, layers in enumerate(tried):
        if len(layers) <= len(kinds) and layers not in tried[:index]:
            yield layers
