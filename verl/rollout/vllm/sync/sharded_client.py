"""vLLM beside a sharded model: one engine for each group of ranks that work on the same rows.

    rank 0  leads ── engine: worker 0 <── slices or whole tensors ──┐
    rank 1        └────────  worker 1 <── slices                  ──┼── moved by a plan from all who hold them
    rank 2  leads ── another engine   <── ...                     ──┘

A process that leads no engine feeds it, or only gives what it holds to those who do. The engine's worker w reads what
sibling w puts into its stream, as far as the engine says which slices its workers take; otherwise the first feeds all.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from verl.component import BuildContext
from verl.errors import ConfigError
from verl.models.parallel_info import Autocast
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest, RolloutEngine, SyncResult
from verl.rollout.vllm.client.client import MIB, GroupVLLMClient, died_twice, rows_of
from verl.rollout.vllm.client.engine_args import DIVIDED, dtype_of
from verl.rollout.vllm.client.engine_process import EngineDied
from verl.rollout.vllm.messages import SampleOutput
from verl.rollout.vllm.shm_stream import StreamBroken
from verl.rollout.vllm.sync.consensus import ConsensusFailed, among_siblings, consensus, from_first
from verl.rollout.vllm.sync.weight_sync import WeightSync

if TYPE_CHECKING:
    from verl.rollout.vllm.config import VLLMRollout

log = logging.getLogger(__name__)

LOOK_S = 30.0  # for responses of an engine, before its process tells the others that it still waits

T = TypeVar("T")


class ShardedVLLMClient(RolloutEngine):
    """The running engines of `VLLMRollout`, as one of the processes that hold the model.

    Raises:
        ConfigError: vLLM cannot run this model, or not with these options.
    """

    def __init__(
        self, options: VLLMRollout, model: Any, tokenizer: Any, seed: int, autocast: Autocast, context: BuildContext
    ):
        if options.lora == "adapter" and hasattr(model, "peft_config"):
            raise ConfigError(f"rollout.lora is adapter, {DIVIDED}")
        self.options, self.divided = options, model.divided
        self._pad_id = tokenizer.pad_token_id
        self._begun: tuple[DataProto, GenerationRequest] | None = None
        self._drawn: SampleOutput | None = None
        self._failure: Exception | None = None  # of beginning to draw
        self._times_broken = 0
        is_one_machine = len(set(among_siblings(self.divided, platform.node()))) == 1
        self.engine: GroupVLLMClient | None = None
        if self.divided.rank == self.divided.siblings[0]:
            self.engine = GroupVLLMClient(options, model, tokenizer, seed, autocast, context)
        dtype, chunk_bytes = dtype_of(model, autocast), options.chunk_mib * MIB
        self.compute_type = str(dtype).removeprefix("torch.")
        self._planned = WeightSync(
            model, self.engine, dtype, autocast, chunk_bytes, may_slice=is_one_machine, may_repeat=self._may_repeat
        )

    def generate(self, prompts: DataProto, request: GenerationRequest) -> DataProto:
        """See `RolloutEngine.generate`. Siblings have the same prompts, and get the same rows."""
        self.begin(prompts, request)
        return self.finish()

    def begin(self, prompts: DataProto, request: GenerationRequest) -> None:
        """Begin to draw; the engine's weights stay as they are until `finish`."""
        assert self._begun is None
        if any(self._agreed(lambda: self.engine is not None and self.engine.needs_weights)):
            self.sync()
        self._begin(prompts, request)
        self._begun = prompts, request

    def finish(self) -> DataProto:
        """What was begun. If an engine died of it, all is drawn again, from the weights that are there by now."""
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
        return rows_of(prompts, request, drawn, self.options.max_new_tokens, self._pad_id)

    def sync(self) -> SyncResult:
        """Bring the present weights into all engines, along the plan, and prove them."""
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
        """Give the GPU's memory back until the next call; on a CPU there is nothing to do."""
        if self.engine is not None:
            self.engine.rest()

    def close(self) -> None:
        """End the engine that this process leads, and leave nothing of it."""
        if self.engine is not None:
            self.engine.close()
        self._planned.close()

    def _begin(self, prompts: DataProto, request: GenerationRequest) -> None:
        """What fails is told when all come together, in `_end`."""
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
        """Whether a failure of this process may be mended by another try."""
        if isinstance(error, StreamBroken):  # an engine that another process leads is gone, and will be made anew
            self._times_broken += 1
            return self._times_broken == 1
        return self.engine is not None and self.engine.may_repeat(error)

    def _mend(self, failed: ConsensusFailed) -> None:
        """What a failure leads to, beside all engines: another try, or its end."""
        error = failed.error
        if failed.may_repeat:
            log.warning("%s\nIt is tried once more.", error)
        elif isinstance(error, EngineDied):
            raise died_twice(error) from None
        else:
            raise error from failed
