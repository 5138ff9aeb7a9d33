"""vLLM as the trainer sees it: turns and weights out, tokens in. `VLLMClient` is the engine of one process.

    turns      tokens ──> vLLM process ──> tokens, log-probs
    sync       weights ──> two chunks of shared memory ──> the engine's own parameters

An engine that dies is restarted: it gets the weights, and open turns are generated again. `GroupVLLMClient` is the
engine of a group of ranks, held by the first of them; failures there are decided on by all ranks together, in
`rollout/vllm/sync/sharded_client.py`.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from verl.component import BuildContext
from verl.errors import ConfigError, RolloutError, WeightSyncError
from verl.model_paths.expert_routing import routing_of
from verl.models.parallel_info import Autocast, compute_device
from verl.rollout.base import (
    RolloutEngine,
    SyncResult,
    TurnEngine,
    TurnLimits,
    open_turns_error,
    stop_tokens,
)
from verl.rollout.generation_group import GenerationGroup, RepeatGeneration
from verl.rollout.vllm.client.engine_args import (
    EngineArgs,
    as_config_error,
    as_death,
    engine_args,
    environment,
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
from verl.rollout.vllm.messages import (
    ChunkPlan,
    FeedPlan,
    LoadRequest,
    SyncOffer,
    SyncRound,
    plan_chunks,
)
from verl.rollout.vllm.options import VLLMOptions
from verl.rollout.vllm.shm_stream import StreamBroken, StreamWriter, using_threads
from verl.rollout.vllm.state_dict import NamedWeight, weights_of
from verl.rollout.weight_verification.fingerprint import FingerprintShards, join_shards
from verl.rollout.weight_verification.verifier import SyncVerifier, VerificationResult, VerifyRequest
from verl.utils.env_check import num_cores
from verl.utils.memory import on_current_device, release_cached

log = logging.getLogger(__name__)

T = TypeVar("T")
MIB = 1 << 20
CHUNKS = 8  # at least, of any but the smallest models: an engine begins when it has the first


@dataclass(frozen=True)
class _Connection:
    """State that is kept between syncs during the lifetime of an engine.

    Attributes:
        key: identifies the engine and tensors that it was made for.
        chunks: location of each tensor in the stream.
        feeds: what each worker of the engine reads.
        num_bytes: total size of all tensors.
    """

    key: tuple[Any, ...]
    chunks: ChunkPlan
    stream: StreamWriter
    feeds: list[FeedPlan]
    num_bytes: int


class RepeatAfterDeath(GenerationGroup):
    """A process with an engine of its own. Responses of an engine that died while the trainer went on are generated
    again by another one.

    Args:
        restart: starts it.
    """

    def __init__(self, restart: Callable[[], None]):
        self.restart = restart

    def run(self, generate: Callable[[], T]) -> T:
        try:
            return generate()
        except EngineDied as death:
            log.warning("%s\nA new engine is started, and the same samples are generated again.", death)
            self.restart()
            raise RepeatGeneration from death


class VLLMClient(RolloutEngine):
    """The running engine of `VLLMRollout`.

    A sync consists of `connect`, which fixes the layout of the stream and is repeated only after a restart, `push`
    and `verify`.

    Args:
        gpus: names of the GPUs that the engine uses, if several processes share it; None: this process's GPU.
    Raises:
        ConfigError: vLLM cannot run this model, or not with these options.
    """

    def __init__(
        self,
        options: VLLMOptions,
        model: Any,
        tokenizer: Any,
        seed: int,
        autocast: Autocast,
        context: BuildContext,
        gpus: Sequence[str] | None = None,
    ):
        self.options, self.model, self.seed, self.gpus = options, model, seed, gpus
        self.group = RepeatAfterDeath(self._restart)
        self.pad_id, self.experts = tokenizer.pad_token_id, experts_shape(model, options)
        self.stop_ids = tuple(stop_tokens(model, tokenizer, options.stop_token_ids).tolist())
        self.is_synced = self.is_asleep = self._has_base = self._was_proven = False
        self.in_place = True
        self._adapters, self.chunk_bytes = 0, options.chunk_mib * MIB
        self.open_turns: VLLMTurns | None = None
        self.stream: StreamWriter | None = None
        self.connection: _Connection | None = None
        self._connected: list[FeedPlan] | None = None  # the streams that the engine reads
        self.files = EngineFiles()
        try:
            directory = write_model_directory(model, self.files.directory)
            self.setting = engine_args(
                options, model, autocast, directory, self.files.name, context.bytes_beside_engine
            )
            self.compute_type = str(self.setting.dtype).removeprefix("torch.")
            variables = environment(options, context, self.setting.num_threads, self.setting.dtype, self.gpus)
            limit_s = options.call_timeout_s
            self.process = EngineProcess(self.setting, variables, self.files, _log_file(context), limit_s)
            self.with_engine_restart(self._start, is_start=True)
            self._shared_core_threads = _shared_core_threads(self.setting, context)
            vocabulary = min(model.config.get_text_config().vocab_size, len(tokenizer))
            self._verifier = SyncVerifier(
                model, self.setting.dtype, vocabulary, self.engine_info.max_model_len, autocast
            )
        except BaseException:
            self.close()
            raise

    @property
    def row_tokens(self) -> int | None:  # type: ignore[override]
        return self.engine_info.max_model_len

    @property
    def process_id(self) -> int | None:
        """Process id of the vLLM process."""
        return self.process.process_id

    def turns(self, limits: TurnLimits) -> TurnEngine:
        """See `RolloutEngine.turns`; the draws depend on the noise keys of the turns and the positions alone. While
        training goes on beside it, both sides use fewer threads if necessary.

        Raises:
            ConfigError: an episode is too long for the engine.
        """
        self._refuse_too_long(limits)
        if limits.while_training:
            self.with_engine_restart(self._sync_if_needed)
        threads = self._shared_core_threads if limits.while_training else None
        self.open_turns = VLLMTurns(self, limits, threads)
        return self.open_turns

    def sync(self) -> SyncResult:
        """Stream the present weights into the engine, which drops all keys and values."""
        self.refuse_open_turns()
        return self.with_engine_restart(self._sync)

    def rest(self) -> None:
        """Give the GPU's memory back until the next call; on a CPU there is nothing to do."""
        may_sleep = self.setting.is_on_gpu and self.options.sleep and self.open_turns is None
        if may_sleep and not self.is_asleep and self.process.is_alive():
            self.is_synced = self._has_base = False
            try:
                self.process.call("sleep")
                self.is_asleep = True
            except EngineDied as death:  # its memory is free too
                log.warning("%s\nA new engine will be started when it is needed.", death)
                self.process.kill()

    def close(self) -> None:
        """End the child, and leave nothing of it."""
        if hasattr(self, "process"):
            self.process.kill()
        if self.stream is not None:
            self.stream.close()
            self.stream = None
        self.files.remove()

    def _restart(self) -> None:
        self.process.kill()
        try:
            self._start()
        except EngineDied as death:
            raise died_twice(death) from None

    def _start(self) -> None:
        self.connection = self._connected = None
        self.is_synced = self.is_asleep = self._has_base = self._was_proven = False
        try:
            self.engine_info = self.process.start(self.options.start_timeout_s)
        except EngineError as error:
            if (death := as_death(error)) is not None:
                raise death from error
            raise as_config_error(error, self.setting, self.model) from error

    def call(self, method: str, *args: Any) -> Any:
        """A call to an engine that holds the present weights."""
        self._sync_if_needed()
        try:
            return self.process.call(method, *args)
        except EngineError:  # requests may be left in it: the next call gets a new one
            self.process.kill()
            self.is_synced = False
            raise

    def with_engine_restart(self, action: Callable[[], T], *, is_start: bool = False) -> T:
        """Do something; if the engine dies of it, or makes no progress, do it once more with a new one."""
        try:
            return action()
        except EngineDied as death:
            log.warning("%s\nA new engine is started, and the same samples are generated again.", death)
        try:
            self.process.kill()
            if not is_start:
                self._start()
            return action()
        except EngineDied as death:
            raise died_twice(death) from None

    def refuse_open_turns(self) -> None:
        """Raises RolloutError while turns are open: the present weights have begun them."""
        if self.open_turns is not None:
            raise open_turns_error(self.open_turns.num_pending)

    def _sync_if_needed(self) -> None:
        if not self.is_synced:
            self._sync()

    def _sync(self) -> SyncResult:
        """Send the present weights and prove them.

        Where tensors have their places in the engine is found with the first sync. If that one cannot be proven, vLLM
        loads its model itself, now and from then on: it may make more of a tensor than its layers tell.
        """
        try:
            synced = self._send_and_prove()
        except WeightSyncError as error:
            if self._was_proven or not self.in_place:
                raise
            log.warning(
                "vLLM reloads its model at each sync, because not all of its weights could be loaded in place: %s",
                error,
            )
            self.in_place = False
            synced = self._send_and_prove()
        self.is_synced = self._has_base = self._was_proven = True
        return synced

    def _send_and_prove(self) -> SyncResult:
        rank, all_weights = self.setting.lora_rank, self.setting.lora_rank is None or not self._has_base
        question = self._verifier.question(weights=all_weights, adapter_rank=rank)
        with using_threads(self._shared_core_threads), ThreadPoolExecutor(1) as aside:
            looking = aside.submit(
                on_current_device(self._verifier.compute_probe_log_probs)
            )  # during the transfer of the weights, which it only reads
            if rank is None:
                synced = self.push()
            else:
                if all_weights:
                    self.push(merge=False)
                synced = self._send_adapter()
                self._verifier.add_adapter_fingerprints()
            looking.result()
        self.request_fingerprints(question)
        return replace(synced, metrics=synced.metrics | self.verify().metrics)

    def request_fingerprints(self, question: VerifyRequest) -> None:
        """Ask what the engine holds."""
        self.process.send("prove", question)

    def verify(self) -> VerificationResult:
        """Compare what the engine holds with what the trainer does.

        Raises:
            WeightSyncError: it does not hold the trainer's weights.
        """
        return self._verifier.verify(self.process.answer())

    def _send_adapter(self) -> SyncResult:
        """A new adapter under a new number, in a directory in memory; the former one is removed."""
        self._adapters += 1
        directory = self.files.directory / f"adapter_{self._adapters}"
        start = time.perf_counter()
        self.model.save_pretrained(directory)
        copying = time.perf_counter() - start
        try:
            loading = self.process.call("adopt", str(directory), self._adapters)
            size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        metrics = {"sync/copy_s": copying, "sync/load_s": loading, "sync/bytes": float(size)}
        return SyncResult(f"adapter {self._adapters}, {size / MIB:.1f} MiB to vLLM", metrics)

    def connect(self, weights: Sequence[NamedWeight]) -> _Connection:
        """Layout of tensors in the stream by name and shape, agreed on once per engine."""
        key = self.in_place, self.chunk_bytes, tuple((weight.name, tuple(weight.shape)) for weight in weights)
        if self.connection is None or self.connection.key != key:
            dtype = self.setting.dtype
            size = sum(weight.shape.numel() for weight in weights) * dtype.itemsize
            chunks, chunk_bytes = plan_chunks(weights, dtype, min(self.chunk_bytes, max(MIB, size // CHUNKS)))
            if self.stream is None or self.stream.chunk_bytes < chunk_bytes:
                if self.stream is not None:
                    self.stream.close()
                device = compute_device(self.model) if self.engine_info.reads_peers else torch.device("cpu")
                self.stream = StreamWriter(chunk_bytes, self.engine_info.num_workers, device)
            feeds = [FeedPlan(self.stream.handle, reader, chunks) for reader in range(self.engine_info.num_workers)]
            self.connection = _Connection(key, chunks, self.stream, feeds, size)
        return self.connection

    def push(self, *, merge: bool = True) -> SyncResult:
        """Stream the present weights into the engine."""
        weights = list(weights_of(self.model, merge=merge))
        connection = self.connect(weights)
        self.wake("weights")
        connection.stream.begin()
        self.begin_load(connection.feeds)
        try:
            copying = connection.stream.send(
                connection.chunks, weights, self.setting.dtype, self.process.is_busy, self._verifier.add_fingerprint
            )
        except StreamBroken:
            copying = 0.0  # the answer tells why
        except BaseException:
            self.process.kill()
            raise
        loading, size = self.end_load(), connection.num_bytes
        self.wake_cache()
        metrics = {"sync/copy_s": copying, "sync/load_s": loading, "sync/bytes": float(size)}
        return SyncResult(f"{len(weights)} tensors, {size / MIB:.1f} MiB to vLLM", metrics)

    def begin_load(self, feeds: list[FeedPlan]) -> None:
        """Let the engine's workers read the streams, whose layout is sent once."""
        self.is_synced = False
        if self._connected is not feeds:
            self.process.call("connect", feeds, self.setting.dtype)
            self._connected = feeds
        self.process.send("load", LoadRequest(self._shared_core_threads, self.in_place))

    def end_load(self) -> float:
        """When they have read all of it. Returns the seconds of that."""
        seconds, anew = self.process.answer()
        if anew is not None and self.in_place:
            self.in_place = False
            log.info("vLLM reloads its model at each sync: %s", anew)
        return seconds

    def wake_cache(self) -> None:
        """Allocate keys and values, after the weights have been loaded."""
        self.wake("kv_cache")
        self.is_asleep = False

    def wake(self, what: str) -> None:
        """Restore the `weights` or the `kv_cache` of a sleeping engine."""
        if self.is_asleep:
            release_cached(compute_device(self.model))  # the engine cannot use what torch keeps here for later
            self.process.call("wake", what)

    def _refuse_too_long(self, limits: TurnLimits) -> None:
        held, new = self.engine_info.max_model_len, self.options.max_new_tokens
        if limits.row_tokens <= held:
            return
        limit = f"the engine holds {held} (rollout.max_model_len, or the model's own limit). Lower one of them."
        if limits.is_single:
            raise ConfigError(
                f"rollout.max_new_tokens is {new}: with a prompt of {limits.row_tokens - new} tokens that makes "
                f"{limits.row_tokens}, and {limit}"
            )
        raise ConfigError(
            f"environment.max_tokens makes episodes of up to {limits.row_tokens} tokens, their prompts included, and "
            f"{limit.replace('Lower one of them', 'Lower it, or raise that')}"
        )


def experts_shape(model: Any, options: VLLMOptions) -> tuple[int, int] | None:
    """Layers with experts, and experts of a token; None if they are not recorded."""
    routing = routing_of(model) if options.router_replay else None
    return None if routing is None else (routing.layers, routing.top_k)


def died_twice(death: EngineDied) -> RolloutError:
    """The end of a run whose engine cannot be kept alive."""
    reason = f"The rollout engine died twice in a row. The second time: {death.reason}"
    return RolloutError(message_after_log(reason, death.found, death.log))


def _log_file(context: BuildContext) -> Path | None:
    if context.run_dir is None:
        return None
    folder = context.run_dir / "workers"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"vllm_{context.rank}.log"


def _shared_core_threads(setting: EngineArgs, context: BuildContext) -> int:
    """Threads of each of the two, while trainer and engine work at the same time, so that none waits for a core."""
    own = torch.get_num_threads()
    fit = setting.is_on_gpu or context.world_size * (own + setting.num_threads) <= num_cores()
    return own if fit else max(1, min(own, setting.num_threads) // 2)


class GroupVLLMClient(VLLMClient):
    """The running engine of a group of processes that share a model."""

    _deaths = 0  # since its last finished generation

    @property
    def needs_weights(self) -> bool:
        """Whether it cannot draw before a sync."""
        return not self.is_synced or not self.process.is_alive()

    def may_repeat(self, error: Exception) -> bool:
        """Whether a failed action may be repeated; if so, prepares the engine for that.

        An engine that died is restarted once. One that fails verification at its first sync loads weights through
        vLLM's own loader from then on, as with `VLLMClient`.
        """
        if isinstance(error, EngineDied):
            self._deaths += 1
            self.process.kill()
            self.is_synced = False
            return self._deaths == 1
        if isinstance(error, WeightSyncError) and self.in_place and not self._was_proven:
            self.in_place = False
            return True
        return False

    def with_engine_restart(self, action: Callable[[], T], *, is_start: bool = False) -> T:
        """Run an action. Restarts only an engine that dies while starting: weights have to come from all processes."""
        return super().with_engine_restart(action, is_start=True) if is_start else action()

    def reset_death_count(self) -> None:
        """Called after a generation that succeeded."""
        self._deaths = 0

    def begin_sync(self) -> SyncRound:
        """Prepare for weights; an engine that has died is restarted."""
        self.refuse_open_turns()
        question = self._verifier.question()  # before what may fail: questions are counted alike beside all engines
        if not self.process.is_alive():
            self.process.kill()
            self._start()
        self.wake("weights")
        process_id = self.process_id
        assert process_id is not None
        return SyncRound(question, (process_id, self.in_place))

    def offer(self, shapes: dict[str, tuple[int, ...]] | None) -> SyncOffer:
        """Ask which weights the engine takes. `shapes` are those of tensors that may come in slices; None: only whole
        ones may come.
        """
        wants = None
        if shapes is not None and self.in_place and self.engine_info.num_workers > 1:
            found = self.process.call("wants", shapes)
            wants = None if found is None else tuple(found)
        process_id = self.process_id
        assert process_id is not None
        return SyncOffer(
            wants,
            self.engine_info.num_workers,
            process_id,
            self.process.progress_path,
            self.options.call_timeout_s,
            self._shared_core_threads,
            self.engine_info.reads_peers,
        )

    def is_reading(self) -> bool:
        """Whether it still reads."""
        return self.process.is_busy()

    def compute_probe_log_probs(self) -> None:
        """The trainer's side of the probe; all processes of the model take part."""
        self._verifier.compute_probe_log_probs()

    def verify_shards(self, parts: Sequence[FingerprintShards], seconds: float) -> VerificationResult:
        """Compare with what the processes of the trainer have made of their own parts in these seconds.

        Raises:
            WeightSyncError: it does not hold their weights.
        """
        self._verifier.adopt(join_shards(parts), seconds)
        proof = self.verify()
        self.is_synced = self._was_proven = True
        return proof

    def add_fingerprint(self, name: str, tensor: Any) -> None:
        """Compute the fingerprint of a whole tensor on its way."""
        self._verifier.add_fingerprint(name, tensor)
