"""The engine of `rollout=vllm`: requests (`client/turns.py`), weights (`sync/weight_sync.py`), handling of failures.

    rank 0  leads ── engine: worker 0 <── slices or whole tensors ──┐
    rank 1        └────────  worker 1 <── slices                  ──┼── sent by a plan from their holders
    rank 2  leads ── another engine   <── ...                     ──┘

A process that holds the whole model leads its own engine. Ranks of a sharded model share one engine per group of ranks
that work on the same rows. A rank without an engine feeds the engine of its group, or only sends its
tensors to the ranks that do. If the engine reports which slices its workers need, worker w reads the stream of sibling
w; otherwise the first sibling feeds all workers.

An engine on GPUs spans those of its group: `rollout.tensor_parallel_size` x `rollout.pipeline_parallel_size`
consecutive ranks, or tensor-parallel siblings if they are more. Ranks of a group with different rows (FSDP) send their
prompts to the first, whose engine generates all of them.

An engine that dies is restarted once: it gets the weights, and open turns are generated again. Ranks of a sharded model
decide on that together.
"""

from __future__ import annotations

import logging
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
from verl.rollout.generation_group import ConsensusFailed, OneGenerates, among_siblings, consensus
from verl.rollout.probe_log_probs import trainer_log_probs
from verl.rollout.proof import SyncVerifier, probe_rows
from verl.rollout.token_sampler import TokenSampler
from verl.rollout.vllm.client.engine_args import (
    EngineArgs,
    as_config_error,
    as_death,
    dtype_of,
    engine_args,
    environment,
    gpu_name,
    write_model_directory,
)
from verl.rollout.vllm.client.engine_process import (
    EngineDied,
    EngineError,
    EngineFiles,
    EngineProcess,
    message_after_log,
)
from verl.rollout.vllm.client.turns import VLLMTurns
from verl.rollout.vllm.options import VLLMOptions
from verl.rollout.vllm.shm_stream import StreamBroken
from verl.rollout.vllm.sync.engine_weights import MIB, EngineWeights
from verl.rollout.vllm.sync.weight_sync import WeightSync
from verl.utils.env_check import num_cores
from verl.utils.memory import keep_cached

log = logging.getLogger(__name__)

SIZE = "rollout.tensor_parallel_size x rollout.pipeline_parallel_size"  # of an engine, in messages

RESTARTED = "A new engine is started, and the same samples are generated again."

T = TypeVar("T")


