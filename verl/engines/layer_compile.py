"""Compilation of a model, layer by layer: programs that torch compiles for one decoder layer serve all layers like it.

    layer ── norms, projections, rotation ──> attention of the packed line, as it is ──> projection, norm, MLP

Attention stays outside: it reads the layout of each line, so that a program would serve one micro-batch. Sizes are
symbols; a line of another length compiles nothing. What was compiled is kept on disk by torch
(`TORCHINDUCTOR_CACHE_DIR`). Decoding, where a layer is called with a cache of keys and values, is not compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from verl.engines.fsdp import blocks_of
from verl.engines.parallel_dims import Parallelism, ShardedParallelism
from verl.errors import ConfigError
from verl.model_paths import packed_attention
from verl.models.structure import expert_layers

COMPILE_LIMITS = "compiled layers were tried with ddp and fsdp alone. Set model.compile=false."
COMPILED_EXPERTS = "has experts, whose choices are counted in Python while it runs. Set model.compile=false."


def compile_layers(model: Any, parallel: Parallelism, backend: str = "inductor") -> None:
    """Compile the layers of a model at their first call.

    Args:
        parallel: how the model will be sharded.
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
    for layer in blocks_of(model):  # what `layer.compile()` sets; `forward` stays that of its class
        compiled = torch.compile(layer._call_impl, dynamic=True, backend=backend)
        layer._compiled_call_impl = functools.partial(_call, layer._call_impl, compiled)


def _call(eager: Callable[..., Any], compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from transformers import Cache

    decodes = any(isinstance(x, Cache) for x in (*args, *kwargs.values()))
    return (eager if decodes else compiled)(*args, **kwargs)
