"""The engine inside the vLLM process: the trainer can call each of its public methods."""

from __future__ import annotations

import signal
import tempfile
import time
import weakref
from typing import Any

import torch
from vllm import LLM
from vllm.lora.request import LoRARequest
from vllm.v1.executor import multiproc_executor, uniproc_executor

from verl.errors import RolloutError
from verl.rollout.base import TurnRequest
from verl.rollout.engine_process.messages import EngineInfo, TurnOutput
from verl.rollout.proof.verifier import VerifyRequest
from verl.rollout.token_sampler import TokenSampler
from verl.rollout.vllm.engine_args import EngineArgs
from verl.rollout.vllm.server.images import inspect_here
from verl.rollout.vllm.server.turns import EngineTurns
from verl.rollout.vllm.server.verification import answer_request
from verl.rollout.weight_sync.stream import Feed, WantedSlices
from verl.utils.child_process.process import describe_exit, memory_kills
from verl.utils.progress import report


def name_file_store(name: str) -> None:
    """Set the name of the rendezvous file of vLLM's workers; their shared memory on a CPU is named after it."""
    path = f"file://{tempfile.gettempdir()}/{name}_store"
    for module in (uniproc_executor, multiproc_executor):
        if hasattr(module, "get_file_store_init_method"):
            module.get_file_store_init_method = lambda: path  # type: ignore[attr-defined]