class VLLMEngine(RolloutEngine):
    """The running engine of `VLLMRollout`, seen from one of the processes that hold the model.

    Attributes:
        is_alone: this process holds the whole model.
        process: led by this process; None if another process leads the engine.
        weights: of that process.
    Raises:
        ConfigError: vLLM cannot run this model, or not with these options.
    """

    def __init__(
        self, options: VLLMOptions, model: Any, tokenizer: Any, seed: int, autocast: Autocast, context: BuildContext
    ):
        self.options, self.model, self.seed = options, model, seed
        self.stop_ids = tuple(stop_tokens(model, tokenizer, options.stop_token_ids).tolist())
        self.experts = _experts_shape(model, options)
        whole, self._num_failures = parallel_info_of(model), 0
        self.parallel_info = with_engine_group(whole, options.num_workers)
        self.is_alone = self.parallel_info.mesh.size == 1
        self.group = OneGenerates(
            self.parallel_info,
            len(whole.siblings),  # consecutive ranks with the same prompts
            self._sync_if_needed,
            self._may_repeat,
            self._repeat_or_raise,
            self._has_generated,
        )
        self.process: EngineProcess | None = None
        self.weights: EngineWeights | None = None
        self._turns: VLLMTurns | None = None
        dtype = dtype_of(model, autocast)
        self.compute_type = str(dtype).removeprefix("torch.")
        is_one_machine = len(set(among_siblings(self.parallel_info, platform.node()))) == 1
        gpus = self._gpus(context, is_one_machine)
        try:
            if self.group.generates:
                self._prepare_process(autocast, context, gpus)
                keep_cached(self.setting.is_on_gpu and not options.sleep and not context.shares_device)
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

    @property
    def process_id(self) -> int | None:
        """Process id of the vLLM process that this process leads."""
        return None if self.process is None else self.process.process_id

    def turns(self, limits: TurnLimits) -> TurnEngine:
        """See `RolloutEngine.turns`, in the process that leads the engine; samples depend only on noise keys and
        positions. During training both sides use fewer threads if necessary.

        Raises:
            ConfigError: an episode is too long for the engine.
        """
        assert self.process is not None
        assert self.weights is not None
        limit = f"the engine holds {self.info.max_model_len} (rollout.max_model_len, or the model's own limit)"
        limits.refuse_above(self.info.max_model_len, self.options.max_new_tokens, limit)
        if limits.is_stepwise and self.weights.needs_sync:  # the weights may be partly updated
            raise EngineDied("The vLLM engine is not running.")
        if self.is_alone:  # several processes have done so together, in `group`
            self._sync_if_needed()
        self.weights.prove_function()
        self._turns = VLLMTurns(
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
        """Load the current weights into all engines, and verify them. Keys and values of previous weights are used by
        open, `paused` turns only."""
        synced = self._sync(self._refuse_open_turns)
        if self.is_alone:  # a group counts on, since it repeats a whole generation after the sync
            self._num_failures = 0
        return synced

    def offload(self) -> None:
        """Free GPU memory until the next sync; on a CPU there is nothing to do."""
        if self.weights is None or self._open_turns is not None:
            return
        if not (self.setting.is_on_gpu and self.options.sleep):
            return
        try:
            self.weights.sleep()
        except EngineDied as death:  # its memory is free too
            log.warning("%s\nA new engine will be started when it is needed.", death)
            self.weights.process.kill()

    def close(self) -> None:
        """End the vLLM process that this process leads, and remove its files."""
        if self.process is not None:
            keep_cached(False)
            self.process.kill()
            self.process.files.remove()
        if hasattr(self, "weight_sync"):
            self.weight_sync.close()

    def _prepare_process(self, autocast: Autocast, context: BuildContext, gpus: Sequence[str] | None) -> None:
        """The vLLM process, not started yet."""
        files = EngineFiles()
        try:
            directory = write_model_directory(self.model, files.directory)
            self.setting = engine_args(self.options, self.model, autocast, directory, files.name, context.trainer_bytes)
            variables = environment(self.options, context, self.setting.num_threads, self.setting.dtype, gpus)
        except BaseException:
            files.remove()
            raise
        log_file = None
        if context.run_dir is not None:
            log_file = context.run_dir / "workers" / f"vllm_{context.rank}.log"
            log_file.parent.mkdir(parents=True, exist_ok=True)
        self.process = EngineProcess(self.setting, variables, files, log_file, self.options.call_timeout_s)

    def _engine_weights(self, tokenizer: Any, autocast: Autocast, context: BuildContext) -> EngineWeights:
        assert self.process is not None
        vocabulary = min(self.model.config.get_text_config().vocab_size, len(tokenizer))
        rows = probe_rows(vocabulary, self.info.max_model_len)
        log_probs = partial(trainer_log_probs, self.model, autocast=autocast)
        own_type = compute_type(self.model, autocast)
        verifier = SyncVerifier(self.model, self.setting.dtype, rows, log_probs, own_type)
        threads = _shared_core_threads(self.setting, context)
        stops = context.gap_stops and self.is_alone  # else a probe is a forward pass of all processes together
        return EngineWeights(self.process, self.info, self.model, verifier, self.setting.lora_rank, threads, stops)

    def _gpus(self, context: BuildContext, is_one_machine: bool) -> Sequence[str] | None:
        """Names of the GPUs of the engine of several processes; None for those of this process alone."""
        if self.is_alone or self.parallel_info.device.type != "cuda":
            return None
        size = self.options.num_workers
        if size > 1 and not is_one_machine:
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
        try:
            self.info = self.process.start(self.options.start_timeout_s)
        except EngineError as error:
            if (death := as_death(error)) is not None:
                raise death from error
            raise as_config_error(error, self.setting, self.model) from error
        self.row_tokens = self.info.max_model_len

    def _restart(self, death: EngineDied) -> None:
        """Start another engine with the current weights, after one died during generation."""
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
        """Sync before turns are generated, if needed; collective over the processes of the model."""
        needs_sync = consensus(
            self.parallel_info, lambda: self.weights is not None and self.weights.needs_sync, self._may_repeat
        )
        if any(needs_sync):
            self.sync()

    @property
    def _open_turns(self) -> VLLMTurns | None:
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
        """Whether a failure of this process may be retried (the first in a row, or of a first sync), and prepare the
        retry."""
        if isinstance(error, EngineDied | StreamBroken):  # or the engine of another process died
            if self.process is not None and isinstance(error, EngineDied):
                self.process.kill()
            self._num_failures += 1
            return self._num_failures == 1
        return self.weights is not None and self.weights.may_repeat(error)

    def _repeat_or_raise(self, failed: ConsensusFailed) -> None:
        """Called in all processes after a failure; returns if they shall retry."""
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
    """`parallel_info` with all ranks that share an engine as siblings: an engine on GPUs spans those of its group.

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
    """`parallel_info` with ranks in groups of this size as siblings. Collective over the processes of the model."""
    import torch.distributed as dist

    groups = [list(range(first, first + size)) for first in range(0, parallel_info.mesh.size, size)]
    group, _ = dist.new_subgroups_by_enumeration(groups, timeout=parallel_info.timeout)
    return replace(parallel_info, siblings=tuple(groups[parallel_info.rank // size]), sibling_group=group)


def _experts_shape(model: Any, options: VLLMOptions) -> tuple[int, int] | None:
    """Layers with experts, and experts of a token; None if they are not recorded."""
    routing = routing_of(model) if options.router_replay else None
    return None if routing is None else (routing.layers, routing.top_k)


def _shared_core_threads(setting: EngineArgs, context: BuildContext) -> int:
    """Threads of trainer and engine each while both work, so that none waits for a core."""
    threads = torch.get_num_threads()
    fit = setting.is_on_gpu or context.world_size * (threads + setting.num_threads) <= num_cores()
    return threads if fit else max(1, min(threads, setting.num_threads) // 2)
