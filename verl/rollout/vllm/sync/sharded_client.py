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
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from verl.component import BuildContext
from verl.errors import ConfigError
from verl.models.parallel_info import Autocast, ParallelInfo
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest, PlayEpisodes, RolloutEngine, SyncResult, TurnEngine, TurnLimits
from verl.rollout.consensus import ConsensusFailed, among_siblings, consensus, from_first
from verl.rollout.vllm.client.client import MIB, GroupVLLMClient, died_twice, experts_shape, rows_of
from verl.rollout.vllm.client.engine_args import DIVIDED, dtype_of, gpu_name
from verl.rollout.vllm.client.engine_process import EngineDied
from verl.rollout.vllm.messages import SampleOutput
from verl.rollout.vllm.shm_stream import StreamBroken
from verl.rollout.vllm.sync.weight_sync import WeightSync

if TYPE_CHECKING:
    from verl.rollout.vllm.config import VLLMRollout

log = logging.getLogger(__name__)

SIZE = "rollout.tensor_parallel_size x rollout.pipeline_parallel_size"  # of an engine, in messages
LOOK_S = 30.0  # for responses of an engine, before its process tells the others that it still waits

T = TypeVar("T")


def with_engine_group(divided: ParallelInfo, engine_size: int) -> ParallelInfo:
    """The same, with all ranks that share an engine as siblings: one engine on GPUs spans those of its whole group.

    On a CPU every group of tensor-parallel ranks has its own engine, of any size. All processes of the model take
    part.

    Raises:
        ConfigError: ranks cannot be put into groups of this size.
    """
    size = max(engine_size, len(divided.siblings))
    if divided.device.type == "cpu" or size == len(divided.siblings):
        return divided
    if divided.stage_group is not None:
        raise ConfigError(
            f"{SIZE} is {engine_size}: an engine beside pipeline stages spans at most the "
            f"{len(divided.siblings)} GPUs of the processes that work on the same rows. Set it to at most that."
        )
    if size % len(divided.siblings) or divided.mesh.size % size:
        raise ConfigError(
            f"{SIZE} is {engine_size}: {divided.mesh.size} processes, of which "
            f"{len(divided.siblings)} share the same rows, cannot be put into groups of {size} GPUs. Set it to 1, or "
            "so that it divides their number."
        )
    return grouped(divided, size)


