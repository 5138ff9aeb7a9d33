"""vLLM as the trainer sees it: prompts out, responses in, and weights that follow.

    generate   prompts ──> child process ──> tokens, log-probs ──> rows
    sync       weights ──> two chunks of shared memory ──> the engine's own parameters

An engine that dies, or makes no progress for `call_timeout_s`, is made anew: it gets the weights, and the same samples
are drawn again.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from verl.component import BuildContext
from verl.errors import ConfigError, RolloutError, WeightSyncError
from verl.models.parallel_info import Autocast
from verl.protocol import DataProto
from verl.rollout.base import Request, RolloutEngine, Synced, assemble, stop_tokens
from verl.rollout.drawing import Drawing
from verl.rollout.vllm.faults import as_config_error, as_death
from verl.rollout.vllm.feeds import Feed, Loading, plan
from verl.rollout.vllm.files import EngineFiles
from verl.rollout.vllm.options import VLLMRollout
from verl.rollout.vllm.process import EngineDied, EngineError, EngineProcess, told_after_log
from verl.rollout.vllm.setting import Setting, environment, setting_of, write_model_directory
from verl.rollout.vllm.stream import Stream, StreamBroken, using_threads
from verl.rollout.vllm.told import Drawn
from verl.rollout.vllm.weights import weights_of
from verl.sync.proof import Prover
from verl.utils.env_check import num_cores

log = logging.getLogger(__name__)

T = TypeVar("T")
MIB = 1 << 20
CHUNKS = 8  # at least, of any but the smallest models: an engine begins when it has the first


class VLLMEngine(RolloutEngine):
    """The running engine of `VLLMRollout`.

    Raises:
        ConfigError: vLLM cannot run this model, or not with these options.
    """

    def __init__(
        self, options: VLLMRollout, model: Any, tokenizer: Any, seed: int, autocast: Autocast, context: BuildContext
    ):
        self.options, self.model, self.seed = options, model, seed
        self.pad_id = tokenizer.pad_token_id
        self.stop_ids = tuple(stop_tokens(model, tokenizer, options.stop_token_ids).tolist())
        self._is_synced = self._is_asleep = self._has_base = self._was_proven = False
        self._in_place = True
        self._adapters, self._chunk_bytes = 0, options.chunk_mib * MIB
        self._begun: tuple[DataProto, Request, tuple[Any, ...]] | None = None
        self._stream: Stream | None = None
        self._while_drawing = contextlib.ExitStack()
        self._files = EngineFiles()
        try:
            directory = self._files.directory
            self.setting = setting_of(options, model, autocast, directory, self._files.name)
            self.compute_type = str(self.setting.dtype).removeprefix("torch.")
            write_model_directory(model, directory)
            variables = environment(options, context, self.setting.num_threads)
            limit_s = options.call_timeout_s
            self._process = EngineProcess(self.setting, variables, self._files, _log_file(context), limit_s)
            self._outliving_it(self._start, is_start=True)
            self._threads_beside = _threads_beside(self.setting, context)
            vocabulary = min(model.config.get_text_config().vocab_size, len(tokenizer))
            self._prover = Prover(model, self.setting.dtype, vocabulary, self.told.max_model_len, autocast)
        except BaseException:
            self.close()
            raise

    @property
    def process_id(self) -> int | None:
        """Of the child."""
        return self._process.process_id

    def generate(self, prompts: DataProto, request: Request) -> DataProto:
        """See `RolloutEngine.generate`. The draws depend on (seed, stream, step, prompt, sample, position) alone."""
        asked = self._question(prompts, request)
        drawn = self._outliving_it(lambda: self._call("draw", *asked)) if asked else None
        return rows_of(prompts, request, drawn, self.options.max_new_tokens, self.pad_id)

    def begin(self, prompts: DataProto, request: Request) -> None:
        """Begin to draw; until `finish` the engine keeps its weights, and both use fewer threads if need be."""
        assert self._begun is None
        asked = self._question(prompts, request)
        if asked:
            self._outliving_it(lambda: self._ask(asked))
            self._while_drawing.enter_context(using_threads(self._threads_beside))
        self._begun = prompts, request, asked

    def finish(self) -> DataProto:
        """What was begun. If the engine died of it, it is drawn again, from the weights that are there by now."""
        assert self._begun is not None
        (prompts, request, asked), self._begun = self._begun, None
        self._while_drawing.close()
        answers = iter([self._process.answer])  # to the question that was sent; later ones are asked anew
        self.has_redrawn = False

        def anew() -> Drawn:
            self.has_redrawn = True
            return self._call("draw", *asked)

        drawn = self._outliving_it(lambda: next(answers, anew)()) if asked else None
        return rows_of(prompts, request, drawn, self.options.max_new_tokens, self.pad_id)

    def _question(self, prompts: DataProto, request: Request) -> tuple[Any, ...]:
        """What the child is asked for; empty where there is nothing to draw."""
        tokens = [row[mask].tolist() for row, mask in zip(*map(prompts.batch.get, ("prompts", "prompt_mask")))]
        self._refuse_too_long(max(map(len, tokens), default=0))
        drawing = Drawing.of(self.options, request, self.seed, self.stop_ids)
        ids = prompts.batch["prompt_ids"].tolist()
        limits = self._limits(ids, request.num_samples)
        return (drawing, limits, tokens, ids) if limits else ()

    def _ask(self, asked: tuple[Any, ...]) -> None:
        if not self._is_synced:
            self._sync()
        self._process.send("draw", *asked, self._threads_beside)

    def sync(self) -> Synced:
        """Stream the present weights into the engine."""
        assert self._begun is None, "weights may not change while responses are drawn"
        return self._outliving_it(self._sync)

    def rest(self) -> None:
        """Give the GPU's memory back until the next call; on a CPU there is nothing to do."""
        may_sleep = self.setting.is_on_gpu and self.options.sleep and self._begun is None
        if may_sleep and not self._is_asleep and self._process.is_alive():
            self._is_synced = self._has_base = False
            try:
                self._process.call("sleep")
                self._is_asleep = True
            except EngineDied as death:  # its memory is free too
                log.warning("%s\nAnother engine is started when one is needed.", death)
                self._process.kill()

    def close(self) -> None:
        """End the child, and leave nothing of it."""
        self._while_drawing.close()
        if hasattr(self, "_process"):
            self._process.kill()
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._files.remove()

    def _start(self) -> None:
        self._is_synced = self._is_asleep = self._has_base = self._was_proven = False
        try:
            self.told = self._process.start(self.options.start_timeout_s)
        except EngineError as error:
            if (death := as_death(error)) is not None:
                raise death from error
            raise as_config_error(error, self.setting, self.model) from error

    def _call(self, method: str, *args: Any) -> Any:
        """A call to an engine that holds the present weights."""
        if not self._is_synced:
            self._sync()
        try:
            return self._process.call(method, *args)
        except EngineError:  # requests may be left in it: the next call gets a new one
            self._process.kill()
            self._is_synced = False
            raise

    def _outliving_it(self, action: Callable[[], T], *, is_start: bool = False) -> T:
        """Do something; if the engine dies of it, or makes no progress, do it once more with a new one."""
        try:
            return action()
        except EngineDied as death:
            log.warning("%s\nAnother engine is started; the same samples are drawn again.", death)
        try:
            self._process.kill()
            if not is_start:
                self._start()
            return action()
        except EngineDied as death:
            raise died_twice(death) from None

    def _sync(self) -> Synced:
        """Send the present weights and prove them.

        Where tensors have their places in the engine is found with the first sync. If that one cannot be proven, vLLM
        loads its model itself, now and from then on: it may make more of a tensor than its layers tell.
        """
        try:
            synced = self._send_and_prove()
        except WeightSyncError as error:
            if self._was_proven or not self._in_place:
                raise
            log.warning("vLLM loads its model anew at each sync, since its weights were not all found: %s", error)
            self._in_place = False
            synced = self._send_and_prove()
        self._is_synced = self._has_base = self._was_proven = True
        return synced

    def _send_and_prove(self) -> Synced:
        rank, all_weights = self.setting.lora_rank, self.setting.lora_rank is None or not self._has_base
        question = self._prover.question(weights=all_weights, adapter_rank=rank)
        with using_threads(self._threads_beside), ThreadPoolExecutor(1) as aside:
            looking = aside.submit(self._prover.look)  # while the weights travel: it only reads them too
            if rank is None:
                synced = self._send_weights()
            else:
                if all_weights:
                    self._send_weights(merge=False)
                synced = self._send_adapter()
                self._prover.note_adapter()
            looking.result()
        proof = self._prover.prove(self._process.call("prove", question))
        return replace(synced, metrics=synced.metrics | proof.metrics)

    def _send_adapter(self) -> Synced:
        """A new adapter under a new number, in a directory in memory; the former one is removed."""
        self._adapters += 1
        directory = self._files.directory / f"adapter_{self._adapters}"
        start = time.perf_counter()
        self.model.save_pretrained(directory)
        copying = time.perf_counter() - start
        try:
            loading = self._process.call("adopt", str(directory), self._adapters)
            size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        metrics = {"sync/copy_s": copying, "sync/load_s": loading, "sync/bytes": float(size)}
        return Synced(f"adapter {self._adapters}, {size / MIB:.1f} MiB to vLLM", metrics)

    def _send_weights(self, *, merge: bool = True) -> Synced:
        dtype = self.setting.dtype
        weights = list(weights_of(self.model, merge=merge))
        size = sum(weight.shape.numel() for weight in weights) * dtype.itemsize
        chunks, chunk_bytes = plan(weights, dtype, min(self._chunk_bytes, max(MIB, size // CHUNKS)))
        stream = self._opened(chunk_bytes)
        self._wake("weights")
        stream.begin()
        feeds = [Feed(stream.handle, reader, chunks) for reader in range(self.told.num_workers)]
        self._process.send("load", feeds, dtype, Loading(self._threads_beside, self._in_place))
        try:
            copying = stream.send(chunks, weights, dtype, self._process.is_busy, self._prover.note)
        except StreamBroken:
            copying = 0.0  # the answer tells why
        except BaseException:
            self._process.kill()
            raise
        loading, anew = self._process.answer()
        if anew is not None and self._in_place:
            self._in_place = False
            log.info("vLLM loads its model anew with each sync: %s", anew)
        self._wake("kv_cache")
        self._is_asleep = False
        metrics = {"sync/copy_s": copying, "sync/load_s": loading, "sync/bytes": float(size)}
        return Synced(f"{len(weights)} tensors, {size / MIB:.1f} MiB to vLLM", metrics)

    def _opened(self, chunk_bytes: int) -> Stream:
        """The stream, made with the first sync and kept."""
        if self._stream is None or self._stream.chunk_bytes < chunk_bytes:
            if self._stream is not None:
                self._stream.close()
            self._stream = Stream(chunk_bytes, self.told.num_workers, self.model.device)
        return self._stream

    def _wake(self, what: str) -> None:
        if self._is_asleep:
            self._process.call("wake", what)

    def _limits(self, prompt_ids: list[int], num_samples: int) -> list[int]:
        """Tokens that each response may have."""
        return [self.options.max_new_tokens] * (len(prompt_ids) * num_samples)

    def _refuse_too_long(self, longest: int) -> None:
        limit, new = self.told.max_model_len, self.options.max_new_tokens
        if longest + new > limit:
            raise ConfigError(
                f"rollout.max_new_tokens is {new}: with a prompt of {longest} tokens that makes {longest + new}, and "
                f"the engine holds {limit} (rollout.max_model_len, or the model's own limit). Lower one of them."
            )


def rows_of(prompts: DataProto, request: Request, drawn: Drawn | None, width: int, pad_id: int) -> DataProto:
    """What was drawn as rows; None for no rows."""
    rows = len(prompts) * request.num_samples
    responses = torch.full((rows, width), pad_id)
    mask = torch.zeros(rows, width, dtype=torch.bool)
    log_probs = torch.zeros(rows, width)
    if drawn is not None:
        mask = torch.arange(width) < torch.from_numpy(drawn.lengths)[:, None]
        responses[mask] = torch.from_numpy(drawn.tokens)
        log_probs[:, : drawn.log_probs.shape[1]] = drawn.log_probs
    return assemble(prompts, request.num_samples, responses, mask, log_probs, pad_id)


def died_twice(death: EngineDied) -> RolloutError:
    """The end of a run whose engine cannot be kept alive."""
    reason = f"The rollout engine died twice in a row. The second time: {death.reason}"
    return RolloutError(told_after_log(reason, death.found, death.log))


def _log_file(context: BuildContext) -> Path | None:
    if context.run_dir is None:
        return None
    folder = context.run_dir / "workers"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"vllm_{context.rank}.log"


def _threads_beside(setting: Setting, context: BuildContext) -> int:
    """Threads of each of the two, while trainer and engine work at the same time, so that none waits for a core."""
    own = torch.get_num_threads()
    fit = setting.is_on_gpu or context.world_size * (own + setting.num_threads) <= num_cores()
    return own if fit else max(1, min(own, setting.num_threads) // 2)
