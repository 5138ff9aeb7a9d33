"""Mesh, layouts, device and computing dtype (autocast) of a sharded model, for its callers."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from verl.ops.resharding.dtensor import is_divided, local, tensor_layout
from verl.ops.resharding.layout import Mesh, TensorLayout


@dataclass(frozen=True, kw_only=True)
class ParallelInfo:
    """Sharding of a model; its attribute `parallel_info`, set by the code that shards it.

    Attributes:
        device: device of computation; weights may rest elsewhere.
        stage_group: process group of the pipeline stages, in order. With it, the model cannot be called outside of
            `gathered`. None if each process has all layers.
        generation_groups: process groups with the same rows; inside `gathered` each process has the whole weights, and
            the processes of a group split the rows for generation.
        casts_weights: whether the model casts its weights to the computing dtype itself.
        free_gathered_parameters: frees weights that the last forward pass has gathered.
        gathered: a context in which this process has all weights, so that forward passes do not communicate.
        mesh: process mesh of the model.
        rank: of this process in the mesh.
        through_stages: of a pipeline: runs a function that calls the model once on token ids [b s], and returns its
            result in all stages. None if each process has all layers.
        siblings: ranks that work on the same rows, including this one and those of other stages, in order.
        sibling_group: process group of the siblings.
        layout_of: layout of a tensor of the model over the mesh.
        local: the local part of such a tensor.
        tensor_group: process group of those that compute every forward pass together, inside `gathered` too (tensor
            parallelism); None if this process is the only one.
        timeout: time limit of a collective operation, for more groups of its processes; None for that of torch.
    """

    device: torch.device
    mesh: Mesh
    rank: int
    siblings: tuple[int, ...]
    sibling_group: Any
    layout_of: Callable[[Tensor], TensorLayout]
    local: Callable[[Tensor], Tensor]
    casts_weights: bool = False
    gathered: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    free_gathered_parameters: Callable[[], None] = lambda: None
    stage_group: Any = None
    through_stages: Callable[[Tensor, Callable[[], Tensor]], Tensor] | None = None
    generation_groups: tuple[Any, ...] = ()
    tensor_group: Any = None
    timeout: timedelta | None = None


_MEETINGS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # number of calls of `meet` so far, by store
MAX_POLL_S = 0.05


def meet(parallel_info: ParallelInfo) -> None:
    """Barrier over all processes of the model, without a time limit: collective operations have one.

    For work that may take one process much longer than another. If a process dies, the driver ends the run.
    """
    if parallel_info.mesh.size == 1:
        return
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    number = _MEETINGS[store] = _MEETINGS.get(store, 0) + 1
    store.set(f"verl/meeting/{number}/{parallel_info.rank}", "here")
    everyone = [f"verl/meeting/{number}/{rank}" for rank in range(parallel_info.mesh.size)]
    wait_for(store, everyone)
    if number > 1:  # all have left the previous barrier, since they reached this one
        store.delete_key(f"verl/meeting/{number - 1}/{parallel_info.rank}")


def wait_for(store: Any, keys: list[str]) -> None:
    """Wait until a store of torch.distributed has all keys, without a time limit."""
    poll_s = 0.0005
    while not store.check(keys):
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, MAX_POLL_S)


def parallel_info_of(model: Any) -> ParallelInfo:
    """Sharding of a model; one that is not sharded is held by a mesh of this process alone."""
    if (parallel_info := getattr(model, "parallel_info", None)) is not None:
        return parallel_info
    return ParallelInfo(
        device=compute_device(model),
        mesh=Mesh((("shard", 1),)),
        rank=0,
        siblings=(0,),
        sibling_group=None,
        layout_of=tensor_layout,
        local=local,
    )


def compute_device(model: Any) -> torch.device:
    """The device that a model computes on."""
    parallel_info = getattr(model, "parallel_info", None)
    return next(model.parameters()).device if parallel_info is None else parallel_info.device


def casts_weights(model: Any) -> bool:
    """Whether a model casts its weights to the computing dtype itself."""
    parallel_info = getattr(model, "parallel_info", None)
    return parallel_info is not None and parallel_info.casts_weights


def release_gathered(model: Any) -> None:
    """Free weights that a forward pass has gathered: parameters are the local shards again. Otherwise embedding and
    head, the largest, stay in memory."""
    if (parallel_info := getattr(model, "parallel_info", None)) is not None:
        parallel_info.free_gathered_parameters()


def weights_gathered(model: Any) -> AbstractContextManager[None]:
    """Inside this context a process may call the model any number of times, independently of the others.

    Used for generation: gathering each layer for each token would be slow, and would hang once a process has finished
    its last response. All processes enter and leave together.
    """
    parallel_info = getattr(model, "parallel_info", None)
    return contextlib.nullcontext() if parallel_info is None else parallel_info.gathered()


def layers_gathered(model: Any) -> AbstractContextManager[None]:
    """Inside this context the process has all layers of a model; calls stay collective with its siblings."""
    info = getattr(model, "parallel_info", None)
    return contextlib.nullcontext() if info is None or info.stage_group is None else info.gathered()


def through_stages(model: Any, ids: Tensor, function: Callable[[], Tensor]) -> Tensor:
    """Result of a function that calls the model once on token ids [b s]. Collective over the processes that hold it."""
    info = getattr(model, "parallel_info", None)
    return function() if info is None or info.through_stages is None else info.through_stages(ids, function)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor. Collective: all processes must call it in the same order."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


Autocast = Literal["bfloat16"] | None
# Copies of `computing_in`, by id of the weight, of models whose copies stay in their memory: CUDA graphs read them
KEPT_COPIES: WeakKeyDictionary[nn.Module, dict[int, Tensor]] = WeakKeyDictionary()
GRADIENT_BYTES = 2**26  # of gradients in a narrow dtype that are held on a GPU, to be cast and added up together


@dataclass(frozen=True)
class Numerics:
    """Precision of log-probs in the trainer and in the rollout engine.

    Attributes:
        trainer, engine: dtypes, as named by `compute_type`.
        engine_kind: class of the engine.
        temperature: divides the logits.
    """

    trainer: str
    engine: str
    engine_kind: str
    temperature: float


def compute_type(model: nn.Module, autocast: Autocast = None) -> str:
    """The least precise dtype that a model computes in: `float64`, `float32`, `tf32`, `float16`, `bfloat16` or
    narrower.

    It is that of its weights, of `autocast`, or for float32 the precision of matrix products that torch is set to
    (`torch.set_float32_matmul_precision`).
    """
    if autocast is not None:
        return autocast
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} or {torch.float32}
    name = str(max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)).removeprefix("torch.")
    if name == "float32":
        return {"highest": "float32", "high": "tf32"}.get(torch.get_float32_matmul_precision(), "bfloat16")
    return name


@contextlib.contextmanager
def computing_in(dtype: Autocast, model: nn.Module) -> Iterator[None]:
    """Inside this context `model` computes in `dtype`, weights and activations; None changes nothing.

    Every weight is replaced by a copy in that dtype, made once per context, where torch.autocast would cast at every
    product. Gradients of the copies are added to those of their weights, in the weights' dtype, at the latest when the
    context ends; there may be several backward passes. They must be inside too, since gradient checkpointing repeats
    the forward pass.

    Submodules in `model.computes_in_own_type` (a value head) keep their dtype. A sharded model may cast its weights
    itself when it gathers them.
    """
    if dtype is None or casts_weights(model):
        yield
        return
    narrow = getattr(torch, dtype)
    excluded = {id(p) for part in getattr(model, "computes_in_own_type", ()) for p in part.parameters()}
    replaced = [
        (module._parameters, name, weight)
        for module in model.modules()
        for name, weight in module._parameters.items()
        if weight is not None and weight.is_floating_point() and weight.dtype != narrow and id(weight) not in excluded
    ]
    weights = {id(weight): weight for _, _, weight in replaced}  # tied weights stay tied
    kept = [(w, KEPT_COPIES.get(model, {}).get(number)) for number, w in weights.items()]
    into = [x if x is not None and (x.shape, x.device) == (w.shape, w.device) else None for w, x in kept]
    found = dict(zip(weights, cast_together([w.detach() for w, _ in kept], narrow, into), strict=True))
    if model in KEPT_COPIES and weights:  # there are none within another context of the model
        KEPT_COPIES[model] = found
    copies = {number: x.detach() for number, x in found.items()}  # gradients are those of this context
    gradients = _WideGradients(compute_device(model))
    for number, copy in copies.items():
        if weights[number].requires_grad and torch.is_grad_enabled():
            copy.requires_grad_().register_post_accumulate_grad_hook(functools.partial(gradients.take, weights[number]))
    try:
        for parameters, name, weight in replaced:
            parameters[name] = copies[id(weight)]  # type: ignore[assignment]
        yield
        gradients.hand_over()
    finally:
        for parameters, name, weight in replaced:
            parameters[name] = weight


def cast_together(
    tensors: Sequence[Tensor], dtype: torch.dtype, into: Sequence[Tensor | None] | None = None
) -> list[Tensor]:
    """Copies of tensors in another dtype, by one call for all: on a GPU in few launches.

    Args:
        into: memory for some of them.
    """
    given = zip(tensors, into or [None] * len(tensors), strict=True)
    copies = [torch.empty_like(x, dtype=dtype) if copy is None else copy for x, copy in given]
    if copies:
        torch.ops.aten._foreach_copy_([local(x) for x in copies], [local(x) for x in tensors])
    return copies


class _WideGradients:
    """Adds gradients of narrow copies to those of their weights, on a GPU many together."""

    def __init__(self, device: torch.device):
        self._most_bytes = 0 if device.type == "cpu" else GRADIENT_BYTES
        self._pending: dict[int, tuple[nn.Parameter, Tensor]] = {}
        self._bytes = 0

    def take(self, weight: nn.Parameter, copy: Tensor) -> None:
        assert copy.grad is not None
        gradient, copy.grad = copy.grad, None
        if is_divided(gradient):  # which may have to be summed over processes before it is added
            wide = gradient.to(weight.dtype)
            weight.grad = wide if weight.grad is None else weight.grad + wide
            return
        if id(weight) in self._pending:  # of the micro-batch before
            self.hand_over()
        self._pending[id(weight)] = weight, gradient
        self._bytes += gradient.nbytes
        if self._bytes >= self._most_bytes:
            self.hand_over()

    @torch.no_grad()
    def hand_over(self) -> None:
        pending, self._pending, self._bytes = list(self._pending.values()), {}, 0
        of_dtype: dict[torch.dtype, list[tuple[nn.Parameter, Tensor]]] = {}
        for weight, gradient in pending:
            of_dtype.setdefault(weight.dtype, []).append((weight, gradient))
        for dtype, pairs in of_dtype.items():
            wide = cast_together([gradient for _, gradient in pairs], dtype)
            sums: list[tuple[Tensor, Tensor]] = []
            for (weight, _), gradient in zip(pairs, wide, strict=True):
                if weight.grad is None:
                    weight.grad = gradient
                else:
                    sums.append((weight.grad, gradient))
            if sums:
                torch.ops.aten._foreach_add_.List(*map(list, zip(*sums, strict=True)))
