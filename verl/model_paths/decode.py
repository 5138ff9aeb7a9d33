"""Decoding of rows that begin together, with the tensors that train.

prompts ── one prefill each ──> keys and values, states ── repeated per sample ──> `read`, one token of each row
                                                                                  ^                |
                                                                                  └── rows leave ──┘

`ModelPaths` tells which of this a model supports; at worst each token is computed from its whole row. Models that keep
all keys and values are decoded in slots instead: see `verl.rollout.hf_rows`.

A step can be a CUDA graph, which replaces the launches of some hundred kernels, slower than the kernels themselves, by
one. A graph has fixed shapes and addresses: rows and keys are padded to a few numbers (`padded`), inputs are written in
place, and it is valid as long as weights, keys and values lie where they did, through all steps of training.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.model_paths.expert_routing import ExpertRouting
from verl.model_paths.families import ModelPaths
from verl.model_paths.images import ImageRows, RowMedia
from verl.models.structure import call_model, unwrapped

CACHES = ("past_key_values", "cache_params", "state")  # names of the cache in outputs and inputs
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # nats between two decoding paths; 0.3 in narrower dtypes


@dataclass(frozen=True)
class NextToken:
    """Logits after the last token of each row, and the experts of that token.

    Attributes:
        logits: [r V], float32 at least.
        routed: [r layers k] int16, experts that routers chose for the last token; None if they are not recorded.
        picked: the next token of each row and its log-prob, [r] each, if they are known already.
    """

    logits: Tensor
    routed: Tensor | None = None
    picked: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, out: Any, routing: ExpertRouting | None) -> NextToken:
        """Logits at the last position of a forward pass, and experts if `routing` recorded it."""
        logits = out.logits[:, -1]
        routed = None if routing is None else routing.last_chosen(len(logits))
        return cls(logits.to(torch.promote_types(logits.dtype, torch.float32)), routed)

    def select(self, rows: Tensor | slice) -> NextToken:
        """Some of the rows."""
        return NextToken(self.logits[rows], None if self.routed is None else self.routed[rows])

    @staticmethod
    def concat(parts: Sequence[NextToken]) -> NextToken:
        """The rows of all parts."""
        if len(parts) == 1:
            return parts[0]
        routed = [part.routed for part in parts if part.routed is not None]
        return NextToken(torch.cat([part.logits for part in parts]), torch.cat(routed) if routed else None)


class BatchReader:
    """Decodes rows as one batch.

    Args:
        paths: execution paths of the model.
        repeats: compute each prompt once for all of its samples, if the paths allow it.
        routing: routers whose choices are recorded; the caller enters `ExpertRouting.recording`.
    """

    def __init__(self, model: Any, paths: ModelPaths, *, repeats: bool = True, routing: ExpertRouting | None = None):
        self.model, self.paths, self.routing = model, paths, routing
        self.repeats = repeats and paths.repeats_rows
        self.cache: Any = None
        self.cache_name = CACHES[0]
        self._shifts: Tensor | int = 0

    def begin(self, tokens: Tensor, mask: Tensor, n: int = 1, media: Sequence[RowMedia] = ()) -> NextToken:
        """Read prompts [b P], padded on the left, for n consecutive rows each.

        Args:
            media: of each prompt; empty if none has images.
        """
        attention, repeat = mask.long(), torch.arange(len(tokens), device=tokens.device).repeat_interleave(n)
        self.media = list(media) if any(key for key, _ in media) else []
        if not self.repeats:
            tokens, attention = tokens[repeat], attention[repeat]
            self.media = [self.media[row] for row in repeat.tolist()] if self.media else []
        self.tokens, self.attention, self.is_padded = tokens, attention, not bool(attention.all())
        if self.paths.cache == "in_place":
            from transformers import DynamicCache

            self.cache = DynamicCache(config=self.model.config)
        following = self._forward(tokens, self._positions(), has_images=True)
        self.position = self.attention.sum(dim=1) + self._shifts
        if self.repeats and n > 1:
            following = following.select(repeat)
            self.position = self.position[repeat]
            self._select(repeat)
        return following

    def read(self, token: Tensor) -> NextToken:
        """Read the next token [r] of each row."""
        self.attention = torch.cat([self.attention, self.attention.new_ones(len(token), 1)], dim=1)
        if self.paths.cache == "none":
            self.tokens = torch.cat([self.tokens, token[:, None]], dim=1)
            return self._forward(self.tokens, self._positions(), has_images=True)
        following = self._forward(token[:, None], self.position[:, None])
        self.position = self.position + 1
        return following

    def keep(self, rows: Tensor) -> None:
        """Continue with the given rows only."""
        self.position = self.position[rows]
        self._select(rows)

    def _positions(self) -> Tensor:
        return (self.attention.cumsum(dim=1) - 1).clamp_min(0)

    def _select(self, rows: Tensor) -> None:
        self.tokens, self.attention = self.tokens[rows], self.attention[rows]
        if self.media:
            self.media = [self.media[row] for row in rows.tolist()]
        if self.cache is not None:
            from verl.model_paths.kv_cache import select_rows  # brings transformers

            select_rows(self.cache, rows)

    def _forward(self, tokens: Tensor, positions: Tensor, has_images: bool = False) -> NextToken:
        has_cache = self.paths.cache != "none"
        inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": has_cache, "logits_to_keep": 1}
        if self.cache is not None:
            inputs[self.cache_name] = self.cache
        if self.is_padded:
            inputs["attention_mask"] = self.attention
        if self.paths.pads_prompts:  # otherwise the model counts positions itself
            inputs["position_ids"] = positions
        images, self._shifts = None, 0
        if has_images and self.media:
            images = ImageRows(self.model).of_media(self.media, tokens.cpu(), self.attention.cpu())
            assert images is not None
            self._shifts = torch.tensor(images.shifts, device=tokens.device)
            images = images.to(tokens.device)
        out = call_model(self.model, images, **inputs)
        if has_cache and self.cache is None:
            self.cache_name = next((name for name in CACHES if getattr(out, name, None) is not None), "")
            if not self.cache_name:
                raise NotImplementedError(f"{type(unwrapped(self.model)).__name__} gives no cache")
            self.cache = getattr(out, self.cache_name)
        return NextToken.of(out, self.routing)


def allowed(model: Any, autocast: str | None) -> float:
    """Maximum difference in nats between two correct decoding paths, for the model's compute dtype."""
    return 0.3 if autocast is not None else TOLERANCE.get(model.dtype, 0.3)


