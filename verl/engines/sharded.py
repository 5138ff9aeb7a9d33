"""This process where a model's weights are divided: over shards of the data-parallel processes, over tensors, or both.

rank = (replica * shards + shard) * tensors + tensor        rows are divided over replicas x shards, siblings along
                                                            `tensor` work on the same rows
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from verl.component import BuildContext
from verl.engines.filling import fill
from verl.engines.fully_sharded import gathered, settle, shard_fully
from verl.engines.parallel import REPLICATE, SHARD, TENSOR, TorchParallel
from verl.engines.tensor_parallel import split_over
from verl.models.division import Divided
from verl.models.heads import ValueModel
from verl.models.precision import Autocast
from verl.resharding.dtensor import is_divided, local, mesh_dims, tensor_layout
from verl.resharding.layout import Mesh


class ShardedParallel(TorchParallel):
    """This process on a mesh of replicas, shards and tensor-parallel siblings.

    Args:
        sizes: of the dimensions `replicate`, `shard` and `tensor`.
        fully: divide weights, gradients and optimizer state over `shard`; without it they are whole along it.
        reshard: see `shard_fully`.
        offload: parts rest in main memory.
    """

    divides_weights = True

    def __init__(
        self,
        context: BuildContext,
        timeout_s: float,
        sizes: tuple[int, int, int],
        *,
        fully: bool,
        reshard: bool = True,
        offload: bool = False,
    ):
        super().__init__(context, timeout_s)
        from torch.distributed.device_mesh import init_device_mesh

        assert math.prod(sizes) == self.world_size, (sizes, self.world_size)
        names = (REPLICATE, SHARD, TENSOR)
        self.mesh = Mesh(tuple(zip(names, sizes, strict=True)))
        self.fully, self.reshard, self.offload = fully, reshard, offload
        self.in_step = fully
        self._device_mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
        if sizes[2] > 1:
            self.data_group, _ = self.dist.new_subgroups_by_enumeration(
                [[r for r in range(self.world_size) if r % sizes[2] == t] for t in range(sizes[2])]
            )
        self._partial_over_tensor: set[int] = set()  # ids of parameters

    def divide(self, model: nn.Module, autocast: Autocast = None) -> None:
        """See `Parallel.divide`. A head that stands on a backbone (a critic's) is small and stays whole."""
        core: Any = model.backbone if isinstance(model, ValueModel) else model
        partial = split_over(core, self._device_mesh[TENSOR]) if self.mesh.extent(TENSOR) > 1 else []
        if self.fully:
            replicated = self.mesh.extent(REPLICATE) > 1
            shard_fully(
                core,
                self._device_mesh[(REPLICATE, SHARD) if replicated else SHARD],
                reshard=self.reshard,
                compute_dtype=getattr(torch, autocast) if autocast else None,
                offload=self.offload,
                pin=self.device.type == "cuda",
            )
        if (files := getattr(core, "weight_files", None)) is not None:
            resting = torch.device("cpu") if self.offload else self.device
            fill(core, files, self.device, resting)
            del core.weight_files
        if not self.fully:
            model.to(self.device)
        elif model is not core:  # FSDP has moved the core
            for head in (child for child in model.children() if child is not core):
                head.to(self.device)
        named = dict(core.named_parameters())
        self._partial_over_tensor |= {id(named[name]) for name in partial}
        whole = functools.partial(gathered, core, self.reshard) if self.fully else contextlib.nullcontext
        tensors = self.mesh.extent(TENSOR)
        first = self.rank // tensors * tensors
        model.divided = Divided(  # type: ignore[assignment]
            self.device,
            self.mesh,
            self.rank,
            tuple(range(first, first + tensors)),
            self._device_mesh[TENSOR].get_group(),
            tensor_layout,
            local,
            self.fully and autocast is not None,
            whole,
        )

    def settle(self, model: nn.Module) -> None:
        if self.fully:
            settle(model)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """See `Parallel.sum_gradients`; those of fully sharded weights were added up as they came."""
        trained = [p for p in parameters if p.requires_grad]
        self.sum_over([p for p in trained if SHARD not in mesh_dims(p)], self.data_group)
        for p in trained:
            if p.grad is not None and is_divided(p.grad) and p.grad.placements != p.placements:  # type: ignore
                p.grad = p.grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]
        partial = [p for p in trained if id(p) in self._partial_over_tensor]
        if partial:
            self.sum_over(partial, self._device_mesh[TENSOR].get_group())

    def clip(self, parameters: Iterable[nn.Parameter], limit: float | None) -> Tensor:
        """See `Parallel.clip`: squares of what each process holds, divided by how many hold it, added up over all."""
        grads = [p.grad for p in parameters if p.grad is not None]
        squares = [
            torch.linalg.vector_norm(local(grad)).double().square().to(self.device) / self._holders(grad)
            for grad in grads
        ]
        total = torch.stack(squares).sum()
        self.dist.all_reduce(total)
        norm = total.sqrt()
        if limit is not None:
            scale = float((limit / (norm + 1e-6)).clamp(max=1.0))
            for grad in grads:
                local(grad).mul_(scale)
        return norm

    def _holders(self, x: Tensor) -> int:
        """How many processes hold the same part of a tensor as this one."""
        return self.world_size // math.prod(self.mesh.extent(name) for name, _ in tensor_layout(x).splits)

    def assert_siblings_agree(self, x: Tensor) -> None:
        assert self.siblings_agree(x), "tensor-parallel siblings came to other tokens"

    def siblings_agree(self, x: Tensor) -> bool:
        """Whether all processes that share the layers have these integers; the answer is the same in each of them."""
        if self.mesh.extent(TENSOR) == 1:
            return True
        flat = x.reshape(-1).to(self.device, torch.int64)
        digest = (flat * torch.arange(1, len(flat) + 1, device=self.device)).sum().reshape(1)
        group = self._device_mesh[TENSOR].get_group()
        found = [torch.empty_like(digest) for _ in range(self.mesh.extent(TENSOR))]
        self.dist.all_gather(found, digest, group=group)
        return all(torch.equal(other, digest) for other in found)
