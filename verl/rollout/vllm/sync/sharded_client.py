"""vLLM beside a sharded model: one engine for each group of ranks that work on the same rows.

    rank 0  leads ── engine: worker 0 <── slices or whole tensors ──┐
    rank 1        └────────  worker 1 <── slices                  ──┼── sent by a plan from their holders
    rank 2  leads ── another engine   <── ...                     ──┘

A process without an engine feeds the engine of its group, or only sends its tensors to the processes that do. If the
engine reports which slices its workers need, worker w reads the stream of sibling w; otherwise the first sibling feeds
all workers.

An engine on GPUs spans those of its group: `rollout.tensor_parallel_size` x `rollout.pipeline_parallel_size` ranks in a
row, or tensor-parallel siblings where they are more. Ranks of a group that have rows of their own (FSDP) send their
prompts to the first, whose engine draws all of them.
"""

from __future__ import annotations

import logging
import platform
from dataclasses import replace
from typing import Any, TypeVar

from verl.component import BuildContext
from verl.errors import ConfigError
from verl.models.parallel_info import Autocast, ParallelInfo
from verl.rollout.base import RolloutEngine, SyncResult, TurnEngine, TurnLimits
from verl.rollout.consensus import ConsensusFailed, among_siblings, consensus
from verl.rollout.generation_group import OneGenerates
from verl.rollout.vllm.client.client import MIB, GroupVLLMClient, died_twice
from verl.rollout.vllm.client.engine_args import dtype_of, gpu_name
from verl.rollout.vllm.client.engine_process import EngineDied
from verl.rollout.vllm.options import DIVIDED, VLLMOptions
from verl.rollout.vllm.shm_stream import StreamBroken
from verl.rollout.vllm.sync.weight_sync import WeightSync

log = logging.getLogger(__name__)

SIZE = "rollout.tensor_parallel_size x rollout.pipeline_parallel_size"  # of an engine, in messages

T = TypeVar("T")


def with_engine_group(parallel_info: ParallelInfo, engine_size: int) -> ParallelInfo:
    """The same, with all ranks that share an engine as siblings: one engine on GPUs spans those of its whole group.

    On a CPU every group of tensor-parallel ranks has its own engine, of any size. All processes of the model take
    part.

    Raises:
        ConfigError: ranks cannot be put into groups of this size.
    """
    size = max(engine_size, len(parallel_info.siblings))
    if parallel_info.device.type == "cpu" or size == len(parallel_info.siblings):
        return parallel_info
    if parallel_info.stage_group is not None:
        raise ConfigError(
            f"{SIZE} is {engine_size}: an engine beside pipeline stages spans at most the "
            f"{len(parallel_info.siblings)} GPUs of the processes that work on the same rows. Set it to at most that."
        )
    if size % len(parallel_info.siblings) or parallel_info.mesh.size % size:
        raise ConfigError(
            f"{SIZE} is {engine_size}: {parallel_info.mesh.size} processes, of which "
            f"{len(parallel_info.siblings)} share the same rows, cannot be put into groups of {size} GPUs. Set it to "
            "1, or so that it divides their number."
        )
    return grouped(parallel_info, size)


def grouped(parallel_info: ParallelInfo, size: int) -> ParallelInfo:
    """The same, with ranks in groups of this size as siblings. All processes of the model take part."""
    import torch.distributed as dist

    groups = [list(range(first, first + size)) for first in range(0, parallel_info.mesh.size, size)]
    own, _ = dist.new_subgroups_by_enumeration(groups, timeout=parallel_info.timeout)
    return replace(parallel_info, siblings=tuple(groups[parallel_info.rank // size]), sibling_group=own)


class ShardedVLLMClient(RolloutEngine):
    """The running engines of `VLLMRollout`, seen from one of the processes that hold the model.

    Raises:
        ConfigError: vLLM cannot run this model, or not with these options.
    """

    def __init__(
        self, options: VLLMOptions, model: Any, tokenizer: Any, seed: int, autocast: Autocast, context: BuildContext
    ):
        if options.lora == "adapter" and hasattr(model, "peft_config"):
            raise ConfigError(f"rollout.lora is adapter, {DIVIDED}")
        self.options, self.parallel_info = options, with_engine_group(model.parallel_info, options.num_workers)
        same = len(model.parallel_info.siblings)  # ranks in a row that have the same prompts
        self.group = OneGenerates(
            self.parallel_info, same, self._load_if_needed, self._may_repeat, self._mend, self._succeeded
        )
        self._times_broken = 0
        is_one_machine = len(set(among_siblings(self.parallel_info, platform.node()))) == 1
        is_on_gpu = self.parallel_info.device.type == "cuda"
        gpus = among_siblings(self.parallel_info, gpu_name(context.device)) if is_on_gpu else []
        if is_on_gpu and options.num_workers > 1 and not is_one_machine:
            raise ConfigError(
                f"{SIZE} is {options.num_workers}: the processes of an engine would be on several machines. Set it so "
                "that it divides trainer.n_gpus_per_node."
            )
        self.engine: GroupVLLMClient | None = None
        if self.group.generates:
            spanned = gpus[: options.num_workers]
            self.engine = GroupVLLMClient(options, model, tokenizer, seed, autocast, context, spanned)
        dtype, chunk_bytes = dtype_of(model, autocast), options.chunk_mib * MIB
        self.compute_type = str(dtype).removeprefix("torch.")
        self._planned = WeightSync(
            model,
            self.parallel_info,
            self.engine,
            dtype,
            autocast,
            chunk_bytes,
            may_slice=is_one_machine,
            may_repeat=self._may_repeat,
        )

    def turns(self, limits: TurnLimits) -> TurnEngine:
        """See `RolloutEngine.turns`; in the first process of each group."""
        assert self.engine is not None
        return self.engine.turns(limits)

    def sync(self) -> SyncResult:
        """Load the current weights into all engines according to the plan, and verify them."""
        while True:
            try:
                synced = self._planned.run()
                break
            except ConsensusFailed as failed:
                self._mend(failed)
        self._times_broken = 0
        return synced

    def rest(self) -> None:
        """Free GPU memory until the next call; no effect on a CPU."""
        if self.engine is not None:
            self.engine.rest()

    def close(self) -> None:
        """Stop the engine that this process leads and remove its files."""
        if self.engine is not None:
            self.engine.close()
        self._planned.close()

    def _load_if_needed(self) -> None:
        needs_weights = consensus(
            self.parallel_info, lambda: self.engine is not None and self.engine.needs_weights, self._may_repeat
        )
        if any(needs_weights):
            self.sync()

    def _succeeded(self) -> None:
        if self.engine is not None:
            self.engine.reset_death_count()

    def _may_repeat(self, error: Exception) -> bool:
        """Whether a failure of this process may be retried."""
        if isinstance(error, StreamBroken):  # the engine of another process died and will be restarted
            self._times_broken += 1
            return self._times_broken == 1
        return self.engine is not None and self.engine.may_repeat(error)

    def _mend(self, failed: ConsensusFailed) -> None:
        """Handle a failure on all ranks: retry, or raise."""
        error = failed.error
        if failed.may_repeat:
            log.warning("%s\nRetrying once.", error)
        elif isinstance(error, EngineDied):
            raise died_twice(error) from None
        else:
            raise error from failed
