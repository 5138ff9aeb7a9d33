"""What a HybridActor may be told of its layout and its memory: the keys of `hybrid_config`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from verl import config
from verl.component import Description


@dataclass(frozen=True, kw_only=True)
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

    tp_size: int = 1
    dp_size: int | None = None
    fsdp_sharding: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] | None = None
    contiguous: bool = False
    auto_cache_clear: bool | None = None
    busy_timeout_s: float = 600.0

    def faults(self) -> Iterator[str]:
        for name in ("tp_size", "dp_size"):
            if (size := getattr(self, name)) is not None and size < 1:
                yield f"{name} is {size}: must be at least 1."
        if not self.busy_timeout_s >= 0:
            yield f"busy_timeout_s is {self.busy_timeout_s}: must be at least 0."

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
