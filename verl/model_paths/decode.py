"""Decoding of rows that begin together, with the tensors that train.

prompts ── one prefill each ──> keys and values, states ── repeated per sample ──> `read`, one token of each row
                                                                                  ^                |
                                                                                  └── rows leave ──┘

`ModelPaths` tells which of this a model supports; at worst each token is computed from its whole row. Models that keep
all keys and values are decoded in slots instead: see `verl.rollout.hf_rows`.

A step can be a CUDA graph, which replaces the launches of some hundred kernels, slower than the kernels themselves, by
one. A graph has fixed addresses: its inputs are written in place, and it is valid as long as the rows, the width of
their keys and the memory of the weights do not change.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
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
    """

    logits: Tensor
    routed: Tensor | None = None

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

Work = Callable[[], NextToken]
KEY_MULTIPLE = 64  # on a GPU: kernels are set up for each length of keys, and a graph has a single length
EAGER_STEPS = 2  # of one shape before its graph is made, which takes about as long; many shapes are short-lived


@functools.cache
def recording_stream(device: int) -> torch.cuda.Stream:
    """The stream that graphs are recorded on; one per device, because cuBLAS keeps memory for each stream."""
    return torch.cuda.Stream(device)


class GraphMaker:
    """Makes graphs that share memory for intermediate results: only the newest may be used."""

    def __init__(self) -> None:
        self.pool, self.stream = torch.cuda.graph_pool_handle(), recording_stream(torch.cuda.current_device())
        self.last: torch.cuda.CUDAGraph | None = None  # keeps the memory for the next graph

    def __call__(self, work: Work) -> Work:
        """Record `work` without running it; returns a function that runs it on the current values of its tensors.

        Raises:
            RuntimeError: `work` cannot be recorded, for example because it waits for the device.
        """
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):  # other threads may allocate at the same time
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                recorded = work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self.stream)
        self.last = graph

        def replay() -> NextToken:
            graph.replay()
            return NextToken(recorded.logits.clone())  # the next step overwrites them

        return replay


class StepGraphs:
    """The graph of the current rows with the current width of keys, used from the third such step.

    Args:
        new_graph: see `graph_maker`.
    """

    def __init__(self, new_graph: Callable[[Work], Work] | None):
        self.new_graph = new_graph
        self.reset()

    def reset(self) -> None:
        """Discard the graph, because the rows or the memory of the weights changed."""
        self._width = self._num_eager = 0
        self._tokens: Tensor | None = None  # input of the graph
        self._graph: Work | None = None

    def read(self, tokens: Tensor, width: int, read_one: Callable[[Tensor], NextToken]) -> NextToken:
        """The result of `read_one` for tokens [r 1]. All other changing state must be in tensors that it updates."""
        if self.new_graph is None:
            return read_one(tokens)
        if width != self._width:
            self.reset()
            self._width = width
        if self._graph is None and self._num_eager == EAGER_STEPS:
            held = self._tokens = tokens.clone()
            try:
                self._graph = self.new_graph(lambda: read_one(held))
            except RuntimeError as error:
                log.warning("Decode steps run kernel by kernel, since no CUDA graph can be made of them: %s", error)
                self.new_graph = None
        if self._graph is None or self._tokens is None:
            self._num_eager += 1
            return read_one(tokens)
        self._tokens.copy_(tokens)
        return self._graph()


def graph_maker(model: Any, device: torch.device, *, records_experts: bool) -> Callable[[Work], Work] | None:
    """A maker of graphs of a model's decode steps; None if they run without graphs.

    They do on a CPU, for a sharded model, whose forward pass communicates, and if experts are recorded.
    """
    if device.type != "cuda" or records_experts or getattr(model, "parallel_info", None) is not None:
        return None
    return GraphMaker()


def key_multiple(device: torch.device) -> int:
    """Multiple to which the number of keys of a decode step is padded on a device; 1 on a CPU."""
    return 1 if device.type == "cpu" else KEY_MULTIPLE
