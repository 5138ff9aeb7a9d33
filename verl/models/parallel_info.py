"""What callers of a sharded model must know: its mesh and layouts, its device, and its computing precision
(autocast).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from verl.resharding.layout import Mesh, TensorLayout


@dataclass(frozen=True, kw_only=True)
class ParallelInfo:
    """Left on a model, as its attribute `divided`, by what has divided it.

    Attributes:
        device: where it computes; weights may rest elsewhere.
        stage_group: of torch.distributed, the processes that hold the stages of its pipeline, in order; with one, it
            cannot be called before it is `gathered`. None where each process has all layers.
        generation_groups: of torch.distributed, groups of processes that have the same rows, and each the whole weights
            while it is `gathered`: they divide the rows that are to be generated.
        casts_weights: it computes in the narrower type that it was told, without being asked each time.
        settle: lets go of weights that the last forward pass has gathered.
        gathered: a context in which its weights are whole in this process, so that a forward pass needs no sibling.
        mesh: of all processes that hold it.
        rank: of this process in the mesh.
        through_stages: of a pipeline: runs a function that calls the model once on token ids [b s], and gives its
            result in all stages; None where each process has all layers.
        siblings: the ranks that work on the same rows as this process, those of other stages and itself included, in
            order.
        sibling_group: of torch.distributed, the siblings.
        layout_of: how a tensor of the model is divided over the mesh.
        local: what this process holds of such a tensor.
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
    settle: Callable[[], None] = lambda: None
    stage_group: Any = None
    through_stages: Callable[[Tensor, Callable[[], Tensor]], Tensor] | None = None
    generation_groups: tuple[Any, ...] = ()


_MEETINGS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # so far, by store
LONGEST_LOOK_S = 0.05


def meet(divided: ParallelInfo) -> None:
    """Barrier over all processes of the model, without a time limit: collective operations have one.

    For what may take one process much longer than another. If a process dies, the driver ends the run.
    """
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    number = _MEETINGS[store] = _MEETINGS.get(store, 0) + 1
    store.set(f"verl/meeting/{number}/{divided.rank}", "here")
    everyone = [f"verl/meeting/{number}/{rank}" for rank in range(divided.mesh.size)]
    look_s = 0.0005
    while not store.check(everyone):
        time.sleep(look_s)
        look_s = min(2 * look_s, LONGEST_LOOK_S)
    if number > 1:  # all have left that one, or they would not have come to this
        store.delete_key(f"verl/meeting/{number - 1}/{divided.rank}")


def compute_device(model: Any) -> torch.device:
    """Where a model computes."""
    divided = getattr(model, "divided", None)
    return next(model.parameters()).device if divided is None else divided.device


def casts_weights(model: Any) -> bool:
    """Whether a model computes in a narrower type by itself."""
    divided = getattr(model, "divided", None)
    return divided is not None and divided.casts_weights


def release_gathered(model: Any) -> None:
    """Let go of weights that a forward pass has gathered here: embedding and head, the largest, stay otherwise."""
    if (divided := getattr(model, "divided", None)) is not None:
        divided.settle()


def weights_gathered(model: Any) -> AbstractContextManager[None]:
    """Within, this process may call the model as often as it likes, whatever its siblings do.

    For generation: gathering each layer for each token would be slow, and would hang as soon as one process has
    finished its last response. Entering and leaving it is done by all processes together.
    """
    divided = getattr(model, "divided", None)
    return contextlib.nullcontext() if divided is None else divided.gathered()


def layers_gathered(model: Any) -> AbstractContextManager[None]:
    """Within, this process has all layers of a model, and may call it as its siblings do."""
    divided = getattr(model, "divided", None)
    return divided.gathered() if divided is not None and divided.stage_group is not None else contextlib.nullcontext()


def through_stages(model: Any, ids: Tensor, function: Callable[[], Tensor]) -> Tensor:
    """What a function that calls the model once on token ids [b s] gives; all processes that hold it take part."""
    divided = getattr(model, "divided", None)
    return function() if divided is None or divided.through_stages is None else divided.through_stages(ids, function)


def full_tensor(tensor: Tensor) -> Tensor:
    """A tensor that is divided over processes, put together: all of them ask for it, in the same order."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor that every process has whole, divided as another is; nothing is sent."""
    if not hasattr(like, "placements"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]


Autocast = Literal["bfloat16"] | None


@dataclass(frozen=True)
class Numerics:
    """What the log-probs of the trainer and of the engine that samples are computed with.

    Attributes:
        trainer, engine: types, as `compute_type` names them.
        engine_kind: class of the engine.
        temperature: that divides the logits.
    """

    trainer: str
    engine: str
    engine_kind: str
    temperature: float


def compute_type(model: nn.Module, autocast: Autocast = None) -> str:
    """The coarsest type in which a model computes: `float64`, `float32`, `tf32`, `float16`, `bfloat16` or narrower.

    That of its weights, of `autocast`, or for float32 what torch is set to multiply it in
    (`torch.set_float32_matmul_precision`).
    """
    if autocast is not None:
        return autocast
    found = {p.dtype for p in model.parameters() if p.is_floating_point()} or {torch.float32}
    name = str(max(found, key=lambda dtype: torch.finfo(dtype).eps)).removeprefix("torch.")
    if name == "float32":
        return {"highest": "float32", "high": "tf32"}.get(torch.get_float32_matmul_precision(), "bfloat16")
    return name


@contextlib.contextmanager
def computing_in(dtype: Autocast, model: nn.Module) -> Iterator[None]:
    """Within, `model` computes in `dtype`, weights, activations and all; None changes nothing.

    Every weight is replaced by its copy in that type, through which gradients reach the weight itself, in its own type.
    Each is cast once for all that is done inside, where torch.autocast would cast weights and activations at every
    product. The backward pass belongs inside too, since gradient checkpointing computes forward again.

    A submodule may keep its own type: those in `model.computes_in_own_type` do (a value head). A model that was divided
    over processes may cast its weights itself, as it gathers them.
    """
    if dtype is None or casts_weights(model):
        yield
        return
    narrow = getattr(torch, dtype)
    kept = {id(p) for part in getattr(model, "computes_in_own_type", ()) for p in part.parameters()}
    copies: dict[int, torch.Tensor] = {}  # tied weights stay tied
    replaced: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    try:
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is None or weight.dtype == narrow or not weight.is_floating_point() or id(weight) in kept:
                    continue
                if id(weight) not in copies:
                    copies[id(weight)] = weight.to(narrow)
                replaced.append((module._parameters, name, weight))
                module._parameters[name] = copies[id(weight)]  # type: ignore[assignment]
        yield
    finally:
        for parameters, name, weight in replaced:
            parameters[name] = weight