class EngineServer:
    """vLLM with our noise, without weights until `load` brings them."""

    def __init__(self, setting: EngineArgs):
        self._memory_kills = memory_kills()
        torch.set_num_threads(setting.num_threads)
        if setting.options.num_workers == 1 or not setting.is_on_gpu:  # before a fork CUDA must not be initialised
            inspect_here(setting.directory)
        if setting.name:
            name_file_store(setting.name)
        self.llm = LLM(
            setting.directory,
            load_format="dummy",
            skip_tokenizer_init=True,
            logits_processors=["verl.rollout.vllm.server.logits_processor:CounterNoiseProcessor"],
            worker_extension_cls="verl.rollout.vllm.server.worker_extension.WorkerExtension",
            logprobs_mode="raw_logprobs",
            disable_log_stats=True,
            async_scheduling=False,
            model_impl="vllm",
            mm_processor_cache_gb=0,  # images come processed
            skip_mm_profiling=True,
            **setting.engine_arguments(),
        )
        self._lora_request: Any = None
        self._turns: EngineTurns | None = None
        self._is_stepwise = False  # the latest turns
        self._version = 0  # of the weights
        self._max_num_seqs, self._keeps_cache = setting.options.max_num_seqs, setting.options.kv_cache == "keep"
        self._report_steps(self.llm.llm_engine)
        if setting.options.pipeline_parallel_size > 1:
            self.llm.collective_rpc("verl_prepare_stage")
        self._records_experts = setting.options.router_replay
        if self._records_experts:
            self.llm.collective_rpc("verl_record_experts")
        if setting.options.runs_eager(setting.is_on_gpu):  # compiled code runs no hooks
            self.llm.collective_rpc("verl_report_layers")

    def describe(self) -> EngineInfo:
        """Properties of the engine that the trainer needs."""
        reads_peers = all(self.llm.collective_rpc("verl_reads_peers"))
        config = self.llm.llm_engine.vllm_config
        return EngineInfo(config.model_config.max_model_len, config.parallel_config.world_size, reads_peers)

    def lost_worker(self) -> str | None:
        """Description of vLLM's worker process that ended unexpectedly; None while all are running."""
        workers = getattr(self.llm.llm_engine.model_executor, "workers", None) or ()
        codes = {worker.proc.pid: worker.proc.exitcode for worker in workers}
        ended = {pid: code for pid, code in codes.items() if code}
        first = {pid: code for pid, code in ended.items() if code != -signal.SIGTERM}  # which vLLM sends to the others
        for pid, code in {**first, **ended}.items():
            return f"its worker process {pid}, which ended with {describe_exit(code, self._memory_kills)}"
        return None

    def wants(self, shapes: dict[str, tuple[int, ...]]) -> list[WantedSlices] | None:
        """The slices of these tensors that each worker needs; None if a worker loads weights by vLLM's own loader."""
        slices = self.llm.collective_rpc("verl_wants", args=(shapes,))
        return None if None in slices else slices

    def connect(self, feeds: list[Feed], dtype: torch.dtype) -> None:
        """Use these streams for weights; each worker reads one of them."""
        self.llm.collective_rpc("verl_connect", args=(feeds, dtype))

    def load(self, num_threads: int, in_place: bool) -> tuple[float, str | None]:
        """Load the weights from the streams.

        Args:
            num_threads: threads of each worker meanwhile, on a CPU, where trainer and engine work concurrently.
            in_place: copy tensors into the engine's parameters; False: vLLM reloads its whole model.
        Returns:
            The seconds spent without waiting, and why vLLM reloaded its whole model, if it did.
        """
        results = self.llm.collective_rpc("verl_load", args=(num_threads, in_place))
        self._renew()
        return max(seconds for seconds, _ in results), next((reason for _, reason in results if reason), None)

    def adopt(self, directory: str, number: int) -> float:
        """Replace the adapter, also for open turns. Returns seconds."""
        start = time.perf_counter()
        self._lora_request = LoRARequest("adapter", 1, directory)
        if not self.llm.llm_engine.add_lora(LoRARequest("adapter", 1, directory, load_inplace=True)):
            raise RolloutError(f"vLLM did not take adapter {number}")
        self._renew()
        return time.perf_counter() - start

    def prove(self, question: VerifyRequest) -> Any:
        """Fingerprints of the engine's weights; see `verl.rollout.proof`."""
        return answer_request(self.llm, question, self._lora_request)

    def begin_turns(
        self, drawing: TokenSampler, width: int, num_threads: int | None, is_stepwise: bool = False
    ) -> None:
        """Prepare for turns of at most `width` tokens each; earlier turns are cancelled.

        Args:
            num_threads: threads of each worker, on a CPU that the trainer uses at the same time; None: all.
            is_stepwise: turns are recomputed whenever they are begun, and the weights may change meanwhile.
        """
        self.end_turns()
        capacity = self._max_num_seqs
        if is_stepwise or self._is_stepwise:  # so that a new engine has the same bits
            self._version += 1
        self._is_stepwise = is_stepwise
        if is_stepwise:
            capacity = min(capacity, self._num_full_rows) if self._keeps_cache else capacity
        self.llm.collective_rpc("verl_begin", args=(drawing, self._max_num_seqs, width, num_threads))
        self._turns = EngineTurns(self.llm, drawing, capacity, self._lora_request, self._salt, self._records_experts)

    def advance_turns(self, new: list[TurnRequest], budget_s: float, until_all: bool) -> TurnOutput:
        """Add new turns, and generate for a while; see `EngineTurns.advance`."""
        assert self._turns is not None
        return self._turns.advance(new, budget_s, until_all)

    def open_turns(self) -> TurnOutput:
        """The unfinished turns, with the tokens sampled so far."""
        return TurnOutput() if self._turns is None else self._turns.open()

    def end_turns(self) -> None:
        """Cancel all open turns. Idempotent."""
        if self._turns is not None:
            self._turns.close()
            self._turns = None
            self.llm.collective_rpc("verl_end")

    @property
    def _salt(self) -> str:
        return f"version {self._version}"

    def _renew(self) -> None:
        """Reset caches after a change of the weights."""
        self._version += 1
        if self._turns is not None:
            self._turns.renew(self._salt)
        self.llm.llm_engine.reset_encoder_cache()

    @property
    def _num_full_rows(self) -> int:
        """Number of rows of the maximum length that fit in the cache. With more, vLLM may preempt a row and recompute
        it with other weights than those of its keys and values."""
        cache: Any = self.llm.llm_engine.vllm_config.cache_config
        return max(1, int(cache.kv_cache_max_concurrency * (1 - 1 / cache.num_gpu_blocks)))  # it keeps a block

    def sleep(self) -> None:
        """Free GPU memory, which discards the weights and the key-value cache."""
        self.llm.sleep(level=2)

    def wake(self, what: str) -> None:
        """Allocate memory again, for `weights` or the `kv_cache`."""
        self.llm.wake_up(tags=[what])

    def _report_steps(self, engine: Any) -> None:
        """Report progress at each step of a `vllm.LLMEngine` and at each added request, with the number of remaining
        sequences."""
        # no reference cycle: an engine ends with its object
        kind, of = type(engine), weakref.ref(engine)

        def added(*args: Any, **options: Any) -> Any:
            report()
            return kind.add_request(of(), *args, **options)

        def counted() -> Any:
            present: Any = of()
            outputs = kind.step(present)
            report(f"generating; sequences left: {present.get_num_unfinished_requests()}")
            return outputs

        engine.step, engine.add_request = counted, added
