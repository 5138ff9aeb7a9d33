"""Activation memory of a micro-batch, measured by running one and two layers on fake tensors.

    config ── 1 and 2 layers ──> forward and backward under FakeTensorMode ── bytes alive, at their peak ──> a + n b

`LiveBytes` does the same for real tensors, to validate the estimate.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verl.engines.chunked_logprobs import logits_at_a_time, score_in_parts
from verl.models.model_stats import model_stats, settings_text

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # what configurations call their number
CAUSAL = "verl_causal"  # attention without a mask, as packed rows have it


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages that operations in its context have allocated.

    Attributes:
        live, peak: current bytes, and their maximum; without gradients of `watch`ed parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._handles: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._run(func, args, kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return result

    def watch(self, module: nn.Module) -> None:
        """Exclude the parameters of a module and their gradients."""
        for parameter in module.parameters():
            self._known.setdefault(parameter.untyped_storage(), 0)
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._forget_gradient))

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known or tensor.is_meta:
            return
        size = storage.nbytes()
        self._known[storage] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, size)

    def _release(self, size: int) -> None:
        self.live -= size

    def _forget_gradient(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and (size := self._known.get(gradient.untyped_storage(), 0)):
            self._known[gradient.untyped_storage()] = 0
            self.live -= size
            weakref.finalize(gradient.untyped_storage(), self._release, -size)


class FakeBytes(LiveBytes):
    """`LiveBytes` for fake tensors, with rules for operations that FakeTensorMode does not support."""

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return False  # such as whether a layer is dropped
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            halved = [x.to(torch.bfloat16) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
            return func(*halved, **kwargs).to(args[0].dtype)
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Activations:
    """Memory of a micro-batch in addition to weights and gradients.

    Attributes:
        training: peak of forward and backward pass, without logits.
        after_forward: at the end of the forward pass, when logits are added.
        scoring: peak of a forward pass without gradients.
        logits: of one chunk of tokens in the backward pass.
        why_counted: why the layers were not traced, so that a formula for Llama layers was used; None if they were.
    """

    training: int
    after_forward: int
    scoring: int
    logits: int
    why_counted: str | None = None

    @property
    def bytes(self) -> tuple[int, int, int]:
        """Bytes that depend on the number of experts of a token."""
        return self.training, self.after_forward, self.scoring


def _cached(trace: Callable[..., Activations]) -> Callable[..., Activations]:
    """A plan with its changes asks many times for the same micro-batch."""
    known: dict[tuple[Any, ...], Activations] = {}

    @functools.wraps(trace)
    def traced(config: Any, *args: Any, **kwargs: Any) -> Activations:
        key = (type(config), settings_text(config), *args, *sorted(kwargs.items()))
        if key not in known:
            known[key] = trace(config, *args, **kwargs)
        return known[key]

    return traced


@_cached
def trace_activations(
    config: Any,
    tokens: int,
    dtype: torch.dtype,
    *,
    recomputed: bool = False,
    siblings: int = 1,
    exact: bool = False,
    counted_below: int = 0,
    device_type: str = "cpu",
    expert_load: float | None = None,
) -> Activations:
    """Trace a packed sequence of this many tokens through a model with this Hugging Face configuration.

    Args:
        recomputed: with gradient checkpointing.
        siblings: processes that share each layer (tensor parallelism): each has its part of MLP and attention.
        exact: run all layers, rather than one and two. They are run too where layers differ in their parameters.
        counted_below: bytes: activations that take less by a formula are not traced, which takes seconds.
        device_type: on which it will run: parts of the logits are larger on a GPU.
        expert_load: of experts that are divided over processes, how many times its share of the tokens this one's get:
            1 where routing is balanced. None where each process has all experts, or there are none.
    """
    layers = config.get_text_config().num_hidden_layers
    logits = _logits(config, tokens, dtype, siblings, device_type)
    if counted_below:
        counted = _counted(config, tokens, dtype, recomputed, siblings, logits, "they take little")
        if counted.training < counted_below:
            return counted
    log = logging.getLogger("torch._subclasses.fake_tensor")  # which prints tracebacks of what fails below
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        depths = [layers] if exact or layers < 3 or not _are_alike(config) else [1, 2]
        if expert_load is None:
            return _trace(config, depths, tokens, dtype, recomputed, siblings, logits)
        share = config.get_text_config().num_experts_per_tok * expert_load / siblings  # of a token's experts, here
        with_one, with_two = (
            _trace(_with_chosen(config, chosen, siblings), depths, tokens, dtype, recomputed, siblings, logits)
            for chosen in (1, 2)
        )
        return Activations(
            *(int(a + (share - 1) * (b - a)) for a, b in zip(with_one.bytes, with_two.bytes, strict=True)),
            logits=logits,
        )
    except Exception as error:  # noqa: BLE001 - a model's own code on tensors without data may fail in any way
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return _counted(config, tokens, dtype, recomputed, siblings, logits, why)
    finally:
        log.setLevel(level)


def _counted(
    config: Any, tokens: int, dtype: torch.dtype, recomputed: bool, siblings: int, logits: int, why: str
) -> Activations:
    sizes = model_stats(config)
    training = sizes.activation_elements(tokens, recomputed) * dtype.itemsize // siblings
    scoring = sizes.layer_elements * tokens * dtype.itemsize // siblings
    return Activations(training=training, after_forward=training, scoring=scoring, logits=logits, why_counted=why)


def _trace(
    config: Any, depths: list[int], tokens: int, dtype: torch.dtype, recomputed: bool, siblings: int, logits: int
) -> Activations:
    layers = config.get_text_config().num_hidden_layers

    def at(depth: int, recomputed: bool, trains: bool) -> tuple[int, int]:
        part = _with_layers(config, depth, siblings)
        try:
            return traced_activations(part, tokens, dtype, recomputed, CAUSAL, trains=trains)
        except Exception:  # noqa: BLE001 - a family that does not take another attention: by its own
            return traced_activations(part, tokens, dtype, recomputed, None, trains=trains)

    trained = [at(depth, recomputed, True) for depth in depths]
    scored = [at(depth, False, False) for depth in depths]
    return Activations(
        training=_at([peak for peak, _ in trained], layers),
        after_forward=_at([remaining for _, remaining in trained], layers),
        scoring=_at([peak for peak, _ in scored], layers),
        logits=logits,
    )


def num_experts(config: Any) -> int:
    """Number of experts of each layer of a mixture whose routers choose some for each token; 0 of any other model."""
    text = config.get_text_config()
    if not getattr(text, "num_experts_per_tok", None):
        return 0
    return next((count for name in EXPERTS if (count := getattr(text, name, None))), 0)


def _with_chosen(config: Any, chosen: int, siblings: int) -> Any:
    """The same with so many experts for each token, among those of one of some processes."""
    part_config = deepcopy(config)
    text = part_config.get_text_config()
    for name in EXPERTS:
        if getattr(text, name, None):
            setattr(text, name, max(2, getattr(text, name) // siblings))
    text.num_experts_per_tok = chosen
    if not hasattr(text, "moe_intermediate_size") and getattr(text, "intermediate_size", None):
        text.intermediate_size *= siblings  # experts are whole: `_with_layers` divides the widths of dense layers
    return part_config


def _are_alike(config: Any) -> bool:
    """Whether all layers have the same parameters, so that two of them represent the others."""
    from transformers import AutoModel

    from verl.models.pretrained import quiet_transformers

    with torch.device("meta"), quiet_transformers():
        model = AutoModel.from_config(config)
    count = config.get_text_config().num_hidden_layers
    stacks = [x for x in model.modules() if isinstance(x, nn.ModuleList) and len(x) == count]
    shapes = [{tuple((n, p.shape) for n, p in layer.named_parameters()) for layer in stack} for stack in stacks]
    return bool(stacks) and len(shapes[0]) == 1


def _at(peaks: list[int], layers: int) -> int:
    return peaks[0] + (layers - 1) * (peaks[1] - peaks[0]) if len(peaks) == 2 else peaks[0]


def traced_activations(
    config: Any, tokens: int, dtype: torch.dtype, recomputed: bool, attention: str | None, *, trains: bool
) -> tuple[int, int]:
    """Bytes at the peak, and at the end of the forward pass."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModel

    from verl.models.pretrained import quiet_transformers

    AttentionInterface.register(CAUSAL, AttentionInterface._global_mapping["sdpa"])
    AttentionMaskInterface.register(CAUSAL, _no_mask)
    with FakeTensorMode(), quiet_transformers(), torch.random.fork_rng(devices=[]):
        model = AutoModel.from_config(config, dtype=dtype, attn_implementation=attention)
        if attention is not None and not model._supports_sdpa:
            raise ValueError(f"{type(model).__name__} keeps its matrix of scores")
        model.train(trains)
        if recomputed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        ids = torch.zeros(1, tokens, dtype=torch.long)
        with FakeBytes() as counted, torch.set_grad_enabled(trains):
            counted.watch(model)
            hidden = model(input_ids=ids, use_cache=False)[0]
            remaining = counted.live
            if trains:
                hidden.backward(torch.empty_like(hidden))
        return counted.peak, remaining


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Make attention plain causal, so that it creates no matrix of scores or masks."""


def _with_layers(config: Any, layers: int, siblings: int) -> Any:
    shallow = deepcopy(config)
    for part in {id(x): x for x in (shallow, shallow.get_text_config())}.values():
        part.num_hidden_layers = layers
        if "layer_types" in vars(part):
            part.layer_types = list(part.layer_types)[:layers]
        part.use_cache = False
        if siblings > 1:
            size = getattr(part, "head_dim", None) or part.hidden_size // part.num_attention_heads
            part.head_dim = size
            part.num_attention_heads = max(1, part.num_attention_heads // siblings)
            if getattr(part, "num_key_value_heads", None):
                part.num_key_value_heads = max(1, part.num_key_value_heads // siblings)
            if getattr(part, "intermediate_size", None):
                part.intermediate_size = max(1, part.intermediate_size // siblings)
    return shallow


def _logits(config: Any, tokens: int, dtype: torch.dtype, siblings: int, device_type: str) -> int:
    """Bytes for one part of the tokens: logits, their log-softmax in float32, and gradients of both; where there are
    several parts, with the sum of their gradients of the head, as far as it takes more than the gradient itself."""
    text = config.get_text_config()
    count = max(1, min(tokens, logits_at_a_time(device_type) // text.vocab_size))
    num_parts = 1 + (count < tokens)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        head = nn.Linear(text.hidden_size, text.vocab_size, bias=False, dtype=dtype)
        hidden = torch.empty(num_parts * count, text.hidden_size, dtype=dtype, requires_grad=True)
        chosen = torch.zeros(num_parts * count, dtype=torch.long)
        with LiveBytes() as counted:
            counted.watch(head)
            score_in_parts(head, hidden, chosen, count)[0].sum().backward()
        return counted.peak // siblings
