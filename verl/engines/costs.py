"""What a division of a model costs each process: memory at rest, memory meanwhile, traffic. Arithmetic alone.

cost = cost_of(FSDP(), world_size=8, sizes=sizes_of(config), tokens=16384, compute_bytes=2)
cost.resting / 2**30          GiB of weights, gradients and optimizer state in each process

Traffic is what a process sends, by ring algorithms: gathering x bytes over k processes sends (k - 1) / k x, and so does
adding up to parts of x; adding up to the whole sends twice that.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl.engines.sharding import FSDP, HSDP, TP, TPFSDP, Sharding
from verl.models.sizes import ModelSizes


@dataclass(frozen=True)
class Cost:
    """Of one role in each process, in bytes.

    Attributes:
        weights, gradients, optimizer: at rest; of a role that is only asked the latter are 0.
        gathered: weights of siblings that lie here during a forward or backward pass.
        generating: likewise while a response is drawn from the training weights.
        per_micro_batch: sent in the forward and backward pass of one micro-batch.
        per_update: sent once per optimizer step beside that.
        is_offloaded: what rests does so in main memory.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int = 0
    generating: int = 0
    per_micro_batch: int = 0
    per_update: int = 0
    is_offloaded: bool = False

    @property
    def resting(self) -> int:
        """Weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer

    def per_step(self, micro_batches: int, updates: int = 1) -> int:
        """Bytes sent in a training step, generation and scoring left out."""
        return micro_batches * self.per_micro_batch + updates * self.per_update


def mesh_of(sharding: Sharding, world_size: int) -> tuple[int, int, int]:
    """Replicas, shards of each, and processes that share each layer."""
    if isinstance(sharding, FSDP):
        return sharding.sizes(world_size)
    siblings = sharding.parameter_shards(world_size) if isinstance(sharding, TP) else 1
    return world_size // siblings, 1, siblings


def cost_of(
    sharding: Sharding,
    world_size: int,
    sizes: ModelSizes,
    tokens: int = 0,
    weight_bytes: int = 4,
    compute_bytes: int | None = None,
    trains: bool = True,
) -> Cost:
    """The cost of a role.

    Args:
        tokens: of a micro-batch, for the activations that tensor-parallel siblings exchange.
        weight_bytes: of a number at rest; of its gradient and of each of AdamW's two moments too.
        compute_bytes: of a number in the type that is computed in; None for the same.
        trains: has gradients and an optimizer.
    """
    replicas, shards, siblings = mesh_of(sharding, world_size)
    compute = compute_bytes or weight_bytes
    held = _held(sizes, siblings)
    trained = (held if sizes.trained == sizes.parameters else sizes.trained) if trains else 0
    fully = isinstance(sharding, FSDP)
    copy = 0 if fully or compute == weight_bytes else held * compute
    gathered = generating = 0
    sent = 0.0
    if fully and shards > 1:
        keeps_block_only = sharding.strategy == "FULL_SHARD"  # type: ignore[attr-defined]
        block = (sizes.parameters - sizes.embedding_elements) // max(sizes.layers, 1) // siblings
        ends = held - block * sizes.layers
        gathered = (ends + block if keeps_block_only else held) * compute
        generating = held * compute
        gathers = 2 if keeps_block_only and trains else 1
        sent = _part(shards) * (gathers * held * compute + trained * weight_bytes)
    if siblings > 1:
        sums = 4 if trains else 2  # after attention and MLP, forward and backward
        sent += 2 * _part(siblings) * sums * sizes.layers * sizes.hidden * tokens * compute
    return Cost(
        weights=held * weight_bytes // shards + copy,
        gradients=trained * weight_bytes // shards,
        optimizer=2 * trained * weight_bytes // shards,
        gathered=gathered,
        generating=generating,
        per_micro_batch=int(sent),
        per_update=int(2 * _part(replicas) * trained * weight_bytes / shards),
        is_offloaded=fully and sharding.cpu_offload,  # type: ignore[attr-defined]
    )


def _held(sizes: ModelSizes, siblings: int) -> int:
    """Parameters of a process that shares layers: transformers' plans leave the embedding whole."""
    embedding = sizes.vocabulary * sizes.hidden if siblings > 1 else 0
    return (sizes.parameters - embedding) // siblings + embedding


def _part(count: int) -> float:
    return (count - 1) / count


def usual(world_size: int, per_machine: int = 8) -> dict[str, Sharding]:
    """The shardings that so many devices allow, by name, for tables."""
    together = min(per_machine, world_size)
    found: dict[str, Sharding] = {"fsdp": FSDP(), "fsdp, SHARD_GRAD_OP": FSDP(strategy="SHARD_GRAD_OP")}
    if world_size > per_machine:
        found["hsdp"] = HSDP(replicas=world_size // per_machine)
    found["tp"] = TP(tensor_parallel=together)
    if world_size > together:
        found["tp_fsdp"] = TPFSDP(tensor_parallel=together)
    return found
