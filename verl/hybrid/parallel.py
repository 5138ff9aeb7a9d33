"""A HybridActor in several processes, which torchrun or the user has started.

rank = group * tp_size + sibling        siblings share the layers and get the same prompts; gradients are added up
                                        over the groups
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from verl import config
from verl.component import BuildContext, Description, component
from verl.compose.suggestions import described
from verl.engines.fsdp import units_of
from verl.engines.parallel_degrees import ParallelDegrees
from verl.engines.parallel_dims import TENSOR, ShardedParallelism
from verl.engines.tensor_parallel import heads_fault
from verl.errors import ConfigError
from verl.models.hf_state_dict import live_tensors
from verl.resharding.dtensor import is_divided, local
from verl.workers.rank_checkpoint import whole_on_first


@component
class HybridConfig(Description):
    """Settings of a `HybridActor`.

    Where all of the first three are left out, the actor is whole in its process and knows of no other.

    Args:
        tp_size: processes that share the layers, next to each other, and work on the same rows.
        dp_size: groups of such processes, each with rows of its own; gradients are averaged over them. Null: as many as
            the processes that there are make.
        fsdp_sharding: divide weights, gradients and optimizer state over those groups too: FULL_SHARD, SHARD_GRAD_OP
            (weights stay gathered from the forward to the backward pass), HYBRID_SHARD (within a machine, repeated on
            each). Null or NO_SHARD: they are not.
        contiguous: lay parameters that are views of other tensors out in memory anew, instead of refusing them.
        auto_cache_clear: give back what generating has cached once it is done. The keys and values go in any case; on a
            GPU this is the memory that torch keeps for later. Null follows `verl.config.auto_cache_clear`.
        busy_timeout_s: how long a call waits while another thread is in one; then it is refused. 0 refuses at once.
    """

    tp_size: PositiveInt = 1
    dp_size: PositiveInt | None = None
    fsdp_sharding: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] | None = None
    contiguous: bool = False
    auto_cache_clear: bool | None = None
    busy_timeout_s: NonNegativeFloat = 600.0

    @property
    def shards(self) -> bool:
        """Whether weights are divided over the processes with other rows."""
        return self.fsdp_sharding not in (None, "NO_SHARD")

    @property
    def is_alone(self) -> bool:
        """Whether the actor is whole in its process."""
        return self.tp_size == 1 and self.dp_size in (None, 1) and not self.shards

    @property
    def clears_cache(self) -> bool:
        """Whether caches are given back, by this actor's setting or else by that of the process."""
        return config.auto_cache_clear if self.auto_cache_clear is None else self.auto_cache_clear


def hybrid_config_from(
    given: HybridConfig | Mapping[str, Any] | None, contiguous: bool | None, auto_cache_clear: bool | None
) -> HybridConfig:
    """The settings of an actor, of which some may be arguments of their own.

    Raises:
        ConfigError: a key is unknown, or one stands in both places with two values.
    """
    config = described(HybridConfig, "hybrid_config", given)
    own = {"contiguous": contiguous, "auto_cache_clear": auto_cache_clear}
    own = {name: value for name, value in own.items() if value is not None}
    named = given if isinstance(given, Mapping) else {f.name: getattr(config, f.name) for f in fields(config) if given}
    defaults = HybridConfig()
    for name, value in own.items():
        if name in named and named[name] not in (value, getattr(defaults, name)):
            raise ConfigError(
                f"{name} is {value!r}, and hybrid_config.{name} is {named[name]!r}: leave one of them out."
            )
    return replace(config, **own)  # type: ignore[arg-type]


TIMEOUT_S = 600.0

_log = logging.getLogger(__name__)


def num_processes() -> int:
    """Those of the user's group; without one, those that torchrun says it has started."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def sizes_of(config: HybridConfig, processes: int) -> tuple[int, int, int]:
    """Replicas, shards of each, and processes that share the layers.

    Raises:
        ConfigError: there are not so many processes.
    """
    tensors, groups = config.tp_size, config.dp_size or max(1, processes // config.tp_size)
    if tensors * groups != processes:
        wanted = f"a multiple of {tensors}" if config.dp_size is None else str(tensors * groups)
        name, size = ("tp_size", tensors) if tensors > 1 else ("dp_size", groups)
        raise ConfigError(
            f"hybrid_config.{name} is {size}: it needs {wanted} processes, and there "
            f"{'is' if processes == 1 else 'are'} {processes}. "
            f"Start them with `torchrun --nproc_per_node={tensors * groups}`, or leave it out."
        )
    if not config.shards:
        return groups, 1, tensors
    machines = processes // int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    replicas = machines if config.fsdp_sharding == "HYBRID_SHARD" and groups % max(1, machines) == 0 else 1
    return replicas, groups // replicas, tensors


def hybrid_parallelism(config: HybridConfig, device: str) -> HybridParallelism | None:
    """The processes that hold an actor together; None where it is whole in this one.

    Raises:
        ConfigError: there are others than the settings take.
    """
    if config.is_alone:
        return None
    if config.shards and config.tp_size == 1 and config.dp_size in (None, 1) and num_processes() == 1:
        _log.warning(
            "hybrid_config.fsdp_sharding is %s: there is 1 process, so nothing is sharded", config.fsdp_sharding
        )
        return None
    return HybridParallelism(config, device)


def own_device() -> str:
    """Of this process: a GPU of its own where there are some."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"


