"""A HybridActor over several processes, started by torchrun or the user.

rank = group * tp_size + sibling        siblings split the layers and have the same prompts; gradients are
                                        averaged over the groups
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from verl.component import BuildContext, Description, component
from verl.engines.fsdp import units_of
from verl.engines.parallel_degrees import ParallelDegrees
from verl.engines.parallel_dims import TENSOR, ShardedParallelism
from verl.engines.tensor_parallel import heads_fault
from verl.errors import ConfigError
from verl.models.hf_state_dict import live_tensors
from verl.models.images import save_tokenizer
from verl.ops.resharding.dtensor import is_divided, local
from verl.workers.rank_checkpoint import whole_on_first


@component
class HybridConfig(Description):
    """Sharding of a `HybridActor`; without any of these settings it uses only its own process.

    Args:
        tp_size: size of tensor parallelism: consecutive ranks that split the layers and work on the same rows.
        dp_size: number of such groups, each on different rows; gradients are averaged over them. Null: all processes
            divided by `tp_size`.
        fsdp_sharding: shard weights, gradients and optimizer state over the groups: FULL_SHARD, SHARD_GRAD_OP (weights
            stay gathered from the forward to the backward pass) or HYBRID_SHARD (within each machine). Null or NO_SHARD
            for no sharding, as with one group.
        contiguous, auto_cache_clear: arguments of `HybridActor`, which may stand here too.
    """

    tp_size: PositiveInt = 1
    dp_size: PositiveInt | None = None
    fsdp_sharding: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] | None = None
    contiguous: bool = False
    auto_cache_clear: bool | None = None

    @property
    def shards(self) -> bool:
        """Whether weights are sharded over the data-parallel processes."""
        return self.fsdp_sharding not in (None, "NO_SHARD")


TIMEOUT_S = 600.0


def sizes_of(config: HybridConfig, processes: int) -> tuple[int, int, int]:
    """Numbers of replicas, of FSDP shards and of tensor-parallel processes.

    Raises:
        ConfigError: they do not match the number of processes.
    """
    tensors, groups = config.tp_size, config.dp_size or max(1, processes // config.tp_size)
    if tensors * groups != processes:
        needed = f"a multiple of {tensors}" if config.dp_size is None else str(tensors * groups)
        name, size = ("tp_size", tensors) if tensors > 1 else ("dp_size", groups)
        raise ConfigError(
            f"hybrid_config.{name} is {size}: it needs {needed} processes, and there "
            f"{'is' if processes == 1 else 'are'} {processes}. "
            f"Start them with `torchrun --nproc_per_node={tensors * groups} SCRIPT.py`, or leave it out."
        )
    if not config.shards:
        return groups, 1, tensors
    machines = processes // int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    replicas = machines if config.fsdp_sharding == "HYBRID_SHARD" and groups % max(1, machines) == 0 else 1
    return replicas, groups // replicas, tensors


def hybrid_parallelism(config: HybridConfig, device: str) -> HybridParallelism | None:
    """The process mesh of an actor; None for a single process.

    Raises:
        ConfigError: the settings do not match the number of processes.
    """
    import torch.distributed as dist

    processes = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if config.tp_size > 1 or config.dp_size not in (None, 1) or (config.shards and processes > 1):
        return HybridParallelism(config, device, processes)
    return None


class HybridParallelism(ShardedParallelism):
    """The process mesh of an actor. Creates the default process group if the user has not."""

    def __init__(self, config: HybridConfig, device: str, world: int):
        import torch.distributed as dist

        sizes = sizes_of(config, world)
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        context = BuildContext(device=device, rank=rank, world_size=world)
        reshard = config.fsdp_sharding != "SHARD_GRAD_OP"
        degrees = ParallelDegrees(dp_replicate=sizes[0], dp_shard=sizes[1], tp=sizes[2])
        super().__init__(context, TIMEOUT_S, degrees, fully=config.shards and world > sizes[2], reshard=reshard)
        self.groups, self.tensors = sizes[0] * sizes[1], sizes[2]

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give all processes the tensors of the first, which differ where each has drawn its own.

        Raises:
            ConfigError: in all processes, if one has tensors of other shapes.
        """
        tensors, found = [*tensors], [[]] * self.world_size
        self.dist.all_gather_object(found, [(str(tensor.dtype), *tensor.shape) for tensor in tensors])
        for rank, shapes in enumerate(found):
            if shapes != found[0]:
                raise ConfigError(
                    f"model has other shapes in process {rank} than in process 0. Load the same model in all."
                )
        for tensor in tensors:
            flat = tensor.data.contiguous()
            self.dist.broadcast(flat.view(-1).view(torch.uint8), src=0)
            tensor.data.copy_(flat)

    def take(self, model: Any) -> None:
        """Shard a model in place, and register hooks that reduce its gradients in every backward pass.

        Gradients are those of the mean loss over the groups, as in torch's DistributedDataParallel.

        Args:
            model: on its device; the same in all processes.
        Raises:
            ConfigError: the model cannot be sharded this way.
        """
        config = model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", 1)
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        if self.tensors > 1 and (fault := heads_fault(heads, kv_heads, self.tensors)) is not None:
            raise ConfigError(f"hybrid_config.tp_size {fault}")
        self.shard_model(model)
        self._names = {name for name, _ in model.named_parameters()}
        if self.tensors > 1:
            self._complete_over_siblings(model)
        for unit in units_of(model):
            unit.set_gradient_divide_factor(float(self.groups))
        if not self.fully:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_hook(functools.partial(self._mean_over_groups, parameter))

    def _complete_over_siblings(self, model: nn.Module) -> None:
        """Sum the gradients of weights with partial gradients per process, in each backward pass."""
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
        mean = grad.clone(memory_format=torch.contiguous_format)
        part = local(mean)
        self.dist.all_reduce(part, group=self.data_group)
        part /= self.groups
        return mean

    def refuse_changes(self, model: Any) -> None:
        """Raises:
        ConfigError: the model has other parameters than when it was sharded; new ones differ between processes.
        """
        if changed := self._names ^ {name for name, _ in model.named_parameters()}:
            raise ConfigError(f"model has changed at {min(changed)}, and it is sharded. Make a new HybridActor.")

    def refuse_other_rows(self, ids: Any) -> None:
        """Check that tensor-parallel siblings have the same tokens.

        Raises:
            ConfigError: in all siblings, if tokens differ.
        """
        if isinstance(ids, Tensor) and not self.siblings_agree(ids):
            raise ConfigError(
                f"input_ids differ between tensor-parallel processes (hybrid_config.tp_size is {self.tensors}). "
                f"Choose rows by the index of the group, rank // {self.tensors}."
            )

    def save(self, model: Any, tokenizer: Any, directory: str | Path) -> None:
        """Gather a model of local parts and save it by `save_pretrained` in the first process; all processes wait."""
        whole = whole_on_first(live_tensors(model), self)
        if self.rank == 0:
            model.save_pretrained(directory, state_dict=whole)
            save_tokenizer(tokenizer, directory)
        self.dist.barrier()


def _completing(module: nn.Module, names: list[str], group: Any) -> Any:
    forward = module.forward

    def completed(*args: Any, **kwargs: Any) -> Any:
        weights = {name: module._parameters[name] for name in names}
        try:
            for name, parameter in weights.items():
                module._parameters[name] = _CompletedWeight.apply(parameter, group)  # type: ignore[assignment]
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(weights)

    return completed


class _CompletedWeight(torch.autograd.Function):
    """Identity on a weight; its backward pass all-reduces the gradient over a group."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None