def grouped(divided: ParallelInfo, size: int) -> ParallelInfo:
    """The same, with ranks in groups of this size as siblings. All processes of the model take part."""
    import torch.distributed as dist

    groups = [list(range(first, first + size)) for first in range(0, divided.mesh.size, size)]
    own, _ = dist.new_subgroups_by_enumeration(groups, timeout=divided.timeout)
    return replace(divided, siblings=tuple(groups[divided.rank // size]), sibling_group=own)


class ShardedVLLMClient(RolloutEngine):
    """The running engines of `VLLMRollout`, seen from one of the processes that hold the model.

    Raises:
        ConfigError: vLLM cannot run this model, or not with these options.
    """

    def __init__(
        self, options: VLLMRollout, model: Any, tokenizer: Any, seed: int, autocast: Autocast, context: BuildContext
    ):
        if options.lora == "adapter" and hasattr(model, "peft_config"):
            raise ConfigError(f"rollout.lora is adapter, {DIVIDED}")
        self.options, self.divided = options, with_engine_group(model.divided, options.num_workers)
        self.num_same_rows = len(model.divided.siblings)  # ranks in a row that have the same prompts
        self._own_rows = slice(0, 0)  # of what its engine draws
        self._pad_id, self._experts = tokenizer.pad_token_id, experts_shape(model, options)
        self._begun: tuple[DataProto, GenerationRequest] | None = None
        self._drawn: SampleOutput | None = None
        self._played: Sequence[DataProto] = []
        self._failure: Exception | None = None  # of beginning to draw
        self._times_broken = 0
        is_one_machine = len(set(among_siblings(self.divided, platform.node()))) == 1
        is_on_gpu = self.divided.device.type == "cuda"
        gpus = among_siblings(self.divided, gpu_name(context.device)) if is_on_gpu else []
        if is_on_gpu and options.num_workers > 1 and not is_one_machine:
            raise ConfigError(
                f"{SIZE} is {options.num_workers}: the processes of an engine would be on several machines. Set it so "
                "that it divides trainer.n_gpus_per_node."
            )
        self.engine: GroupVLLMClient | None = None
        if self.divided.rank == self.divided.siblings[0]:
            spanned = gpus[: options.num_workers]
            self.engine = GroupVLLMClient(options, model, tokenizer, seed, autocast, context, spanned)
        dtype, chunk_bytes = dtype_of(model, autocast), options.chunk_mib * MIB
        self.compute_type = str(dtype).removeprefix("torch.")
        self._planned = WeightSync(
            model,
            self.divided,
            self.engine,
            dtype,
            autocast,
            chunk_bytes,
            may_slice=is_one_machine,
            may_repeat=self._may_repeat,
        )

    def generate(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        """See `RolloutEngine.generate`. Siblings pass the same prompts and get the same rows."""
        self.begin(prompts, request)
        return self.finish()

    def turns(self, request: GenerationRequest, limits: TurnLimits) -> TurnEngine:
        """See `RolloutEngine.turns`; within `play` alone, in the first process of each group."""
        assert self.engine is not None
        return self.engine.turns(request, limits)

    def play(self, prompts: DataProto, play: PlayEpisodes) -> DataProto:
        """See `RolloutEngine.play`. The first process of a group plays the episodes of the whole group; if its engine
        died, they are played again."""
        self._load_if_needed()
        parts = among_siblings(self.divided, prompts)[:: self.num_same_rows]
        while True:
            try:
                self._agreed(lambda: self._play(parts, play))  # waits for the others without a time limit
                break
            except ConsensusFailed as failed:
                self._mend(failed)
            self.sync()
        played, self._played = from_first(self.divided, self._played), []
        return played[(self.divided.rank - self.divided.siblings[0]) // self.num_same_rows]

    def begin(self, prompts: DataProto, request: GenerationRequest) -> None:
        """Start generating; the engine's weights must not change until `finish`."""
        assert self._begun is None
        self._load_if_needed()
        prompts, self._own_rows = self.of_group(prompts, request.num_samples)
        self._begin(prompts, request)
        self._begun = prompts, request

    def finish(self) -> DataProto:
        """Wait for the responses. If an engine died, all responses are generated again with the current weights."""
        assert self._begun is not None
        (prompts, request), self._begun = self._begun, None
        self.has_redrawn = False
        while True:
            try:
                while not all(self._agreed(self._has_ended)):  # no wait in an exchange is longer than a look
                    pass
                self._agreed(self._end)
                break
            except ConsensusFailed as failed:
                self._mend(failed)
            self.has_redrawn = True
            self.sync()
            self._begin(prompts, request)
        drawn, self._drawn = from_first(self.divided, self._drawn), None
        rows = rows_of(prompts, request, drawn, self.options.max_new_tokens, self._pad_id, self._experts)
        return rows if len(rows) == self._own_rows.stop - self._own_rows.start else rows[self._own_rows]

    def sync(self) -> SyncResult:
        """Load the current weights into all engines according to the plan, and verify them."""
        assert self._begun is None, "weights may not change while responses are drawn"
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
        if any(self._agreed(lambda: self.engine is not None and self.engine.needs_weights)):
            self.sync()

    def _play(self, parts: Sequence[DataProto], play: PlayEpisodes) -> None:
        if self.engine is not None:
            self._played = play(parts)
            self.engine.has_played()

    def of_group(self, prompts: DataProto, num_samples: int) -> tuple[DataProto, slice]:
        """The prompts of the engine of this process, and which of the resulting rows belong to this process."""
        same, group = self.num_same_rows, self.divided.siblings
        if len(group) <= same:
            return prompts, slice(0, len(prompts) * num_samples)
        parts = among_siblings(self.divided, prompts)[::same]
        own = (self.divided.rank - group[0]) // same
        begin = sum(map(len, parts[:own])) * num_samples
        return DataProto.concat(parts), slice(begin, begin + len(prompts) * num_samples)

    def _begin(self, prompts: DataProto, request: GenerationRequest) -> None:
        """Failures are reported in `_end`, where all processes meet."""
        self._failure = None
        try:
            if self.engine is not None:
                self.engine.begin_drawing(prompts, request)
        except Exception as error:  # noqa: BLE001 - raised in `_end`
            self._failure = error

    def _has_ended(self) -> bool:
        return self.engine is None or self._failure is not None or self.engine.has_drawn(LOOK_S)

    def _end(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self.engine is not None:
            self._drawn = self.engine.end_drawing()

    def _agreed(self, part: Callable[[], T]) -> list[T]:
        return consensus(self.divided, part, self._may_repeat)

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
