"""What a HybridActor may be told of its layout and its memory: the keys of `hybrid_config`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl import config
from verl.description import Description


@dataclass(frozen=True, kw_only=True)
class HybridConfig(Description):
    """Settings of a `HybridActor`.

    Args:
        tp_size, dp_size: processes that share the layers, and that share the rows. This version keeps an actor whole in
            one process: both are 1. Data parallelism over the roles of a run is `sharding=ddp`.
        fsdp_sharding: null or NO_SHARD, for the same reason.
        contiguous: lay parameters that are views of other tensors out in memory anew, instead of refusing them.
        auto_cache_clear: give back what generating has cached once it is done. The keys and values go in any case; on a
            GPU this is the memory that torch keeps for later. Null follows `verl.config.auto_cache_clear`.
    """

    tp_size: int = 1
    dp_size: int = 1
    fsdp_sharding: str | None = None
    contiguous: bool = False
    auto_cache_clear: bool | None = None

    def faults(self) -> Iterator[str]:
        for name in ("tp_size", "dp_size"):
            if (size := getattr(self, name)) != 1:
                yield f"{name} is {size}: this version keeps a HybridActor whole in one process. Leave it out or set 1."
        if self.fsdp_sharding not in (None, "NO_SHARD"):
            yield (
                f"fsdp_sharding is {self.fsdp_sharding!r}: this version keeps all weights in one process. Leave it out "
                "or set NO_SHARD."
            )

    @property
    def clears_cache(self) -> bool:
        """Whether caches are given back, by this actor's setting or else by that of the process."""
        return config.auto_cache_clear if self.auto_cache_clear is None else self.auto_cache_clear
