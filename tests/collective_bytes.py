"""Bytes that a process sends in collective operations, counted where they are called, by ring algorithms.

Gathering x bytes over k processes sends (k - 1) / k x, and so does adding up to parts of x; adding up to the whole
sends twice that. Only floating-point numbers are counted: objects, counts and digests travel as integers.
"""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verl.engines.chunked_logprobs import token_log_probs
from verl.engines.engine import TrainingEngine
from verl.engines.optimizer import AdamW
from verl.engines.parallel_dims import Parallelism
from verl.engines.pipeline_parallelism import num_tokens
from verl.engines.sharding import Sharding
from verl.model_paths.check import paths_for
from verl.models.heads import LMHead
from verl.models.model_stats import ModelStats
from verl.models.parallel_info import Autocast
from verl.models.structure import routers
from verl.ops.masking import aggregate
from verl.protocol import DataProto

WITHOUT_SENDING = {"recv_", "recv_any_source_", "barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd"}


class CollectiveBytes(TorchDispatchMode):
    """Within, `sent` has the bytes by kind of operation."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    @property
    def total(self) -> float:
        return sum(self.sent.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and func.overloadpacket.__name__ not in WITHOUT_SENDING:
            named = dict(zip([x.name for x in func._schema.arguments], args, strict=False)) | (kwargs or {})
            name = func.overloadpacket.__name__.rstrip("_")
            self.sent[name] += _sent(name, named)
        return func(*args, **(kwargs or {}))


def _sent(name: str, named: dict[str, Any]) -> float:
    own = named.get("input_tensor", named.get("input", named.get("input_tensors", named.get("tensors"))))
    own = [x for x in tree_leaves(own) if isinstance(x, Tensor)]
    size = sum(x.nbytes for x in own if x.is_floating_point())
    if not size:
        return 0.0
    group = named.get("process_group", named.get("group_name"))
    group = dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group
    group = dist.ProcessGroup.unbox(group) if isinstance(group, torch.ScriptObject) else group
    others = group.size() - 1
    if name in ("allreduce", "all_reduce"):
        return 2 * others / (others + 1) * size
    if name in ("_allgather_base", "all_gather_into_tensor", "allgather", "allgather_into_tensor_coalesced"):
        return others * size
    if name in ("_reduce_scatter_base", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"):
        return others / (others + 1) * size
    if name in ("alltoall_base", "all_to_all_single"):
        rows = named.get("input_split_sizes")
        kept = rows[group.rank()] / max(1, sum(rows)) if rows else 1 / (others + 1)
        return (1 - kept) * size
    if name == "send":
        return size
    raise AssertionError(f"{name} is not known here")


def bytes_of_update(
    model: Any, parallel: Parallelism, rows: DataProto, tokens: int, autocast: Autocast = None
) -> tuple[Counter[str], list[int]]:
    """What this process sends in an update on its rows, and the tokens that it runs of each micro-batch.

    Routers choose every expert equally often.

    Args:
        tokens: of a micro-batch.
    """
    for router in routers(model):
        router.register_forward_hook(_every_expert)
    paths_for(model, 64, shares_tokens=parallel.shares_tokens)
    parallel.shard_model(model, autocast)
    engine = TrainingEngine(model, parallel, tokens, AdamW(lr=1e-3), total_updates=1, autocast=autocast)
    head, ran = LMHead(model), list[int]()

    def loss(model: Any, micro: Any, totals: Any) -> Any:
        ran.append(num_tokens(micro))
        found = token_log_probs(model, head, micro)
        return -aggregate(found.log_probs, micro.tensors["response_mask"], "token-mean", totals), {}

    with CollectiveBytes() as counted:
        engine.update(rows, loss)
    return counted.sent, ran


def _every_expert(router: Any, _: Any, output: Any) -> Any:
    logits, weights, experts = output
    return logits, weights, torch.arange(experts.numel()).view_as(experts) % router.num_experts


def planned_bytes(
    sharding: Sharding, size: int, sizes: ModelStats, ran: list[int], predicted: int, itemsize: int, computed: int
) -> float:
    """What the cost model says of an update with micro-batches of so many tokens.

    Args:
        predicted: of the tokens of all micro-batches, those whose logits are wanted.
        itemsize, computed: bytes of a number at rest and in products.
    """
    empty = sharding.cost(size, sizes, 0, itemsize, computed)
    full = sharding.cost(size, sizes, sum(ran), itemsize, computed, predicted=predicted)
    return empty.per_step(len(ran)) + full.per_micro_batch - empty.per_micro_batch
