"""An engine in a process of its own: requests (`engine_process/turns.py`), weights (`weight_sync/sync.py`), and what a
failure leads to.

    rank 0  leads ── engine: worker 0 <── slices or whole tensors ──┐
    rank 1        └────────  worker 1 <── slices                  ──┼── sent by a plan from their holders
    rank 2  leads ── another engine   <── ...                     ──┘

A process that holds the whole model leads an engine of its own. Ranks of a sharded model share one engine for each
group of them that work on the same rows. A rank without an engine feeds the engine of its group, or only sends its
tensors to the ranks that do. If the engine reports which slices its workers need, worker w reads the stream of sibling
w; otherwise the first sibling feeds all workers.

An engine on GPUs spans those of its group: `rollout.tensor_parallel_size` x `rollout.pipeline_parallel_size` ranks in a
row, or tensor-parallel siblings where they are more. Ranks of a group that have rows of their own (FSDP) send their
prompts to the first, whose engine draws all of them.

An engine that dies is restarted once: it gets the weights, and open turns are generated again. Ranks of a sharded model
decide on that together.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from verl.component import BuildContext
from verl.errors import ConfigError, RolloutError
from verl.model_paths.expert_routing import routing_of
from verl.models.parallel_info import Autocast, ParallelInfo, compute_type, parallel_info_of
from verl.rollout.base import RolloutEngine, SyncResult, TurnEngine, TurnLimits, open_turns_error, stop_tokens
from verl.rollout.engine_process.messages import EngineSetup
from verl.rollout.engine_process.options import ProcessOptions
from verl.rollout.engine_process.process import (
    EngineDied,
    EngineError,
    EngineFiles,
    EngineProcess,
    message_after_log,
)
from verl.rollout.engine_process.turns import ProcessTurns
from verl.rollout.generation_group import ConsensusFailed, OneGenerates, among_siblings, consensus
from verl.rollout.model_log_probs import trainer_log_probs
from verl.rollout.proof import SyncVerifier, probe_rows
from verl.rollout.token_sampler import TokenSampler
from verl.rollout.weight_sync.engine_weights import MIB, EngineWeights
from verl.rollout.weight_sync.state_dict import dtype_of
from verl.rollout.weight_sync.stream import StreamBroken
from verl.rollout.weight_sync.sync import WeightSync
from verl.utils.env_check import num_cores
from verl.utils.memory import keep_cached, release_cached

log = logging.getLogger(__name__)

SIZE = "rollout.tensor_parallel_size x rollout.pipeline_parallel_size"  # of an engine, in messages

RESTARTED = "A new engine is started, and the same samples are generated again."

T = TypeVar("T")


class ProcessEngine(RolloutEngine):
    """A running engine in a process of its own, seen from one of the processes that hold the model. A kind of engine
    gives `set_up`, and a class for the process, see `serve`.

    Attributes:
        is_alone: this process holds the whole model.
        process: that this process leads; None where another one leads the engine.
        weights: of that process.
    Raises:
        ConfigError: the engine cannot run this model, or not with these options.
    """

    def __init__(
        self, options: ProcessOptions, model: Any, tokenizer: Any, seed: int, autocast: Autocast, context: BuildContext
    ):
        self.options, self.model, self.seed = options, model, seed
        self.stop_ids = tuple(stop_tokens(model, tokenizer, options.stop_token_ids).tolist())
        self.experts = _experts_shape(model, options)
        whole, self._num_failures = parallel_info_of(model), 0
        self.parallel_info = with_engine_group(whole, options.num_workers)
        self.is_alone = self.parallel_info.mesh.size == 1
        self.group = OneGenerates(
            self.parallel_info,
            len(whole.siblings),  # ranks in a row that have the same prompts
            self._sync_if_needed,
            self._may_repeat,
            self._repeat_or_raise,
            self._has_generated,
        )
        self.process: EngineProcess | None = None
        self.weights: EngineWeights | None = None
        self._turns: ProcessTurns | None = None
        dtype = dtype_of(model, autocast)
        self.compute_type = str(dtype).removeprefix("torch.")
        is_one_machine = len(set(among_siblings(self.parallel_info, platform.node()))) == 1
        gpus = self._gpus(context, is_one_machine)
        try:
            if self.group.generates:
                self._prepare_process(autocast, context, gpus)
                keep_cached(self.setup.is_on_gpu and not options.sleep and not context.shares_device)
            self._with_retry(lambda: consensus(self.parallel_info, self._start, self._may_repeat))
            if self.process is not None:
                self.weights = self._engine_weights(tokenizer, autocast, context)
            self.weight_sync = WeightSync(
                model,
                self.parallel_info,
                self.weights,
                dtype,
                autocast,
                options.chunk_mib * MIB,
                may_slice=is_one_machine,
                may_repeat=self._may_repeat,
            )
        except BaseException:
            self.close()
            raise

    def set_up(
        self, files: EngineFiles, autocast: Autocast, context: BuildContext, gpus: Sequence[str] | None
    ) -> EngineSetup:
        """Describe the engine that the process is to make.

        Args:
            files: its directories.
            gpus: names of the GPUs of an engine of several processes; None: this process's GPU.
        Raises:
            ConfigError: the engine cannot run this model, or not with these options.
        """
        raise NotImplementedError

    def start_error(self, error: EngineError) -> Exception:
        """The error to raise in place of one that the engine raised as it started."""
        return RolloutError(f"The {self.setup.name} engine could not be started: {error}")

    @property
    def process_id(self) -> int | None:
        """Process id of the engine that this process leads."""
        return None if self.process is None else self.process.process_id

    def turns(self, limits: TurnLimits) -> TurnEngine:
        """See `RolloutEngine.turns`, in the process that leads the engine; the draws depend on the noise keys of the
        turns and the positions alone. While training goes on beside it, both sides use fewer threads if necessary.

        Raises:
            ConfigError: an episode is too long for the engine.
        """
        assert self.process is not None
        assert self.weights is not None
        limit = f"the engine holds {self.info.max_model_len} (rollout.max_model_len, or the model's own limit)"
        limits.refuse_above(self.info.max_model_len, self.options.max_new_tokens, limit)
        if limits.is_stepwise and self.weights.needs_sync:  # the weights may be half updated now
            raise EngineDied(f"The {self.setup.name} engine is not running.")
        if self.is_alone:  # several processes have done so together, in `group`
            self._sync_if_needed()
        self.weights.prove_function()
        self._turns = ProcessTurns(
            self.process,
            TokenSampler.of(self.options, self.seed, self.stop_ids),
            self.options.max_new_tokens,
            is_single=limits.is_single,
            is_stepwise=limits.is_stepwise,
            experts=self.experts,
            num_threads=self.weights.num_threads if limits.while_training else None,
            restart=self._restart if self.is_alone and not limits.while_training else None,
        )
        return self._turns

    def sync(self) -> SyncResult:
        """Load the current weights into all engines according to the plan, and verify them; keys and values of former
        weights are used by turns alone that are open, and `paused`."""
        synced = self._sync(self._refuse_open_turns)
        if self.is_alone:  # a group counts on, since it repeats a whole generation after the sync
            self._num_failures = 0
        return synced

    def offload(self) -> None:
        """Free GPU memory until the next sync; on a CPU there is nothing to do."""
        if self.weights is None or self._open_turns is not None:
            return
        if not (self.setup.is_on_gpu and self.options.sleep):
            return
        try:
            self.weights.sleep()
        except EngineDied as death:  # its memory is free too
            log.warning("%s\nA new engine will be started when it is needed.", death)
            self.weights.process.kill()

    def close(self) -> None:
        """End the process of the engine that this process leads, and leave nothing of it."""
        if self.process is not None:
            keep_cached(False)
            self.process.kill()
            self.process.files.remove()
        if hasattr(self, "weight_sync"):
            self.weight_sync.close()

    def _prepare_process(self, autocast: Autocast, context: BuildContext, gpus: Sequence[str] | None) -> None:
        """The process of the engine, not started yet."""
        files = EngineFiles()
        try:
            self.setup = self.set_up(files, autocast, context, gpus)
        except BaseException:
            files.remove()
            raise
        log_file = None
        if context.run_dir is not None:
            log_file = context.run_dir / "workers" / f"{self.setup.name.lower()}_{context.rank}.log"
            log_file.parent.mkdir(parents=True, exist_ok=True)
        self.process = EngineProcess(self.setup, files, log_file, self.options.call_timeout_s)

    def _engine_weights(self, tokenizer: Any, autocast: Autocast, context: BuildContext) -> EngineWeights:
        assert self.process is not None
        vocabulary = min(self.model.config.get_text_config().vocab_size, len(tokenizer))
        rows = probe_rows(vocabulary, self.info.max_model_len)
        log_probs = partial(trainer_log_probs, self.model, autocast=autocast)
        own_type = compute_type(self.model, autocast)
        verifier = SyncVerifier(self.model, self.setup.dtype, rows, log_probs, own_type)
        threads = _shared_core_threads(self.setup, context)
        stops = context.gap_stops and self.is_alone  # else a probe is a forward pass of all processes together
        return EngineWeights(self.process, self.info, self.model, verifier, self.setup.lora_rank, threads, stops)

    def _gpus(self, context: BuildContext, is_one_machine: bool) -> Sequence[str] | None:
        """Names of the GPUs of the engine of several processes; None for those of this process alone."""
        if self.is_alone or self.parallel_info.device.type != "cuda":
            return None
        if (size := self.options.num_workers) > 1 and not is_one_machine:
            raise ConfigError(
                f"{SIZE} is {size}: the processes of an engine would be on several machines. Set it so that it divides "
                "trainer.n_gpus_per_node."
            )
        return among_siblings(self.parallel_info, gpu_name(context.device))[:size]

    def _start(self) -> None:
        """Start the engine that this process leads, if it is not running."""
        if self.process is None or self.process.is_alive():
            return
        self.process.kill()  # what is left of one that has ended
        release_cached(self.parallel_info.device, always=True)  # an engine refuses to start with too little memory
        try:
            self.info = self.process.start(self.options.start_timeout_s)
        except EngineError as error:
            raise self.start_error(error) from error
        self.row_tokens = self.info.max_model_len

    def _restart(self, death: EngineDied) -> None:
        """Start another engine with the present weights, in place of one that died while it was drawing with them."""
        self._num_failures += 1
        log.warning("%s\n%s", death, RESTARTED)
        self._sync(lambda: None)

    def _sync(self, check: Callable[[], None]) -> SyncResult:
        def prepare() -> bool:
            check()
            self._start()
            return self._turns is not None and self._turns.is_active

        return self._with_retry(lambda: self.weight_sync.run(prepare))

    def _sync_if_needed(self) -> None:
        """Before turns are generated; all processes that hold the model take part."""
        needs_sync = consensus(
            self.parallel_info, lambda: self.weights is not None and self.weights.needs_sync, self._may_repeat
        )
        if any(needs_sync):
            self.sync()

    @property
    def _open_turns(self) -> ProcessTurns | None:
        return self._turns if self._turns is not None and self._turns.is_open else None

    def _refuse_open_turns(self) -> None:
        """Raises RolloutError while turns are open and not paused: the former weights have begun them."""
        if (turns := self._open_turns) is not None and not turns.is_paused:
            raise open_turns_error(turns.num_pending)

    def _with_retry(self, action: Callable[[], T]) -> T:
        """The result of an action that raises `ConsensusFailed` in all processes that hold the model."""
        while True:
            try:
                return action()
            except ConsensusFailed as failed:
                self._repeat_or_raise(failed)

    def _may_repeat(self, error: Exception) -> bool:
        """Whether a failure of this process may be followed by another try, which this prepares: the first of several
        in a row, or that of a first sync."""
        if isinstance(error, EngineDied | StreamBroken):  # or the engine of another process died
            if self.process is not None and isinstance(error, EngineDied):
                self.process.kill()
            self._num_failures += 1
            return self._num_failures == 1
        return self.weights is not None and self.weights.may_repeat(error)

    def _repeat_or_raise(self, failed: ConsensusFailed) -> None:
        """Called in all processes after a failure in one; returns if they are to try again."""
        error = failed.error
        if failed.may_repeat:
            log.warning("%s\n%s", error, RESTARTED if isinstance(error, EngineDied) else "Retrying once.")
        elif isinstance(error, EngineDied):
            reason = f"The rollout engine died twice in a row. The second time: {error.reason}"
            raise RolloutError(message_after_log(reason, error.found, error.log)) from None
        else:
            raise error from failed

    def _has_generated(self) -> None:
        self._num_failures = 0


def with_engine_group(parallel_info: ParallelInfo, engine_size: int) -> ParallelInfo:
    """The same, with all ranks that share an engine as siblings: one engine on GPUs spans those of its whole group.

    On a CPU every group of tensor-parallel ranks has its own engine, of any size. All processes of the model take
    part.

    Raises:
        ConfigError: ranks cannot be put into groups of this size.
    """
    size = max(engine_size, len(parallel_info.siblings))
    is_alone = parallel_info.mesh.size == 1
    if is_alone or parallel_info.device.type == "cpu" or size == len(parallel_info.siblings):
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
    group, _ = dist.new_subgroups_by_enumeration(groups, timeout=parallel_info.timeout)
    return replace(parallel_info, siblings=tuple(groups[parallel_info.rank // size]), sibling_group=group)


def gpu_name(device: str) -> str:
    """The name of a GPU of this process, as CUDA_VISIBLE_DEVICES has it for a child."""
    visible, index = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.device(device).index or 0
    names = visible.split(",") if visible else []
    return names[index].strip() if index < len(names) else str(index)


def _experts_shape(model: Any, options: ProcessOptions) -> tuple[int, int] | None:
    """Layers with experts, and experts of a token; None if they are not recorded."""
    routing = routing_of(model) if options.router_replay else None
    return None if routing is None else (routing.layers, routing.top_k)


def _shared_core_threads(setup: EngineSetup, context: BuildContext) -> int:
    """Threads of each of the two, while trainer and engine work at the same time, so that none waits for a core."""
    threads = torch.get_num_threads()
    fit = setup.is_on_gpu or context.world_size * (threads + setup.num_threads) <= num_cores()
    return threads if fit else max(1, min(threads, setup.num_threads) // 2)
