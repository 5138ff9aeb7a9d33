"""Activation memory of a micro-batch, measured by running one and two layers on fake tensors.

    config ── 1 and 2 layers ──> forward and backward under FakeTensorMode ── bytes alive, at their peak ──> a + n b

`LiveBytes` does the same for real tensors, to validate the estimate.
"""

from __future__ import annotations

import logging
import weakref
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verl.engines.chunked_logprobs import logits_at_a_time, score_in_chunks
from verl.models.model_stats import model_stats, settings_text

DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")  # by siblings
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


class _FakeBytes(LiveBytes):
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
    """Bytes of a micro-batch without weights and gradients.

    Attributes:
        training: peak of forward and backward pass, without logits.
        after_forward: at the end of the forward pass, when logits are added.
        scoring: peak of a forward pass without gradients.
        logits: of one chunk of tokens in the backward pass.
        why_counted: why a formula for Llama layers was used, and no layers traced; None if they were.
    """

    training: int = 0
    after_forward: int = 0
    scoring: int = 0
    logits: int = 0
    why_counted: str | None = None


_known: dict[Any, Activations] = {}  # a plan with its changes asks many times for the same micro-batch


def trace_activations(
    config: Any,
    tokens: int,
    dtype: torch.dtype,
    *,
    recomputed: bool = False,
    siblings: int = 1,
    counted_below: int = 0,
    device_type: str = "cpu",
) -> Activations:
    """Trace a packed sequence of `tokens` tokens through a model with this Hugging Face configuration, with one and two
    of its layers, or with all if they differ in their parameters.

    Args:
        recomputed: with gradient checkpointing.
        siblings: tensor-parallel processes: each has a share of MLP, experts and attention.
        counted_below: bytes: activations that take less by a formula are not traced, which takes seconds.
        device_type: on which it will run: parts of the logits are larger on a GPU.
    """
    options = tokens, dtype, recomputed, siblings, counted_below, device_type
    if (key := (type(config), settings_text(config), *options)) in _known:
        return _known[key]
    stats, logits = model_stats(config), _logits(config, tokens, dtype, siblings, device_type)
    training = stats.activation_elements(tokens, recomputed) * dtype.itemsize // siblings
    scoring = stats.layer_elements * tokens * dtype.itemsize // siblings
    found = Activations(training, training, scoring, logits, "they take little")
    if training >= counted_below:
        log = logging.getLogger("torch._subclasses.fake_tensor")  # which prints tracebacks of failures below
        level = log.level
        log.setLevel(logging.CRITICAL)
        try:
            depths = [1, 2] if stats.layers > 2 and stats.are_layers_alike else [stats.layers]
            traced = []
            for part in (_part_of(config, depth, siblings) for depth in depths):
                try:
                    traced.append(traced_activations(part, tokens, dtype, recomputed, CAUSAL))
                except Exception:  # noqa: BLE001 - a family that refuses another attention uses its own
                    traced.append(traced_activations(part, tokens, dtype, recomputed, None))
            layers = (one + (stats.layers - 1) * (two - one) for one, two in zip(traced[0], traced[-1], strict=True))
            found = Activations(*layers, logits=logits)
        except Exception as error:  # noqa: BLE001 - a model's own code on tensors without data may fail in any way
            first_line = str(error).strip().partition("\n")[0]
            found = replace(found, why_counted=f"{type(error).__name__}: {first_line}")
        finally:
            log.setLevel(level)
    return _known.setdefault(key, found)


def _part_of(config: Any, layers: int, siblings: int) -> Any:
    """The configuration with `layers` layers, reduced to the share of one of `siblings` processes."""
    part = deepcopy(config)
    for config_part in {id(x): x for x in (part, part.get_text_config())}.values():
        config_part.num_hidden_layers, config_part.use_cache = layers, False
        if "layer_types" in vars(config_part):
            config_part.layer_types = list(config_part.layer_types)[:layers]
        if siblings > 1:
            heads = config_part.num_attention_heads
            config_part.head_dim = getattr(config_part, "head_dim", None) or config_part.hidden_size // heads
            for name in DIVIDED:
                if getattr(config_part, name, None):
                    setattr(config_part, name, max(1, getattr(config_part, name) // siblings))
    return part


def traced_activations(
    config: Any, tokens: int, dtype: torch.dtype, recomputed: bool, attention: str | None
) -> tuple[int, int, int]:
    """Bytes at the peak of training and at the end of its forward pass, and at the peak of scoring."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModel

    from verl.models.pretrained import quiet_transformers

    AttentionInterface.register(CAUSAL, AttentionInterface._global_mapping["sdpa"])
    AttentionMaskInterface.register(CAUSAL, lambda *_, **__: None)  # plain causal: no matrix of scores or masks
    counts = []
    with FakeTensorMode(), quiet_transformers(), torch.random.fork_rng(devices=[]):
        model = AutoModel.from_config(config, dtype=dtype, attn_implementation=attention)
        if attention is not None and not model._supports_sdpa:
            raise ValueError(f"{type(model).__name__} keeps its matrix of scores")
        if recomputed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        ids = torch.zeros(1, tokens, dtype=torch.long)
        for trains in (True, False):
            model.train(trains)
            with _FakeBytes() as counted, torch.set_grad_enabled(trains):
                counted.watch(model)
                hidden = model(input_ids=ids, use_cache=False)[0]
                after_forward = counted.live
                if trains:
                    hidden.backward(torch.empty_like(hidden))
            counts += [counted.peak, after_forward]
            del hidden
    return counts[0], counts[1], counts[2]


def _logits(config: Any, tokens: int, dtype: torch.dtype, siblings: int, device_type: str) -> int:
    """Bytes of one chunk of tokens: logits, their log-softmax in float32, and gradients of both; with several chunks,
    also the float32 sum of the head's gradients, as far as it is larger than the gradient itself."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    text = config.get_text_config()
    count = max(1, min(tokens, logits_at_a_time(device_type) // text.vocab_size))
    num_tokens = count * (1 + (count < tokens))
    with FakeTensorMode():
        head = nn.Linear(text.hidden_size, text.vocab_size, bias=False, dtype=dtype)
        chosen = torch.zeros(num_tokens, dtype=torch.long)
        hidden = torch.empty(num_tokens, text.hidden_size, dtype=dtype, requires_grad=True)
        with LiveBytes() as counted:
            counted.watch(head)
            score_in_chunks(head, hidden, chosen, count)[0].sum().backward()
        return counted.peak // siblings
