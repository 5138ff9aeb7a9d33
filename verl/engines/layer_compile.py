"""Compilation of a model, layer by layer: programs that torch compiles for one decoder layer serve all layers like it.

    layer ── norms, projections, rotation ──> attention of the packed line, as it is ──> projection, norm, MLP

Attention stays outside: it reads the layout of each line, so that a program would serve one micro-batch. Sizes are
symbols; a line of another length compiles nothing. What was compiled is kept on disk by torch
(`TORCHINDUCTOR_CACHE_DIR`). Decoding, where a layer is called with a cache of keys and values, is not compiled.

A resumed process must compile the same programs. Inductor may choose between reductions by timing, which its option
`deterministic` forbids, and by the sizes of the first call. That is therefore a trial on rows of a fixed length, after
which the programs are used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from verl.engines.fsdp import blocks_of
from verl.engines.parallel_dims import Parallelism, ShardedParallelism
from verl.errors import ConfigError
from verl.model_paths import packed_attention
from verl.models.structure import expert_layers, unwrapped

COMPILE_LIMITS = "compiled layers were tried with ddp and fsdp alone. Set model.compile=false."
COMPILED_EXPERTS = "has experts, whose choices are counted in Python while it runs. Set model.compile=false."


AUTO_WIDTH = 512  # of narrower models the kernels saved are not worth the time to compile


@dataclass
class LayerPrograms:
    """Compiled layers of a model; its attribute `layer_programs`.

    Attributes:
        is_optional: only packed lines are computed by them, and only if a trial succeeds.
        are_used: set after the trial, and during it.
    """

    is_optional: bool
    are_used: bool = False

    def __deepcopy__(self, memo: Any) -> LayerPrograms:
        return LayerPrograms(self.is_optional)


def programs_of(model: Any) -> LayerPrograms | None:
    """The `LayerPrograms` of a model in training; None if its layers are not compiled."""
    return getattr(unwrapped(getattr(model, "backbone", model)), "layer_programs", None)


def is_worth_compiling(model: Any, parallel: Parallelism, device: str) -> bool:
    """Whether `model.compile=auto` compiles: elsewhere a failure of one process would stop the others."""
    width = getattr(model.config.get_text_config(), "hidden_size", 0)
    is_alone = parallel.world_size == 1 and not isinstance(parallel, ShardedParallelism)
    is_dense_text = not expert_layers(model) and not hasattr(model.config, "vision_config")
    return torch.device(device).type == "cuda" and is_alone and width >= AUTO_WIDTH and is_dense_text


def compile_layers(
    model: Any, parallel: Parallelism, *, is_optional: bool = False, backend: Literal["inductor", "eager"] = "inductor"
) -> None:
    """Compile the layers of a model at their first call after the `LayerPrograms` of it are used.

    Args:
        parallel: how the model will be sharded.
        is_optional: see `LayerPrograms`.
        backend: of torch.compile.
    Raises:
        ConfigError: the model has experts, or a sharding splits its layers.
    """
    degrees = parallel.degrees if isinstance(parallel, ShardedParallelism) else None
    split = [] if degrees is None else [name for name in ("tp", "pp", "ep") if getattr(degrees, name) > 1]
    if split:
        raise ConfigError(
            f"model.compile is true, and sharding.{split[0]} is {getattr(degrees, split[0])}: {COMPILE_LIMITS}"
        )
    if expert_layers(model):
        raise ConfigError(f"model.compile is true: a {type(model).__name__} {COMPILED_EXPERTS}")
    packed_attention.leave_uncompiled()
    programs = model.layer_programs = LayerPrograms(is_optional)
    options: dict[str, Any] = {"options": {"deterministic": True}} if backend == "inductor" else {}
    for layer in blocks_of(model):  # what `layer.compile()` sets; `forward` stays that of its class
        compiled = torch.compile(layer._call_impl, dynamic=True, backend=backend, **options)
        layer._compiled_call_impl = functools.partial(_call, programs, layer._call_impl, compiled)


def _call(
    programs: LayerPrograms, eager: Callable[..., Any], compiled: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    from transformers import Cache

    is_left = programs.is_optional and kwargs.get("packing") is None
    decodes = is_left or any(isinstance(x, Cache) for x in (*args, *kwargs.values()))
    return (compiled if programs.are_used and not decodes else eager)(*args, **kwargs)