class HybridParallelism(ShardedParallelism):
    """The processes that hold one actor together. Opens their group where the user has not."""

    def __init__(self, config: HybridConfig, device: str):
        import torch.distributed as dist

        world = num_processes()
        sizes = sizes_of(config, world)
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        context = BuildContext(device=device, rank=rank, world_size=world)
        reshard = config.fsdp_sharding != "SHARD_GRAD_OP"
        degrees = ParallelDegrees(dp_replicate=sizes[0], dp_shard=sizes[1], tp=sizes[2])
        super().__init__(context, TIMEOUT_S, degrees, fully=config.shards and world > sizes[2], reshard=reshard)
        self.groups, self.tensors = sizes[0] * sizes[1], sizes[2]

    def take(self, model: Any) -> None:
        """Leave this process its part of a model, in place, and let every backward pass come to whole gradients.

        They are those of the mean of the groups' losses, as of any data-parallel model of torch.

        Raises:
            ConfigError: the model cannot be divided so.
        """
        config = model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", 1)
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        if self.tensors > 1 and (fault := heads_fault(heads, kv_heads, self.tensors)) is not None:
            raise ConfigError(f"hybrid_config.tp_size {fault}")
        self.shard_model(model)
        if self.tensors > 1:
            self._complete_over_siblings(model)
        for unit in units_of(model):
            unit.set_gradient_divide_factor(float(self.groups))
        if not self.fully:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_hook(functools.partial(self._mean_over_groups, parameter))

    def _complete_over_siblings(self, model: nn.Module) -> None:
        """Weights of which each sibling sees its own heads alone: add up what they come to, in each backward pass."""
        group = self._device_mesh[TENSOR].get_group()
        for module in model.modules():
            names = [name for name, p in module._parameters.items() if id(p) in self._partial_over_tensor]
            if names:
                module.forward = _completing(module, names, group)

    def _mean_over_groups(self, parameter: Any, grad: Any) -> Tensor:
        if is_divided(grad) and grad.placements != parameter.placements:
            grad = grad.redistribute(placements=parameter.placements)
        if self.groups == 1:
            return grad
        mean = local(grad).clone(memory_format=torch.contiguous_format)
        self.dist.all_reduce(mean, group=self.data_group)
        mean /= self.groups
        if not is_divided(grad):
            return mean
        from torch.distributed.tensor import DTensor

        layout = {"device_mesh": grad.device_mesh, "placements": grad.placements}
        return DTensor.from_local(mean, run_check=False, shape=grad.shape, stride=grad.stride(), **layout)

    @contextmanager
    def same_random_numbers(self) -> Iterator[None]:
        """Within, torch's generator gives each process the numbers that it gives the first; then each has its own back.

        Processes that had the first one's state before have it after, too.
        """
        own = torch.get_rng_state()
        shared = own.clone().to(self.device)
        self.dist.broadcast(shared, src=0)
        first = shared.cpu()
        torch.set_rng_state(first)
        try:
            yield
        finally:
            if not torch.equal(own, first):
                torch.set_rng_state(own)

    def refuse_other_weights(self, model: Any) -> None:
        """Replicas that begin apart would stay apart, since only their gradients are brought together.

        Raises:
            ConfigError: in all processes, if one has made its model with other weights than the first.
        """
        norms = {name: float(torch.linalg.vector_norm(p.detach().double())) for name, p in model.named_parameters()}
        found: list[Any] = [None] * self.world_size
        self.dist.all_gather_object(found, norms)
        for rank, other in enumerate(found):
            differing = [name for name in found[0] if not _are_close(found[0][name], other.get(name))]
            if differing:
                raise ConfigError(
                    f"model has other weights in process {rank} than in process 0: {differing[0]} and "
                    f"{len(differing) - 1} more. Load it from one place, or make it from one seed in all processes."
                )

    def refuse_other_rows(self, ids: Any) -> None:
        """Siblings must have been given the same tokens, or they would compute nonsense together.

        Raises:
            ConfigError: in all of them, if they were not.
        """
        if isinstance(ids, Tensor) and not self.siblings_agree(ids):
            raise ConfigError(
                f"input_ids differ between processes that share the layers (hybrid_config.tp_size is {self.tensors}). "
                f"Give rows by the number of the group, which is rank // {self.tensors}."
            )

    def agreed(self, number: int) -> int:
        """The number that the first of the siblings has."""
        if self.tensors == 1:
            return number
        shared = torch.tensor([number], device=self.device)
        self.dist.broadcast(shared, group=self._device_mesh[TENSOR].get_group(), group_src=0)
        return int(shared)

    def save(self, model: Any, tokenizer: Any, directory: str | Path) -> None:
        """What `save_pretrained` of the whole model writes; the first process does, and all wait until it is there."""
        self.settle(model)
        whole = whole_on_first(live_tensors(model), self)
        if self.rank == 0:
            model.save_pretrained(directory, state_dict=whole)
            if tokenizer is not None:
                tokenizer.save_pretrained(directory)
        self.dist.barrier()


def _are_close(number: float, other: float | None) -> bool:
    return other is not None and math.isclose(number, other, rel_tol=1e-9)


def _completing(module: nn.Module, names: list[str], group: Any) -> Any:
    forward = module.forward

    def completed(*args: Any, **kwargs: Any) -> Any:
        own = {name: module._parameters[name] for name in names}
        try:
            for name, parameter in own.items():
                module._parameters[name] = _CompletedWeight.apply(parameter, group)  # type: ignore[assignment]
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(own)

    return completed


class _CompletedWeight(torch.autograd.Function):
    """A weight as it is, whose gradient is added up over a group."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None