log = logging.getLogger(__name__)

KEY_MULTIPLE = 64  # on a GPU: kernels are set up for each length of keys, and a graph has a single length
NewGraph = Callable[[Callable[[], None]], Callable[[], None]]  # see `GraphMaker`
MOST_GRAPHS = 256  # at a time: each takes memory of the driver, which no plan counts


@functools.cache
def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that graphs are recorded on; one per device, because cuBLAS keeps memory for each stream."""
    return torch.cuda.Stream(device)


class GraphMaker:
    """Makes graphs that share memory for intermediate results, so that nothing in it outlives a replay."""

    def __init__(self, device: torch.device):
        self.pool, self.stream = torch.cuda.graph_pool_handle(), recording_stream(device)
        self.last: torch.cuda.CUDAGraph | None = None  # keeps the memory for the next graph

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record `work` without running it; returns a function that runs it on the current values of its tensors.

        Raises:
            RuntimeError: `work` cannot be recorded, for example because it waits for the device.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()  # a graph cannot take what torch keeps for other tensors
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):  # other threads may allocate at the same time
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        self.last = graph
        return graph.replay


class StepGraphs:
    """Graphs of decode steps by their shapes, each made when its shape comes for the second time.

    Args:
        new_graph: see `graph_maker`.
    """

    def __init__(self, new_graph: NewGraph | None):
        self.new_graph = new_graph
        self._graphs: dict[Hashable, Callable[[], None] | None] = {}  # None: the shape came once
        self._valid_for: Any = None

    def valid_for(self, state: Any) -> None:
        """Discard the graphs if they are of another state: of memory, or of what a model computes."""
        if state != self._valid_for:
            self._graphs, self._valid_for = {}, state

    def run(self, shape: Hashable, work: Callable[[], None]) -> None:
        """Do `work`, which reads and writes nothing but tensors that stay where they are.

        Args:
            shape: equal for equal work; None if it cannot be a graph.
        """
        if self.new_graph is not None and self._graphs.get(shape) is None and shape in self._graphs:
            try:
                self._graphs[shape] = self.new_graph(work)
            except RuntimeError as error:
                reason = error.__context__ or error  # of the work, before the end of the recording failed too
                log.warning("Decode steps run kernel by kernel, since no CUDA graph can be made of them: %s", reason)
                self.new_graph = None
        if self.new_graph is not None and (graph := self._graphs.get(shape)) is not None:
            graph()
            return
        work()
        if shape is not None:
            self._graphs[shape] = None  # kernels are loaded now
            if len(self._graphs) > MOST_GRAPHS:
                del self._graphs[next(iter(self._graphs))]


def model_state(model: Any) -> tuple[Any, ...]:
    """State that a graph of a model is valid for: the addresses of its weights, and its active adapters."""
    adapters = [x for x in model.modules() if hasattr(x, "_disable_adapters")]  # of peft
    chosen = [(x._active_adapter, x._disable_adapters, getattr(x, "scaling", None)) for x in adapters]
    return [x.data_ptr() for x in itertools.chain(model.parameters(), model.buffers())], repr(chosen)


def graph_maker(model: Any, device: torch.device, *, records_experts: bool) -> NewGraph | None:
    """A maker of graphs of a model's decode steps; None if they run without graphs.

    They do on a CPU, for a sharded model, whose forward pass communicates, and if experts are recorded.
    """
    if device.type != "cuda" or records_experts or getattr(model, "parallel_info", None) is not None:
        return None
    return GraphMaker(device)


def key_multiple(device: torch.device) -> int:
    """Multiple to which keys of a decode step are padded on a device; 1 on a CPU, where rows are not padded either."""
    return 1 if device.type == "cpu" else KEY_MULTIPLE


def padded(count: int, multiple: int, per_doubling: int) -> int:
    """The next larger of few numbers: multiples of `multiple`, and `per_doubling` of them between powers of two."""
    unit = max(multiple, (1 << count.bit_length() - 1) // per_doubling)
    return -(-count // unit) * unit
