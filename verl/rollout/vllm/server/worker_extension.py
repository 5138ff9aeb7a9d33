"""Methods added to vLLM's worker processes: load weights from the stream, sample with our noise, verify weights.

vLLM mixes the class into its worker class, so the methods run in every worker of an engine.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
from vllm.platforms import current_platform

from verl.rollout.token_sampler import TokenSampler
from verl.rollout.vllm.server.expert_recorder import ExpertRecorder
from verl.rollout.vllm.server.logits_processor import ActiveRequests, CounterNoiseProcessor
from verl.rollout.vllm.server.verification import read_parts
from verl.rollout.vllm.server.weight_loader import InPlaceLoader, UnsupportedLayer, give_back_free_memory
from verl.rollout.weight_sync.stream import ChunkPlan, Feed, StreamReader, WantedSlices, reads_peers
from verl.utils.progress import report
from verl.utils.threads import using_threads


class WorkerExtension:
    """Additional methods of vLLM's worker, called by `collective_rpc`."""

    rank: int
    device: torch.device
    model_runner: Any
    _feed: Feed | None = None
    _stream_dtype: torch.dtype
    _found: InPlaceLoader | str | None = None  # for this feed; None before the first in-place load
    _reader: StreamReader | None = None
    _recorder: ExpertRecorder | None = None
    _threads = contextlib.ExitStack()  # during generation; class state, since a process has one worker

    def verl_begin(self, drawing: TokenSampler, rows: int, width: int, num_threads: int | None) -> None:
        """Prepare for generation, with this number of CPU threads if it is given."""
        CounterNoiseProcessor.active = ActiveRequests(
            drawing, torch.zeros(rows, width, device=self.device), self._recorder
        )
        if num_threads is not None:
            self._threads.enter_context(using_threads(num_threads))

    def verl_end(self) -> None:
        """Stop generating."""
        self._threads.close()
        CounterNoiseProcessor.active = None

    def verl_rows(self, rows: list[int], width: int) -> tuple[Tensor, Tensor | None]:
        """The log-probs [rows, width] of tokens that were sampled in some rows, and the experts [rows, width, layers k]
        of those that predict them, if they are recorded."""
        active = CounterNoiseProcessor.active
        assert active is not None
        experts = None if active.experts is None else active.experts[rows, :width]
        return active.log_probs[torch.tensor(rows, device=self.device), :width].cpu(), experts

    def verl_record_experts(self) -> None:
        """Start recording the experts that routers choose."""
        self._recorder = ExpertRecorder(self.model_runner)

    def verl_prepare_stage(self) -> None:
        """Allocate the buffers for the outputs of the previous pipeline stage. vLLM does that in its warm-up, which it
        omits on a CPU for a model that is not compiled."""
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=self.device
            )

    def verl_report_layers(self) -> None:
        """Report progress at each layer, because a single step over long prompts may take minutes on a CPU."""
        for module in self.model_runner.get_model().modules():
            if isinstance(module, torch.nn.ModuleList):
                for layer in module:
                    layer.register_forward_pre_hook(lambda *_: report())

    verl_read_parts = read_parts

    def verl_reads_peers(self) -> bool:
        """Whether this worker can open memory of all GPUs of the engine."""
        return reads_peers(self.device)

    def verl_wants(self, shapes: dict[str, tuple[int, ...]]) -> WantedSlices | None:
        """The slices of these tensors that this rank loads; None if vLLM has to reload its whole model."""
        try:
            return InPlaceLoader(self.model_runner.get_model(), shapes).wanted()
        except UnsupportedLayer:
            return None

    def verl_connect(self, feeds: list[Feed], dtype: torch.dtype) -> None:
        """Use the feed that this worker reads."""
        self._feed = next(feed for feed in feeds if self.rank in feed.readers)
        self._stream_dtype, self._found = dtype, None

    def verl_load(self, num_threads: int, in_place: bool) -> tuple[float, str | None]:
        """See `EngineServer.load`."""
        start, feed, dtype = time.perf_counter(), self._feed, self._stream_dtype
        assert feed is not None, "verl_connect comes first"
        loader = self._loader_or_reason(feed) if in_place else "it was requested"
        reader = self._opened(feed)
        waited = reader.waited_s
        try:
            with using_threads(num_threads):
                if isinstance(loader, InPlaceLoader):
                    _load_in_place(loader, reader, feed.chunks, dtype)
                else:
                    self._reload_model(reader, feed.chunks, dtype)
        except BaseException:
            reader.abandon()
            raise
        finally:
            give_back_free_memory()
        seconds = time.perf_counter() - start - (reader.waited_s - waited)
        return seconds, loader if isinstance(loader, str) else None

    def _opened(self, feed: Feed) -> StreamReader:
        """The reader of a stream, kept between syncs because the first access to newly mapped memory is slow."""
        assert feed.handle is not None
        number = feed.readers.index(self.rank)
        if self._reader is None or not self._reader.is_of(feed.handle, number):
            if self._reader is not None:
                self._reader.close()
            self._reader = StreamReader(feed.handle, number)
        return self._reader

    def _loader_or_reason(self, feed: Feed) -> InPlaceLoader | str:
        """The in-place loader for these tensors, created at the first load; or why vLLM has to reload its whole
        model."""
        if self._found is None:
            starts = {name: start for name, (_, start) in feed.slices.items()}
            try:
                self._found = InPlaceLoader(self.model_runner.get_model(), feed.shapes, starts)
            except UnsupportedLayer as reason:
                self._found = str(reason)
        return self._found

    def _reload_model(self, reader: StreamReader, chunks: ChunkPlan, dtype: torch.dtype) -> None:
        """Reload the whole model by vLLM's loader, then fix what that leaves stale."""
        _renew_experts(self.model_runner.get_model())
        self.reload_weights(weights_iterator=_lasting(reader, chunks, dtype))  # type: ignore[attr-defined]
        _refresh_tied_heads(self.model_runner.get_model())


def _load_in_place(loader: InPlaceLoader, reader: StreamReader, chunks: ChunkPlan, dtype: torch.dtype) -> None:
    for number, entries in enumerate(chunks):
        for entry, tensor in reader.pieces(number, entries, dtype):
            loader.take(entry, tensor)
        loader.keep()
        reader.leave(number)


def _lasting(reader: StreamReader, chunks: ChunkPlan, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a stream; those that vLLM keeps until their layer is complete are copied out of their chunk."""
    for number, entries in enumerate(chunks):
        yield from reader.chunk(number, entries, dtype)
        _copy_retained()
        reader.leave(number)


def _copy_retained() -> None:
    """vLLM collects the tensors of a layer (q, k and v of a merged projection) and loads them with the last one."""
    for info in LAYERWISE_INFO.values():
        for _, bound in info.loaded_weights:
            for name, value in bound.arguments.items():
                if isinstance(value, Tensor) and not value.is_meta and name != "param":
                    bound.arguments[name] = value.clone()


def _renew_experts(model: torch.nn.Module) -> None:
    """On a CPU vLLM packs experts at the first load only, so force it to create their kernel again."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and current_platform.is_cpu():
            method.moe_kernel = None  # type: ignore[union-attr]


def _refresh_tied_heads(model: torch.nn.Module) -> None:
    """Pack a tied output head again: it is loaded with the embedding, but its packed CPU copy is not updated."""
    weights = {id(module.weight) for module in model.modules() if type(module) is VocabParallelEmbedding}
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and id(module.weight) in weights:
            module.quant_method.process_weights_after_loading(module)
