"""The engine of a group of processes, as the first of them holds it: each thing is done once, and may fail.

What is done about a failure is decided by all processes together, in `divided.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl.errors import WeightSyncError
from verl.protocol import DataProto
from verl.rollout.base import Request
from verl.rollout.vllm.engine import VLLMEngine
from verl.rollout.vllm.feeds import Feed, Loading
from verl.rollout.vllm.process import EngineDied
from verl.rollout.vllm.told import Drawn, Wanted
from verl.sync.proof import Proof
from verl.sync.questions import Question
from verl.sync.shards import Shards, join


@dataclass(frozen=True)
class Offer:
    """What an engine needs for a sync.

    Attributes:
        question: of the proof.
        wants: the slices that each of its workers takes; None: tensors come whole, to all of them.
        num_workers: of the engine.
        process_id: of the engine.
        progress_path: opens the memory of its progress.
        call_timeout_s: without progress, until it counts as lost.
        num_threads: that trainer and engine may each use, while both work.
    """

    question: Question
    wants: tuple[Wanted, ...] | None
    num_workers: int
    process_id: int
    progress_path: str
    call_timeout_s: float
    num_threads: int


class LeadingEngine(VLLMEngine):
    """The running engine of a group of processes that share a model."""

    _wants: tuple[dict[str, tuple[int, ...]], tuple[Wanted, ...] | None] | None = None
    _deaths = 0  # since it drew last

    @property
    def needs_weights(self) -> bool:
        """Whether it cannot draw before a sync."""
        return not self._is_synced or not self._process.is_alive()

    def may_repeat(self, error: Exception) -> bool:
        """Whether what failed may be tried again, and if so, with what is needed for that.

        An engine that died is made anew, once. One that cannot be proven at its first sync is told to have vLLM load
        its model itself, as `VLLMEngine` does.
        """
        if isinstance(error, EngineDied):
            self._deaths += 1
            self._process.kill()
            self._is_synced = False
            return self._deaths == 1
        if isinstance(error, WeightSyncError) and self._in_place and not self._was_proven:
            self._in_place = False
            return True
        return False

    def offer(self, shapes: dict[str, tuple[int, ...]] | None) -> Offer:
        """Be ready for weights. `shapes` are those of tensors that may come in slices; None: whole ones must come."""
        question = self._prover.question()  # before what may fail: questions are counted alike beside all engines
        if not self._process.is_alive():
            self._process.kill()
            self._start()
            self._wants = None
        self._wake("weights")
        process_id = self.process_id
        assert process_id is not None
        wants = self._slices(shapes) if shapes is not None and self._in_place and self.told.num_workers > 1 else None
        return Offer(
            question,
            wants,
            self.told.num_workers,
            process_id,
            self._process.progress_path,
            self.options.call_timeout_s,
            self._threads_beside,
        )

    def begin_load(self, feeds: list[Feed]) -> None:
        """Let its workers read."""
        self._is_synced = False
        self._process.send("load", feeds, self.setting.dtype, Loading(self._threads_beside, self._in_place))

    def end_load(self) -> float:
        """When they have read all of it. Returns the seconds of that."""
        seconds, anew = self._process.answer()
        self._in_place = self._in_place and anew is None
        self._wake("kv_cache")
        self._is_asleep = False
        return seconds

    def is_reading(self) -> bool:
        """Whether it still reads."""
        return self._process.is_busy()

    def begin_proof(self, question: Question) -> None:
        """Ask what it holds."""
        self._process.send("prove", question)

    def look(self) -> None:
        """The trainer's side of the probe; all processes of the model take part."""
        self._prover.look()

    def end_proof(self, parts: Sequence[Shards], seconds: float) -> Proof:
        """Compare with what the processes of the trainer have made of their own parts in these seconds.

        Raises:
            WeightSyncError: it does not hold their weights.
        """
        self._prover.adopt(join(parts), seconds)
        proof = self._prover.prove(self._process.answer())
        self._is_synced = self._was_proven = True
        return proof

    def note(self, name: str, tensor: Any) -> None:
        """Take the mark of a whole tensor on its way."""
        self._prover.note(name, tensor)

    def begin_drawing(self, prompts: DataProto, request: Request) -> None:
        """Begin to draw with the weights that it has."""
        asked = self._question(prompts, request)
        self._begun = prompts, request, asked  # before what may fail: `end_drawing` may follow in any case
        if asked:
            self._process.send("draw", *asked)

    def has_drawn(self, within_s: float) -> bool:
        """Whether `end_drawing` would not wait; waits a while for that."""
        return self._begun is None or not self._begun[2] or self._process.has_answered(within_s)

    def end_drawing(self) -> Drawn | None:
        """What was begun; None for no rows."""
        assert self._begun is not None
        (*_, asked), self._begun = self._begun, None
        if not asked:
            return None
        try:
            drawn = self._process.answer()
        except Exception:  # requests may be left in it: the next call gets a new one
            self._process.kill()
            self._is_synced = False
            raise
        self._deaths = 0
        return drawn

    def _slices(self, shapes: dict[str, tuple[int, ...]]) -> tuple[Wanted, ...] | None:
        """Found once for an engine."""
        if self._wants is None or self._wants[0] != shapes:
            found = self._process.call("wants", shapes)
            self._wants = shapes, None if found is None else tuple(found)
        return self._wants[1]
